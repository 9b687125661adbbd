"""Every loss of rows that are divided over devices, and of whole rows on one, in float64.

    python rows_in_float64.py CASE ...

The program says float32 where it wants its highest precision, which is float64 here, so this is a
process of its own: what differs by more than 1e-12 is not rounding. It prints an object with the
`Found` of each case of `CASES`.
"""

import dataclasses
import json
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SEQUENCES = {"aggregation": "sequence_mean"}
CORRECTED = {"importance_correction": "token", "importance_truncation": "tis"}
# Each loss, and each option that adds a term to it or takes tokens from it.
LOSSES: dict[str, dict[str, Any]] = {
  "clipped": {"kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0},
  "gspo": {"loss": "gspo", "kl_coef": 0.1, "entropy_coef": 0.05, **SEQUENCES},
  "gspo_token": {"loss": "gspo_token", **SEQUENCES},
  "cispo": {"loss": "cispo", "kl_coef": 0.1, "clip_low": 1.0, "clip_high": 4.0},
  "sapo": {"loss": "sapo", "kl_coef": 0.1, "kl_estimator": "k2"},
  "reinforce": {"loss": "reinforce", "kl_coef": 0.1, "kl_estimator": "k1"},
  "gmpo": {"loss": "gmpo", **SEQUENCES},
  "luspo": {"loss": "luspo", **SEQUENCES},
  "vespo": {"loss": "vespo"},
  "dppo_tv": {"loss": "dppo_tv", "dppo_kl_tau": 0.1},
  "dppo_kl": {"loss": "dppo_kl"},
  "clip_cov": {"loss": "clip_cov"},
  "kl_cov": {"loss": "kl_cov"},
  "sequence_mean": {"kl_coef": 0.1, "kl_weight": "old", **SEQUENCES},
  "constant_length": {"aggregation": "constant_length", "max_completion_tokens": 9},
  "icepop": {**CORRECTED, "importance_truncation": "icepop", "importance_high": 30.0},
  "by sequence": {**CORRECTED, "importance_correction": "sequence", "importance_high": 30.0},
  "seq_mask": {**CORRECTED, "importance_truncation": "seq_mask", "importance_high": 30.0},
  "off-policy mask": {"off_policy_mask_threshold": 0.1},
  "top entropy": {"top_entropy_share": 0.3, "entropy_coef": 0.05},
  "by error": {"seq_logprob_error_threshold": 20.0},
  "interpolated": {"old_logprobs": "interpolated", **CORRECTED, "importance_high": 30.0},
  "behavior": {"use_behavior_logprobs": True},
  "on policy": {"force_on_policy_ratio": True},
  "in reward": {"kl_coef": 0.1, "kl_in_reward": True},
  "taught": {"distillation": {"coef": 0.7, "reward_coef": 0.5, "clamp": 2.0}},
}
# Those that are computed by one sweep over the head, too.
SWEPT = ("clipped", "taught")


class Found(NamedTuple):
  """Distances of a case from one device, relative to the largest number.

  Attributes:
    scores: Distance of logprobs and entropies.
    losses: Distance of each loss.
    gradients: Largest distance of the gradients of each loss.
    blind: Losses and arrays without a gradient.
  """

  scores: float
  losses: dict[str, float]
  gradients: dict[str, float]
  blind: list[str]


class Case(NamedTuple):
  """A model, the mesh that divides rows, their layout, and the losses."""

  model: str
  mesh: Mapping[str, int]
  layout: Mapping[str, Any]
  losses: Sequence[str] = tuple(LOSSES)


FEW = ("gspo", "clipped", "sequence_mean")
PACKED = {"rows": 4, "length": 64, "packed": True}
# Parts of three places: prompts are longer than a part, and other parts are padding alone.
ALONE = {"rows": 13, "length": 24, "packed": False}
CASES = {
  "fsdp, tensor": Case("dense", {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, PACKED),
  "eight parts": Case("dense", {"context": 8}, ALONE, FEW),
  "adapter, replay": Case("mixture", {"data": 1, "expert": 2, "context": 4}, PACKED, FEW),
}


def as_float64() -> None:
  """Has float32 mean float64 in the program; before it is imported."""
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  jnp.float32 = jnp.float64
  from grpo_kernels.linear_logprobs import sharded

  replace = lambda x, **_: dataclasses.replace(x, gradient_dtype="float64")
  sharded.dataclasses = types.SimpleNamespace(**{**vars(dataclasses), "replace": replace})


def objectives_of(names: Sequence[str]) -> dict[str, Any]:
  """Returns the objectives of losses."""
  from grpo_jax.rl import objectives
  from grpo_jax.rl.distillation import Distillation

  found = {}
  for name in names:
    options = {"kl_coef": 0.0, **LOSSES[name]}
    if "distillation" in options:
      options["distillation"] = Distillation(**options["distillation"])
    found[name] = objectives.make(**options)
  return found


def program(config: Any, names: Sequence[str], of_mesh: Mapping[str, Any]) -> Any:
  """Returns the function to scores, losses and the gradients of every loss.

  A loss and its gradients are computed as `train_step.make_update` does.
  """
  from grpo_jax.learn import policy, token_scores
  from grpo_jax.rl.logprobs import gather_loss_tokens

  objectives, settings = objectives_of(names), {"temperature": 1.3, **of_mesh}
  logprobs = token_scores.make_logprobs(config, **settings)
  swept = {
    name: token_scores.make_token_loss(config, objectives[name], **settings)
    for name in SWEPT
    if name in names
  }

  def losses(sums: Any, weights: Any, batch: Any, denominators: Any) -> Any:
    params = policy.full_weights(policy.attach(weights, sums))
    scores = token_scores.TokenScores(*logprobs(params, batch, True))
    tokens = gather_loss_tokens(batch)
    found = {
      name: objective(*scores[:2], tokens, denominators)[0]
      for name, objective in objectives.items()
    }
    for name, loss in swept.items():
      found[f"{name}, one sweep"] = loss(params, batch, denominators, True)[0]
    return found, scores[:2]

  def run(weights: Any, batch: Any, denominators: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, policy.trainable_of(weights))
    of_sums = lambda sums: losses(sums, weights, batch, denominators)
    found, pull, scores = jax.vjp(of_sums, zeros, has_aux=True)
    names = list(found)
    alone = lambda one_hot: pull(dict(zip(names, one_hot, strict=True)))[0]
    stacked = jax.lax.map(alone, jnp.eye(len(names)))
    each = {name: jax.tree.map(lambda x, i=i: x[i], stacked) for i, name in enumerate(names)}
    return found, scores, each

  return jax.jit(run)


def model_of(name: str) -> Any:
  """Returns a config: layers with and without a window, or a mixture of experts."""
  import equivalence_case as case
  import test_replay_changes_nothing as replay

  from grpo_jax.models.config import LayerKind

  if name == "mixture":
    return replay.CONFIG
  return dataclasses.replace(case.CONFIG, layer_kinds=(LayerKind(), LayerKind(window=6)))


def weights_of(config: Any, mesh: Any) -> Any:
  """Returns the weights as programs take them: whole, or an adapter on a frozen mixture."""
  import equivalence_case as case

  from grpo_jax.learn import adapters, policy, sharding
  from grpo_jax.models import lora, transformer

  params = jax.tree.map(lambda x: np.asarray(x, np.float64), case.params(0, config))
  shardings = sharding.param_shardings(transformer.logical_axes(config), mesh, shapes=params)
  placed = jax.tree.map(jax.device_put, params, shardings)
  if config.mixture is None:
    return placed
  options = lora.AdapterOptions(2, 6.0, base_dtype="float32")
  composition = adapters.composition(config, mesh, options, seed=0)
  new, owner = policy.begin(placed, composition, copy=None)
  rng = np.random.default_rng(8)
  draw = lambda x: jax.device_put(rng.normal(size=x.shape) / 8, x.sharding)
  return owner.weights(jax.tree.map(draw, new))


def minibatch_of(config: Any, parts: int, layout: Mapping[str, Any]) -> Any:
  """Returns a minibatch of one microbatch, with every field that a loss reads."""
  import equivalence_case as case
  import test_layout_changes_nothing as layouts
  import test_replay_changes_nothing as replay

  from grpo_jax import batching
  from grpo_jax.batching import packing
  from grpo_jax.types import Minibatch

  groups, advantages = case.ragged_groups() if config.mixture is None else replay.recorded(0.8)
  (minibatch,) = batching.assemble(
    layouts.weighed(case.aged(groups), 0.5, 1.0, 0.5, 1.5, 1.0),
    advantages,
    shapes=(packing.Shape(layout["rows"], layout["length"], layout["length"]),),
    skip_zero_advantage=False,
    share_prefixes=layout["packed"],
    pack=layout["packed"],
    step=4,
    parts=parts,
    experts=config.expert_shape if config.mixture else None,
  ).minibatches
  (batch,) = minibatch.microbatches
  rng, is_real = np.random.default_rng(2), batch.loss_places >= 0
  completions = np.take_along_axis(batch.rollout_ids, np.maximum(batch.loss_places, 0), axis=1)
  fields = ("old_logprobs", "ref_logprobs", "teacher_logprobs")
  drawn = {name: np.where(is_real, -5 * rng.random(is_real.shape), 0) for name in fields}
  drawn["selected"] = is_real & (rng.random(is_real.shape) < 0.6)
  drawn["kept"] = is_real & (completions % 3 > 0)
  return Minibatch((dataclasses.replace(batch, **drawn),), minibatch.denominators)


def measured(case: Case, *, on_mesh: bool) -> Any:
  """Returns losses, scores and gradients of a case, on its mesh or on one device."""
  import equivalence_case
  from grpo_kernels.attention import Attention

  from grpo_jax.learn import sharding
  from grpo_jax.models.placement import attention_partition

  config, of_mesh = model_of(case.model), {}
  mesh = (
    sharding.make_mesh(**case.mesh) if on_mesh else sharding.make_mesh(devices=jax.devices()[:1])
  )
  minibatch = minibatch_of(config, sharding.row_parts(mesh), case.layout)
  if on_mesh:
    of_mesh = equivalence_case.placed_on(mesh)
    of_mesh["attention"] = Attention(None, attention_partition(mesh))
    minibatch = sharding.put(minibatch, mesh)
  (batch,) = minibatch.microbatches
  run = program(config, case.losses, of_mesh)
  return jax.device_get(run(weights_of(config, mesh), batch, minibatch.denominators))


def distance(found: Any, wanted: Any) -> float:
  """Returns the largest distance of two trees of arrays, relative to the largest number."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  apart = lambda a, b: np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))
  return max(float(apart(a, b)) for a, b in pairs)


def compared(case: Case) -> Found:
  """Returns the distances of a case."""
  here, there = (measured(case, on_mesh=on_mesh) for on_mesh in (True, False))
  assert {x.dtype for x in jax.tree.leaves((here, there))} == {np.dtype(np.float64)}
  (losses, scores, gradients), apart = there, {}
  for loss, wanted in gradients.items():
    apart[loss] = distance(here[2][loss], wanted)
  blind = [
    f"{loss} {jax.tree_util.keystr(path)}"
    for loss, grads in gradients.items()
    for path, x in jax.tree_util.tree_leaves_with_path(grads)
    if not np.abs(x).max() > 1e-6
  ]
  of_losses = {loss: distance(here[0][loss], wanted) for loss, wanted in losses.items()}
  return Found(distance(here[1], scores), of_losses, apart, blind)


def main(cases: list[str]) -> None:
  """Prints the distances of cases."""
  as_float64()
  print(json.dumps({name: compared(CASES[name])._asdict() for name in cases}))


if __name__ == "__main__":
  main(sys.argv[1:])
