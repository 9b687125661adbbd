"""Attempts that finish in a random order, and a stream of numbered prompts that uses them."""

import contextlib
import dataclasses
import random

import numpy as np

from grpo_jax.groups import filters
from grpo_jax.rollouts import stream
from grpo_jax.rollouts.admission import AdmissionRule
from grpo_jax.rollouts.ahead import AheadSource
from grpo_jax.rollouts.background_attempts import Arrived
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


class Shuffled:
  """Attempts of which any may finish next; see `background_attempts.Attempts`.

  A group has a token of the version at which it was admitted and one of that at which it finished.
  """

  def __init__(self, seed, *, version=0, slow=()):
    """Makes attempts of nothing.

    Args:
      seed: Seed of the order in which groups finish.
      version: Version of the weights; `self.version` is what later tokens have.
      slow: Numbers of prompts whose groups finish only when nothing else is in flight.
    """
    self.version = version
    self.submitted: list[int] = []
    self.is_closed = False
    self._random = random.Random(seed)
    self._slow = {*slow}
    self._going: dict[int, tuple[Prompt, int]] = {}
    self._ready: list[Arrived] = []

  @property
  def in_flight(self):
    return len(self._going)

  def submit(self, numbers, prompts):
    self.submitted += numbers
    self._going |= {n: (p.prompt, self.version) for n, p in zip(numbers, prompts, strict=True)}

  def give_up(self, number):
    self._going.pop(number, None)
    self._ready = [each for each in self._ready if each.number != number]

  def arrived(self):
    found, self._ready = self._ready, []
    return found

  def wait(self, stop=False):
    if not self._ready and self._going:
      self.finish_one()

  def finish_one(self):
    quick = sorted({*self._going} - self._slow)
    number = self._random.choice(quick or sorted(self._going))
    prompt, version = self._going.pop(number)
    self._ready.append(Arrived(number, group(prompt, version, self.version)))

  def now(self):
    return 0.0

  def busy_s(self):
    return 0.0

  def close(self):
    self.is_closed = True


def group(prompt, *versions):
  """Returns a group of one completion, with a token of each version."""
  count = len(versions)
  rollout = Rollout(
    completion_ids=np.arange(count, dtype=np.int32),
    loss_mask=np.ones(count, bool),
    behavior_logprobs=np.full(count, -1.0, np.float32),
    weight_versions=np.array(versions, np.int32),
    finish_reason=FinishReason.STOP,
    reward=0.0,
  )
  return RolloutGroup(prompt, (rollout,))


class Numbers:
  """Prompts 0, 1, 2, …"""

  def __init__(self, count, position=0):
    self._count, self.position = count, position

  def take(self, n):
    numbers = range(self.position, min(self.position + n, self._count))
    self.position += len(numbers)
    return [Prompt(f"{i}", np.array([i]), "none", text=f"{i}") for i in numbers]

  def state(self):
    return {"position": self.position}

  def metrics(self):
    return {}


def opened(
  attempts,
  *,
  per_step=4,
  count=10**6,
  state=None,
  total_steps=10**6,
  block=None,
  dynamic=None,
  useless=(),
  stop=False,
  **rule,
):
  """Returns a stream of numbered prompts at a position; `useless` ones do not fill a step."""
  state = state or {}
  at = lambda found: Numbers(count, found.get("prompts", {}).get("position", 0))
  known = state.get("ahead", {})
  source = AheadSource(
    at({"prompts": known["next"]} if known else state),
    attempts,
    AdmissionRule(groups_per_step=per_step, **rule),
    block=block or per_step,
    max_error_share=1.0,
    total_steps=total_steps,
    reopen=at,
    progress=lambda description, total: contextlib.nullcontext(lambda count: None),
    state=state,
    stop=stop,
  )

  def keep(groups):
    kept = tuple(each for each in groups if number_of(each) not in useless)
    return dataclasses.replace(filters.apply(()), kept=kept)

  return stream.OnlineStream(
    source, prompts_per_step=per_step, dynamic=dynamic, keep=keep, surplus=state.get("surplus", ())
  )


def number_of(group):
  return int(group.prompt.text)
