"""The shapes that microbatches may have, and which completions go into which row. Pure.

`plan` chooses the shapes of a run once, from the numbers of its configuration. `pack` lays every
batch out in these shapes and in no others, so that a run compiles a known set of programs. Only
sizes are read here, so the result depends on nothing but the arguments.
"""

import bisect
import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from grpo_jax.batching import attended

MOST_SHAPES = 3  # each shape takes a compilation.

_LEAST_PLACES = 128  # a smaller microbatch spends most of its time reading the weights.
_TRIED_GROUPS = 16  # the largest groups that are tried when one is split to fill a row.
_TRIED_REMAINDERS = 48  # combinations of shapes tried for what does not fill a whole microbatch.
_SAMPLE_GROUPS = 8  # groups on which row lengths are compared.


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
  """Shape of a microbatch: B rows of T tokens, with at most N loss tokens in each row."""

  rows: int
  row_tokens: int
  loss_tokens: int

  @property
  def places(self) -> int:
    """Number of tokens that the microbatch has room for, B · T."""
    return self.rows * self.row_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
  """Operations of an update, in any unit; see `learn.operations`. The default counts places.

  Attributes:
    place: Operations of the layers' products for one place of a row.
    pair: Operations of attention for one pair of a query and a key, in all layers.
    windows: Windows of the layers, each with its share of the layers; None: all tokens are seen.
    loss_place: Operations of the head for one of the N places of a row.
    microbatch: Operations to which reading the weights and adding the gradients are equivalent;
      every microbatch costs them, whatever its shape.
  """

  place: float = 1.0
  pair: float = 0.0
  loss_place: float = 0.0
  microbatch: float = 0.0
  windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)

  def pairs(self, pieces: Sequence[tuple[int, Sequence[int]]]) -> float:
    """Returns the pairs in a row, on average over the layers; see `attended.pairs`."""
    return sum(share * attended.pairs(pieces, window) for window, share in self.windows)

  def row_cost(self, row_tokens: int, loss_tokens: int) -> float:
    """Returns the operations of one row of a microbatch, whatever is in it: without attention."""
    return self.place * row_tokens + self.loss_place * loss_tokens

  def of(self, shape: Shape) -> float:
    """Returns the operations of a microbatch, whatever is in it: without attention."""
    return shape.rows * self.row_cost(shape.row_tokens, shape.loss_tokens) + self.microbatch


PLACES = Cost()  # counts nothing but places.


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
  """The most that an optimizer step may hold, by the numbers of a configuration.

  Attributes:
    prompt: Largest number of tokens of a prompt.
    completion: Largest number of tokens of a completion.
    longest: Largest number of tokens of a prompt and one of its completions together.
    group: Number of completions of a prompt.
    groups: Number of prompts of an optimizer step.
  """

  prompt: int
  completion: int
  longest: int
  group: int
  groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
  """Number of tokens of a prompt and of each of its completions."""

  prompt: int
  completions: tuple[int, ...]

  @property
  def total(self) -> int:
    """Number of tokens if the prompt is stored once."""
    return self.prompt + sum(self.completions)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
  """A prompt with some of its completions, which share it in a row; all by their indices."""

  group: int
  completions: tuple[int, ...]


Row = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
  """A microbatch of at most `shape.rows` rows; missing rows are padding."""

  shape: Shape
  rows: tuple[Row, ...]


def attention(groups: Sequence[Sizes], packed: Iterable[Packed], cost: Cost) -> float:
  """Returns the operations of attention in microbatches of these groups."""
  return cost.pair * sum(_pairs_of_rows(groups, one.rows, cost) for one in packed)


def _pairs_of_rows(groups: Sequence[Sizes], rows: Iterable[Row], cost: Cost) -> float:
  def lengths(piece: Piece) -> tuple[int, list[int]]:
    group = groups[piece.group]
    return group.prompt, [group.completions[i] for i in piece.completions]

  return sum(cost.pairs([lengths(piece) for piece in row]) for row in rows)


def pack(
  groups: Sequence[Sizes], shapes: Sequence[Shape], *, cost: Cost, one_piece: bool = False
) -> list[Packed]:
  """Lays the completions of an optimizer step out in microbatches of the given shapes.

  Rows are filled one after another with the largest groups that fit. If no group fits, part of one
  is taken. Full microbatches all have the same shape; the rest goes into the cheapest combination
  of shapes that holds it. This is tried with each shape, and the cheapest result wins.

  Args:
    groups: Sizes of the groups; a group without completions takes no place.
    shapes: Shapes that microbatches may have.
    cost: Cost of a microbatch by its shape.
    one_piece: Whether every row holds a single piece.

  Raises:
    ValueError: A completion with its prompt does not fit in any row, or a shape has fewer loss
      places than row places.
  """
  longest = max((g.prompt + max(g.completions) for g in groups if g.completions), default=0)
  bulks = [shape for shape in shapes if shape.row_tokens >= longest]
  if not bulks:
    lengths = tuple(shape.row_tokens for shape in shapes)
    raise ValueError(
      f"a prompt with its completion has {longest} tokens, but rows have {lengths} tokens"
    )
  if any(shape.loss_tokens < shape.row_tokens for shape in shapes):
    raise ValueError(f"loss_tokens must be at least row_tokens in every shape: {tuple(shapes)}")
  if not longest:
    return []
  tokens = sum(group.total for group in groups if group.completions)
  best: list[Packed] | None = None
  for bulk in sorted(bulks, key=lambda shape: cost.of(shape) / shape.places):
    least = tokens / bulk.places * cost.of(bulk)
    if best is None or least < _total(groups, best, cost):
      made = _mostly(bulk, groups, shapes, cost, one_piece)
      if best is None or _total(groups, made, cost) < _total(groups, best, cost):
        best = made
  assert best is not None
  return best


def plan(
  load: Load,
  *,
  cost: Cost,
  row_tokens: int | None = None,
  row_buckets: Sequence[int] | None = None,
  microbatch_tokens: int | None = 8192,
  rows_multiple: int = 1,
  share_prefixes: bool = True,
  pack: bool = True,
) -> tuple[Shape, ...]:
  """Returns the shapes that a run may use, at most three, the largest first.

  The first shape has as many places as `microbatch_tokens` allows, or as a step of moderate lengths
  fills. Its row length is the one at which groups at the limits and moderate groups cost least. The
  other shapes have about a quarter and a sixteenth of its places, for what does not fill a whole
  microbatch. If the first shape is larger than the longest prompt with a completion, the second
  shape has room for that too.

  Args:
    load: The most that an optimizer step may hold.
    cost: Cost of a microbatch by its shape.
    row_tokens: Length of the longest row in tokens. None: the cheapest length that a microbatch
      has room for, or that of the longest prompt with a completion.
    row_buckets: Row lengths to choose from; None: any length.
    microbatch_tokens: Largest number of places of a microbatch on each replica; one row is always
      allowed. None: as many as a step at the limits needs.
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
    return planner.from_buckets(sorted(set(row_buckets)), row_tokens)
  return planner.chosen(row_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Planner:
  """The arguments of `plan`, and the steps by which it chooses."""

  load: Load
  cost: Cost
  microbatch_tokens: int | None
  rows_multiple: int
  share_prefixes: bool
  pack: bool

  def chosen(self, row_tokens: int | None) -> tuple[Shape, ...]:
    """Returns the shapes with the cheapest row length up to `row_tokens`."""
    longest = self.load.longest if row_tokens is None else min(self.load.longest, row_tokens)
    full = self._cheapest(self._lengths(longest, row_tokens), longest)
    sizes = self._smaller(full.places // self.rows_multiple, longest)
    shapes = [full, *(self._shape(full.row_tokens, places) for places in sizes)]
    return _distinct(shapes)

  def from_buckets(self, lengths: Sequence[int], row_tokens: int | None) -> tuple[Shape, ...]:
    """Returns a shape for each of these row lengths, then smaller shapes of the first length."""
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
    """Returns the row lengths to choose from; each has room for `longest` tokens."""
    prompt, completion = self._limits(longest)
    held = [prompt + count * completion for count in range(1, self._group + 1)]
    most = self._most_places(longest)
    parts = [most // count for count in range(1, 9)]
    shortest = min(_rounded(longest), row_tokens or _rounded(longest))
    highest = max(shortest, min(most, row_tokens or most))
    found = {shortest, row_tokens or shortest, *map(_rounded, held)}
    found |= {_rounded(length, down=True) for length in parts}
    return sorted(length for length in found if shortest <= length <= highest)

  def _cheapest(self, lengths: Sequence[int], longest: int) -> Shape:
    """Returns the full shape with which the samples of groups cost least."""
    shapes = [self._full(length, longest) for length in lengths]
    if len(shapes) == 1:
      return shapes[0]
    costs = [[self._likely(shape, sample) for shape in shapes] for sample in self._samples(longest)]
    relative = [
      sum(one / min(sample) for one, sample in zip(column, costs, strict=True))
      for column in zip(*costs, strict=True)
    ]
    return shapes[relative.index(min(relative))]

  def _likely(self, shape: Shape, sample: Sequence[Sizes]) -> float:
    """Returns the cost of a sample of groups in microbatches that are all full."""
    rows = _rows(sample, shape.row_tokens, not self.pack)
    # The last row counts by its filled share: a step has many more groups than the sample.
    filled = len(rows) - 1 + _tokens(sample, rows[-1:]) / shape.row_tokens
    attention = self.cost.pair * _pairs_of_rows(sample, rows, self.cost)
    return filled * self.cost.of(shape) / shape.rows + attention

  def _full(self, length: int, longest: int) -> Shape:
    """Returns the largest microbatch with rows of this length."""
    rows = len(_rows(self._expected(longest), length, not self.pack))
    needed = math.ceil(rows * self.load.groups / _SAMPLE_GROUPS / self.rows_multiple)
    if self.microbatch_tokens is not None:
      needed = min(needed, self.microbatch_tokens // length)
    return self._rows(max(1, needed), length)

  def _smaller(self, full: int, longest: int) -> tuple[int, int]:
    """Returns how many places the second and the third shape have on each replica."""
    third = min(full, max(full // 16, _LEAST_PLACES))
    second = math.isqrt(full * third)
    return (longest if second < longest and _rounded(longest) < full else second), third

  def _shape(self, length: int, places: int) -> Shape:
    """Returns a shape with about `places` on each replica: whole rows, or one shorter row."""
    if places >= length or not self.pack:
      return self._rows(max(1, places // length), length)
    return self._rows(1, min(_rounded(places), length))

  def _rows(self, rows: int, length: int) -> Shape:
    return Shape(rows * self.rows_multiple, length, length)

  def _most_places(self, longest: int) -> int:
    """Returns the largest number of places that a microbatch may have on each replica."""
    tokens = sum(group.total for group in self._expected(longest))
    most = math.ceil(tokens * self.load.groups / _SAMPLE_GROUPS / self.rows_multiple)
    return max(longest, min(most, self.microbatch_tokens or most))

  def _expected(self, longest: int) -> list[Sizes]:
    """Returns the groups from which the size of the first shape follows."""
    at_limits, moderate = self._samples(longest)
    return at_limits if self.microbatch_tokens is None else moderate

  @property
  def _group(self) -> int:
    return self.load.group if self.share_prefixes else 1

  def _limits(self, longest: int) -> tuple[int, int]:
    """Returns the lengths of a prompt and a completion that together have `longest` tokens."""
    prompt = min(self.load.prompt, max(longest - self.load.completion, longest // 2))
    return prompt, min(self.load.completion, longest - prompt)

  def _samples(self, longest: int) -> tuple[list[Sizes], list[Sizes]]:
    """Returns groups at the limits, and groups with short prompts and various completions."""
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
  """Returns a length rounded to a multiple of 32, or of 128 from 1024 on; up by default."""
  step = 32 if length < 1024 else 128
  return max(step, (length // step if down else -(-length // step)) * step)


def _total(groups: Sequence[Sizes], packed: Sequence[Packed], cost: Cost) -> float:
  return sum(cost.of(one.shape) for one in packed) + attention(groups, packed, cost)


def _mostly(
  bulk: Shape, groups: Sequence[Sizes], shapes: Sequence[Shape], cost: Cost, one_piece: bool
) -> list[Packed]:
  """Packs into full microbatches of shape `bulk`, and the rest as cheaply as all shapes allow."""
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
  """Yields combinations of shapes that have room for `tokens`, the cheapest first.

  Each is cheaper than one microbatch of shape `bulk`.
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
  """Packs the content of some rows into these microbatches; returns None if it does not fit."""
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
  """Packs into as many rows of one length as are needed."""
  pool = _Pool(groups)
  rows = []
  while pool:
    row = pool.fill(length, one_piece)
    assert row, f"nothing that is left fits in a row of {length} tokens"
    rows.append(row)
  return rows


def _tokens(groups: Sequence[Sizes], rows: Sequence[Row]) -> int:
  """Returns the number of tokens in some rows if each prompt were stored once."""
  pieces = [piece for row in rows for piece in row]
  prompts = sum(groups[g].prompt for g in {piece.group for piece in pieces})
  return prompts + sum(groups[p.group].completions[i] for p in pieces for i in p.completions)


class _Pool:
  """The completions that are not in a row yet, by group."""

  def __init__(self, groups: Sequence[Sizes], rows: Sequence[Row] | None = None):
    """Makes a pool of all completions of the groups, or only of those in some rows."""
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
    """Takes out the pieces of one row of `room` tokens; returns () if nothing fits."""
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
    """Takes out all remaining completions of the group at index `at` of the sizes."""
    _, negative = self._sizes.pop(at)
    return Piece(-negative, tuple(sorted(self._left.pop(-negative))))

  def _part(self, room: int) -> Piece | None:
    """Takes out completions of one group that fill the room best; no whole group fits."""
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
    """Returns the completions in descending order of length."""
    return sorted(left, key=lambda i: (-self._groups[g].completions[i], i))


def _fullest(sizes: Sequence[int], room: int) -> list[int]:
  """Returns the indices of the sizes with the largest sum of at most `room`.

  Bit s of `reachable` is set if some of the sizes add up to s.
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
