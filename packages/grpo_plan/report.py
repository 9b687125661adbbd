"""A plan as text and as JSON."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_plan import advice, compiling, row_choice
from grpo_plan.chips import GIB
from grpo_plan.plan import Need, Plan
from grpo_plan.search import Limit

_MOST_ARRAYS = 5
_KIBI = 1024


def text(plan: Plan, *, source: str) -> str:
  """Returns the plan as lines for the terminal.

  Args:
    plan: The plan.
    source: Origin of the model's sizes.
  """
  if plan.is_of_arrays:
    parts = [_head(plan, source), _rows(plan), _held(plan), _verdict(plan)]
  else:
    parts = [_head(plan, source), _choices(plan), _rows(plan), _memory(plan), _arrays(plan)]
    parts += [_traffic(plan), _time(plan), _limits(plan), _verdict(plan)]
  return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def _head(plan: Plan, source: str) -> Iterator[str]:
  run, shape = plan.run, largest_shape(plan)
  mesh = ", ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
  yield str(plan.topology)
  yield f"mesh: {mesh}"
  yield f"model: {parameters(plan) / 1e6:,.1f} million parameters; sizes from {source}"
  rows = shape.rows // plan.replicas
  yield (
    f"microbatch: {rows} rows of {shape.row_tokens} tokens on each of {plan.replicas} replicas"
    f"{f' of {plan.parts} devices' if plan.parts > 1 else ''};"
    f" products in {run.config.model.compute_dtype}, remat {run.config.model.remat}"
  )
  engine = run.config.engine.name
  if not run.sizes and not run.config.mode == "offline":
    yield f"engine.name={engine}: the memory of the engine is not counted"


def _choices(plan: Plan) -> Iterator[str]:
  """Yields what the run will choose by this machine's memory, and whether the compiler agrees."""
  choices = plan.run.choices
  if choices is None:
    return
  yield from (*choices.lines, *choices.warnings)
  counted = arithmetic(plan)
  need = plan.need("update")
  if counted is None or need is None:
    return
  if need.compiled.is_refused:
    yield f"the compiler refuses this update, for which arithmetic counts {_gib(counted, 0)} GiB"
    return
  yield (
    f"the compiler counts {_gib(need.peak, 0)} GiB for this update, arithmetic {_gib(counted, 0)}"
  )


def _rows(plan: Plan) -> Iterator[str]:
  """Yields over how many devices a row is divided, and why."""
  if plan.rows is not None:
    yield from row_choice.lines(plan.rows)


def arithmetic(plan: Plan) -> int | None:
  """Returns the bytes by which the run chose what it recomputes; None: nothing was counted."""
  choices, remat = plan.run.choices, plan.run.config.model.remat
  if choices is None or choices.learning is None or remat is None:
    return None
  return choices.learning.peak(remat)


def _held(plan: Plan) -> Iterator[str]:
  """Yields the arrays of a run and their bytes."""
  arrays = plan.run.arrays
  yield "memory of one device, in GiB"
  when = "also while it learns" if arrays.keeps_sampler else "while it samples"
  base = f"frozen base, {plan.run.config.model.lora.base_dtype}"
  of_sampler = "adapter" if arrays.kept else "weights"
  held = (
    (base if arrays.adapter else "weights, float32", arrays.weights - arrays.adapter),
    ("adapter, float32", arrays.adapter),
    ("optimizer state", arrays.optimizer),
    ("reference policy", arrays.reference),
    ("teacher", arrays.teacher),
    ("sum of the gradients, during updates", arrays.sums),
    ("sampler: copy of the base, always", arrays.kept),
    (f"sampler: {of_sampler}, {when}", arrays.sampler - arrays.kept),
    ("sampler: keys and values, likewise", arrays.caches),
  )
  for name, size in held:
    if size:
      yield f"  {name:38}{_gib(size)}"


def _memory(plan: Plan) -> Iterator[str]:
  yield from _held(plan)
  if plan.run.samples_whole:
    yield (
      "  (each device holds a whole copy for the sampler, because the devices of a host are not a"
      " block of the mesh)"
    )
  yield ""
  yield f"  {'program':34}{'arrays':>8}{'results':>9}{'temporaries':>13}{'together':>10}"
  for need in plan.needs:
    made = need.compiled
    note = "  refused by the compiler" if made.is_refused else ""
    note += "  (*)" if made.without_triton else ""
    mark = "  ← most" if need is plan.worst and not note else note
    numbers = (
      f"{_gib(need.beside, 8)}{_gib(made.outputs, 9)}{_gib(made.temporaries + made.code, 13)}"
    )
    yield f"  {made.name:34}{numbers}{_gib(need.peak, 10)}{mark}"
  if any(need.compiled.without_triton for need in plan.needs):
    yield "  (*) with cuBLAS for all products: without a device XLA finds no Triton kernel for one"
  yield f"  {'the device has':34}{_gib(plan.room, 40)}  ({plan.topology.chip.of_usable})"


def _arrays(plan: Plan) -> Iterator[str]:
  worst = plan.worst
  if worst.compiled.largest:
    yield f"largest arrays that {worst.compiled.name} makes, in GiB"
    for size, shape, where in worst.compiled.largest[:_MOST_ARRAYS]:
      yield f"  {_gib(size, 8)}  {shape:28} {kind_of(shape, where, plan)}"


def kind_of(shape: str, where: str, plan: Plan) -> str:
  """Returns what an array probably is, by its shape and the operation that makes it."""
  model = plan.run.model
  dtype, _, inside = shape.rstrip("]").partition("[")
  sizes = [int(size) for size in inside.split(",") if size.strip()]
  vocab_parts = {model.vocab_size, math.ceil(model.vocab_size / plan.run.mesh.shape["tensor"])}
  if "all_gather" in where:
    kind = "gathered weights"
  elif vocab_parts & {*sizes}:
    kind = "embedding or head: weights, gradient or logits"
  elif sizes[:1] == [model.num_layers] and len(sizes) > 2:
    is_kept = dtype in ("f32", "bf16", "u16") and "transpose" not in where
    kind = "saved or stacked for all layers" if is_kept else "gradients of all layers"
  else:
    kind = "activations"
  last = where.rpartition("/")[2]
  return f"{kind} ({last})" if last else kind


def _traffic(plan: Plan) -> Iterator[str]:
  rows = list(traffic(plan))
  if plan.topology.devices == 1:
    return
  yield "received by one device in a step, in GB (what a program receives × its calls in a step)"
  yield f"  {'phase':24}{'collective':20}{'mesh axes':20}{'all':>10}{'network':>10}{'calls':>9}"
  for row in rows:
    yield (
      f"  {row['program']:24}{row['kind']:20}{row['axes']:20}"
      f"{row['bytes'] / 1e9:10.3f}{row['network_bytes'] / 1e9:10.3f}{row['calls']:9.0f}"
    )
  if not rows:
    yield "  nothing"


def traffic(plan: Plan) -> Iterator[dict[str, Any]]:
  """Yields the collectives of a step: kind, mesh axes, bytes, bytes by the network, calls."""
  for work in plan.work:
    need = plan.need(work.program) if work.program else None
    for one in need.compiled.moved if need else ():
      if one.bytes * work.calls >= 1e5:
        yield {
          "program": work.phase,
          "kind": one.kind,
          "axes": one.axes or "all",
          "bytes": one.bytes * work.calls,
          "network_bytes": one.far * work.calls,
          "calls": work.calls,
        }


def _time(plan: Plan) -> Iterator[str]:
  config, chip = plan.run.config, plan.topology.chip
  if not plan.phases:
    yield f"time: not estimated, because the rates of {chip.name} are not in the table"
    return
  yield "least time of a step, in seconds: a bound from vendors' peak rates, NOT MEASURED"
  yield (
    f"  {'phase':24}{'TFLOP':>10}{'compute':>10}{'memory':>10}{'links':>10}{'network':>10}"
    f"{'bound':>10}  by"
  )
  for phase in plan.phases:
    numbers = (phase.compute_s, phase.memory_s, phase.near_s, phase.far_s, phase.total_s)
    shown = "".join(f"{number:10.3f}" for number in numbers)
    yield f"  {phase.name:24}{phase.operations / 1e12:10.2f}{shown}  {phase.bound}"
  total = sum(phase.total_s for phase in plan.phases)
  yield f"  {'step':24}{sum(p.operations for p in plan.phases) / 1e12:10.2f}{total:50.3f}"
  yield "assumed:"
  peak = chip.bfloat16 if config.model.compute_dtype == "bfloat16" else chip.float32
  yield (
    f"  a device: {peak / 1e12:.0f} TFLOP/s, memory {chip.bandwidth / 1e12:.2f} TB/s, links"
    f" {chip.link / 1e9:.0f} GB/s, network {chip.network / 1e9:g} GB/s, all received one way;"
    " a slice or node receives what comes from others once, and its devices share it"
  )
  yield f"  from: {chip.sources}"
  prompts, group = config.rollout.prompts_per_step, config.rollout.group_size
  yield (
    f"  {prompts} prompts of {plan.assumed.prompt} tokens, {group} completions each of"
    f" {plan.assumed.completion} tokens; all completions are learned from"
  )
  yield (
    "  max(compute, memory) + links + network for each phase: collectives do not overlap; memory"
    " counts weights, gradients, optimizer state and the sampler's keys and values, no activations;"
    " not counted: grading, evaluations, checkpoints, the metrics all/*, the host"
  )


def _limits(plan: Plan) -> Iterator[str]:
  if plan.microbatch is not None:
    point = plan.microbatch.point
    found = "none fits"
    if point is not None:
      found = (
        f"{point.rows} rows of {point.row_tokens} = {point.places} tokens a replica,"
        f" {_gib(point.peak).strip()} GiB"
      )
      found += _beyond(plan.microbatch, "a step of the assumed lengths fills no more")
    yield f"largest microbatch that fits: {found}"
  if plan.row is not None:
    point = plan.row.point
    found = "none fits"
    if point is not None:
      found = f"{point.row_tokens} tokens, one a replica, {_gib(point.peak).strip()} GiB"
      found += _beyond(plan.row, "the model's context")
    yield f"longest row that fits: {found}"


def _beyond(limit: Limit, reason: str) -> str:
  if limit.is_capped:
    return f" ({reason})"
  if limit.too_large is None:
    return " (more may fit)"
  size = f"{limit.too_large.rows} × {limit.too_large.row_tokens}"
  is_refused = limit.too_large.is_refused
  more = "is refused" if is_refused else f"takes {_gib(limit.too_large.peak).strip()} GiB"
  return f" ({size} {more})"


def _verdict(plan: Plan) -> Iterator[str]:
  worst = plan.worst
  of = f"{_gib(worst.peak).strip()} of {_gib(plan.room).strip()} GiB ({worst.compiled.name})"
  if plan.fits:
    yield f"FITS {plan.topology.name}: {of}"
    return
  missing = worst.peak - plan.room
  if plan.is_of_arrays:
    when = "while it learns" if worst.program == "update" else "while it samples"
    of = f"the arrays alone take {_gib(worst.peak).strip()} GiB {when}, nothing was compiled, and a"
    of += f" device has {_gib(plan.room).strip()}"
  yield f"DOES NOT FIT {plan.topology.name}: {of}, {_gib(missing).strip()} GiB too much"
  yield "what to turn (--config.…):"
  for remedy in advice.remedies(plan):
    enough = remedy.saved >= missing
    saved = f"saves {_gib(remedy.saved).strip()} GiB" if remedy.saved else ""
    note = f"{saved}{', enough by itself' if enough else ''}"
    if remedy.may_cost:
      note = f"{saved} of arrays, but may take more temporaries; plan it to see"
    yield f"  {remedy.change:34}{remedy.reason}{f' ({note})' if note else ''}"


def _gib(size: int | float, width: int = 10) -> str:
  return f"{size / GIB:{width}.2f}"


def largest_shape(plan: Plan) -> Any:
  """Returns the planned shape with the most places."""
  return max(plan.run.made.shapes, key=lambda shape: shape.places)


def parameters(plan: Plan) -> int:
  """Returns the number of parameters of the model."""
  import jax

  from grpo_jax.models import leaves

  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves.tree(plan.run.model)))


def to_json(plan: Plan, *, source: str, arguments: Sequence[str]) -> dict[str, Any]:
  """Returns the plan as plain values; sizes are in bytes of one device, times in seconds."""
  run, chip = plan.run, plan.topology.chip
  arrays = run.arrays
  return {
    "arguments": list(arguments),
    "versions": compiling.versions(),
    "topology": {
      "name": plan.topology.name,
      "chip": chip.name,
      "devices": plan.topology.devices,
      "hosts": plan.topology.hosts,
      "slices": plan.topology.slices,
      "shape": plan.topology.shape,
      "usable_bytes": chip.usable,
      "sources": chip.sources,
    },
    "mesh": {str(axis): size for axis, size in run.mesh.shape.items()},
    "model": {"source": source, "parameters": parameters(plan)},
    "arrays": {
      "weights": arrays.weights,
      "adapter": arrays.adapter,
      "optimizer": arrays.optimizer,
      "reference": arrays.reference,
      "teacher": arrays.teacher,
      "gradients": arrays.sums,
      "sampler_weights": arrays.sampler,
      "sampler_kept": arrays.kept,
      "sampler_caches": arrays.caches,
    },
    "programs": [_program(need) for need in plan.needs],
    "choices": {
      "model.remat": run.config.model.remat,
      "engine.max_rows": run.config.engine.max_rows,
      "engine.cache_gib": run.config.engine.cache_gib,
      "chosen": list(run.config.chosen_by_memory or ()),
      "update_bytes_by_arithmetic": arithmetic(plan),
      "mesh.context": row_choice.to_json(plan.rows),
    },
    "peak_bytes": plan.worst.peak,
    "peak_program": plan.worst.compiled.name,
    "fits": plan.fits,
    "collectives": list(traffic(plan)),
    "assumed": {"prompt_tokens": plan.assumed.prompt, "completion_tokens": plan.assumed.completion},
    "phases": [
      {
        "name": phase.name,
        "operations": phase.operations,
        "compute_s": phase.compute_s,
        "memory_s": phase.memory_s,
        "links_s": phase.near_s,
        "network_s": phase.far_s,
        "bound_s": phase.total_s,
      }
      for phase in plan.phases
    ],
    "step_bound_s": sum(phase.total_s for phase in plan.phases) if plan.phases else None,
    "largest_microbatch": _limit(plan.microbatch),
    "longest_row": _limit(plan.row),
    "remedies": [
      {"change": each.change, "reason": each.reason, "saved_bytes": each.saved}
      for each in advice.remedies(plan)
    ],
  }


def _program(need: Need) -> dict[str, Any]:
  made = need.compiled
  return {
    "name": made.name,
    "beside_bytes": need.beside,
    "argument_bytes": made.arguments,
    "result_bytes": made.outputs,
    "temporary_bytes": made.temporaries,
    "code_bytes": made.code,
    "peak_bytes": need.peak,
    "is_refused": made.is_refused,
    "without_triton": made.without_triton,
    "compile_s": made.compile_s,
    "largest": [
      {"bytes": size, "array": shape, "operation": where} for size, shape, where in made.largest
    ],
  }


def _limit(limit: Limit | None) -> dict[str, Any] | None:
  if limit is None or limit.point is None:
    return None
  point = limit.point
  return {
    "rows": point.rows,
    "row_tokens": point.row_tokens,
    "tokens": point.places,
    "peak_bytes": point.peak,
    "is_capped": limit.is_capped,
  }
