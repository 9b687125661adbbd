"""The shapes that microbatches may have, and which completions stand in which row. Pure.

The shapes of a run are planned once, by `plan`, from the numbers of its configuration; `pack` lays
every batch out in these and in no others, so that a run compiles a known set of programs. Only
sizes are read here, so the result depends on nothing but the arguments.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

MOST_SHAPES = 3  # of a run: each takes a compilation.

# Longer rows have longer blocks of queries in attention, whose scores take more memory.
LONGEST_BY_CHOICE = 4096
# Queries that attention computes at once, as in `models.layers.packed_attention`.
_BLOCK, _MOST_BLOCKS = 256, 16

_LEAST_PLACES = 128  # of a microbatch: with fewer, reading the weights takes most of its time.
_TRIED_GROUPS = 16  # the largest ones, of which one is split to fill a row.
_TRIED_REMAINDERS = 48  # combinations of shapes for what does not fill a whole microbatch.
_SAMPLE_GROUPS = 8  # by which row lengths are compared.


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
  """Shape of a microbatch: B rows of T tokens, at most N of which are learned from."""

  rows: int
  row_tokens: int
  loss_tokens: int

  @property
  def places(self) -> int:
    """B · T."""
    return self.rows * self.row_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
  """Operations of an update, in any unit; see `models.operations`. The default counts places.

  Attributes:
    place: Operations of the layers' products for one place of a row.
    pair: Operations of attention for one pair of a query and a key.
    pair_of_short: The same in rows of a single block, whose scores are computed once less.
    loss_place: Operations of the head for one of the N places of a row.
    microbatch: Operations that every microbatch costs, whatever its shape, to read the weights and
      to add the gradients.
  """

  place: float = 1.0
  pair: float = 0.0
  pair_of_short: float = 0.0
  loss_place: float = 0.0
  microbatch: float = 0.0

  def of_row(self, row_tokens: int, loss_tokens: int) -> float:
    """Returns the operations of one row of a microbatch."""
    pair = self.pair if row_tokens > _BLOCK else self.pair_of_short
    of_layers = self.place * row_tokens + pair * pairs(row_tokens)
    return of_layers + self.loss_place * loss_tokens

  def of(self, shape: Shape) -> float:
    """Returns the operations of a microbatch."""
    return shape.rows * self.of_row(shape.row_tokens, shape.loss_tokens) + self.microbatch


PLACES = Cost()  # counts places only.


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
  """The most that an optimizer step may hold, by the numbers of a configuration.

  Attributes:
    prompt: Tokens of a prompt.
    completion: Tokens of a completion.
    longest: Tokens of a prompt together with a completion of it.
    group: Completions of a prompt.
    groups: Prompts of an optimizer step.
  """

  prompt: int
  completion: int
  longest: int
  group: int
  groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
  """Tokens of a prompt, and of each completion that stands after it."""

  prompt: int
  completions: tuple[int, ...]

  @property
  def total(self) -> int:
    """Tokens if the prompt stands once."""
    return self.prompt + sum(self.completions)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """What stands together in a row: a prompt, and some of its completions, by their indices."""

  group: int
  completions: tuple[int, ...]


Row = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
  """A microbatch: at most `shape.rows` rows; the others are padding."""

  shape: Shape
  rows: tuple[Row, ...]


def pairs(row_tokens: int) -> int:
  """Returns how many pairs of query and key attention computes in a row of T tokens.

  Blocks of queries see the keys up to their own end, whatever the mask says.
  """
  block = max(_BLOCK, -(-row_tokens // _MOST_BLOCKS))
  stops = [min(start + block, row_tokens) for start in range(0, row_tokens, block)]
  starts = [0, *stops[:-1]]
  return sum((stop - start) * stop for start, stop in zip(starts, stops, strict=True))


def pack(
  groups: Sequence[Sizes], shapes: Sequence[Shape], *, cost: Cost, one_piece: bool = False
) -> list[Packed]:
  """Lays the completions of an optimizer step out in microbatches of the given shapes.

  Rows are filled one after another: with the largest groups that fit, and where none fits, with a
  part of one. Whole microbatches have one shape; what is left over goes into the cheapest
  combination of shapes that holds it. This is tried with each shape, and the cheapest result wins.

  Args:
    groups: Sizes of the groups; a group without completions takes no place.
    shapes: Shapes that microbatches may have.
    cost: Cost of a microbatch by its shape.
    one_piece: Whether a row holds a single piece.

  Raises:
    ValueError: A completion with its prompt fits in no row, or a shape has fewer loss places than
      row places.
  """
  longest = max((g.prompt + max(g.completions) for g in groups if g.completions), default=0)
  bulks = [shape for shape in shapes if shape.row_tokens >= longest]
  if not bulks:
    lengths = tuple(shape.row_tokens for shape in shapes)
    raise ValueError(f"no row of {lengths} tokens holds a prompt with its completion of {longest}")
  if any(shape.loss_tokens < shape.row_tokens for shape in shapes):
    raise ValueError(f"loss_tokens must be row_tokens in every shape, got {tuple(shapes)}")
  if not longest:
    return []
  tokens = sum(group.total for group in groups if group.completions)
  best: list[Packed] | None = None
  for bulk in sorted(bulks, key=lambda shape: cost.of(shape) / shape.places):
    least = tokens / bulk.places * cost.of(bulk)
    if best is None or least < _total(best, cost):
      made = _mostly(bulk, groups, shapes, cost, one_piece)
      if best is None or _total(made, cost) < _total(best, cost):
        best = made
  assert best is not None
  return best


def plan(
  load: Load,
  *,
  cost: Cost,
  row_tokens: int | None = None,
  row_buckets: Sequence[int] | None = None,
  microbatch_tokens: int | None = None,
  rows_multiple: int = 1,
  share_prefixes: bool = True,
  pack: bool = True,
) -> tuple[Shape, ...]:
  """Returns the shapes that a run may use, at most three, the largest first.

  The first takes as many places as `microbatch_tokens` allows, or as a step of moderate lengths
  fills. Its row length is the one with which groups at the limits and moderate ones cost least. The
  others have about a quarter and a sixteenth of its places, for what does not fill a whole
  microbatch. The second holds whatever the first does, where the first is larger than that.

  Args:
    load: The most that an optimizer step may hold.
    cost: Cost of a microbatch by its shape.
    row_tokens: Length of the longest row. None: rows are as long as is cheapest, and longer than
      `LONGEST_BY_CHOICE` only if a prompt with one completion is.
    row_buckets: Row lengths to choose from; None: any.
    microbatch_tokens: Most places of a microbatch on each replica; one row is always allowed. None:
      as many as a step at the limits needs.
    rows_multiple: Number of replicas over which rows are split.
    share_prefixes: Whether completions of a group may share a prompt in a row.
    pack: Whether a row may hold several pieces.

  Raises:
    ValueError: `row_buckets` names more lengths than there may be shapes.
  """
  if row_buckets and len(set(row_buckets)) > MOST_SHAPES:
    raise ValueError(
      f"row_buckets={tuple(row_buckets)}: a run compiles at most {MOST_SHAPES} shapes of the"
      f" update, so name at most {MOST_SHAPES} row lengths"
    )
  planner = _Planner(load, cost, microbatch_tokens, rows_multiple, share_prefixes, pack)
  if row_buckets:
    return planner.of_buckets(sorted(set(row_buckets)), row_tokens)
  return planner.of_choice(row_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Planner:
  """The arguments of `plan`, and the steps of its choice."""

  load: Load
  cost: Cost
  microbatch_tokens: int | None
  rows_multiple: int
  share_prefixes: bool
  pack: bool

  def of_choice(self, row_tokens: int | None) -> tuple[Shape, ...]:
    """Returns the plan with the cheapest row length up to `row_tokens`."""
    longest = self.load.longest if row_tokens is None else min(self.load.longest, row_tokens)
    full = self._cheapest(self._lengths(longest, row_tokens), longest)
    sizes = self._smaller(full.places // self.rows_multiple, longest)
    shapes = [full, *(self._shape(full.row_tokens, places) for places in sizes)]
    return _distinct(shapes)

  def of_buckets(self, lengths: Sequence[int], row_tokens: int | None) -> tuple[Shape, ...]:
    """Returns a plan with rows of these lengths only: all of them, and then smaller shapes."""
    limit = min(lengths[-1], row_tokens or lengths[-1])
    longest = min(self.load.longest, limit)
    full = self._cheapest([length for length in lengths if length >= longest], longest)
    rows = full.rows // self.rows_multiple
    others = [n for n in reversed(lengths) if n != full.row_tokens]
    shapes = [full, *(self._rows(max(1, rows * full.row_tokens // n), n) for n in others)]
    for fewer in (max(1, rows // 4), max(1, rows // 16)):
      if len(shapes) < MOST_SHAPES:
        shapes.append(self._rows(fewer, full.row_tokens))
    return _distinct(shapes)

  def _lengths(self, longest: int, row_tokens: int | None) -> list[int]:
    """Returns the row lengths to choose from, each of which holds `longest`."""
    prompt, completion = self._limits(longest)
    held = [prompt + count * completion for count in range(1, self._group + 1)]
    most = self._most_places(longest)
    parts = [most // count for count in range(1, 9)]
    shortest = min(_rounded(longest), row_tokens or _rounded(longest))
    highest = max(shortest, min(most, row_tokens or LONGEST_BY_CHOICE))
    found = {shortest, row_tokens or shortest, *map(_rounded, held)}
    found |= {_rounded(length, down=True) for length in parts}
    return sorted(length for length in found if shortest <= length <= highest)

  def _cheapest(self, lengths: Sequence[int], longest: int) -> Shape:
    """Returns the full shape with which what is likely costs least."""
    shapes = [self._full(length, longest) for length in lengths]
    if len(shapes) == 1:
      return shapes[0]
    costs = [[self._likely(shape, sample) for shape in shapes] for sample in self._samples(longest)]
    relative = [
      sum(of_shape / min(of_sample) for of_shape, of_sample in zip(column, costs, strict=True))
      for column in zip(*costs, strict=True)
    ]
    return shapes[relative.index(min(relative))]

  def _likely(self, shape: Shape, sample: Sequence[Sizes]) -> float:
    """Returns what a sample of groups costs in microbatches that are all full."""
    rows = _rows(sample, shape.row_tokens, not self.pack)
    # The last row counts as far as it is filled: a step has many more groups than a sample.
    filled = len(rows) - 1 + _tokens(sample, rows[-1:]) / shape.row_tokens
    return filled * self.cost.of(shape) / shape.rows

  def _full(self, length: int, longest: int) -> Shape:
    """Returns the largest microbatch with rows of a length."""
    rows = len(_rows(self._expected(longest), length, not self.pack))
    needed = math.ceil(rows * self.load.groups / _SAMPLE_GROUPS / self.rows_multiple)
    if self.microbatch_tokens is not None:
      needed = min(needed, self.microbatch_tokens // length)
    return self._rows(max(1, needed), length)

  def _smaller(self, full: int, longest: int) -> tuple[int, int]:
    """Returns the places, on each replica, of the second and the third shape."""
    third = max(full // 16, _LEAST_PLACES)
    second = math.isqrt(full * third)
    return (longest if second < longest and _rounded(longest) < full else second), third

  def _shape(self, length: int, places: int) -> Shape:
    """Returns a shape of so many places on each replica: rows of a length, or one shorter row."""
    if places >= length or not self.pack:
      return self._rows(max(1, places // length), length)
    return self._rows(1, min(_rounded(places), length))

  def _rows(self, rows: int, length: int) -> Shape:
    return Shape(rows * self.rows_multiple, length, length)

  def _most_places(self, longest: int) -> int:
    """Returns the most places of a microbatch on each replica."""
    tokens = sum(group.total for group in self._expected(longest))
    most = math.ceil(tokens * self.load.groups / _SAMPLE_GROUPS / self.rows_multiple)
    return max(longest, min(most, self.microbatch_tokens or most))

  def _expected(self, longest: int) -> list[Sizes]:
    """Returns groups that the first shape should hold together; more take more microbatches."""
    at_limits, moderate = self._samples(longest)
    return at_limits if self.microbatch_tokens is None else moderate

  @property
  def _group(self) -> int:
    return self.load.group if self.share_prefixes else 1

  def _limits(self, longest: int) -> tuple[int, int]:
    """Returns tokens of prompt and completion that are as long as they can be together."""
    prompt = min(self.load.prompt, max(longest - self.load.completion, longest // 2))
    return prompt, min(self.load.completion, longest - prompt)

  def _samples(self, longest: int) -> tuple[list[Sizes], list[Sizes]]:
    """Returns groups at the limits, and ones with short prompts and completions of all lengths."""
    prompt, completion = self._limits(longest)
    at_limits = Sizes(prompt, (completion,) * self._group)
    spread = [max(1, completion * (i + 1) // (self._group + 1)) for i in range(self._group)]
    moderate = Sizes(max(1, prompt // 4), tuple(spread))
    count = _SAMPLE_GROUPS * (1 if self.share_prefixes else self.load.group)
    return [at_limits] * count, [moderate] * count


def _distinct(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
  """Returns each shape once, the largest first."""
  return tuple(sorted(set(shapes), key=lambda shape: (-shape.places, -shape.row_tokens)))


def _rounded(length: int, *, down: bool = False) -> int:
  """Returns a row length that is a round number."""
  step = 32 if length < 1024 else 128
  return max(step, (length // step if down else -(-length // step)) * step)


def _total(packed: Sequence[Packed], cost: Cost) -> float:
  return sum(cost.of(one.shape) for one in packed)


def _mostly(
  bulk: Shape, groups: Sequence[Sizes], shapes: Sequence[Shape], cost: Cost, one_piece: bool
) -> list[Packed]:
  """Packs into microbatches of one shape, and what is left as cheaply as any shapes allow."""
  rows = _rows(groups, bulk.row_tokens, one_piece)
  whole = (len(rows) - 1) // bulk.rows * bulk.rows
  made = [Packed(bulk, tuple(rows[i : i + bulk.rows])) for i in range(0, whole, bulk.rows)]
  last = rows[whole:]
  for chosen in _combinations(_tokens(groups, last), bulk, shapes, cost):
    held = _held(groups, last, chosen, one_piece)
    if held is not None:
      return made + held
  return [*made, Packed(bulk, tuple(last))]


def _combinations(
  tokens: int, bulk: Shape, shapes: Sequence[Shape], cost: Cost
) -> Iterator[tuple[Shape, ...]]:
  """Yields shapes that together have places for so many tokens, the cheapest first.

  All are cheaper than one microbatch of `bulk`.
  """
  most, costs = cost.of(bulk), [cost.of(shape) for shape in shapes]
  places, found = [shape.places for shape in shapes], []
  for counts in itertools.product(*(range(min(16, int(most / one)) + 1) for one in costs)):
    total = sum(map(operator.mul, counts, costs))
    if total < most and sum(map(operator.mul, counts, places)) >= tokens:
      found.append((total, sum(counts), counts))
  for _, _, counts in heapq.nsmallest(_TRIED_REMAINDERS, found):
    yield tuple(shape for shape, n in zip(shapes, counts, strict=True) for _ in range(n))


def _held(
  groups: Sequence[Sizes], rows: Sequence[Row], shapes: Sequence[Shape], one_piece: bool
) -> list[Packed] | None:
  """Packs what stands in some rows into exactly these microbatches; None if it does not fit."""
  pool = _Pool(groups, rows)
  made = []
  for shape in sorted(shapes, key=lambda shape: (-shape.row_tokens, -shape.rows)):
    filled = []
    while pool and len(filled) < shape.rows:
      row = pool.fill(shape.row_tokens, one_piece)
      if not row:
        break
      filled.append(row)
    made.append(Packed(shape, tuple(filled)))
  return None if pool else [one for one in made if one.rows]


def _rows(groups: Sequence[Sizes], length: int, one_piece: bool) -> list[Row]:
  """Packs into as many rows of a length as it takes."""
  pool = _Pool(groups)
  rows = []
  while pool:
    row = pool.fill(length, one_piece)
    assert row, f"a row of {length} tokens holds nothing of what is left"
    rows.append(row)
  return rows


def _tokens(groups: Sequence[Sizes], rows: Sequence[Row]) -> int:
  """Returns the tokens of rows if no prompt stood twice."""
  pieces = [piece for row in rows for piece in row]
  prompts = sum(groups[g].prompt for g in {piece.group for piece in pieces})
  return prompts + sum(groups[p.group].completions[i] for p in pieces for i in p.completions)


class _Pool:
  """The completions that stand in no row yet, by group."""

  def __init__(self, groups: Sequence[Sizes], rows: Sequence[Row] | None = None):
    """Holds what the groups have, or only what stands in some rows."""
    self._groups = groups
    self._left: dict[int, list[int]] = {}
    if rows is None:
      self._left = {g: [*range(len(group.completions))] for g, group in enumerate(groups)}
    else:
      for piece in (piece for row in rows for piece in row):
        self._left.setdefault(piece.group, []).extend(piece.completions)
    self._left = {g: self._ordered(g, left) for g, left in self._left.items() if left}
    self._sizes = sorted((self._size(g), -g) for g in self._left)

  def __bool__(self) -> bool:
    return bool(self._left)

  def fill(self, room: int, one_piece: bool) -> Row:
    """Takes out what fills a row of `room` tokens; nothing if nothing fits."""
    row: list[Piece] = []
    while self._sizes:
      at = bisect.bisect_right(self._sizes, (room, 1)) - 1
      piece = self._whole(at) if at >= 0 else self._part(room)
      if piece is None:
        break
      row.append(piece)
      group = self._groups[piece.group]
      room -= group.prompt + sum(group.completions[i] for i in piece.completions)
      if one_piece:
        break
    return tuple(row)

  def _whole(self, at: int) -> Piece:
    """Takes out all that is left of a group."""
    _, negative = self._sizes.pop(at)
    return Piece(-negative, tuple(sorted(self._left.pop(-negative))))

  def _part(self, room: int) -> Piece | None:
    """Takes those completions out of one group that fill the room best; each fits in no whole."""
    best: tuple[int, int, list[int]] | None = None
    for at in range(len(self._sizes) - 1, max(-1, len(self._sizes) - 1 - _TRIED_GROUPS), -1):
      g = -self._sizes[at][1]
      group = self._groups[g]
      chosen = _fullest([group.completions[i] for i in self._left[g]], room - group.prompt)
      members = [self._left[g][i] for i in chosen]
      gained = sum(group.completions[i] for i in members)
      if members and (best is None or gained > best[0]):
        best = (gained, at, members)
    if best is None:
      return None
    _, at, members = best
    g = -self._sizes.pop(at)[1]
    taken = set(members)
    self._left[g] = [i for i in self._left[g] if i not in taken]
    bisect.insort(self._sizes, (self._size(g), -g))
    return Piece(g, tuple(sorted(members)))

  def _size(self, g: int) -> int:
    group = self._groups[g]
    return group.prompt + sum(group.completions[i] for i in self._left[g])

  def _ordered(self, g: int, left: Sequence[int]) -> list[int]:
    """Returns completions, the longest first."""
    return sorted(left, key=lambda i: (-self._groups[g].completions[i], i))


def _fullest(sizes: Sequence[int], room: int) -> list[int]:
  """Returns the indices of sizes whose sum is the largest that is not above `room`.

  Bit s of `reachable` says that some of the sizes add up to s.
  """
  if room <= 0:
    return []
  reachable, before, mask = 1, [], (1 << (room + 1)) - 1
  for size in sizes:
    before.append(reachable)
    reachable |= (reachable << size) & mask
  total, chosen = reachable.bit_length() - 1, []
  for i in reversed(range(len(sizes))):
    if not before[i] >> total & 1:
      chosen.append(i)
      total -= sizes[i]
  return chosen[::-1]
