"""Groups that are sampled ahead of the steps that learn from them: asynchronous GRPO.

`admission` decides which prompts may be sampled and which groups a step takes;
`background_attempts` samples them in the background. This file reads prompts block by block, brings
the processes' groups together, and keeps what a checkpoint needs: a block's position in the data,
and the groups that are finished. What was not finished is sampled again when the run continues.

All methods are called by the main thread, and by all processes alike.
"""

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax import processes
from grpo_jax.errors import ExpectedFailure
from grpo_jax.groups import group_bytes, group_json
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import bulk
from grpo_jax.processes.exchanges import EndedEarly
from grpo_jax.rollouts import failures, group_source, rollout
from grpo_jax.rollouts.admission import AdmissionQueue, AdmissionRule
from grpo_jax.rollouts.background_attempts import Arrived, Attempts
from grpo_jax.rollouts.group_source import PromptSource
from grpo_jax.types import Prompt, RolloutGroup

_log = logging.getLogger(__name__)

# Time for which groups under way are waited for when the run is asked to end between an update and
# its record. The save waits for that, and a machine that is taken away leaves about 30 s for both.
PATIENCE_S = 10.0

# Shows how many groups of a step have come: (description, total) -> a context with `advance`.
Progress = Callable[[str, int], contextlib.AbstractContextManager[Callable[..., None]]]


class ChangedDataError(ExpectedFailure, ValueError):
  """The data has changed since a checkpoint, and prompts that were under way are not found."""


@dataclasses.dataclass(slots=True)
class _Block:
  """Prompts that were read together.

  Attributes:
    first: Running number of its first prompt.
    prompts: The prompts.
    index: Number of the block; random seeds depend on it.
    state: Position in the data before it was read.
    metrics: Metrics of reading it.
  """

  first: int
  prompts: list[Prompt]
  index: int
  state: dict[str, Any]
  metrics: dict[str, float]

  @property
  def numbers(self) -> range:
    return range(self.first, self.first + len(self.prompts))


class AheadSource:
  """Draws groups that are sampled ahead; see `group_source.GroupSource`."""

  def __init__(
    self,
    prompts: PromptSource,
    attempts: Attempts,
    rule: AdmissionRule,
    *,
    block: int,
    max_error_share: float,
    total_steps: int,
    reopen: Callable[[Mapping[str, Any]], PromptSource],
    progress: Progress,
    state: Mapping[str, Any],
    stop: Any = False,
  ):
    """Makes a source that continues at a position.

    Args:
      prompts: Prompts in training order, at the position of `state`.
      attempts: Attempts in the background.
      rule: Rule of admission, and of the order in which groups are learned from.
      block: Number of prompts that are read together.
      max_error_share: Largest share of attempts of a draw that may fail.
      total_steps: Number of steps of the run; nothing is sampled for later ones.
      reopen: Function that opens the prompts at an earlier position.
      progress: Function that shows how many groups have come.
      state: `state()` of an earlier source, or {}.
      stop: Flag that becomes true when the run is asked to end; see `interrupts.Flag`.
    """
    self._prompts = prompts
    self._attempts = attempts
    self._rule = rule
    self._block = block
    self._max_error_share = max_error_share
    self._total_steps = total_steps
    self._progress = progress
    self._stop = stop
    self._blocks: list[_Block] = []
    self._ready: dict[int, RolloutGroup] = {}
    self._encoded: dict[int, dict[str, Any]] = {}
    self._is_over = False  # whether the data has ended.
    self._metrics: dict[str, float] = {}
    self._clock = _Clock(attempts)
    known = state.get("ahead", {})
    self._next_block = int(known.get("next_block", 0))
    self._queue = AdmissionQueue(rule, first=int(known.get("next_number", 0)))
    self._unsent: list[int] = []  # numbers of restored prompts whose attempts have to begin again.
    self._failure: BaseException | None = None  # raised when the next step begins.
    self._restore(known, reopen)

  def begin(self, step: int, held: Sequence[RolloutGroup]) -> None:
    """Begins all attempts that the rule allows, first those that a run was interrupted at.

    Raises:
      Exception: What failed while a step was learned.
    """
    if self._failure is not None:
      raise self._failure
    old = [group for group in held if self._rule.is_too_old(oldest_version(group), step)]
    if old:
      _log.warning(
        "%d groups that an earlier step left over are older than rollout.max_staleness=%d, because"
        " it or rollout.prompts_per_step was larger then; step %d learns from them all the same",
        *(len(old), self._rule.max_staleness, step),
      )
    unsent, self._unsent = self._unsent, []
    self._queue.restart(unsent, step)
    self._send(unsent)
    self._begin_again(self._queue.too_old(step), step)
    steps_left = max(self._total_steps - step, 1)
    capacity = min(self._rule.capacity, steps_left * self._rule.groups_per_step)
    while not self._is_over and self._queue.may_admit(
      self._block, held=len(held), capacity=capacity
    ):
      self._admit(step)

  def draw(self, count: int, step: int, held: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups that the step takes, in the order of their prompts; see
    `GroupSource.draw`.

    Raises:
      TooManyFailures: More attempts failed than are allowed.
      DisagreementError: The processes of the run have different prompts.
      OtherProcessError: Reading, sampling or scoring failed on another process.
      Stopped: The run is asked to end.
    """
    while not self._is_over and self._queue.outstanding < count:  # the step is short.
      if self._queue.outstanding and not self._queue.may_admit(self._block, held=len(held)):
        break
      self._admit(step)
    ages = [oldest_version(group) for group in held]
    choose = functools.partial(self._queue.choose, count, step, held=ages)
    total = min(count, self._queue.outstanding)
    with self._progress(f"step {step}: waiting for groups", total) as advance:
      shown = 0
      while True:
        chosen = choose()
        done = self._queue.count_finished(total)
        advance(max(done - shown, 0))
        shown = max(done, shown)
        if chosen is not None:
          break
        if not self._queue.has_unfinished:
          raise RuntimeError(f"step {step} waits for groups, and all of them are finished")
        self._wait(f"the groups of step {step}", self._stop)
    groups = [self._ready.pop(number) for number in chosen]
    for number in chosen:
      self._encoded.pop(number, None)
    self._queue.take(chosen)
    self._metrics = {**self._reading(chosen), **failures.error_counts(groups)}
    failures.check_failures(groups, self._max_error_share)
    return groups

  def ordered(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Returns the groups in the order of their prompts, or the oldest first: they may be a surplus.

    Prompts that come first were sampled first, so either way none becomes too old as a surplus.
    """
    if self._rule.in_turn:
      return list(groups)
    return sorted(groups, key=oldest_version)

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of reading the newest block of the last `draw`, and its failures."""
    return dict(self._metrics)

  def step_metrics(self) -> dict[str, float]:
    """Returns shares of the time since the last call."""
    return self._clock.shares()

  def settle(self, *, has_learned: bool = True) -> None:
    """Waits until nothing is under way if the rule says so; see `GroupSource`."""
    if not self._rule.in_turn or self._unsent or self._failure is not None:
      return
    stop = _Later(self._stop, PATIENCE_S) if has_learned else self._stop
    try:
      while self._queue.has_unfinished:
        self._wait("the groups under way", stop)
    except Stopped:
      if not has_learned:
        raise
      _log.warning(
        "%d groups are still under way %g s after the run was asked to end: they are sampled again"
        " with newer weights, so the run will not end bit for bit as one that was never stopped",
        len(self._queue.unfinished),
        PATIENCE_S,
      )
    except Exception as error:
      if not has_learned:
        raise
      self._failure = error

  def state(self) -> dict[str, Any]:
    """Returns the position of the first block that is not wholly taken, and the finished groups."""
    self._gather()
    waiting = {*self._queue.unfinished, *self._queue.finished}
    blocks = [block for block in self._blocks if waiting.intersection(block.numbers)]
    self._blocks = blocks
    now = self._prompts.state()
    return {
      "prompts": blocks[0].state if blocks else now,
      "ahead": {
        "next": now,
        "next_block": self._next_block,
        "next_number": self._queue.next_number,
        "blocks": [
          {
            "first": block.first,
            "count": len(block.prompts),
            "index": block.index,
            "state": block.state,
            "metrics": block.metrics,
          }
          for block in blocks
        ],
        "waiting": [[number, self._queue.version_of(number)] for number in sorted(waiting)],
        "ready": [[number, self._record(number)] for number in self._queue.finished],
      },
    }

  def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
    """Passes the metrics of a step to the source of prompts; it chooses later blocks by them."""
    group_source.pass_on(metrics, step, to=self._prompts)

  def close(self) -> None:
    """Ends all attempts."""
    self._attempts.close()

  def _admit(self, step: int) -> None:
    """Reads the next block and begins its attempts."""
    before = self._prompts.state()
    found = group_source.read(self._prompts, self._block, of=f"block {self._next_block}")
    self._is_over = len(found) < self._block
    if not found:
      return
    numbers = self._queue.admit(len(found), step)
    metrics = self._prompts.metrics()
    self._blocks.append(_Block(numbers[0], found, self._next_block, before, metrics))
    self._next_block += 1
    self._send(numbers)

  def _send(self, numbers: Sequence[int]) -> None:
    """Begins the attempts at those of the prompts that are this process's share."""
    for block in self._blocks:
      own = [n for n in numbers if n in block.numbers and self._is_own(n - block.first)]
      if own:
        asked = rollout.for_step([block.prompts[n - block.first] for n in own], block.index)
        self._attempts.submit(own, asked)

  def _is_own(self, place: int) -> bool:
    return place % processes.count() == processes.index()

  def _prompt(self, number: int) -> Prompt:
    block = next(block for block in self._blocks if number in block.numbers)
    return block.prompts[number - block.first]

  def _begin_again(self, numbers: Sequence[int], step: int) -> None:
    """Gives groups up that were admitted under larger bounds, and attempts their prompts again."""
    if not numbers:
      return
    _log.info(
      "%d groups are too old for rollout.max_staleness=%d, because it or rollout.prompts_per_step"
      " was larger when they began: their prompts are sampled again",
      *(len(numbers), self._rule.max_staleness),
    )
    for number in numbers:
      self._attempts.give_up(number)
      self._ready.pop(number, None)
      self._encoded.pop(number, None)
    self._queue.restart(numbers, step)
    self._send(numbers)

  def _wait(self, what: str, stop: Any) -> None:
    """Waits until groups have finished on some process, and gathers those of all."""
    if processes.count() == 1:
      with self._clock.waiting():
        self._attempts.wait(stop)
      self._gather()
      return
    early = EndedEarly(stop)
    try:
      with self._clock.waiting():
        processes.together(lambda: self._waited(early), what=what)
    finally:
      early.forget()
    self._gather()

  def _waited(self, early: EndedEarly) -> None:
    """Waits for groups of this process, or for the news that another one has some or has failed."""
    has_any = self._attempts.in_flight > 0
    try:
      self._attempts.wait(early)
    except Stopped:
      if early.is_over:
        return  # `together` raises it if it was a failure.
      early.announce()
      raise
    except BaseException:
      early.announce()
      raise
    if has_any:
      early.announce()

  def _gather(self) -> None:
    """Records the groups that have finished on any process, in the same order on all."""
    own = self._attempts.arrived()
    for number, group in self._exchanged(own):
      self._ready[number] = group_json.without_info(group)
      self._queue.finish(number, max(oldest_version(group), self._queue.version_of(number)))

  def _exchanged(self, own: Sequence[Arrived]) -> list[Arrived]:
    if processes.count() == 1:
      return list(own)
    numbers = [each.number for each in own]
    all_numbers = processes.exchange(numbers, what="the groups that have finished")
    if not any(all_numbers):
      return []
    prompts = [self._prompt(number) for number in numbers]
    data = group_bytes.encode([each.group for each in own], prompts)
    shares = bulk.exchange_bytes(data, what="groups that were sampled ahead")
    found = []
    for there, share in zip(all_numbers, shares, strict=True):
      groups = group_bytes.decode(share, [self._prompt(number) for number in there])
      found += map(Arrived, there, groups)
    return found

  def _reading(self, chosen: Sequence[int]) -> dict[str, float]:
    """Returns the metrics of reading the newest block that groups come from."""
    blocks = [block for block in self._blocks if {*chosen}.intersection(block.numbers)]
    return dict(blocks[-1].metrics) if blocks else {}

  def _record(self, number: int) -> dict[str, Any]:
    """Returns a finished group as JSON; the JSON is made once."""
    if number not in self._encoded:
      self._encoded[number] = group_json.encode(self._ready[number])
    return self._encoded[number]

  def _restore(
    self, known: Mapping[str, Any], reopen: Callable[[Mapping[str, Any]], PromptSource]
  ) -> None:
    """Restores blocks, finished groups, and what has to be sampled again."""
    for record in known.get("blocks", ()):
      source = reopen({"prompts": record["state"]})
      prompts = group_source.read(source, record["count"], of=f"block {record['index']}")
      if len(prompts) != record["count"]:
        raise ChangedDataError(
          f"the data has changed since the checkpoint: of {record['count']} prompts that were read"
          f" ahead, {len(prompts)} are left"
        )
      self._blocks.append(
        _Block(record["first"], prompts, record["index"], record["state"], record["metrics"])
      )
    for number, version in known.get("waiting", ()):
      self._queue.restore(number, version)
    for number, record in known.get("ready", ()):
      group = group_json.decode(record)
      found, expected = self._prompt(number).prompt_id, group.prompt.prompt_id
      if found != expected:
        raise ChangedDataError(
          f"the data has changed since the checkpoint: prompt {expected}, which was read ahead, is"
          f" now {found}"
        )
      self._ready[number], self._encoded[number] = group, record
      self._queue.finish(number, max(oldest_version(group), self._queue.version_of(number)))
    self._unsent = list(self._queue.unfinished)


def oldest_version(group: RolloutGroup) -> int:
  """Returns the oldest version of the weights that sampled tokens of a group; -1: none is known."""
  members = [*group.rollouts, *([group.greedy] if group.greedy else [])]
  found = [r.weight_versions[r.loss_mask & (r.weight_versions >= 0)] for r in members]
  return min((int(each.min()) for each in found if each.size), default=-1)


def positions(state: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Returns the positions in the data that `AheadSource` opens to continue from a state."""
  known = state.get("ahead", {})
  states = [*(block["state"] for block in known.get("blocks", ())), known.get("next")]
  return [{"prompts": each} for each in states if each is not None]


def is_split(state: Mapping[str, Any]) -> bool:
  """Returns whether some groups of a block were learned from and others were not."""
  known = state.get("ahead", {})
  read = sum(block["count"] for block in known.get("blocks", ()))
  return read > len(known.get("waiting", ()))


class _Later:
  """Becomes true some time after a flag has become true."""

  def __init__(self, stop: Any, seconds: float):
    self._stop = stop
    self._seconds = seconds
    self._since: float | None = None

  def __bool__(self) -> bool:
    if self._since is None and self._stop:
      self._since = time.monotonic()
    return self._since is not None and time.monotonic() - self._since >= self._seconds


class _Clock:
  """Measures what the engine and the trainer wait for."""

  def __init__(self, attempts: Attempts):
    self._attempts = attempts
    self._began, self._busy_before = attempts.now(), attempts.busy_s()
    self._waited = 0.0
    self._busy_while_waiting = 0.0

  @contextlib.contextmanager
  def waiting(self):
    """Counts the time in the block as the trainer's waiting."""
    began, busy = self._attempts.now(), self._attempts.busy_s()
    try:
      yield
    finally:
      self._waited += self._attempts.now() - began
      self._busy_while_waiting += self._attempts.busy_s() - busy

  def shares(self) -> dict[str, float]:
    """Returns shares of the time since the last call."""
    now, busy = self._attempts.now(), self._attempts.busy_s()
    took, engine = now - self._began, busy - self._busy_before
    if took <= 0:
      return {}
    overlap = engine - self._busy_while_waiting
    found = {
      "perf/overlap_share": overlap / took,
      "perf/engine_idle_share": 1 - engine / took,
      "perf/trainer_idle_share": self._waited / took,
    }
    self._began, self._busy_before = now, busy
    self._waited = self._busy_while_waiting = 0.0
    return {name: float(np.clip(value, 0, 1)) for name, value in found.items()}
