"""What keeps an environment's thread from working is the failure of its attempts."""

import asyncio
import contextlib
import contextvars
import threading
import time

import attempts
import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments import hanging, isolation
from grpo_jax.environments.base import SingleTurn, StepResult, as_factory
from grpo_jax.environments.isolation import EnvironmentFailure, IsolatedEnvironment
from grpo_jax.types import FinishReason


def test_too_many_open_files_are_the_reason_that_is_reported(monkeypatch):
  calls = []

  def no_loop():
    calls.append(1)
    raise OSError(24, "Too many open files")

  prompt = attempts.prompt_of(("user", "x"))
  loop = asyncio.Runner()
  loop.get_loop()
  monkeypatch.setattr(asyncio, "new_event_loop", no_loop)
  with loop, pytest.raises(EnvironmentFailure, match="Too many open files") as caught:
    loop.run(attempts.attempt(lambda prompt: None, prompt, "x", timeout_s=5.0))
  assert caught.value.kind == "OSError" and calls


def test_a_thread_that_cannot_be_started_is_the_failure_of_the_attempt(monkeypatch):
  def no_thread(thread):
    raise RuntimeError("can't start new thread")

  monkeypatch.setattr(threading.Thread, "start", no_thread)
  with pytest.raises(EnvironmentFailure, match="can't start new thread") as caught:
    IsolatedEnvironment(Instant, attempts.prompt_of(("user", "x")), timeout_s=5.0)
  assert caught.value.kind == "RuntimeError"


def test_a_call_that_is_cancelled_before_it_begins_does_not_end_the_thread(monkeypatch):
  started = isolation._EnvironmentCall.started

  def cancelled_first(job):
    job.cancel()
    monkeypatch.setattr(isolation._EnvironmentCall, "started", started)
    started(job)

  async def two_calls():
    environment = IsolatedEnvironment(Instant, attempts.prompt_of(("user", "x")), timeout_s=5.0)
    monkeypatch.setattr(isolation._EnvironmentCall, "started", cancelled_first)
    with pytest.raises(EnvironmentFailure) as caught:
      await environment.start()
    assert caught.value.kind == "CancelledError"
    await environment.start()
    result = await environment.step("x", np.zeros(0, np.int32), FinishReason.STOP)
    await environment.close()
    return result.total

  assert asyncio.run(two_calls()) == 1.0


def failures(factory, count, *, timeout_s=0.05):
  """Returns the kinds of the failures of attempts that are made one after another; "" for none."""
  kinds = []
  for _ in range(count):
    try:
      attempts.score(factory, attempts.prompt_of(("user", "x")), "x", timeout_s=timeout_s)
      kinds.append("")
    except EnvironmentFailure as error:
      kinds.append(error.kind)
  return kinds


def test_an_environment_that_hangs_is_refused_until_its_calls_return(monkeypatch, caplog):
  monkeypatch.setattr(isolation, "_GRACE_S", 0.02)
  monkeypatch.setattr(hanging, "MOST", 3)
  release = threading.Event()
  made = environments.Environments(
    {"x": lambda prompt: SingleTurn(lambda *_: release.wait(), prompt)}
  )
  before = {*threading.enumerate()}
  kinds = failures(made["x"], 20)  # a busy machine may need more than 0.05 s to begin a call.
  assert {*kinds} == {"timeout", "hanging"} and kinds[-2:] == ["hanging"] * 2
  assert len({*threading.enumerate()} - before) == 3
  assert made.metrics() == {"env/x/hanging_attempts": 3.0}
  assert len(caplog.records) == 1 and "3 earlier calls of it still hang" in caplog.text
  release.set()
  while made["x"].hanging.count():
    time.sleep(0.01)
  assert failures(made["x"], 1, timeout_s=5.0) == [""] and made.metrics() == {}


@pytest.mark.parametrize("leaves", ["a thread of asyncio", "a task that cannot be cancelled"])
def test_what_an_environment_leaves_behind_counts_as_hanging(monkeypatch, leaves):
  monkeypatch.setattr(hanging, "MOST", 2)
  monkeypatch.setattr(hanging, "WINDING_UP_S", 0.0)
  release, tasks = threading.Event(), []

  async def never_ends():
    while not release.is_set():
      with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0.01)

  async def reward(prompt, text):
    if leaves == "a thread of asyncio":
      await asyncio.to_thread(release.wait)
    tasks.append(asyncio.ensure_future(never_ends()))
    return 1.0

  factory = as_factory(lambda prompt: SingleTurn(reward, prompt))
  kinds = failures(factory, 20)
  release.set()
  assert kinds[-1] == "hanging" and "hanging" not in kinds[:2]


def test_what_start_sets_in_the_context_is_there_in_step():
  variable = contextvars.ContextVar("variable", default=0.0)

  class Sets(Instant):
    async def start(self):
      variable.set(0.5)

    async def step(self, text, completion_ids, finish_reason):
      return StepResult(variable.get(), done=True)

  assert attempts.score(Sets, attempts.prompt_of(("user", "x")), "x").total == 0.5


class Instant:
  """An environment that never waits."""

  def __init__(self, prompt):
    pass

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    return StepResult(1.0, done=True)

  async def close(self):
    pass
