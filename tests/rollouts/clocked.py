"""A fake engine with a clock of its own: rows that each sample one token per unit of time."""

import collections
import heapq
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.rollouts.background_attempts import Arrived
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup


class Clocked:
  """Attempts whose time passes only while somebody waits; see `background_attempts.Attempts`."""

  def __init__(self, rows: int, lengths: Callable[[int], Sequence[int]]):
    """Makes an engine that does nothing.

    Args:
      rows: Number of completions that are sampled at the same time.
      lengths: Function from the number of a prompt to the lengths of its completions, in tokens.
    """
    self.version = 0
    self._rows = rows
    self._lengths = lengths
    self._time = 0.0
    self._busy = 0.0
    self._waiting: collections.deque[tuple[int, int]] = collections.deque()
    self._running: list[tuple[float, int, int, int]] = []  # (end, order, number, place).
    self._order = 0
    self._prompts: dict[int, Prompt] = {}
    self._begun: dict[tuple[int, int], int] = {}  # version at the first token.
    self._left: dict[int, int] = {}
    self._arrived: list[Arrived] = []

  @property
  def in_flight(self) -> int:
    return len(self._left)

  def submit(self, numbers, prompts):
    for number, asked in zip(numbers, prompts, strict=True):
      lengths = self._lengths(number)
      self._prompts[number], self._left[number] = asked.prompt, len(lengths)
      self._waiting += [(number, place) for place in range(len(lengths))]
    self._fill()

  def give_up(self, number):
    self._left.pop(number, None)
    self._arrived = [each for each in self._arrived if each.number != number]
    self._waiting = collections.deque(each for each in self._waiting if each[0] != number)
    self._running = [each for each in self._running if each[2] != number]
    heapq.heapify(self._running)
    self._fill()

  def arrived(self):
    found, self._arrived = self._arrived, []
    return found

  def wait(self, stop=False):
    del stop
    while not self._arrived and self._running:
      self._advance(self._running[0][0])

  def now(self):
    return self._time

  def busy_s(self):
    return self._busy

  def close(self):
    self._running.clear()

  def work_for(self, seconds: float) -> None:
    """Passes time, as a trainer that learns."""
    end = self._time + seconds
    while self._running and self._running[0][0] <= end:
      self._advance(self._running[0][0])
    self._pass(end)

  def _pass(self, until: float) -> None:
    if self._running:
      self._busy += until - self._time
    self._time = until

  def _advance(self, until: float) -> None:
    self._pass(until)
    while self._running and self._running[0][0] <= until:
      _, _, number, _ = heapq.heappop(self._running)
      self._left[number] -= 1
      if not self._left[number]:
        del self._left[number]
        self._arrived.append(Arrived(number, self._group(number)))
    self._fill()

  def _fill(self) -> None:
    while self._waiting and len(self._running) < self._rows:
      number, place = self._waiting.popleft()
      self._begun[number, place] = self.version
      self._order += 1
      end = self._time + self._lengths(number)[place]
      heapq.heappush(self._running, (end, self._order, number, place))

  def _group(self, number: int) -> RolloutGroup:
    places = range(len(self._lengths(number)))
    return RolloutGroup(
      self._prompts[number],
      tuple(rollout(self._begun[number, place], self.version) for place in places),
    )


def rollout(first: int, last: int) -> Rollout:
  """Returns a completion of two tokens, by weights of these versions."""
  return Rollout(
    completion_ids=np.array([1, 2]),
    loss_mask=np.ones(2, bool),
    behavior_logprobs=np.full(2, -1.0, np.float32),
    weight_versions=np.array([first, last], np.int32),
    finish_reason=FinishReason.STOP,
    reward=0.0,
  )
