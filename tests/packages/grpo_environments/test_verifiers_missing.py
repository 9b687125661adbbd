"""Environments of the package verifiers, where the package is not installed."""

import importlib.util
import pathlib
import types

import pytest

from grpo_environments import verifiers
from grpo_environments.verifiers_kinds import base
from grpo_jax import environments, main
from tests.packages.grpo_environments.http_routes import prompt_of

CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "verifiers.py"

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed"
)


def source(**fields):
  given = dict(task="wordle", task_args={}, split=None, size=5, name=None)
  return types.SimpleNamespace(**{**given, **fields})


@pytest.mark.parametrize(
  "fields, message",
  [
    ({}, "the package verifiers is not installed: pip install verifiers"),
    ({"task": None}, "data.task must be the name of an environment"),
    ({"split": "test"}, "data.split must be one of train, eval, got 'test'"),
  ],
)
def test_rows_that_cannot_be_opened(fields, message):
  with pytest.raises(ValueError, match=message):
    verifiers.rows(source(**fields))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wordle", ""])
def test_a_run_without_the_package_or_a_name_ends_with_one_message(name, model, tmp_path, capsys):
  arguments = [f"--config={CONFIG}:{name}", f"--workdir={tmp_path / 'run'}"]
  sizes = ["--config.rollout.max_tokens=512", "--config.sampling.max_tokens=16"]
  assert main.main([*arguments, *sizes, f"--config.model.path={model}"]) == 2
  said = capsys.readouterr().err
  reason = "verifiers is not installed: pip install" if name else "data.task must be the name"
  assert reason in said and "Traceback" not in said


def test_rows_of_other_data_are_refused():
  with environments.make(made=dict(module="verifiers")) as made:
    with pytest.raises(ValueError, match="needs the rows of an environment of the package"):
      environments.check(made, [prompt_of({"problem": "1 + 2?"})])
  row = {verifiers.FIELD: {"id": "wordle", "number": 0}}
  with pytest.raises(ValueError, match="not installed"):
    environments.make(made=dict(module="verifiers", id="wordle"))
  with environments.make(made=dict(module="verifiers")) as made:
    environments.check(made, [prompt_of(row)])


def test_prompts_are_shown_as_messages_of_text():
  parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x"}}]
  assert base.plain("Hello", "Be brief.") == [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
  ]
  assert base.plain([{"role": "user", "content": parts}])[0]["content"] == "Look:\n[image_url]"
  assert base.plain(None) == [{"role": "user", "content": base.PLACEHOLDER}]
