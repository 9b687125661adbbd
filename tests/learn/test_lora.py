"""The update of an adapter: nothing of the frozen base is differentiated, copied or closed over."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax import batching
from grpo_jax.batching import packing
from grpo_jax.learn import adapters, optim, policy, sharding, token_scores, train_step
from grpo_jax.models import leaves, lora, parameter_reading, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.placement import MeshPlacement
from grpo_jax.models.products import Products
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup

V, D = 896, 64  # larger than all else, so that [V, D] is unmistakable and its work is visible.
CONFIG = ModelConfig(
  family="llama",
  vocab_size=V,
  hidden_size=D,
  intermediate_size=192,
  num_layers=1,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  tie_embeddings=False,
)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
OPTIONS = lora.AdapterOptions(rank=4, alpha=8.0, base_dtype="float32")
FULL_RANK = lora.AdapterOptions(rank=D, alpha=float(D), base_dtype="float32")
ROWS = packing.Shape(3, 16, 16)  # a row for each of the groups.
OPTIMIZER, _ = optim.make(1000, learning_rate=0.01, max_grad_norm=None, weight_decay=0.0)


@dataclasses.dataclass(frozen=True)
class Made:
  """An update, and the parts of the policy that it trains, as arrays or their descriptions."""

  update: train_step.Update
  weights: Any


@functools.cache
def made(
  options: lora.AdapterOptions | None,
  *,
  config: ModelConfig = CONFIG,
  sizes: tuple[int, int, int] = (1, 1, 1),
  remat: str = "none",
  dtype: str = "float32",
  in_one_sweep: bool = True,
) -> Made:
  """Returns the update of a run; options of None train every weight."""
  count = int(np.prod(sizes))
  names = dict(zip(sharding.AXES, sizes, strict=True))
  mesh = sharding.make_mesh(**names, devices=jax.devices()[:count])
  of_policy: dict[str, Any] = {
    "products": Products(jnp.dtype(dtype), None, MeshPlacement(mesh) if count > 1 else None),
    "remat": remat,
    "partition": sharding.head_partition(mesh),
  }
  objective = objectives.make(kl_coef=0.0)
  lies = sharding.param_shardings(
    transformer.logical_axes(config), mesh, shapes=leaves.tree(config)
  )
  dtypes: Any = np.float32 if options is None else adapters.read_dtypes(options)
  read = jax.tree.map(
    lambda leaf, at: parameter_reading.described(leaf, at, dtypes), leaves.tree(config), lies
  )
  composition = None
  if options is not None:
    composition = adapters.composition(config, mesh, options, seed=0)
  weights, _ = policy.described(read, composition)
  token_loss = (
    token_scores.make_token_loss(config, objective, **of_policy) if in_one_sweep else None
  )
  update = train_step.make_update(
    token_scores.make_logprobs(config, **of_policy),
    OPTIMIZER,
    objective,
    shardings=policy.shardings_of(policy.trainable_of(weights)),
    token_loss=token_loss,
    report_entropy=False,
  )
  return Made(update, weights)


def groups(lengths=((5, 3), (7, 2), (4, 4))):
  """Returns groups of a prompt of four tokens and two completions of these lengths."""
  rng, found = np.random.default_rng(0), []
  for number, pair in enumerate(lengths):
    rollouts = tuple(
      Rollout(
        completion_ids=rng.integers(0, V, length),
        loss_mask=np.ones(length, bool),
        behavior_logprobs=np.full(length, -np.log(V), np.float32),
        weight_versions=np.zeros(length, np.int32),
        finish_reason=FinishReason.STOP,
        reward=float(reward),
      )
      for reward, length in enumerate(pair)
    )
    found.append(RolloutGroup(Prompt(str(number), rng.integers(0, V, 4), "none"), rollouts))
  return found


def minibatch(shape=ROWS):
  """Returns the groups in rows of this shape; as many microbatches as that takes."""
  given = groups()
  advantages = [np.asarray([-1.0, 1.0], np.float32)] * len(given)
  (one,) = batching.assemble(
    given, advantages, shapes=(shape,), skip_zero_advantage=False
  ).minibatches
  return one


@functools.cache
def lowered(options, **settings):
  """Lowers the program of a microbatch; `donate_argnums` and all are those of a run."""
  of_run = made(options, **settings)
  trainable = policy.trainable_of(of_run.weights)
  mesh = sharding.mesh_of(policy.shardings_of(trainable))
  zero = jax.ShapeDtypeStruct((), jnp.float32, sharding=sharding.whole(mesh))
  one = minibatch(packing.Shape(8, 24, 64))
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.of_rows(mesh)),
    one.microbatches[0],
  )
  given = of_run.weights, (trainable, zero), batch, one.denominators
  return of_run.update.differentiate.lower(*given)


@functools.cache
def compiled(options, **settings):
  return lowered(options, **settings).compile()


def arrays_made(program: Any) -> list[tuple[tuple[int, ...], str]]:
  """Returns the shape of every array that a compiled program makes, and the operation."""
  found = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", program.as_text())
  named = [(tuple(map(int, sizes.split(","))), name) for sizes, name in found]
  return [one for one in named if one[1] not in ("parameter", "get-tuple-element", "bitcast")]


@pytest.mark.long
def test_the_base_is_an_argument_and_is_not_donated():
  text = lowered(OPTIONS).as_text()
  constants = re.findall(r"stablehlo\.constant dense.*tensor<([\dx]+)x[a-z]", text)
  assert max(np.prod([int(n) for n in shape.split("x")]) for shape in constants) < 1000
  main = next(line for line in text.splitlines() if "func.func public @main" in line)
  arguments = main.split("%arg")
  donated = [i for i, one in enumerate(arguments) if re.search("buffer_donor|aliasing_output", one)]
  own = 2 * len(lora.MODULES)
  assert len(donated) == own + 1, "the sums of the gradients, and that of the loss"
  assert min(donated) > own + len(jax.tree.leaves(made(OPTIONS).weights.frozen))


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_gradient_of_the_base_is_computed(remat):
  # Products with a weight: forward, (again,) for the input's gradient, for the weight's gradient.
  whole, ours = (lowered(o, remat=remat).cost_analysis()["flops"] for o in (None, OPTIONS))
  expected = 2 / 3 if remat == "none" else 3 / 4
  # The head saves a third in both; the adapter itself takes some.
  assert 2 / 3 - 0.02 < ours / whole < expected + 0.06


@pytest.mark.long
@pytest.mark.parametrize(
  ("sizes", "config", "in_one_sweep"),
  [
    ((1, 1, 1), CONFIG, True),
    ((1, 1, 1), TIED, False),
    ((2, 1, 2), CONFIG, False),
    ((1, 2, 2), TIED, True),
  ],
  ids=["one sweep", "two passes, tied", "sharded, two passes", "sharded, tied, one sweep"],
)
def test_no_gradient_of_the_head_exists(sizes, config, in_one_sweep):
  settings = {"sizes": sizes, "config": config, "in_one_sweep": in_one_sweep}
  _, fsdp, tensor = sizes
  shapes = {tuple(sorted(shape)) for shape in ((V // tensor, D), (V // tensor, D // fsdp))}
  # The head is gathered, transposed or converted for a product; nothing is summed in its shape. A
  # fusion makes what its last operation makes, which has the same shape and is listed too.
  moved = {"all-gather", "transpose", "copy", "convert", "fusion"}
  of_head = lambda program: (
    {name for shape, name in arrays_made(program) if tuple(sorted(shape)) in shapes} - moved
  )
  assert not of_head(compiled(OPTIONS, **settings))
  if config is CONFIG:
    # One sweep adds products of that shape; two passes write it by parts.
    trained = of_head(compiled(None, **settings))
    assert trained & {"dot", "dynamic-update-slice"}, "that of a trained head would be seen"


DEEP = dataclasses.replace(CONFIG, num_layers=4, vocab_size=64, intermediate_size=640)


@pytest.mark.long
@pytest.mark.parametrize(
  ("base_dtype", "remat"),
  # Not bfloat16: XLA for CPUs slices in float32, so it converts a stack of bfloat16 as a whole.
  [("float32", "none"), ("float32", "dots"), ("int8", "none"), ("nf4", "full")],
)
def test_no_stack_of_the_base_is_made(base_dtype, remat):
  # Neither as residuals of the scan over layers nor dequantised ahead of it.
  options = dataclasses.replace(OPTIONS, base_dtype=base_dtype, targets=("q", "up", "down"))
  program = compiled(options, config=DEEP, remat=remat)
  of_layer = DEEP.hidden_size * DEEP.intermediate_size
  is_kernels = lambda shape: 640 in shape and {D, D // 2} & set(shape)
  large = [
    one for one in arrays_made(program) if is_kernels(one[0]) and np.prod(one[0]) >= 2 * of_layer
  ]
  assert not large
  text = lowered(options, config=DEEP, remat=remat).as_text()
  inputs = D // 2 if base_dtype == "nf4" else D  # two codes in a byte.
  assert f"tensor<4x{inputs}x640x" in text, "a stack is an argument, so its shape would be seen"


# Values.


def begun(options=OPTIONS, *, head_scale=1.0):
  """Returns the update, the state before it, and the policy."""
  of_run = made(options)
  full = transformer.init(jax.random.key(0), CONFIG)
  full = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, full)
  full["head"] = head_scale * full["head"]
  composition = None if options is None else of_run.weights.composition
  trainable, around = policy.begin(full, composition, copy=None)
  shardings = policy.shardings_of(policy.trainable_of(of_run.weights))
  return of_run.update, train_step.init(trainable, OPTIMIZER, shardings=shardings), around


def random_adapter(options=OPTIONS, config=CONFIG):
  rng = np.random.default_rng(1)
  draw = lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape), jnp.float32)
  return jax.tree.map(draw, lora.tree(config, options))


@pytest.mark.long
def test_packed_padded_and_microbatched_gradients_are_equal():
  update, _, around = begun()
  own, found = random_adapter(), []
  for shape, count in (
    (packing.Shape(1, 40, 40), 1),  # all groups in one row.
    (ROWS, 1),
    (packing.Shape(1, 16, 16), 3),  # a microbatch for each group.
  ):
    one = minibatch(shape)
    assert len(one.microbatches) == count
    (grads, loss), *_ = update.gradients(around.weights(own), one)
    found.append((grads, loss))
  for other in found[1:]:
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(found[0]), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(np.abs(b).max(), 1e-3))


@pytest.mark.long
def test_the_update_changes_the_adapter_only_and_the_base_lives_on():
  update, state, around = begun(FULL_RANK)
  before = jax.tree.map(np.asarray, around.frozen)
  for _ in range(2):
    state, metrics, _ = update(state, [minibatch()], weights=around.weights)
    assert metrics["train/skipped_share"].value() == 0
  jax.tree.map(np.testing.assert_array_equal, around.frozen, before)
  assert all(np.abs(parts["b"]).max() > 0 for parts in state.params.values())
  assert around.reference is around.frozen


def reached(options, *, steps):
  """Returns the mean logprob of fixed completions after training on them."""
  # The norm before a frozen head bounds the logits, so a small head bounds the logprobs.
  update, state, around = begun(options, head_scale=10.0)
  given = groups()
  one = batching.assemble(
    given, [np.ones(2, np.float32)] * 3, shapes=(ROWS,), skip_zero_advantage=False
  ).minibatches
  for _ in range(steps):
    state, _, seen = update(state, one, weights=around.weights)
  tokens = sum(len(one.completion_ids) for each in given for one in each.rollouts)
  return float(np.sum(seen[0][0]) / tokens)


@pytest.mark.long
def test_rank_of_the_full_width_reaches_what_full_training_reaches():
  assert reached(FULL_RANK, steps=1) < -5
  whole, ours = (reached(each, steps=40) for each in (None, FULL_RANK))
  assert whole > -0.2
  assert ours == pytest.approx(whole, abs=0.01)


@pytest.mark.long
def test_the_norm_that_is_clipped_and_what_decays_are_those_of_the_adapter():
  own, rng = random_adapter(), np.random.default_rng(6)
  grads = jax.tree.map(lambda x: jnp.asarray(rng.choice([-1.0, 1.0], x.shape), jnp.float32), own)
  norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(grads)))
  expected = {
    # SGD: the step has the length of the rate times the largest norm.
    ("sgd", 0.0): lambda x, g: x - 0.1 * 0.5 * g / norm,
    # AdamW's first step is the gradient's sign; A and B decay alike.
    ("adamw", 0.2): lambda x, g: x - 0.1 * (np.sign(g) + 0.2 * x),
  }
  for (optimizer, weight_decay), wanted in expected.items():
    tx, _ = optim.make(
      10,
      optimizer=optimizer,
      learning_rate=0.1,
      max_grad_norm=0.5,
      weight_decay=weight_decay,
    )
    update = train_step.make_update(lambda *_: (), tx, objectives.make(), report_entropy=False)
    given = jax.tree.map(jnp.copy, own)
    found, _, metrics = update.apply(given, tx.init(given), grads, jnp.float32(0))
    assert metrics["train/grad_norm"].value() == pytest.approx(norm, rel=1e-5)
    for name, parts in own.items():
      for part in "ab":
        after = wanted(np.asarray(parts[part]), np.asarray(grads[name][part]))
        np.testing.assert_allclose(found[name][part], after, rtol=0, atol=1e-5)
