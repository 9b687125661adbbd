"""What one training step computes, from a run's config and an assumed length of completions.

A multiplication with an addition counts as two operations. Recomputed activations are counted:
these are the operations that the devices execute, not those of the model.
"""

import collections
import dataclasses
import inspect
import math
from collections.abc import Mapping

import jax

from grpo_jax.batching import packing
from grpo_jax.building import arrays_in_memory
from grpo_jax.config import batching_options
from grpo_jax.config.options import Config
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn.operations import shares_of_windows
from grpo_jax.models import leaves
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.options import REMATS
from grpo_plan.programs import PlannedRun
from grpo_plan.topologies import PlanError

# Times that an update reads each weight in the compute dtype: forward, backward, recomputation.
_READS = {"full": 3, "dots": 2, "none": 2}
# Products that form s A B in an update: forward, backward again, and the gradients of A and of B.
_OF_MERGING = 4
# Decode steps of one call.
_CHUNK: int = inspect.signature(JaxSampler).parameters["chunk_tokens"].default


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Assumed tokens of every prompt and completion of a step."""

  prompt: int
  completion: int


@dataclasses.dataclass(frozen=True)
class PhaseWork:
  """One phase of a step, on all devices together.

  Attributes:
    phase: Name of the phase.
    program: Program that it runs, one of `programs.PROGRAMS`, or "" for none.
    calls: Number of runs of the program in a step.
    operations: Operations of the phase.
    bytes: Least bytes that each device exchanges with its memory.
  """

  phase: str
  program: str
  calls: float
  operations: float
  bytes: float


def lengths(config: Config, *, prompt: int | None = None, completion: int | None = None) -> Lengths:
  """Returns the assumed lengths; where none is given, half of the largest that the config allows.

  Args:
    config: Config of the run.
    prompt: Tokens of a prompt; None: half of the largest.
    completion: Tokens of a completion; None: half of the largest.

  Raises:
    PlanError: A given length is more than the config allows.
  """
  load = batching_options.load(config)
  _check_length("--prompt-tokens", prompt, load.prompt, "a prompt")
  _check_length("--completion-tokens", completion, load.completion, "a completion")
  of_prompt = prompt or max(-(-load.prompt // 2), 1)
  if completion is not None and prompt is None:
    of_prompt = min(of_prompt, load.longest - completion)
  of_completion = completion or min(max(-(-load.completion // 2), 1), load.longest - of_prompt)
  if of_prompt + of_completion > load.longest:
    raise PlanError(
      f"--prompt-tokens={of_prompt} and --completion-tokens={of_completion}: the config allows a"
      f" prompt with its completion of at most {load.longest} tokens (rollout.max_tokens)"
    )
  return Lengths(of_prompt, of_completion)


def _check_length(name: str, given: int | None, most: int, of: str) -> None:
  """Raises PlanError if a length is more than the run allows."""
  if given is not None and given > most:
    raise PlanError(
      f"{name}={given}: the config allows {of} of at most {most} tokens (data.max_prompt_tokens,"
      " sampling.max_tokens, rollout.max_tokens)"
    )


def microbatches(run: PlannedRun, assumed: Lengths) -> dict[packing.Shape, int]:
  """Returns the microbatches of a step by shape, as the run packs them; all completions count."""
  count = collections.Counter(each.shape for each in _packed(run, assumed)[1])
  return {shape: n * run.config.learn.minibatches for shape, n in count.items()}


def _packed(run: PlannedRun, assumed: Lengths) -> tuple[list[packing.Sizes], list[packing.Packed]]:
  """Returns the groups of an optimizer step, and its microbatches."""
  load = batching_options.load(run.config)
  group = packing.Sizes(assumed.prompt, (assumed.completion,) * load.group)
  if not run.config.batching.share_prefixes:
    one = packing.Sizes(assumed.prompt, (assumed.completion,))
    groups = [one] * (load.groups * load.group)
  else:
    groups = [group] * load.groups
  packed = packing.pack(
    groups, run.made.shapes, cost=run.made.cost, one_piece=not run.config.batching.pack
  )
  return groups, packed


def operations(run: PlannedRun, assumed: Lengths, cost: packing.Cost) -> float:
  """Returns the operations of all microbatches of a step, without those added for other costs."""
  groups, packed = _packed(run, assumed)
  of_rows = sum(
    each.shape.rows * cost.row_cost(each.shape.row_tokens, each.shape.loss_tokens)
    for each in packed
  )
  return run.config.learn.minibatches * (of_rows + packing.attention(groups, packed, cost))


def forward_cost(model: ModelConfig) -> packing.Cost:
  """Returns the operations of one forward pass."""
  of_pair = 4.0 * model.num_layers * model.num_heads * model.head_dim
  return packing.Cost(
    place=2.0 * model.num_layers * leaves.used_by_token(model),
    pair=of_pair,
    loss_place=2.0 * model.vocab_size * model.hidden_size,
    windows=shares_of_windows(model),
  )


def weights_of_layers(model: ModelConfig) -> int:
  """Returns the number of weights in the matrices of all layers."""
  layers = jax.tree.leaves(leaves.tree(model)["layers"])
  return sum(math.prod(leaf.shape) for leaf in layers if len(leaf.shape) > 2)


def of_step(run: PlannedRun, assumed: Lengths, *, hosts: int) -> list[PhaseWork]:
  """Returns the phases of one training step.

  Args:
    run: The run.
    assumed: Assumed lengths.
    hosts: Number of processes, each of which samples its share of the prompts.
  """
  shapes = microbatches(run, assumed)
  count = sum(shapes.values())
  found = _sampling(run, assumed, hosts) if run.sizes else []
  scorings = _scorings(run)
  if scorings:
    forward = operations(run, assumed, forward_cost(run.model))
    read = scorings * count * _gathered(run)
    forward += count * merging(run)
    found.append(PhaseWork("scoring", "score", float(scorings * count), scorings * forward, read))
  found.append(of_updates(run, assumed))
  steps = run.config.learn.epochs * run.config.learn.minibatches
  state = 2 * (run.arrays.sums + run.arrays.optimizer) + run.arrays.sums
  found.append(PhaseWork("optimizer", "optimizer", float(steps), 0.0, float(steps * state)))
  if run.is_spread:
    arrays = run.arrays
    program, moved = arrays_in_memory.COPYING, arrays.weights + arrays.sampler
    if arrays.kept:  # then only an adapter moves: read, and written. The base moved once.
      program, moved = arrays_in_memory.COPYING_ADAPTER, 2 * (arrays.sampler - arrays.kept)
    found.append(PhaseWork("weights to the sampler", program, 1.0, 0.0, float(moved)))
  return found


def of_updates(run: PlannedRun, assumed: Lengths) -> PhaseWork:
  """Returns the updates of one training step; the run's programs need not be described.

  Args:
    run: The run.
    assumed: Assumed lengths.
  """
  count = sum(microbatches(run, assumed).values())
  operations_ = operations(run, assumed, update_cost(run)) + count * _OF_MERGING * merging(run)
  calls = float(run.config.learn.epochs * count)
  each = weights_read(run) + 2 * run.arrays.sums
  return PhaseWork("update", "update", calls, run.config.learn.epochs * operations_, calls * each)


def weights_read(run: PlannedRun) -> float:
  """Returns the bytes of the weights that one device reads in the update of a microbatch."""
  return _READS[run.config.model.remat or REMATS[0]] * _gathered(run)


def update_cost(run: PlannedRun) -> packing.Cost:
  """Returns the operations of a gradient, without those that a frozen base saves.

  The gradient of a frozen kernel, or of a frozen head, is one product that is not computed, unless
  the kernel is merged, as those of experts are. The adapter's own products are small ones of its
  rank, as many as those of a trained kernel; see `merging` for those of experts.
  """
  cost = run.made.cost
  if run.made.composition is None:
    return cost
  used = run.model.num_layers * leaves.used_by_token(run.model)
  of_layers, of_head = (2.0 * n for n in (used, _weights_of_head(run)))
  trained = run.made.state.params
  apart = [trained[name] for name in trained if name not in leaves.EXPERTS]
  adapter = 2.0 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(apart))
  of_adapter = cost.place / of_layers * adapter
  with_gradients = 2.0 * run.model.num_layers * _used_of_merged(run)
  return dataclasses.replace(
    cost,
    place=cost.place - of_layers + with_gradients + of_adapter,
    loss_place=cost.loss_place - of_head,
  )


def merging(run: PlannedRun) -> float:
  """Returns the operations of s A B of all experts with an adapter, once."""
  rank = run.config.model.lora.rank or 0
  of_layer = leaves.layer(run.model)
  sizes = sum(math.prod(of_layer[name].shape) for name in _merged(run))
  return 2.0 * run.model.num_layers * rank * sizes


def _used_of_merged(run: PlannedRun) -> int:
  """Returns how many weights of merged kernels of one layer a token is multiplied with."""
  mixture, of_layer = run.model.mixture, leaves.layer(run.model)
  chosen = 0 if mixture is None else mixture.experts_per_token
  return chosen * sum(math.prod(of_layer[name].shape[1:]) for name in _merged(run))


def _merged(run: PlannedRun) -> list[str]:
  """Returns the kernels of experts that have an adapter."""
  is_adapted = run.made.composition is not None
  return [name for name in leaves.EXPERTS if is_adapted and name in run.made.state.params]


def _scorings(run: PlannedRun) -> int:
  """Returns how often a step scores its batch before the update."""
  return int(run.made.needs_old) + int(run.made.objective.needs_ref)


def _gathered(run: PlannedRun) -> float:
  """Returns the bytes of the weights in the compute dtype, as one device gathers them."""
  parts, experts = run.mesh.shape["tensor"], run.mesh.shape.get("expert", 1)
  size = 2 if run.config.model.compute_dtype == "bfloat16" else 4
  layers = leaves.tree(run.model)["layers"].values()
  of_experts = sum(math.prod(leaf.shape) for leaf in layers if leaf.kind == "experts")
  own = weights_of_layers(run.model) - of_experts + of_experts / experts
  return size * (own + _weights_of_head(run)) / parts


def _weights_of_head(run: PlannedRun) -> int:
  """Returns the number of weights of the head."""
  return run.model.vocab_size * run.model.hidden_size


def _bytes_of_row(token_bytes: Mapping[int | None, int], assumed: Lengths, group: int) -> float:
  """Returns the bytes of keys and values that a decode step reads for a row, on average.

  A prompt is read once for its group, its completions each for themselves.
  """
  found = 0.0
  for window, size in token_bytes.items():
    own = _context(dataclasses.replace(assumed, prompt=0), window)
    prompt = assumed.prompt if window is None else min(window, assumed.prompt)
    found += size * (own + prompt / group)
  return found


def _context(assumed: Lengths, window: int | None) -> float:
  """Returns how many tokens a sampled one sees, on average."""
  prompt, count = assumed.prompt, assumed.completion
  if window is None:
    return prompt + count / 2
  grows = min(max(window - prompt, 0), count)  # tokens after which the window is full.
  return (grows * (min(prompt, window) + grows / 2) + (count - grows) * window) / count


def _sampling(run: PlannedRun, assumed: Lengths, hosts: int) -> list[PhaseWork]:
  """Returns reading the prompts and decoding."""
  config, model = run.config, run.model
  prompts, group = config.rollout.prompts_per_step, run.sizes["group_size"]
  rows, parts = run.sizes["max_rows"], run.sampler_mesh.size if run.sampler_mesh else 1
  cost = forward_cost(model)
  pairs = cost.pairs([(assumed.prompt, ())])
  read = prompts * (cost.place * assumed.prompt + cost.pair * pairs)
  calls = math.ceil(prompts / hosts) * assumed.prompt / run.prefill
  of_weights = run.weights_read * math.ceil(calls)
  reading = PhaseWork("reading prompts", "reading prompts", calls, read, float(of_weights))
  completions = prompts * group
  context = sum(share * _context(assumed, window) for window, share in cost.windows)
  token = cost.place + cost.loss_place + cost.pair * context
  steps = math.ceil(math.ceil(completions / hosts) / rows) * assumed.completion
  cached = rows * _bytes_of_row(run.cache_token, assumed, group) / parts
  operations = completions * assumed.completion * token
  moved = steps * (run.weights_read + cached)
  decoding = PhaseWork("sampling", "sampling", steps / _CHUNK, operations, float(moved))
  return [reading, decoding]
