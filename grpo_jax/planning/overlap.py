"""How long a step takes if sampling and learning overlap: a model of an engine and a trainer. Pure.

The engine decodes up to R completions side by side. One token of each of n completions takes

    a (1 + c n) seconds,

so a few long completions at the end of a step take almost as long as full rows: the tail. The
trainer learns from P groups at a time, on devices of its own, and then the engine gets new weights.
Which groups may be sampled ahead and which a step takes is decided by `rollouts.admission`, the
rule of real runs. With equal lengths and c = 0 the model gives

    synchronous    sampling + learning + update of the weights
    one ahead      max(sampling, learning) + update
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.rollouts.admission import Ledger, Order, Rule

ROW_COST = 0.004  # c: memory-bound decoding, where 250 completions double the time of a token.
STEPS = 40  # simulated; the first half is left out, in which the pipeline fills.

# Lengths in tokens of the completions of each group, for each step.
StepLengths = Sequence[Sequence[Sequence[int]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
  """What the parts of a synchronous step take, in seconds.

  Attributes:
    sample: Time of sampling and scoring.
    learn: Time of all that the trainer does between sampling and the update of the weights.
    sync: Time in which the engine gets new weights; nothing else happens then.
  """

  sample: float
  learn: float
  sync: float

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"Times.{field.name} must be finite and at least 0, got {value}")
    if self.sample == 0:
      raise ValueError("Times.sample must be above 0, got 0.0")

  @property
  def synchronous(self) -> float:
    """Time of a step in which sampling and learning take turns."""
    return self.sample + self.learn + self.sync

  @property
  def one_ahead(self) -> float:
    """Time of a step whose groups are sampled while the step before is learned."""
    return max(self.sample, self.learn) + self.sync


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
  """A form of asynchronous training, by the options of `config.rollout`."""

  max_staleness: int
  order: Order = "prompt"
  in_flight_updates: bool = False

  @property
  def in_turn(self) -> bool:
    """Whether one block is sampled after the other."""
    return self.order == "prompt" and not self.in_flight_updates


FORMS = (
  Form(max_staleness=1),
  *(Form(max_staleness=k, in_flight_updates=True) for k in (1, 2, 4)),
  *(Form(max_staleness=k, order="finished", in_flight_updates=True) for k in (1, 2, 4)),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
  """What a step takes in the long run."""

  step_s: float
  engine_idle_share: float  # of the time: nothing to sample, or new weights on their way.
  trainer_idle_share: float  # of the time: the trainer waits for groups, or for the engine.


def lognormal_lengths(
  *, steps: int, groups: int, group_size: int, mean: float, sigma: float, longest: int, seed: int
) -> list[list[list[int]]]:
  """Draws lengths of completions that are lognormal up to a limit.

  Args:
    steps: Number of steps.
    groups: Number of groups of a step, P.
    group_size: Number of completions of a group, G.
    mean: Mean length in tokens, before the limit.
    sigma: Standard deviation of the logarithm of the length; 0: all are equal.
    longest: Limit in tokens; longer completions are cut there.
    seed: Random seed of the lengths.

  Returns:
    Lengths in tokens, [steps][groups][group_size].
  """
  draw = np.random.default_rng(seed).normal(size=(steps, groups, group_size))
  lengths = np.exp(math.log(mean) - sigma**2 / 2 + sigma * draw)
  return np.clip(np.rint(lengths), 1, longest).astype(int).tolist()


def forecast(
  times: Times,
  lengths: StepLengths,
  form: Form,
  *,
  rows: int,
  row_cost: float = ROW_COST,
  steps: int = STEPS,
) -> Forecast:
  """Simulates a run and returns what its steps take.

  The engine's speed is chosen such that synchronous steps of these lengths take `times.sample`.

  Args:
    times: Times of the parts of a synchronous step.
    lengths: Lengths of the completions of one step or of several, which are repeated.
    form: Form of asynchronous training; staleness 0 is synchronous.
    rows: Largest number R of completions that the engine samples at a time.
    row_cost: Time c that one more completion adds to a decoding step, relative to a step's fixed
      time; 0: the time of a token does not depend on the number of completions.
    steps: Number of steps to simulate.

  Raises:
    ValueError: There are no lengths, the steps have different numbers of groups, or `rows`, `steps`
      or `row_cost` is out of range.
  """
  if not lengths or not lengths[0] or len({len(step) for step in lengths}) > 1:
    raise ValueError(
      "forecast needs the lengths of at least one step, with the same number of groups in each,"
      f" got {[len(step) for step in lengths]} groups"
    )
  if rows < 1 or steps < 4 or not row_cost >= 0:
    raise ValueError(
      "forecast needs rows >= 1, steps >= 4 and row_cost >= 0, got"
      f" rows={rows}, steps={steps}, row_cost={row_cost}"
    )
  make = lambda token_s: _Decoder(rows=rows, row_cost=row_cost, token_s=token_s)
  synchronous = Form(max_staleness=0)
  free = dataclasses.replace(times, learn=0.0, sync=0.0)
  unit = _run(free, lengths, synchronous, make(1.0), len(lengths), skipped=0).step_s
  return _run(times, lengths, form, make(times.sample / unit), steps, skipped=steps // 2)


def _run(
  times: Times, lengths: StepLengths, form: Form, decoder: "_Decoder", steps: int, *, skipped: int
) -> Forecast:
  """Simulates a run; the first `skipped` steps do not count."""
  count = len(lengths[0])
  rule = Rule(max_staleness=form.max_staleness, groups_per_step=count, order=form.order)
  ledger = Ledger(rule)
  blocks = itertools.cycle(lengths)
  decoder.in_turn = form.in_turn
  waited = 0.0
  start = (0.0, 0.0, 0.0)

  def finish(numbers: Sequence[int]) -> None:
    for number in numbers:
      ledger.finish(number, ledger.version_of(number))

  def wait(is_over: Callable[[], bool]) -> float:
    before = decoder.now
    while not is_over():
      finish(decoder.until_a_group())
    return decoder.now - before

  for step in range(steps):
    if step == skipped:
      start = (decoder.now, decoder.busy_s, waited)
    while ledger.may_admit(count):
      decoder.submit(ledger.admit(count, step), next(blocks))
    waited += wait(lambda step=step: ledger.choose(count, step) is not None)
    ledger.take(ledger.choose(count, step) or ())
    finish(decoder.run(times.learn))
    if not form.in_flight_updates:
      waited += wait(lambda: not ledger.unfinished)
    decoder.pause(times.sync)
    waited += times.sync
  took, busy, idle = (
    end - begin for end, begin in zip((decoder.now, decoder.busy_s, waited), start, strict=True)
  )
  return Forecast(took / (steps - skipped), 1 - busy / took, idle / took)


class _Decoder:
  """The model of the engine, with its clock."""

  def __init__(self, *, rows: int, row_cost: float, token_s: float):
    self.now = 0.0
    self.busy_s = 0.0
    self.in_turn = False  # whether a block begins only when the one before it has ended.
    self._rows, self._row_cost, self._token_s = rows, row_cost, token_s
    self._tokens = 0.0  # tokens that a completion would have that has run from the beginning.
    self._blocks = 0
    self._queue: collections.deque[tuple[int, int, int]] = collections.deque()
    self._running: list[tuple[float, int, int]] = []  # a heap: end in `_tokens`, group, block.
    self._left: dict[int, int] = {}  # completions of each group that have not ended.

  def submit(self, groups: Sequence[int], lengths: Sequence[Sequence[int]]) -> None:
    """Puts the completions of a block into the queue."""
    for group, own in zip(groups, lengths, strict=True):
      self._left[group] = len(own)
      self._queue.extend((max(length, 1), group, self._blocks) for length in own)
    self._blocks += 1
    self._fill()

  def run(self, seconds: float) -> list[int]:
    """Decodes for a time, and returns the groups that have finished."""
    until, found = self.now + seconds, []
    while self._running and self.now < until:
      found += self._advance(until)
    self.now = until
    return found

  def until_a_group(self) -> list[int]:
    """Decodes until a group has finished, and returns it."""
    while True:
      assert self._running, "waits for a group, and nothing is sampled"
      if found := self._advance(math.inf):
        return found

  def pause(self, seconds: float) -> None:
    """Lets time pass without decoding."""
    self.now += seconds

  def _advance(self, until: float) -> list[int]:
    """Decodes until the next completion ends, or until a time; returns a group that finished."""
    token_s = self._token_s * (1 + self._row_cost * len(self._running))
    end, group, _ = self._running[0]
    took = (end - self._tokens) * token_s
    if self.now + took > until:
      self._tokens += (until - self.now) / token_s
      self.busy_s += until - self.now
      self.now = until
      return []
    self.now, self.busy_s, self._tokens = self.now + took, self.busy_s + took, end
    heapq.heappop(self._running)
    self._fill()
    self._left[group] -= 1
    return [] if self._left[group] else [group]

  def _fill(self) -> None:
    """Begins completions in the rows that are free."""
    while self._queue and len(self._running) < self._rows:
      length, group, block = self._queue[0]
      if self.in_turn and self._running and self._running[0][2] != block:
        return
      self._queue.popleft()
      heapq.heappush(self._running, (self._tokens + length, group, block))
