"""What a mesh moves between devices, read from the compiled programs: weights, and no activations.

The partitioner of eight simulated CPU devices is that of GPUs and TPUs. Values alone would not
show the fault that this is about: a mesh on which all devices compute on everybody's rows gives
the same numbers, in many times the memory and the traffic.
"""

import collections
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import Attention

from grpo_jax.batching import dealing
from grpo_jax.learn import optim, scoring, sharding, token_scores, train_step
from grpo_jax.models import leaves, transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.placement import attention_partition
from grpo_jax.models.products import Products
from grpo_jax.rl import objectives
from grpo_jax.types import Batch, Denominators
from grpo_plan import hlo_collectives

# All widths are different, and none is a number of places.
CONFIG = ModelConfig(
  family="qwen2",
  vocab_size=1000,
  hidden_size=160,
  intermediate_size=416,
  num_layers=2,
  num_heads=8,
  num_kv_heads=2,
  head_dim=24,
  tie_embeddings=True,
  qkv_bias=True,
)
UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False, qkv_bias=False, family="qwen3")
UNTIED = dataclasses.replace(UNTIED, qk_norm=True)
# Norms over heads of several devices, and none before attention and MLP.
WIDE = dataclasses.replace(UNTIED, family="olmo2", qk_norm=False, wide_qk_norm=True)
WIDE = dataclasses.replace(WIDE, pre_norms=False, post_norms=True)
ROWS, PLACES, LOSS_PLACES = 2, 56, 44  # rows of a device.
MESHES = {
  "fsdp 8": (1, 8, 1),
  "data 2 x fsdp 4": (2, 4, 1),
  "fsdp 4 x tensor 2": (1, 4, 2),
  "tensor 8": (1, 1, 8),  # more parts than key/value heads.
}
SEEN_BY_ROWS = {"data", "fsdp"}


def batch(rows: int) -> dict[str, Any]:
  """Returns the fields of a microbatch of random rows of two segments with two branches each."""
  rng = np.random.default_rng(0)
  whole = lambda x: np.broadcast_to(np.asarray(x, np.int32), (rows, PLACES)).copy()
  segments = np.repeat([1, 2], PLACES // 2)
  branches = np.tile(np.repeat([0, 1, 2], [8, 10, 10]), 2)
  real = lambda n: rng.normal(size=(rows, n)).astype(np.float32)
  learned = np.flatnonzero(branches > 0)[:LOSS_PLACES]
  padded = np.full(LOSS_PLACES, -1)
  padded[: len(learned)] = learned
  return {
    "tokens": rng.integers(0, CONFIG.vocab_size, (rows, PLACES)).astype(np.int32),
    "segment_ids": whole(segments),
    "branch_ids": whole(branches),
    "positions": whole(np.tile(np.arange(PLACES // 2), 2)),
    "predecessors": whole(np.maximum(np.arange(PLACES) - 1, 0)),
    "loss_mask": np.broadcast_to(branches > 0, (rows, PLACES)).copy(),
    "rollout_ids": whole(2 * segments + branches),
    "advantages": real(PLACES),
    "behavior_logprobs": -np.abs(real(PLACES)),
    "loss_places": np.broadcast_to(padded.astype(np.int32), (rows, LOSS_PLACES)).copy(),
    "ref_logprobs": -np.abs(real(LOSS_PLACES)),
  }


@functools.cache
def weights(config: ModelConfig) -> Any:
  """Returns random parameters in NumPy, larger than at the start so that gradients are not tiny."""
  fresh = transformer.init(jax.random.key(0), config)
  return jax.tree.map(lambda x: np.asarray(x) * (2.0 if x.ndim > 1 else 1.0), fresh)


@dataclasses.dataclass(frozen=True)
class Made:
  """One compiled program for the weights and the batch above."""

  compiled: Any
  given: tuple[Any, Any]
  devices: int

  @functools.cached_property
  def collectives(self) -> list[hlo_collectives.Collective]:
    return hlo_collectives.collectives(self.compiled.as_text(), devices=self.devices)

  @property
  def temporary_bytes(self) -> int:
    return self.compiled.memory_analysis().temp_size_in_bytes

  @functools.cached_property
  def results(self) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(self.compiled(*self.given))]


@functools.cache
def made(
  program: str,
  sizes: tuple[int, int, int] | None,
  *,
  rows: int | None = None,
  config: ModelConfig = CONFIG,
  dtype: str = "float32",
  is_placed: bool = True,
) -> Made:
  """Compiles one program of a run.

  Args:
    program: "update", "two passes", "scorer" or "prefill".
    sizes: Of the mesh; None: one device.
    rows: Of the batch; None: `ROWS` for each part of the rows.
    config: Of the model.
    dtype: Of the products.
    is_placed: False leaves it to the compiler where activations lie.
  """
  sizes = sizes or (1, 1, 1)
  devices = jax.devices()[: math.prod(sizes)]
  mesh = sharding.make_mesh(**dict(zip(sharding.AXES, sizes, strict=True)), devices=devices)
  axes, shapes = transformer.logical_axes(config), leaves.tree(config)
  lies = sharding.param_shardings(axes, mesh, shapes=shapes)
  placement = sharding.placement(mesh) if is_placed else None
  products = Products(dtype, placement=placement)
  of_policy = {"products": products, "partition": sharding.head_partition(mesh), "remat": "full"}
  given = (
    jax.device_put(weights(config), lies),
    sharding.put(batch(rows or ROWS * sharding.replicas(mesh)), mesh),
  )
  function = functools.partial(_PROGRAMS[program], config, of_policy, lies)
  compiled = jax.jit(function).lower(*given).compile()
  return Made(compiled, given, mesh.size)


@pytest.mark.long
def test_divided_rows_gather_keys_and_values_and_hidden_states_once():
  """Twice in each layer, forward and recomputed; their gradients are summed and scattered."""
  mesh = sharding.make_mesh(data=1, context=8)
  lies = sharding.param_shardings(
    transformer.logical_axes(CONFIG), mesh, shapes=leaves.tree(CONFIG)
  )
  of_policy = {
    "products": Products("bfloat16", placement=sharding.placement(mesh)),
    "partition": sharding.head_partition(mesh),
    "attention": Attention(None, attention_partition(mesh)),
    "remat": "full",
  }
  fields = batch(1)
  whole = PLACES - LOSS_PLACES
  fields["loss_places"] = np.pad(fields["loss_places"], ((0, 0), (0, whole)), constant_values=-1)
  fields["ref_logprobs"] = np.pad(fields["ref_logprobs"], ((0, 0), (0, whole)))
  fields["order"] = dealing.order(fields["segment_ids"][0], fields["branch_ids"][0], 8)[0][None]
  given = jax.device_put(weights(CONFIG), lies), sharding.put(fields, mesh)
  function = functools.partial(_PROGRAMS["update"], CONFIG, of_policy, lies)
  made = Made(jax.jit(function).lower(*given).compile(), given, mesh.size)
  moved = collections.Counter()
  for one in made.collectives:
    of_kind = {"reduce-scatter": 8}.get(one.kind, 1)  # by the sizes of the results.
    for array in one.arrays:
      if len(array.shape) > 2 and array.shape[1] * of_kind == PLACES:
        moved[one.kind, array.dtype, array.shape[2:]] += one.times
  heads, width, layers = (CONFIG.num_kv_heads, CONFIG.head_dim), (CONFIG.hidden_size,), 2
  assert moved == {
    ("all-gather", "u16", heads): 2 * 2 * layers,
    ("reduce-scatter", "f32", heads): 2 * layers,
    ("all-gather", "u16", width): 1,
    ("reduce-scatter", "f32", width): 1,
  }


def _gradients(config, of_policy, lies, params, fields, *, in_one_sweep):
  objective = objectives.make(kl_coef=0.1)
  token_loss = None
  if in_one_sweep:
    token_loss = token_scores.make_token_loss(config, objective, **of_policy)
  update = train_step.make_update(
    token_scores.make_logprobs(config, **of_policy),
    optim.make(10)[0],
    objective,
    shardings=lies,
    token_loss=token_loss,
    report_entropy=False,
  )
  one = jnp.float32(100.0)
  sums = update.start(params)
  return update.differentiate(params, sums, Batch(**fields), Denominators(one, one))[0]


def _scores(config, of_policy, lies, params, fields):
  del lies
  return scoring.make_scorer(token_scores.make_logprobs(config, **of_policy))(
    params, Batch(**fields)
  )


def _prefilled(config, of_policy, lies, params, fields):
  del lies
  inputs = (fields["tokens"], fields["positions"], fields["segment_ids"])
  return transformer.prefill(params, config, *inputs, products=of_policy["products"])


_PROGRAMS = {
  "update": functools.partial(_gradients, in_one_sweep=True),
  "two passes": functools.partial(_gradients, in_one_sweep=False),
  "scorer": _scores,
  "prefill": _prefilled,
}


def activations(found, sizes):
  """Returns the collectives over the axes of rows that hold places times a width."""
  parts = dict(zip(sharding.AXES, sizes, strict=True))
  rows = ROWS * sizes[0] * sizes[1]
  of_places = {n * r for n in (PLACES, LOSS_PLACES) for r in {1, ROWS, rows}}

  def is_activation(one):
    has_width = lambda shape: math.prod(shape) >= 8 * math.prod(set(shape) & of_places)
    return hlo_collectives.axes_of(one.groups, parts) & SEEN_BY_ROWS and any(
      set(array.shape) & of_places and has_width(array.shape) for array in one.arrays
    )

  return [one for one in found if is_activation(one)]


@dataclasses.dataclass(frozen=True)
class Needs:
  """What ZeRO-3 (with tensor parallelism) must move and hold, of one device; bytes.

  Attributes:
    moved: Received.
    gathered: Held at once of what lies split: one layer's weights and the gradients of its widest
      kernel, or the head with its gradient.
  """

  moved: float
  gathered: float


def needs(program, config, sizes, *, compute_bytes=4) -> Needs:
  """Returns the arithmetic of a program.

  A weight is gathered over fsdp in the compute dtype for each use (in the update once forward and
  once backward; an embedding and a head of one sweep once), its gradient is reduced over data and
  scattered over fsdp in float32. Over tensor, [places, D] in float32 is summed after attention and
  MLP (and for the embedding and the hidden states' gradient at the head), and again backward.
  """
  data, fsdp, tensor = sizes
  learns = program in ("update", "two passes")
  layer = sum(math.prod(leaf.shape) for leaf in leaves.layer(config).values()) / tensor
  table = config.vocab_size * config.hidden_size / tensor
  gather = lambda numbers: numbers * compute_bytes * (fsdp - 1) / fsdp
  reduce = lambda numbers: 4 * numbers * ((fsdp - 1) / fsdp + 2 * (data - 1) / data / fsdp)
  has_head = program != "prefill"
  uses_of_head = 2 if program == "two passes" else has_head
  moved = gather(config.num_layers * layer * (1 + learns) + table * (1 + uses_of_head))
  if learns:
    moved += reduce(config.num_layers * layer + 2 * table)
  if tensor > 1:
    summed = 2 * (tensor - 1) / tensor * 4 * ROWS * PLACES * config.hidden_size
    of_layer = 2 + 3 * learns  # backward: two, and that of attention is computed again.
    moved += summed * (config.num_layers * of_layer + 1)
    moved += learns * summed * LOSS_PLACES / PLACES
    if config.num_kv_heads % tensor:  # keys and values are whole: forward twice, backward.
      width = 2 * config.num_kv_heads * config.head_dim
      one = 4 * ROWS * PLACES * width * (tensor - 1) / tensor
      moved += config.num_layers * one * (1 + 3 * learns)
  widest = config.hidden_size * config.intermediate_size / tensor
  of_layer = layer * compute_bytes + learns * 3 * widest * 4
  of_head = table * (compute_bytes + 4 * learns)
  return Needs(moved, max(of_layer, of_head) if fsdp > 1 else 0.0)


# The update goes through the layers forward and backward on every mesh. The other programs go
# through the same layers and differ at the head: one mesh or two show it.
PROGRAMS_ON_MESHES = [
  *(("update", CONFIG, name) for name in MESHES),
  ("two passes", UNTIED, "data 2 x fsdp 4"),
  ("scorer", UNTIED, "fsdp 4 x tensor 2"),
  ("update", WIDE, "fsdp 4 x tensor 2"),
  ("scorer", WIDE, "tensor 8"),
  ("prefill", CONFIG, "data 2 x fsdp 4"),
  ("prefill", CONFIG, "tensor 8"),
]
CASES = [
  pytest.param(program, config, MESHES[name], id=f"{program}-{name}")
  for program, config, name in PROGRAMS_ON_MESHES
]
cases = pytest.mark.parametrize(("program", "config", "sizes"), CASES)


def by_kind(found) -> dict[str, float]:
  """Returns the bytes that a device receives by each kind of collective."""
  total = collections.Counter()
  for one in found:
    total[one.kind] += one.nbytes
  return total


@pytest.mark.long
@cases
def test_no_activation_moves_over_the_axes_of_rows(program, config, sizes):
  found = made(program, sizes, config=config).collectives
  assert found
  assert activations(found, sizes) == []


@pytest.mark.long
@cases
def test_what_moves_is_what_zero_3_needs(program, config, sizes):
  found = made(program, sizes, config=config).collectives
  moved = sum(one.nbytes for one in found)
  wanted = needs(program, config, sizes).moved
  assert 0.8 * wanted <= moved <= 1.3 * wanted, (moved, wanted, by_kind(found))


@pytest.mark.long
@cases
def test_a_device_holds_what_it_would_alone_and_what_is_gathered(program, config, sizes):
  on_mesh = made(program, sizes, config=config).temporary_bytes
  alone = made(program, None, rows=ROWS, config=config).temporary_bytes
  assert on_mesh <= 1.2 * alone + needs(program, config, sizes).gathered


@pytest.mark.long
@cases
def test_values_and_gradients_are_those_of_one_device(program, config, sizes):
  rows = ROWS * sizes[0] * sizes[1]
  got, wanted = (made(program, at, rows=rows, config=config) for at in (sizes, None))
  for a, b in zip(got.results, wanted.results, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * np.abs(b).max())


@pytest.mark.long
def test_in_bfloat16_weights_move_rounded_and_gradients_do_not():
  sizes = MESHES["data 2 x fsdp 4"]
  found = made("update", sizes, dtype="bfloat16").collectives
  assert activations(found, sizes) == []
  moved = by_kind(found)
  exact = by_kind(made("update", sizes).collectives)
  assert moved["all-gather"] <= 0.51 * exact["all-gather"]
  sums = [one for one in found if one.kind != "all-gather"]
  assert {array.dtype for one in sums for array in one.arrays} == {"f32"}
  assert sum(one.nbytes for one in sums) == pytest.approx(
    exact["reduce-scatter"] + exact["all-reduce"], rel=0.02
  )


@pytest.mark.long
def test_left_to_the_compiler_activations_would_move():
  sizes = MESHES["fsdp 8"]
  found = made("update", sizes, is_placed=False).collectives
  assert activations(found, sizes)
  assert sum(one.nbytes for one in found) > 1.3 * needs("update", CONFIG, sizes).moved


@pytest.mark.long
@pytest.mark.parametrize(
  ("program", "sizes"),
  [
    ("scorer", (1, 3, 1)),  # neither width nor heads.
    ("update", (1, 1, 3)),  # heads, feed-forward and vocabulary, but not heads × their width.
  ],
  ids=["fsdp 3", "tensor 3"],
)
def test_what_a_mesh_does_not_divide_is_whole_on_its_devices(program, sizes):
  rows = ROWS * sizes[1]
  got, wanted = (made(program, at, rows=rows) for at in (sizes, None))
  assert activations(got.collectives, sizes) == []
  for a, b in zip(got.results, wanted.results, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * np.abs(b).max())
