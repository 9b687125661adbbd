"""What each matrix product of a run is compiled to on a GPU and on a TPU, read from StableHLO."""

import collections
import contextlib
import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_kernels.attention import Attention
from grpo_kernels.linear_logprobs import choice

from configs import base
from grpo_jax import batching, engines
from grpo_jax.batching import packing
from grpo_jax.building import run as building
from grpo_jax.compilation import precision
from grpo_jax.config import run_options
from grpo_jax.engines import (
  decoding,
  kv_cache,
  probe,
  ring_cache,
  sampler_weights,
  scheduling,
  sglang_servers,
)
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.learn import optim, scoring, token_scores, train_step
from grpo_jax.models import classifier
from grpo_jax.models import tiny as tiny_models
from grpo_jax.models.products import Products
from grpo_jax.rl import objectives
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup
from tests.engines import tiny

PLATFORMS = ("cuda", "tpu")
DOT = re.compile(r"stablehlo\.dot_general (.*?) : \((.*?)\) -> tensor<(?:\d+x)*(\w+)>")
ASKED = re.compile(r"precision = \[(\w+), (\w+)\]")


def products_of(function, arguments, platform):
  """Counts the products of a program: (element type of the factors, precision asked for)."""
  [dots] = dots_of(function, arguments, (platform,))
  return collections.Counter(dot[:2] for dot in dots)


def dots_of(function, arguments, platforms):
  """Returns a program's products on each platform, as `dots_in` does.

  Leaves go in one by one: what describes a lowered program puts no arrays into our types.
  """
  leaves, structure = jax.tree.flatten(arguments)
  program = jax.jit(lambda leaves: function(*jax.tree.unflatten(structure, leaves)))
  traced = program.trace(leaves)
  return [dots_in(traced.lower(lowering_platforms=(name,)).as_text()) for name in platforms]


def dots_in(text):
  """Returns products: (type of the factors, precision asked for, type of the result)."""
  found = []
  for line in text.splitlines():
    match = DOT.search(line)
    assert match or "dot_general" not in line, line
    if match:
      types = set(re.findall(r"x([a-z]+\d+)>", match[2]))
      asked = ASKED.search(match[1])
      assert len(types) == 1, line
      found.append((types.pop(), asked[1] if asked else "DEFAULT", match[3]))
  return found


def batch():
  """A microbatch of two completions."""
  rollouts = tuple(
    Rollout(
      completion_ids=np.asarray(ids),
      loss_mask=np.ones(len(ids), bool),
      behavior_logprobs=np.full(len(ids), -1.0, np.float32),
      weight_versions=np.zeros(len(ids), np.int32),
      finish_reason=FinishReason.STOP,
      reward=float(reward),
    )
    for reward, ids in enumerate([[2, 3], [4]])
  )
  group = RolloutGroup(Prompt("p", np.asarray([1, 5]), "none"), rollouts)
  (minibatch,) = batching.assemble(
    [group],
    [np.asarray([-1.0, 1.0])],
    shapes=(packing.Shape(1, 32, 32),),
    skip_zero_advantage=False,
  ).minibatches
  return minibatch.microbatches[0], minibatch.denominators


def programs(compute_dtype, name, *, one_sweep):
  """Yields the name, the jitted function and the arguments of each program of a run."""
  config = tiny.config()
  exact = precision.resolve(name, compute_dtype)
  params = tiny.params(config)
  settings = {"products": Products(compute_dtype)}
  logprobs = token_scores.make_logprobs(config, **settings)
  objective = objectives.make(kl_coef=0.0)
  token_loss = token_scores.make_token_loss(config, objective, **settings) if one_sweep else None
  tx, _ = optim.make(10, learning_rate=1e-3)
  update = train_step.make_update(
    logprobs,
    tx,
    objective,
    report_entropy=False,
    token_loss=token_loss,
    matmul_precision=exact,
  )
  data, denominators = batch()
  yield "update", update.differentiate, (params, update.start(params), data, denominators)
  opt_state = jax.eval_shape(tx.init, params)
  yield "optimizer", update.apply, (params, opt_state, params, jnp.zeros(()))
  if one_sweep:
    return
  score = scoring.make_scorer(logprobs, matmul_precision=exact)
  yield "scorer", score, (params, data)
  watch = scoring.make_watcher(logprobs, matmul_precision=exact)
  yield "watcher", watch, (params, data)
  options = JaxSampler(config, compute_dtype=compute_dtype, matmul_precision=name)._options
  weights = sampler_weights.split_layers(params, options)
  pages, ring = kv_cache.empty_pages((2,), 32, options), ring_cache.empty(1, 2, 32, options)
  prompt = (np.zeros(8, np.int32), scheduling.Slot(((0,),), 8))
  pools = [Pool(None, table=1, page=32, count=2)]
  chunk = next(scheduling.make_chunks([prompt], tokens=8, pools=pools))
  prefill = jax.jit(lambda *a: decoding.prefill(*a, options))
  yield "prefill", prefill, (weights, pages, chunk)
  rows = scheduling.make_rows([], 2, {}, group=8, pools=pools)
  decode = jax.jit(lambda *a: decoding.decode(*a, options))
  yield "decode", decode, (weights, pages, ring, rows, jnp.int32(0))
  tokens = jnp.asarray([[1, 2, 3]])
  static = (config, settings["products"], exact, Attention())
  yield "probe", lambda *a: probe._logprobs(*a, *static), (params, tokens)


# compute dtype, model.matmul_precision → (factors, precision) of all products.
EXPECTED = {
  ("float32", None): ("f32", "HIGHEST"),
  ("float32", "tensorfloat32"): ("f32", "HIGH"),
  ("float32", "default"): ("f32", "DEFAULT"),
  ("bfloat16", None): ("bf16", "DEFAULT"),
}
# In bfloat16, products whose results are bfloat16: q, k, v, gate and up, of a layer that is scanned
# (twice in the update, and there a cotangent), or of both layers; the sampler joins q, k and v, and
# gate and up, into one product each, and its prefill ends with the former.
ROUNDED = {"update": 11, "scorer": 5, "watcher": 5, "prefill": 3, "decode": 4, "probe": 5}


# The precision is that of one scope, whatever its name: each name is tried once.
@pytest.mark.long
@pytest.mark.parametrize(
  ("dtype", "name", "one_sweep"),
  [
    pytest.param("float32", None, False, id="float32-two passes"),
    pytest.param("float32", "tensorfloat32", True, id="tensorfloat32-one sweep"),
    pytest.param("float32", "default", True, id="default-one sweep"),
    pytest.param("bfloat16", None, False, id="bfloat16-two passes"),
    pytest.param("bfloat16", None, True, id="bfloat16-one sweep"),
  ],
)
def test_every_product_of_every_program_is_in_the_precision_of_the_run(dtype, name, one_sweep):
  wanted = EXPECTED[dtype, name]
  seen = set()
  with jax.default_matmul_precision(None):  # as users have it; the suite asks for the highest.
    for program, function, arguments in programs(dtype, name, one_sweep=one_sweep):
      seen.add(program)
      for platform, dots in zip(PLATFORMS, dots_of(function, arguments, PLATFORMS), strict=True):
        found = {dot[:2] for dot in dots}
        assert found == (set() if program == "optimizer" else {wanted}), (program, found)
        rounded = sum(result == "bf16" for *_, result in dots)
        assert rounded == (ROUNDED.get(program, 0) if dtype == "bfloat16" else 0), program
        print(program, platform, found, len(dots), rounded)
  assert {"update", "optimizer"} <= seen


def test_one_program_has_one_precision_for_each_run_and_keeps_them_apart():
  config, params = tiny.config(), tiny.params(tiny.config())
  tokens = jnp.asarray([[1, 2, 3]])
  for name, wanted in (("float32", "HIGHEST"), ("tensorfloat32", "HIGH"), ("float32", "HIGHEST")):
    static = (config, Products("float32"), name, Attention())
    found = products_of(lambda *a, s=static: probe._logprobs(*a, *s), (params, tokens), "cuda")
    assert {asked for _, asked in found} == {wanted}


def test_a_run_hands_its_dtypes_to_trainer_and_engine_alike(tmp_path, monkeypatch):
  """Both ends of the wire, in the run itself, up to where the trainer's function is made."""
  given, make = {}, engines.make

  def make_engine(name, **settings):
    given["engine"] = Products(settings["compute_dtype"], settings["product_dtype"])
    given["attention"].append(settings["attention"])
    return make(name, **settings)

  def make_logprobs(config, *, products, attention, **_):
    given["trainer"] = products
    given["attention"].append(attention)
    raise InterruptedError

  monkeypatch.setattr(engines, "make", make_engine)
  monkeypatch.setattr(token_scores, "make_logprobs", make_logprobs)
  folder = tiny_models.write(tmp_path / "model")
  (tmp_path / "rows.jsonl").write_text('{"problem": "1", "expected_answer": "1"}\n')
  for product_dtype in (None, "float32"):
    config = base.get_config()
    config.model.path = str(folder)
    config.model.product_dtype = product_dtype
    config.model.attention = "reference"
    given["attention"] = []
    config.data.path = str(tmp_path / "rows.jsonl")
    config.loss.kl_coef = 0.0
    with contextlib.ExitStack() as stack:
      with pytest.raises(InterruptedError):
        building.build(config, tmp_path / str(product_dtype), stack)
    given["trainer"] = dataclasses.replace(given["trainer"], placement=None)
    assert given["engine"] == given["trainer"] == Products("bfloat16", product_dtype)
    of_engine, of_trainer = given["attention"]  # the trainer's is split over its mesh.
    assert of_engine == dataclasses.replace(of_trainer, partition=None) == Attention("reference")


def test_results_in_bfloat16_of_float32_products_are_refused_before_the_run():
  config = base.get_config()
  config.model.product_dtype = "bfloat16"
  assert not any("product_dtype" in line for line in run_options.validate(config))
  config.model.compute_dtype = "float32"
  (reported,) = [line for line in run_options.validate(config) if "product_dtype" in line]
  assert "'bfloat16' needs model.compute_dtype='bfloat16', not 'float32'" in reported
  config.model.product_dtype = "float16"
  (reported,) = [line for line in run_options.validate(config) if "product_dtype" in line]
  assert "must be one of" in reported


@pytest.mark.long
def test_the_samplers_worker_thread_computes_in_the_precision_of_the_run(monkeypatch):
  """JAX keeps the precision of a context for each thread by itself."""
  seen = {}
  of_step, here = decoding.decode_step, threading.current_thread().name

  def step(*arguments):
    seen[threading.current_thread().name] = jax.config.jax_default_matmul_precision
    return of_step(*arguments)

  monkeypatch.setattr(decoding, "decode_step", step)
  engine = tiny.sampler(matmul_precision="tensorfloat32", chunk_tokens=3)
  with jax.default_matmul_precision("highest"), engine:
    tiny.run(engine, [tiny.request("x", [1, 2], max_tokens=3)])
  assert set(seen.values()) == {"tensorfloat32"} and here not in seen


def test_the_precision_is_float32_unless_another_is_named_and_none_of_bfloat16():
  assert precision.resolve(None, "float32") == "float32"
  assert precision.resolve("tensorfloat32", jnp.float32) == "tensorfloat32"
  assert precision.resolve(None, "bfloat16") is None
  with pytest.raises(ValueError, match="one of 'float32', 'tensorfloat32', 'default', got 'tf32'"):
    precision.resolve("tf32", "float32")
  with pytest.raises(ValueError, match="float32 products, but model.compute_dtype is 'bfl"):
    precision.resolve("float32", "bfloat16")


@pytest.mark.parametrize(
  ("name", "platform", "reported"),
  [
    ("float32", "gpu", "float32 ("),
    ("tensorfloat32", "cpu", "float32 ("),
    ("tensorfloat32", "gpu", "float32, rounded to TF32"),
    ("tensorfloat32", "tpu", "three bfloat16 passes"),
    ("default", "tpu", "rounded to bfloat16"),
    (None, "tpu", "bfloat16 factors, float32 sums"),
  ],
)
def test_the_log_names_what_is_computed(name, platform, reported):
  assert reported in precision.describe(name, platform)


def test_servers_keep_tf32_out_where_the_trainer_does():
  exact = sglang_servers.variables("float32", {"TRITON_F32_DEFAULT": "tf32x3", "A": "1"})
  assert exact == {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "tf32x3", "A": "1"}
  for products_in in ("tensorfloat32", "default", "bfloat16"):
    assert sglang_servers.variables(products_in, {}) == {}
    assert probe.TOLERANCES[products_in] > probe.TOLERANCES["float32"]


def test_an_engine_of_ones_own_is_given_the_precision_if_it_takes_it(tmp_path, monkeypatch):
  package = tmp_path / "own_package"
  package.mkdir()
  (package / "own_a.py").write_text("def make(*, compute_dtype): return compute_dtype\n")
  (package / "own_b.py").write_text("def make(*, matmul_precision): return matmul_precision\n")
  monkeypatch.syspath_prepend(tmp_path)
  given = {"matmul_precision": "float32"}
  given["product_dtype"] = None
  assert engines.make("own_package.own_a", compute_dtype="float32", **given) == "float32"
  assert engines.make("own_package.own_b", **given) == "float32"


V5E = choice.Chip("tpu", "TPU v5 lite")


def test_the_head_honours_the_precision_or_refuses_it():
  with precision.scope("float32"):
    assert choice.default(V5E, "float32", 128) == ("pallas_tpu", "")
  with precision.scope("tensorfloat32"):
    assert choice.default(V5E, "bfloat16", 128) == ("pallas_tpu", "")
    name, why = choice.default(V5E, "float32", 128)
    assert name == "xla_chunked" and "in the highest precision only, got HIGH" in why
    with pytest.raises(NotImplementedError, match="'pallas_tpu' computes float32 .* got HIGH"):
      choice.pick("pallas_tpu", V5E, dtype="float32", width=128)


def test_a_reward_models_products_are_float32_where_it_computes_in_float32():
  config, params = tiny.config(), tiny.params(tiny.config())
  body = {name: value for name, value in params.items() if name != "head"}
  arguments = ({"body": body, "score": jnp.ones((1, config.hidden_size))}, *[jnp.ones(2, int)] * 2)

  def scores(dtype):
    score = precision.scoped(classifier.scores, precision.resolve(None, dtype))
    return lambda params, lengths, pool_at: score(
      params, config, jnp.ones((2, 8), jnp.int32), lengths, pool_at, products=Products(dtype)
    )

  with jax.default_matmul_precision(None):
    assert set(products_of(scores("float32"), arguments, "tpu")) == {("f32", "HIGHEST")}
    mixed = products_of(scores("bfloat16"), arguments, "tpu")
  assert set(mixed) == {("bf16", "DEFAULT"), ("f32", "HIGHEST")} and mixed["f32", "HIGHEST"] == 1
