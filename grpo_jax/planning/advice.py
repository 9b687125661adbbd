"""Which option to turn if a run does not fit, derived from what takes the memory."""

import dataclasses
import math
from collections.abc import Iterator

from grpo_jax.planning import programs
from grpo_jax.planning.chips import GIB
from grpo_jax.planning.plan import Need, Plan

# Programs whose memory grows with the places of a microbatch, and those of the sampler.
_OF_LEARNING = ("update", "watch", "optimizer")
_OF_SAMPLING = ("reading prompts", "sampling", "score", programs.COPYING)


@dataclasses.dataclass(frozen=True)
class Remedy:
  """A change of the options.

  Attributes:
    change: The options to set.
    reason: Effect of the change.
    saved: Bytes of one device that it saves; 0: not known before it is planned.
  """

  change: str
  reason: str
  saved: int = 0


def remedies(plan: Plan) -> list[Remedy]:
  """Returns what would make a run fit, the surest first; an empty list if it fits.

  What cannot save anything in this run is left out.
  """
  if plan.fits:
    return []
  worst = plan.worst
  found = [*_state(plan), *_sampler(plan, worst), *_activations(plan, worst)]
  missing = worst.peak - plan.room
  found.sort(key=lambda remedy: (remedy.saved < missing, -remedy.saved))
  return [*found, *_machine(plan)]


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
  if not arrays.adapter:  # a frozen base in bfloat16 remains, which is the reference, too.
    saved = state - arrays.teacher - arrays.weights // 2
    yield Remedy(
      "model.lora.rank=32", "an adapter is trained on a frozen base; docs/lora.md", saved
    )
  if arrays.reference:
    yield Remedy("loss.kl_coef=0", "without a KL there is no reference policy", arrays.reference)
  if arrays.teacher:
    yield Remedy("teacher.urls=…", "servers hold the teacher", arrays.teacher)
  if run.config.optim.optimizer == "adamw":
    saved = arrays.optimizer // 2
    yield Remedy("optim.optimizer=lion", "one moment instead of two; it learns differently", saved)


def _sampler(plan: Plan, worst: Need) -> Iterator[Remedy]:
  """Yields how the embedded sampler takes less."""
  run, arrays = plan.run, plan.run.arrays
  if worst.program not in _OF_SAMPLING or not run.sizes:
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
      f"batching.microbatch_tokens={fitting.places}", "smaller microbatches, compiled: fits", saved
    )
  elif fitting is None and plan.microbatch is None and each > shape.row_tokens:
    yield Remedy(
      f"batching.microbatch_tokens={max(each // 2, shape.row_tokens)}", "smaller microbatches"
    )
  if run.config.model.remat != "full":
    yield Remedy("model.remat=full", "activations are computed again in the backward pass")
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


def _gathers(need: Need) -> int:
  """Returns the bytes of the largest arrays that are gathered weights."""
  return sum(size for size, _, source in need.compiled.largest if "all_gather" in source)


def _machine(plan: Plan) -> Iterator[Remedy]:
  """Yields how many devices of this kind hold the state alone, if these do not."""
  arrays = plan.run.arrays
  state = (arrays.always + arrays.sums) * plan.topology.devices / plan.run.mesh.shape["data"]
  least = math.ceil(state / plan.room)
  if least > plan.topology.devices:
    chip = plan.topology.chip
    yield Remedy(
      f"at least {least} × {chip.name}",
      f"weights, optimizer state, reference and gradients take {state / GIB:.0f} GiB in all, and a"
      f" device has {plan.room / GIB:.1f}",
    )
