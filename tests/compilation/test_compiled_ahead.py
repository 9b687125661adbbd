"""A run compiles a known set of programs before its first step, and none after it."""

import json
import threading

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from scripted_engine import ScriptedEngine

import configs.base
from grpo_jax import metrics, train
from grpo_jax.building import computation, online
from grpo_jax.compilation import compiling
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.groups import credit
from grpo_jax.learn import monitoring
from grpo_jax.models import export, loading

JOBS = computation.Computation.jobs  # other tests take them away.
ENGINE = online._engine
STEPS = 4
# Three shapes of the update, the monitor, the drift and the scorer; adding, applying, the state of
# the optimizer, the reference, advantages; tensors of the export: these have five shapes. optax
# converts a number when it is asked which arrays its state has.
MOST = 4 * 3 + 5 + 5 + 1
LATE = "should have been compiled before the first step"


def answer(request):
  """From one letter to as many as there is room for: every step has other lengths."""
  row, _, attempt = request.request_id.rpartition(":")[2].partition("#")
  return "xyaexio" * ((int(row) * 7 + int(attempt.partition(".")[0]) * 3) % 11) + "u"


@pytest.fixture(autouse=True)
def keep_all_programs():
  """The suite's cache keeps what takes long to compile; that of a run keeps everything."""
  before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  yield
  jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture(scope="module")
def make_config(model, tmp_path_factory):
  """Returns a function that makes the config of a run; `a__b=1` sets config.a.b."""
  path = tmp_path_factory.mktemp("data") / "rows.jsonl"
  rows = [{"problem": "1 " * (i % 9) + "+ 1", "expected_answer": str(i)} for i in range(40)]
  for row in rows[7::8]:  # some steps have none of these rows.
    row["loss_multiplier"] = 0.5
  path.write_text("".join(json.dumps(row) + "\n" for row in rows[4:]))
  held_out = path.with_name("held_out.jsonl")
  held_out.write_text("".join(json.dumps({**row, "problem": "2"}) + "\n" for row in rows[:4]))

  def make(**overrides):
    settings = {
      "total_steps": STEPS,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "data__path": str(path),
      "evaluation__data__path": str(held_out),
      "data__environment": "own",
      "data__max_prompt_tokens": 64,
      "rollout__prompts_per_step": 3,
      "rollout__group_size": 4,
      "rollout__max_tokens": 128,
      "sampling__max_tokens": 64,
      "batching__microbatch_tokens": 256,
      "loss__kl_coef": 0.05,
      "optim__learning_rate": 1e-3,
      "learn__report_all_every_steps": 2,
      "learn__report_kl_every_steps": 3,
      "evaluation__every_steps": 2,
      "evaluation__num_prompts": 4,
      "checkpoint__every_steps": 0,
      "logging__sinks": ("jsonl", "console"),
      **overrides,
    }
    config = configs.base.get_config()
    config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
    return config

  return make


@pytest.fixture(scope="module", autouse=True)
def scripted(one_device):
  del one_device
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(computation.Computation, "jobs", JOBS)
    patch.setattr(online, "_engine", lambda *_: ScriptedEngine(answer))
    yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
  """A cache of compiled programs that nobody has used before."""
  before = jax.config.values["jax_compilation_cache_dir"]
  jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_compilation_cache_dir", before)
  compilation_cache.reset_cache()


def as_new_process():
  """Forgets what this process has compiled."""
  jax.clear_caches()


def train_and_name(config, workdir, **options):
  """Runs; returns the names of the programs that XLA compiled meanwhile."""
  as_new_process()
  watch = compiling.CompilationMonitor()
  with watch.listening():
    train.train(config, workdir, **options)
  return [one.name for one in watch.take() if not one.is_kept]


def train_and_count(config, workdir, **options):
  """Runs; returns how many programs XLA compiled meanwhile."""
  return len(train_and_name(config, workdir, **options))


def lines_of(workdir):
  return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def counts(workdir):
  """perf/compilations of every step."""
  return [row["perf/compilations"] for row in lines_of(workdir) if "weight_version" in row]


def reported(workdir):
  return [metrics.reproducible(line) for line in lines_of(workdir)]


def weights(workdir):
  return jax.tree.leaves(loading.load(workdir / "export").params)


class StopAfter:
  """A flag that is up once so many steps are written."""

  def __init__(self, workdir, steps):
    self.file, self.steps = workdir / "metrics.jsonl", steps

  def __bool__(self):
    return self.file.exists() and self.file.read_text().count("weight_version") >= self.steps


@pytest.fixture(scope="module")
def whole(make_config, cache, tmp_path_factory):
  """The folder of an undisturbed run, how many programs it compiled, and what it printed."""
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, train_and_count(make_config(), workdir)


@pytest.mark.long
def test_a_known_set_is_compiled_before_the_first_step_and_nothing_later(whole):
  workdir, compiled = whole
  first, *later = counts(workdir)
  rows = lines_of(workdir)
  assert len({row["batch/row_tokens"] * row["batch/rows"] for row in rows[:STEPS]}) > 1
  assert "all/kl_to_initial" in rows[3] and "all/entropy" in rows[2]
  assert later == [0.0] * (STEPS - 1)
  assert compiled == first  # nothing after the last line, either.
  assert 10 <= first <= MOST
  assert rows[0]["perf/compile_s"] > 0.0 == rows[1]["perf/compile_s"]


@pytest.mark.long
def test_a_resumed_run_compiles_nothing_and_ends_the_same(whole, make_config, tmp_path):
  train_and_count(make_config(), tmp_path, stop=StopAfter(tmp_path, 2))
  assert len(counts(tmp_path)) == 2
  assert train_and_count(make_config(), tmp_path) == 0
  assert counts(tmp_path)[2:] == [0.0] * (STEPS - 2)
  assert reported(tmp_path) == reported(whole[0])
  for one, other in zip(weights(tmp_path), weights(whole[0]), strict=True):
    np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_programs_compiled_ahead_compute_what_others_do(
  whole, make_config, tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(computation.Computation, "jobs", lambda self: [])
  for module_level in (credit._estimate, export._program(None)):
    monkeypatch.setattr(module_level, "_executables", {})
  train_and_count(make_config(), tmp_path)
  assert reported(tmp_path) == reported(whole[0])
  for one, other in zip(weights(tmp_path), weights(whole[0]), strict=True):
    np.testing.assert_array_equal(one, other)


def conversations(make_config):
  """Returns the config of a run on two datasets, of several turns, with the embedded sampler."""
  config = make_config(
    total_steps=3,
    data__max_prompt_tokens=1024,
    data__path=None,
    data__environment="puzzle",
    evaluation__data__path=None,
    rollout__max_turns=3,
    rollout__max_tokens=1280,
    rollout__prompts_per_step=2,
    rollout__group_size=2,
    sampling__max_tokens=16,
    evaluation__every_steps=1,
    evaluation__at_start=False,
    evaluation__sampling__temperature=0.0,
    batching__microbatch_tokens=2048,
    batching__skip_zero_advantage=False,
    loss__kl_coef=0.0,
    learn__report_all_every_steps=0,
    learn__report_kl_every_steps=0,
  )
  config.environments = {"puzzle": {"module": "sliding_puzzle", "max_moves": 9}}
  task = {"kind": "function", "task": "grpo_environments.sliding_puzzle.puzzle"}
  config.data.output_key = ""
  config.data.datasets = tuple(
    {**task, "name": f"of_{size}", "task_args": {"size": size}, "weight": 1.0} for size in (2, 3)
  )
  config.evaluation.datasets = ({**task, "name": "other", "task_seed": 10**6},)
  config.sampling.stop_strings = tuple("abcdefghijklmnop")
  return config


@pytest.mark.slow
def test_conversations_compile_a_known_set_and_a_resumed_run_nothing(
  make_config, cache, tmp_path, monkeypatch
):
  monkeypatch.setattr(online, "_engine", ENGINE)
  config = conversations(make_config)
  names = train_and_name(config, tmp_path, stop=StopAfter(tmp_path, 2))
  assert counts(tmp_path) == [len(names), 0.0]  # evaluations after both steps included.
  assert names.count("differentiate") == 3
  # One number of rows is enough here; caches that are too small would be resized.
  assert [names.count(name) for name in ("prefill", "decode", "resize")] == [1, 1, 0]
  assert train_and_name(config, tmp_path) == []
  assert counts(tmp_path)[2:] == [0.0]
  rows = [row for row in lines_of(tmp_path) if "weight_version" in row]
  assert max(row["rollout/turns_mean"] for row in rows) > 1.0
  assert any("eval/" in name for row in lines_of(tmp_path) for name in row)


@pytest.mark.long
def test_what_is_compiled_late_is_named(make_config, tmp_path, monkeypatch, capsys):
  most = lambda self: [job for job in JOBS(self) if not job.name.startswith("watch")]
  monkeypatch.setattr(computation.Computation, "jobs", most)
  monkeypatch.setattr(monitoring.Monitor, "_is_due", lambda self, step, every: step == 1)
  as_new_process()
  jax.config.update("jax_enable_compilation_cache", False)
  try:
    train.train(make_config(total_steps=2, evaluation__at_start=False), tmp_path)
  finally:
    jax.config.update("jax_enable_compilation_cache", True)
  (line,) = [line for line in capsys.readouterr().out.splitlines() if LATE in line]
  assert line.startswith("step 1 compiled") and "watch" in line
  assert counts(tmp_path)[1] >= 1.0


@pytest.mark.slow
def test_on_a_mesh_nothing_is_compiled_after_the_first_step(make_config, tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: jax.local_devices())
  mesh = {"mesh__data": 2, "mesh__fsdp": 2, "mesh__tensor": 2}
  compiled = train_and_count(make_config(**mesh, total_steps=3), tmp_path)
  assert counts(tmp_path) == [compiled, 0.0, 0.0]


def test_a_signal_while_programs_are_compiled_ends_the_run(make_config, tmp_path, monkeypatch):
  gate = threading.Event()
  monkeypatch.setattr(computation.Computation, "jobs", lambda self: [CompileJob("slow", gate.wait)])
  try:
    assert train.train(make_config(), tmp_path, stop=True) == {}
  finally:
    gate.set()
  assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()
