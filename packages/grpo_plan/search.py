"""The largest microbatch and the longest row that fit, from a few compilations.

Memory grows nearly linearly with the places of a microbatch. Two compilations give the line, and a
compilation of the answer verifies it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

from grpo_jax.batching.packing import Shape
from grpo_jax.compilation.programs import CompileJob
from grpo_plan.programs import PlannedRun, program_of

_ROUND = 256  # row lengths are multiples of it, as those that a run chooses.
_MOST_TRIES = 4  # compilations for one answer.


@dataclasses.dataclass(frozen=True)
class Point:
  """Bytes of one device that the update needs with a microbatch, everything else included.

  Attributes:
    rows: Rows on each replica.
    row_tokens: Length of a row.
    peak: Bytes in all.
    is_refused: Whether the compiler rejects the program by itself.
  """

  rows: int
  row_tokens: int
  peak: int
  is_refused: bool = False

  @property
  def places(self) -> int:
    """Tokens on each replica."""
    return self.rows * self.row_tokens


@dataclasses.dataclass(frozen=True)
class Limit:
  """The largest of something that fits.

  Attributes:
    point: The largest that was compiled and fits; None: not even the smallest does.
    is_capped: Whether more was not tried, because a run could not use it.
    too_large: The smallest that was compiled and does not fit; None: there was none.
  """

  point: Point | None
  is_capped: bool = False
  too_large: Point | None = None


Measure = Callable[[int, int], Point]


def job_of(run: PlannedRun, program: str, rows: int, row_tokens: int, replicas: int) -> CompileJob:
  """Returns the compilation of a program of the update for a shape that the run does not plan.

  Args:
    run: The run.
    program: One of `programs.OF_BATCHES`.
    rows: Rows on each replica.
    row_tokens: Length of a row; every token may be learned from.
    replicas: Number of replicas.
  """
  shape = Shape(rows * replicas, row_tokens, row_tokens)
  with run.assumed():
    jobs = dataclasses.replace(run.made, shapes=(shape,)).jobs()
  return next(job for job in jobs if program_of(job.name) == program)


def largest_microbatch(measure: Measure, room: int, *, start: Point, most_rows: int) -> Limit:
  """Returns the largest number of rows of the planned length that fits on each replica.

  Args:
    measure: Function (rows, row_tokens) → what a microbatch needs.
    room: Bytes of a device available to the run.
    start: Needs of the planned microbatch.
    most_rows: Rows that hold all tokens of a step; a run cannot use more.
  """
  length = start.row_tokens
  other = measure(1 if start.rows > 1 else 2, length)
  return _largest(
    lambda rows: measure(rows, length), room, [start, other], key=_rows, most=most_rows, unit=1
  )


def longest_row(
  measure: Measure,
  room: int,
  *,
  start: Point,
  per_place: float,
  most_tokens: int,
  parts: int = 1,
) -> Limit:
  """Returns the length of the longest row that fits on each replica.

  Args:
    measure: Function (rows, row_tokens) → what a microbatch needs.
    room: Bytes of a device available to the run.
    start: Needs of one row of the planned length.
    per_place: Bytes that one more place of a microbatch needs, for the first guess.
    most_tokens: Context of the model.
    parts: Number of devices over which the places of a row are divided.
  """
  unit = math.lcm(min(_ROUND, start.row_tokens), parts)
  guessed = Point(1, 2 * start.row_tokens, start.peak + int(per_place * start.row_tokens))
  return _largest(
    lambda tokens: measure(1, tokens),
    room,
    [start],
    key=_tokens,
    most=most_tokens,
    unit=unit,
    guessed=guessed,
  )


def slope(points: Iterable[Point]) -> float:
  """Returns the bytes that one more place needs, of the smallest and the largest microbatch."""
  ordered = sorted(points, key=lambda point: point.places)
  if len(ordered) < 2 or ordered[0].places == ordered[-1].places:
    return 0.0
  first, last = ordered[0], ordered[-1]
  return max(last.peak - first.peak, 0) / (last.places - first.places)


def _rows(point: Point) -> int:
  return point.rows


def _tokens(point: Point) -> int:
  return point.row_tokens


def _largest(
  measure: Callable[[int], Point],
  room: int,
  points: list[Point],
  *,
  key: Callable[[Point], int],
  most: int,
  unit: int,
  guessed: Point | None = None,
) -> Limit:
  """Returns the largest size that fits: by a line through two points, verified, then corrected.

  `guessed` is a point of the line that was not compiled; a compiled one takes its place.
  """
  points = list(points)
  most = max(most // unit * unit, unit)
  for _ in range(_MOST_TRIES):
    good, bad = _bounds(points, room, key)
    low = key(good) if good else 0
    high = min(key(bad) - unit if bad else most, most)
    if high <= low or (good and bad and high - low < max(low // 16, unit)):
      break
    line = [*points, guessed] if guessed is not None and len(points) < 2 else points
    guess = _guess(line, room, key) // unit * unit
    guess = min(max(guess, low + unit), high)
    points.append(measure(guess))
  good, bad = _bounds(points, room, key)
  if good is None and all(key(point) > unit for point in points):
    points.append(measure(unit))
    good, bad = _bounds(points, room, key)
  return Limit(good, is_capped=good is not None and key(good) >= most, too_large=bad)


def _bounds(
  points: list[Point], room: int, key: Callable[[Point], int]
) -> tuple[Point | None, Point | None]:
  """Returns the largest point that fits and the smallest that does not."""
  fits = [point for point in points if point.peak <= room and not point.is_refused]
  misfits = [point for point in points if point.peak > room or point.is_refused]
  return max(fits, key=key, default=None), min(misfits, key=key, default=None)


def _guess(points: list[Point], room: int, key: Callable[[Point], int]) -> int:
  """Returns where the line through the two points nearest to the limit reaches it."""
  near = sorted(points, key=lambda point: abs(point.peak - room))
  first = near[0]
  second = next((point for point in near if key(point) != key(first)), first)
  if first.peak == second.peak or key(first) == key(second):
    return key(first) * (4 if first.peak <= room else 1)
  slope = (second.peak - first.peak) / (key(second) - key(first))
  if slope <= 0:
    return 2 * max(key(first), key(second))
  return int(key(first) + (room - first.peak) / slope)
