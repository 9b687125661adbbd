"""What keeps an environment's thread from working is the failure of its attempts."""

import asyncio

import attempts
import pytest

from grpo_jax.environments.isolation import EnvironmentFailure


def test_too_many_open_files_are_the_reason_that_is_reported(monkeypatch):
  calls = []

  def runner():
    calls.append(1)
    raise OSError(24, "Too many open files")

  prompt = attempts.prompt_of(("user", "x"))
  loop = asyncio.Runner()
  monkeypatch.setattr(asyncio, "Runner", runner)
  with loop, pytest.raises(EnvironmentFailure, match="Too many open files") as caught:
    loop.run(attempts.attempt(lambda prompt: None, prompt, "x", timeout_s=5.0))
  assert caught.value.kind == "OSError" and calls
