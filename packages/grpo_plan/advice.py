"""Which option to turn if a run does not fit, derived from what takes the memory."""

import dataclasses
import math
from collections.abc import Iterator

from grpo_jax.building import arrays_in_memory
from grpo_jax.config import lora_options
from grpo_jax.models.options import REMATS
from grpo_plan import programs
from grpo_plan.chips import GIB
from grpo_plan.plan import Need, Plan

# Programs whose memory grows with the places of a microbatch, and those of the sampler.
_OF_LEARNING = ("update", "watch", "optimizer")
_OF_SAMPLING = (
  "reading prompts",
  "sampling",
  "score",
  arrays_in_memory.COPYING,
  arrays_in_memory.COPYING_ADAPTER,
)
# Rank of an adapter that is advised.
_RANK = 32
# Dtypes of a frozen base, the smaller ones last.
_BASES = ("float32", "bfloat16", "int8", "nf4")


@dataclasses.dataclass(frozen=True)
class Remedy:
  """A change of the options.

  Attributes:
    change: The options to set.
    reason: Effect of the change.
    saved: Bytes of one device that it saves; 0: not known before it is planned.
    may_cost: Whether it saves arrays and may take more temporaries, which only a plan shows.
  """

  change: str
  reason: str
  saved: int = 0
  may_cost: bool = False


def remedies(plan: Plan) -> list[Remedy]:
  """Returns what would make a run fit, the surest first; an empty list if it fits.

  Where rows over more devices make its update fit, this is the first. What cannot save anything in
  this run is left out.
  """
  if plan.fits:
    return []
  worst = plan.worst
  found = [*_state(plan), *_adapter(plan, worst)]
  found += [*_sampler(plan, worst), *_activations(plan, worst)]
  missing = worst.peak - plan.room
  found.sort(key=lambda remedy: (remedy.saved < missing, -remedy.saved))
  return [*_rows(plan, worst), *found, *_machine(plan)]


def _rows(plan: Plan, worst: Need) -> Iterator[Remedy]:
  """Yields the mesh that divides rows over as many devices as their update needs."""
  if plan.rows is None or plan.rows.own.fits(plan.room):
    return
  own, chosen = plan.rows.own, plan.rows.chosen
  other = plan.rows.smallest if chosen is None else chosen
  if not other.changes or other.peak >= own.peak:
    return
  saved = worst.peak - other.peak if worst.program == "update" else 0
  reason = f"rows of {own.row_tokens} tokens over {other.parts} devices each"
  if chosen is None:
    reason += ", which takes least"
  yield Remedy(other.options, reason, max(saved, 0))


def _state(plan: Plan) -> Iterator[Remedy]:
  """Yields how the weights, their optimizer state and the reference take less."""
  run, arrays = plan.run, plan.run.arrays
  copies = run.mesh.shape["data"]
  state = arrays.always + arrays.sums
  if copies > 1:
    parts = run.mesh.shape["fsdp"] * copies
    yield Remedy(
      f"mesh.data=1 mesh.fsdp={parts}",
      f"the {copies} replicas each hold all weights and optimizer state",
      int(state * (1 - 1 / copies)),
    )
  if arrays.reference:
    yield Remedy("loss.kl_coef=0", "without a KL there is no reference policy", arrays.reference)
  if arrays.teacher:
    yield Remedy("teacher.urls=…", "servers hold the teacher", arrays.teacher)
  if run.config.optim.optimizer == "adamw":
    saved = arrays.optimizer // 2
    yield Remedy("optim.optimizer=lion", "one moment instead of two; it learns differently", saved)


def _adapter(plan: Plan, worst: Need) -> Iterator[Remedy]:
  """Yields an adapter, or a smaller base of the adapter that there is."""
  run, arrays = plan.run, plan.run.arrays
  if not arrays.adapter:
    if run.config.reference.update_every_steps:  # which a frozen base cannot.
      return
    saved = arrays.beside(worst.program) - _with_adapter(plan).beside(worst.program)
    reason = "an adapter is trained on a frozen base; docs/lora.md"
    yield Remedy(f"model.lora.rank={_RANK}", reason, saved)
    return
  base, dtype = arrays.weights - arrays.adapter, run.config.model.lora.base_dtype
  for smaller in _BASES[_BASES.index(dtype) + 1 :]:
    size = programs.base_bytes(run, smaller)
    if size is None:
      continue
    reason, saved = "the base in fewer bits; docs/lora.md", base - size
    if smaller in lora_options.QUANTIZED:
      reason = "a quantised base; its layers are dequantised one at a time; docs/lora.md"
      if dtype not in lora_options.QUANTIZED:  # its only copies are those for other hosts.
        saved += int(arrays.kept * (1 - size / base)) if run.is_spread else arrays.kept
    yield Remedy(f"model.lora.base_dtype={smaller}", reason, saved, may_cost=True)


def _with_adapter(plan: Plan) -> arrays_in_memory.Arrays:
  """Returns the arrays of a run that would train an adapter on a base in bfloat16."""
  run, arrays = plan.run, plan.run.arrays
  base, adapter = programs.base_bytes(run, "bfloat16"), programs.adapter_bytes(run, _RANK)
  assert base is not None, "every mesh that splits float32 splits bfloat16"
  is_merged = run.config.model.compute_dtype == "float32"
  return dataclasses.replace(
    arrays,
    weights=base + adapter,
    optimizer=int(arrays.optimizer * adapter / arrays.weights),
    reference=0,
    initial=0,
    gradients=adapter,
    kept=0 if is_merged else arrays.sampler,
    adapter=adapter,
  )


def _sampler(plan: Plan, worst: Need) -> Iterator[Remedy]:
  """Yields how the embedded sampler takes less."""
  run, arrays = plan.run, plan.run.arrays
  if not run.sizes:
    return
  if worst.program in _OF_LEARNING and arrays.kept:
    reason = "servers on other devices sample: no copy of the base stays during updates"
    yield Remedy("engine.name=sglang", reason, arrays.kept)
  if worst.program not in _OF_SAMPLING:
    return
  rows = run.sizes["max_rows"]
  if rows > 8 and arrays.caches:
    yield Remedy(f"engine.max_rows={rows // 2}", "half of the sampler's rows", arrays.caches // 2)
  if run.samples_whole:
    host = run.sampler_mesh.size if run.sampler_mesh else 1
    saved = int(arrays.sampler * (1 - 1 / host))
    change = f"mesh.fsdp={run.mesh.size // 2} mesh.tensor=2"
    reason = f"may split the sampler's copy over the {host} devices of a host; plan it to see"
    yield Remedy(change, reason, saved)
  yield Remedy("engine.name=sglang", "servers on other devices sample", arrays.sampling)


def _activations(plan: Plan, worst: Need) -> Iterator[Remedy]:
  """Yields how the program that takes most takes less."""
  run = plan.run
  if worst.program not in (*_OF_LEARNING, "score", "teacher") or worst.program == "optimizer":
    return
  fitting = plan.microbatch.point if plan.microbatch else None
  shape = max(run.made.shapes, key=lambda shape: shape.places)
  each = shape.places // plan.replicas
  if fitting is not None and fitting.places < each:
    saved = worst.peak - fitting.peak
    yield Remedy(
      f"batching.microbatch_tokens={fitting.places // plan.parts}",
      "smaller microbatches, compiled: fits",
      saved,
    )
  elif fitting is None and plan.microbatch is None and each > shape.row_tokens:
    yield Remedy(
      f"batching.microbatch_tokens={max(each // 2, shape.row_tokens) // plan.parts}",
      "smaller microbatches",
    )
  if worst.program == "update":
    yield from _recomputation(plan)
  row = plan.row.point if plan.row else None
  if row is not None and row.row_tokens < shape.row_tokens:
    yield Remedy(
      f"batching.row_tokens={row.row_tokens}",
      "shorter rows; longer completions than that are not sampled",
    )
  tensor = run.mesh.shape["tensor"]
  if tensor < 8 and _gathers(worst) > 0.3 * worst.compiled.temporaries:
    yield Remedy(
      f"mesh.tensor={2 * tensor}",
      "the largest arrays are gathered weights or logits, which it divides; plan it to see",
    )


def _recomputation(plan: Plan) -> Iterator[Remedy]:
  """Yields the choices of `model.remat` that take less than that of the run."""
  remat, choices = plan.run.config.model.remat or REMATS[0], plan.run.choices
  for smaller in reversed(REMATS[: REMATS.index(remat)]):
    learning = None if choices is None else choices.learning
    saved = 0 if learning is None else learning.peak(remat) - learning.peak(smaller)
    reason = "more activations are computed again in the backward pass"
    yield Remedy(f"model.remat={smaller}", reason, saved)


def _gathers(need: Need) -> int:
  """Returns the bytes of the largest arrays that are gathered weights."""
  return sum(size for size, _, source in need.compiled.largest if "all_gather" in source)


def _machine(plan: Plan) -> Iterator[Remedy]:
  """Yields how many devices of this kind hold the state alone, if these do not."""
  arrays = plan.run.arrays
  state = (arrays.always + arrays.sums) * plan.topology.devices / plan.run.mesh.shape["data"]
  least = math.ceil(state / plan.room)
  if least > plan.topology.devices and plan.topology.chip.platform != "cpu":
    chip = plan.topology.chip
    yield Remedy(
      f"at least {least} × {chip.name}",
      f"weights, optimizer state, reference and gradients take {state / GIB:.0f} GiB in all, and a"
      f" device has {plan.room / GIB:.1f}",
    )
