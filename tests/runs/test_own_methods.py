"""A run with a loss, advantages and a schedule of the user's, from the command line on."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

from grpo_jax import main, train
from grpo_jax.building import computation, online
from grpo_jax.config import base, run_options
from grpo_jax.config.configuration import ConfigError, typed
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.models import loading

JOBS = computation.Computation.jobs  # other tests take them away.
ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3
BUILT_IN = {"loss__loss": "clipped", "advantages__estimator": "grpo", "optim__schedule": "cosine"}
COPIES = {
  "loss__loss": "tests.rl.own_methods.clipped",
  "advantages__estimator": "tests.rl.own_methods.group_mean",
  "optim__schedule": "tests.rl.own_methods.cosine",
}


@pytest.fixture(scope="module")
def make_config(model, one_device, tmp_path_factory):
  """Returns a function that makes the config of a run; `a__b=1` sets config.a.b."""
  path = tmp_path_factory.mktemp("data") / "rows.jsonl"
  rows = [{"problem": f"{i} + 1", "expected_answer": str(i)} for i in range(20)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))

  def make(**overrides):
    settings = {
      "total_steps": STEPS,
      "model__path": str(model),
      "model__compute_dtype": "float32",
      "data__path": str(path),
      "data__environment": "own",
      "rollout__prompts_per_step": 2,
      "rollout__group_size": 4,
      "rollout__max_tokens": 64,
      "sampling__max_tokens": 16,
      "batching__row_tokens": 64,
      "batching__row_buckets": (64,),
      "loss__kl_coef": 0.0,
      "loss__clip_high": 0.28,
      "optim__learning_rate": 1e-2,
      "learn__minibatches": 2,  # the ratio leaves 1, so that the clip acts.
      "evaluation__every_steps": 0,
      "evaluation__at_start": False,
      "evaluation__at_end": False,
      "learn__report_all_every_steps": 0,
      "learn__report_kl_every_steps": 0,
      "checkpoint__every_steps": 0,
      "checkpoint__keep_best": 0,
      "logging__sinks": ("jsonl", "console"),
      **overrides,
    }
    config = base.get_config()
    config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in settings.items()})
    return config

  return make


@pytest.fixture(scope="module", autouse=True)
def scripted(one_device):
  """Answers of one letter to some, which differ in every attempt."""

  def engine(config, folder, tokenizer, workdir):
    def script(request):
      row, _, attempt = request.request_id.rpartition(":")[2].partition("#")
      letters = "xyaexio"[: (int(row) + int(attempt.partition(".")[0]) * 3) % 7] + "u"
      return [*tokenizer.encode(letters).tolist(), *tokenizer.stop_ids]

    return FakeEngine(np.zeros((tokenizer.vocab_size, tokenizer.vocab_size)), script=script)

  del one_device
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(online, "_engine", engine)
    yield


class StopAfter:
  """A flag that is up once a number of steps is written."""

  def __init__(self, workdir, steps):
    self.file, self.steps = workdir / "metrics.jsonl", steps

  def __bool__(self):
    return self.file.exists() and self.file.read_text().count("weight_version") >= self.steps


def weights(workdir):
  return jax.tree.leaves(loading.load(workdir / "export").params)


def rows_of(workdir):
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  return [line for line in lines if "weight_version" in line]


@pytest.mark.slow
def test_copies_of_built_in_methods_end_with_the_same_weights_and_compile_nothing_late(
  make_config, tmp_path, monkeypatch
):
  train.train(make_config(**BUILT_IN), tmp_path / "built_in")
  monkeypatch.setattr(computation.Computation, "jobs", JOBS)
  train.train(make_config(**COPIES), tmp_path / "copies", stop=StopAfter(tmp_path / "copies", 2))
  assert len(rows_of(tmp_path / "copies")) == 2
  train.train(make_config(**COPIES), tmp_path / "copies")  # continues.
  rows = rows_of(tmp_path / "copies")
  assert [row["perf/compilations"] for row in rows[1:2]] == [0.0]
  assert len({row["train/learning_rate"] for row in rows}) == STEPS
  one, other = weights(tmp_path / "built_in"), weights(tmp_path / "copies")
  assert any(np.any(a != b) for a, b in zip(one, untrained(make_config), strict=True))
  for a, b in zip(one, other, strict=True):
    np.testing.assert_array_equal(a, b)
  written = json.loads((tmp_path / "copies" / "config.json").read_text())
  assert written["loss"]["loss"] == COPIES["loss__loss"]
  assert (written["loss"]["clip_low"], written["loss"]["clip_high"]) == (0.2, 0.28)
  assert written["optim"]["schedule"] == COPIES["optim__schedule"]


def untrained(make_config):
  return jax.tree.leaves(loading.load(make_config().model.path).params)


def documented():
  """Returns the module and the flags of the example in docs/algorithms.md."""
  page = (ROOT / "docs" / "algorithms.md").read_text().split("## Your own loss")[1]
  code = page.split("```python\n")[1].split("```")[0]
  command = page.split("```\n")[2].split("```")[0].replace("\\\n", " ").split()
  return code, [flag for flag in command if flag.startswith("--config.")]


@pytest.mark.long
def test_the_documented_example_runs_from_the_command_line(
  make_config, tmp_path, monkeypatch, capsys
):
  code, flags = documented()
  assert len(flags) == 5
  (tmp_path / "my_paper.py").write_text(code)
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / "given.json").write_text(make_config(total_steps=2).to_json_best_effort())
  (tmp_path / "my.py").write_text(
    "import json, pathlib\n"
    "from grpo_jax.config import base\n\n\n"
    "def get_config():\n"
    "  config = base.get_config()\n"
    f"  given = json.loads(pathlib.Path({str(tmp_path / 'given.json')!r}).read_text())\n"
    "  config.environments = given.pop('environments')\n"
    "  with config.ignore_type():\n"
    "    config.update(given)\n"
    "  config.data.datasets = config.sampling.stop_strings = config.evaluation.datasets = ()\n"
    "  return config\n"
  )
  workdir = tmp_path / "run"
  command = [f"--config={tmp_path / 'my.py'}", f"--workdir={workdir}", *flags]
  assert main.main(command) == 0, capsys.readouterr().err
  written = json.loads((workdir / "config.json").read_text())
  assert written["loss"]["loss_args"] == {"sharpness": 2.0}
  assert written["optim"]["schedule_args"] == {"half_life": 7}
  assert written["batching"]["skip_zero_advantage"] is True
  rates = [row["train/learning_rate"] for row in rows_of(workdir)]
  np.testing.assert_allclose(rates[0] / rates[1], 2 ** (2 / 7), rtol=1e-5)  # two optimizer steps.


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("loss.loss=broken_module.loss", r"importing .* failed: .*broken_module.py:1: NameError"),
    ("loss.loss=leaving.loss", r"leaving.py:1: SystemExit: 3"),
    ("loss.loss=nowhere.loss", "no module 'nowhere'"),
    ("loss.loss=tests.rl.own_methods.clippd", "has no function 'clippd' .did you mean 'clipped'"),
    ("loss.loss=tests.rl.own_methods.not_callable", "is no function|is not a function"),
    ("loss.loss=tests.rl.own_methods.mixing", "depends on others"),
    ("advantages.estimator=tests.rl.own_methods.of_padding", "mask is False"),
    ("optim.schedule=tests.rl.own_methods.negative", "not negative"),
  ],
)
def test_a_method_that_cannot_be_used_ends_with_exit_code_2_and_one_line(
  tmp_path, monkeypatch, capsys, flag, message
):
  (tmp_path / "broken_module.py").write_text("loss = undefined\n")
  (tmp_path / "leaving.py").write_text("raise SystemExit(3)\n")
  monkeypatch.syspath_prepend(tmp_path)
  config = f"--config={ROOT / 'configs' / 'quickstart.py'}"
  assert main.main([config, f"--workdir={tmp_path / 'run'}", f"--config.{flag}"]) == 2
  found = capsys.readouterr().err
  [line] = [line for line in found.splitlines() if line.strip().startswith("- ")]
  assert flag.partition("=")[2] in line

  assert re.search(message, line), found
  assert "Traceback" not in found


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"loss.loss_args": {"x": 1}}, "loss.loss_args=.* are arguments for a function of your own"),
    (
      {"loss.loss": "tests.rl.own_methods.with_args", "loss.loss_args": {"othr": 1.0}},
      "with_args takes no 'othr' .did you mean 'other'",
    ),
    (
      {"loss.loss": "tests.rl.own_methods.clipped", "loss.loss_args": {"clip_low": 1.0}},
      "loss.loss_args cannot hold 'clip_low'",
    ),
    (
      {"advantages.estimator": "tests.rl.own_methods.group_mean", "advantages.scale": "none"},
      "would never be read",
    ),
  ],
)
def test_arguments_that_a_method_does_not_take_are_refused(make_config, values, message):
  config = make_config()
  config.update_from_flattened_dict(values)
  with pytest.raises((ValueError, ConfigError), match=message):
    run_options.objective(typed(config))
    run_options.estimator(typed(config))


def test_a_loss_that_learns_without_advantage_has_every_completion_computed(make_config):
  config = make_config(loss__loss="tests.rl.own_methods.with_args")
  config.loss.clip_high = None
  config.loss.loss_args = {"other": 0.1}
  assert list(run_options.validate(config)) == []
  assert run_options.resolved(config).batching.skip_zero_advantage is False
  config.loss.loss_args = {"other": 0.0}
  assert run_options.resolved(config).batching.skip_zero_advantage is True
