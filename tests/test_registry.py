"""Modules and functions by name: what code of the user's own raises is one line with its place."""

import linecache
import sys

import pytest

from grpo_jax import engines, environments, registry
from grpo_jax.errors import ExpectedFailure, last_frames, place_and_reason
from grpo_jax.run_folder import sinks

BROKEN = {
  "raising": "\nraise RuntimeError('first\\nsecond')\n",
  "leaving": "\nraise SystemExit(3)\n",
  "unparsed": "\ndef make(:\n",
  "calling": "import json\njson.loads('{')\n",
}
OPENING = object.__new__(sinks.Opening)  # no sink of these tests looks at it.


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
  """Modules that fail when they are imported, and one whose functions fail when they are called."""
  for name, text in BROKEN.items():
    (tmp_path / f"{name}.py").write_text(text)
  (tmp_path / "failing.py").write_text(
    "def make(**settings):\n  raise RuntimeError('first\\nsecond')\n"
    "def leave(**settings):\n  raise SystemExit(3)\n"
    "def explain(**settings):\n  raise ValueError('a limit must be given')\n"
    "class Sink:\n  def __init__(self, opening):\n    raise OSError('no server')\n"
    "  write = write_rollouts = close = print\n"
  )
  monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
  "find",
  [
    lambda name: registry.function(f"{name}.make"),
    lambda name: engines.make(name),
    lambda name: environments.make(own=dict(module=name)),
    lambda name: environments.make(own=dict(module="function", path=f"{name}.reward")),
    lambda name: sinks.make(["jsonl", f"{name}.Sink"], OPENING),
  ],
  ids=["function", "engine", "environment", "reward", "sink"],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(name, find):
  with pytest.raises(
    ValueError, match=rf"importing '{name}' failed: \S*(\.py):\d+: \w+: "
  ) as found:
    find(name)
  assert "\n" not in str(found.value)
  assert f"{name}.py:2: " in str(found.value)  # of the user's code, not of what it calls.


@pytest.mark.parametrize(
  "call, line",
  [
    (lambda: engines.make("failing"), "failing.make failed: .*failing.py:2: RuntimeError: first"),
    (lambda: environments.make(own=dict(module="failing")), "'own'.*failing.py:2: RuntimeError"),
    (lambda: environments.make(own=dict(module="failing.leave")), "failing.py:4: SystemExit: 3"),
    (lambda: environments.make(own=dict(module="failing.explain")), "^a limit must be given$"),
    (
      lambda: sinks._made("failing.Sink", {}, OPENING, 5.0),
      "cannot be opened: .*py:9: OSError: no serv",
    ),
  ],
)
def test_a_part_that_cannot_be_made_is_one_line_with_its_place(call, line):
  with pytest.raises(ValueError, match=line) as found:
    call()
  assert "\n" not in str(found.value)


@pytest.mark.parametrize("error", ["RuntimeError('first\\nsecond')", "SystemExit(3)"])
def test_a_sink_that_fails_is_one_warning_of_one_line(error, tmp_path, caplog):
  (tmp_path / "lost.py").write_text(
    "class Sink:\n  def __init__(self, opening): pass\n"
    f"  def write(self, *arguments): raise {error}\n  write_rollouts = close = write\n"
  )
  sink = sinks._made("lost.Sink", {}, OPENING, 5.0)
  sink.write(0, {})
  sink.close()
  sys.modules.pop("lost")
  [warning] = [record.getMessage() for record in caplog.records]
  assert "failed in write" in warning
  assert "\n" not in warning


def test_what_our_own_code_raises_and_expected_failures_pass_through(monkeypatch):
  class Lost(ExpectedFailure, OSError):
    pass

  def fail(error):
    raise error

  with pytest.raises(Lost):
    registry.called("making it", fail, error=Lost("no server"))
  with pytest.raises(KeyboardInterrupt):
    registry.called("making it", fail, error=KeyboardInterrupt())
  monkeypatch.setattr(fail, "__module__", "grpo_jax.engines.fake")
  with pytest.raises(RuntimeError):
    registry.called("making it", fail, error=RuntimeError("a fault of ours"))


def test_satellites_are_found_by_their_word_and_by_the_path_under_which_they_were_modules():
  assert registry.function("grpo_jax.environments.sliding_puzzle.puzzle").__name__ == "puzzle"
  package = "grpo_jax.run_folder.sinks"
  found = registry.module(package, "mlflow")
  assert found.__name__ == "grpo_trackers.mlflow" and "mlflow" in registry.modules(package)
  assert registry.module(package, f"{package}.mlflow") is found
  assert registry.function(f"{package}.mlflow.make") is found.make
  with pytest.raises(ValueError, match="no module 'mlflw' .did you mean 'mlflow'"):
    registry.module(package, "mlflw")


@pytest.mark.parametrize("path", ["loss", ".loss", "./own.loss", "own.", "/tmp/own.loss", ""])
def test_a_path_that_names_no_function_is_refused(path):
  with pytest.raises(ValueError, match="a function is named by 'package.module.function'"):
    registry.function(path)


def test_the_cell_of_a_notebook_is_a_place_of_user_code(monkeypatch):
  text = "def score():\n  return {}['unit']\n"
  file = "<cell 7>"
  monkeypatch.setitem(linecache.cache, file, (len(text), None, text.splitlines(True), file))
  defined = {}
  exec(compile(text, file, "exec"), defined)
  with pytest.raises(KeyError) as caught:
    defined["score"]()
  assert place_and_reason(caught.value) == "<cell 7>:2: KeyError: 'unit'"
  assert last_frames(caught.value)[-1] == "<cell 7>:2, in score: return {}['unit']"
