"""The sampler's work in progress: its queue, its rows, and their caches.

The caches keep their planned sizes, so that a few programs serve all requests. Requests beyond the
plan make them grow, to powers of two. Where memory does not suffice for all rows, the youngest
completions are put back into the queue, and are read again when they continue; where a device has
less memory than was counted, all of them are, into smaller caches. An idle batcher starts again at
the first step, so what it computes does not depend on earlier requests.
"""

import collections
import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_jax.compilation.programs import OutOfMemory, is_short_of_memory
from grpo_jax.engines import (
  kv_cache,
  ring_cache,
  sampled_experts,
  sampler_inputs,
  sampler_programs,
  sampler_weights,
  scheduling,
  sharing,
  stopping,
)
from grpo_jax.engines.base import Generation
from grpo_jax.engines.sampled_experts import PromptExperts
from grpo_jax.engines.sampler_programs import Programs
from grpo_jax.engines.sampler_sizes import SamplerSizes
from grpo_jax.engines.scheduling import RunningCompletion, Slot
from grpo_jax.errors import ExpectedFailure

_log = logging.getLogger(__name__)


class NonFiniteLogits(ExpectedFailure, FloatingPointError):
  """The model returned NaN or infinite logits: its weights are damaged, or it has diverged."""


@dataclasses.dataclass(slots=True)
class Stats:
  """Counts of what the sampler has computed since it was made."""

  prefilled_prompts: int = 0
  prefilled_tokens: int = 0  # without the last token of a prompt, which every row feeds itself.
  decode_steps: int = 0
  row_steps: int = 0  # decode steps × rows computed, including idle rows.
  sampled_tokens: int = 0
  # Of prompts and completions that new weights have read again, and of completions that had waited
  # or whose cache was made again.
  recomputed_tokens: int = 0
  preemptions: int = 0  # completions that were put back into the queue for lack of memory.


class ContinuousBatcher:
  """Computes the completions that are submitted to it."""

  def __init__(
    self,
    options: sampler_inputs.ProgramOptions,
    *,
    sizes: SamplerSizes,
    decode_text: stopping.Decode | None,
    stats: Stats,
    programs: Programs,
  ):
    """Makes a batcher without caches; they are made for the first completions.

    Args:
      options: Options of the programs.
      sizes: Planned sizes; a size of 0 follows the requests.
      decode_text: Function from token ids to text, for stop strings.
      stats: Counters of what is computed, updated by the batcher.
      programs: Programs of the sampler.
    """
    self.options = options
    self._sizes = sizes
    self._first_blocks = sizes.blocks
    self._counts: tuple[int, ...] = ()  # of rows, for which programs of the cache are compiled.
    self._decode_text = decode_text
    self._stats = stats
    self._programs = programs
    self._most_users = sharing.most_users(options.form, options.group)
    # of the caches; None: an idle batcher.
    self._weights: sampler_weights.SamplerWeights | None = None
    self._waiting: collections.deque[RunningCompletion] = collections.deque()
    self._active: list[RunningCompletion] = []
    # by `RunningCompletion.key`; computed by the present weights.
    self._slots: dict[bytes, Slot] = {}
    self._step = 0  # number of the next decode step.
    self._moves: list[tuple[int, int]] = []
    self._rows = 0
    self._own: kv_cache.Cache = []
    self._prompts: kv_cache.Cache = []
    self._readings = sampled_experts.Readings()
    self._failures = 0  # times that memory ended since a chunk was decoded.

  @property
  def is_idle(self) -> bool:
    return not self._waiting and not self._active

  def submit(self, completions: Sequence[RunningCompletion]) -> None:
    """Appends completions to the queue.

    Raises:
      OutOfMemory: One is longer than memory holds, which has been lowered since it was checked.
    """
    longest = self._sizes.longest(self.options)
    for request in (c.request for c in completions):
      if longest is not None and request.sampling.max_tokens > longest:
        raise OutOfMemory(
          f"request {request.request_id!r}: max_tokens={request.sampling.max_tokens} is more than"
          f" the {longest} tokens for which the sampler has found memory"
        )
    self._waiting.extend(completions)

  def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
    """Drops the completions of owners that no longer want them."""
    for completion in self._active:
      if is_unwanted(completion.owner):
        self._leave(completion)
    self._active = [c for c in self._active if not is_unwanted(c.owner)]
    self._waiting = collections.deque(c for c in self._waiting if not is_unwanted(c.owner))

  def rest(self) -> None:
    """Resets an idle session and keeps its caches."""
    assert self.is_idle
    self._slots, self._step, self._rows = {}, 0, 0
    self._weights = None

  def advance(
    self, weights: sampler_weights.SamplerWeights, version: int
  ) -> list[tuple[Any, Generation]]:
    """Fills the rows, decodes one chunk, and returns (owner, generation) of what finished.

    Args:
      weights: Weights to sample with. If they are others than in the last chunk, they first read
        all unfinished completions again.
      version: Version of the weights.

    Raises:
      NonFiniteLogits: The model's logits are not finite.
      OutOfMemory: One row of the longest request does not fit into the memory of a device.
    """
    sampled, logprobs, experts = self._sampled(weights)
    finished, unfinished = [], []
    for completion in self._active:
      row, count = completion.row, int((sampled[completion.row] >= 0).sum())
      if experts is not None:
        completion.experts.append(experts[row, :count])
      generation = self._extend(completion, sampled[row, :count], logprobs[row, :count], version)
      if generation is None:
        unfinished.append(completion)
      else:
        finished.append((completion.owner, generation))
        self._leave(completion)
    self._active = unfinished
    return finished

  def sizes_within_memory(self, sizes: SamplerSizes) -> SamplerSizes:
    """Returns sizes with the memory that this batcher has found for sampled tokens."""
    limit = self._sizes.sampled_bytes
    if limit == sizes.sampled_bytes:
      return sizes
    return dataclasses.replace(sizes, sampled_bytes=limit).within(self.options)

  def tokens_of(self, owner: Any) -> int:
    """Returns the number of tokens of an owner's unfinished completions."""
    begun = itertools.chain(self._active, self._waiting)
    return sum(len(c.token_ids) for c in begun if c.owner is owner)

  def _extend(
    self, completion: RunningCompletion, ids: np.ndarray, logprobs: np.ndarray, version: int
  ) -> Generation | None:
    """Adds sampled tokens to a completion; returns its generation if it is finished."""
    if not np.isfinite(logprobs).all():
      raise NonFiniteLogits(
        f"request {completion.request.request_id!r}: the logits are not finite with weights of "
        f"version {version}"
      )
    seen = len(completion.token_ids)
    completion.token_ids += ids.tolist()
    completion.logprobs += logprobs.tolist()
    completion.weight_versions += [version] * len(ids)
    kept, reason, matched = stopping.check(
      completion.token_ids, seen, completion.request.sampling, self._decode_text
    )
    completion.keep(kept)
    self._stats.sampled_tokens += kept - seen
    return None if reason is None else completion.finished(reason, matched)

  def _sampled(
    self, weights: sampler_weights.SamplerWeights
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Fills the rows and decodes one chunk, in smaller caches if memory ends; see `_decode_chunk`.

    Nothing on the devices is needed afterwards: what failed may have donated or moved any of it.
    """
    while True:
      active, waiting = [*self._active], [*self._waiting]
      try:
        self._take(weights)
        self._admit(weights)
        found = self._decode_chunk(weights)
      except (RuntimeError, MemoryError) as error:
        if not is_short_of_memory(error) or not self._lower([*active, *waiting]):
          raise
        self._begin_again(active, waiting, error)
      else:
        self._failures = 0
        return found

  def _lower(self, unfinished: Sequence[RunningCompletion]) -> bool:
    """Lowers the memory of sampled tokens by a quarter; returns False if it cannot be less.

    The first failure changes nothing: to free both caches is enough where one was to replace the
    other. One row for the longest request stays possible.
    """
    self._failures += 1
    if self._failures == 1:
      return True
    wanted = max(c.request.sampling.max_tokens for c in unfinished)
    free = dataclasses.replace(self._sizes, sampled_bytes=None)
    least = free.bytes_of(free.blocks_of(wanted, self.options), 1, self.options)
    blocks = self._sizes.blocks
    had = self._sizes.bytes_of(blocks, self._rows_of(blocks), self.options)
    limit = max(had * 3 // 4, least)
    if limit >= had:
      return False
    lowered = dataclasses.replace(self._sizes, blocks=self._first_blocks, sampled_bytes=limit)
    self._sizes = lowered.within(self.options)
    self._first_blocks = self._sizes.blocks
    return True

  def _begin_again(
    self, active: list[RunningCompletion], waiting: list[RunningCompletion], error: BaseException
  ) -> None:
    """Frees the caches and puts all completions into the queue; they keep their tokens."""
    self._own, self._prompts, self._slots, self._active = [], [], {}, []
    self._readings, limit = sampled_experts.Readings(), self._sizes.sampled_bytes
    for completion in [*active, *waiting]:
      completion.row, completion.key = -1, scheduling.prompt_key(completion.request)
      if not completion.token_ids:
        completion.prompt_experts = None  # of a reading that was not fetched.
    self._waiting = collections.deque([*active, *waiting])
    self._stats.preemptions += len(active)
    _log.warning(
      "the sampler's memory ended: %d completions are read again, with %s GiB for keys and values"
      " of sampled tokens (docs/sampler.md). %s",
      len(active),
      "any" if limit is None else f"at most {limit / 2**30:.3g}",
      " ".join(str(error).split())[:300],
    )

  def _leave(self, completion: RunningCompletion) -> None:
    self._slots[completion.key].users -= 1

  def _take(self, weights: sampler_weights.SamplerWeights) -> None:
    """Makes the caches those of the weights, in place: no row and no page moves."""
    is_new = self._weights is not None and self._weights is not weights
    self._weights = weights
    if not is_new:
      return
    prompts = {c.key: (c.request.prompt_ids[:-1], self._slots[c.key]) for c in self._active}
    self._slots = {key: slot for key, (_, slot) in prompts.items()}
    self._stats.recomputed_tokens += self._read_prompts(list(prompts.values()), weights)
    self._read_sampled(self._active, weights)

  def _read_sampled(
    self, completions: Sequence[RunningCompletion], weights: sampler_weights.SamplerWeights
  ) -> None:
    """Computes the columns of completions whose prompts are in the pages."""
    layout = sampler_programs.piece_layout(self.options, self._sizes)
    options = self._sizes.applied(self.options)
    for pieces in scheduling.make_pieces(completions, self._slots, **layout, step=self._step):
      arguments = (weights, self._prompts, self._own, pieces)
      self._own = self._programs.read_again(*arguments, options=options)
    self._stats.recomputed_tokens += sum(len(c.token_ids) for c in completions)

  def _admit(self, weights: sampler_weights.SamplerWeights) -> None:
    """Moves waiting completions into free rows, and prefills their prompts."""
    blocks = self._blocks_of_active()
    self._preempt(len(self._active) - self._rows_of(blocks))
    self._release_slots({c.key for c in self._waiting})
    self._fit_pages()
    new, missing = [], []
    while self._waiting:
      completion = self._waiting[0]
      with_it = max(blocks, self._blocks_for([completion]))
      if len(self._active) + len(new) >= self._rows_of(with_it):
        break
      key = self._key_with_room(completion)
      if key not in self._slots:
        if not self._take_pages(key, completion):
          break  # until other completions have left.
        missing.append(completion)
      completion.key = key
      self._slots[key].users += 1
      new.append(self._waiting.popleft())
      blocks = with_it
    blocks = blocks if new else max(blocks, self._sizes.blocks)
    if self._rows_of(blocks) != self._rows_of(self._sizes.blocks):  # the cache is made again.
      new, self._active, self._own = [*self._active, *new], [], []
    self._fit_own(blocks)
    self._place(new)
    self._prefill_all([(c.request.prompt_ids[:-1], self._slots[c.key]) for c in missing], weights)
    self._read_sampled([c for c in new if c.token_ids], weights)
    for completion in new:
      if completion.prompt_experts is None:
        completion.prompt_experts = self._slots[completion.key].experts

  def _rows_of(self, blocks: int) -> int:
    return self._sizes.rows_of(blocks, self.options)

  def _blocks_of(self, tokens: int) -> int:
    """Returns the blocks for completions of that many tokens, never fewer than planned."""
    return max(self._sizes.blocks_of(tokens, self.options), self._first_blocks)

  def _blocks_for(self, completions: Sequence[RunningCompletion]) -> int:
    """Returns the blocks that completions need for the next chunk."""
    return self._blocks_of(scheduling.longest(completions, self.options.chunk))

  def _blocks_of_active(self) -> int:
    """Returns the blocks for the completions that have a row.

    There are fewer than now if requests wait that would find rows, but only if completions may
    double in length before the rows are too many again.
    """
    now, needed = self._sizes.blocks, self._blocks_for(self._active)
    fewer = self._blocks_of(2 * scheduling.longest(self._active, self.options.chunk))
    has_room = self._rows_of(fewer) > self._rows_of(now)
    return fewer if self._waiting and has_room else max(now, needed)

  def _preempt(self, count: int) -> None:
    """Puts the youngest completions back to the head of the queue; they keep their tokens."""
    for completion in scheduling.youngest(self._active, count):
      self._leave(completion)
      completion.row, completion.key = -1, scheduling.prompt_key(completion.request)
      self._waiting.appendleft(completion)
      self._stats.preemptions += 1
    self._active = [c for c in self._active if c.row >= 0]

  def _key_with_room(self, completion: RunningCompletion) -> bytes:
    """Returns the key of a copy of the prompt that has room for one more row."""
    key, most, number = completion.key, self._most_users, 0
    while most is not None and key in self._slots and self._slots[key].users >= most:
      number += 1
      key = scheduling.prompt_key(completion.request, copy=number)
    return key

  def _release_slots(self, wanted: set[bytes]) -> None:
    """Frees pages that no row uses and that no waiting completion will use."""
    is_kept = lambda slot: slot.users or slot.prompt in wanted
    self._slots = {key: slot for key, slot in self._slots.items() if is_kept(slot)}

  def _take_pages(self, key: bytes, completion: RunningCompletion) -> bool:
    """Reserves pages for a prompt; returns False if too few are free."""
    length = len(completion.request.prompt_ids) - 1
    pools = self._sizes.pools(self.options.config)
    pages = scheduling.free_pages(self._slots, pools, length)
    if pages is None:
      self._release_slots(set())
      pages = scheduling.free_pages(self._slots, pools, length)
    if pages is None:
      return False
    self._slots[key] = Slot(pages, length, prompt=completion.key)
    return True

  def _place(self, new: list[RunningCompletion]) -> None:
    """Assigns rows, in the smallest compiled number of rows; notes which rows must move."""
    self._rows = scheduling.fitting(len(self._active) + len(new), self._counts)
    taken = {c.row for c in self._active}
    free = (row for row in range(self._rows) if row not in taken)
    self._moves = []
    for completion in self._active:
      if completion.row >= self._rows:
        row = next(free)
        self._moves.append((completion.row, row))
        completion.row = row
    for completion in new:
      completion.row = next(free)
    self._active += new

  def _fit_own(self, blocks: int) -> None:
    """Makes the cache of sampled tokens, or a longer one with the same rows."""
    columns, before = self._sizes.columns, self._sizes.blocks
    blocks = max(blocks, before) if self._own else blocks
    self._sizes = dataclasses.replace(self._sizes, blocks=blocks)
    if not self._own:
      self._counts = scheduling.row_counts(self._rows_of(blocks))
      shape = sampler_programs.own_shape(self.options, self._sizes)
      self._own = sampler_programs.empty_own(*shape, self.options)
    elif blocks > before:
      newest = (self._step - 1) // columns
      held = lambda window: [ring_cache.held_blocks(n, window, columns) for n in (before, blocks)]
      counts = [held(kind.window) for kind in self.options.config.kinds]
      places = {after: scheduling.regrown(before, after, newest) for before, after in counts}
      sampler_programs.grow(self._own, places, blocks, columns, self.options)

  def _fit_pages(self) -> None:
    """Makes the pages, or more of them if waiting prompts exceed the plan."""
    size = self._sizes.page
    page_counts = {c.key: -(-(len(c.request.prompt_ids) - 1) // size) for c in self._waiting}
    copies = collections.Counter(c.key for c in self._waiting)
    for key in copies:
      most = self._most_users
      copies[key] = int(key not in self._slots) if most is None else -(-copies[key] // most)
    coming = sorted(n for key, n in page_counts.items() for _ in range(copies[key]))
    longest = max(page_counts.values(), default=0)
    table, pages = self._sizes.table, self._sizes.pages
    if longest > table or not table:
      table = scheduling.power_of_two(longest)
    if not self._sizes.is_planned:
      in_use = sum(-(-slot.length // size) for slot in self._slots.values())
      pages = max(pages, scheduling.power_of_two(in_use + sum(coming[-self._sizes.rows :])))
    if pages < table:
      pages = scheduling.power_of_two(table)
    before, self._sizes = self._sizes, dataclasses.replace(self._sizes, table=table, pages=pages)
    counts = sampler_programs.page_counts(self.options, self._sizes)
    if not self._prompts:
      self._prompts = sampler_programs.empty_pages(counts, size, self.options)
    elif counts != (had := sampler_programs.page_counts(self.options, before)):
      pairs = zip(counts, had, strict=True)
      places = [np.minimum(np.arange(count, dtype=np.int32), old - 1) for count, old in pairs]
      self._prompts = sampler_programs.other_pages(self._prompts, places, options=self.options)

  def _prefill_all(
    self, prompts: list[tuple[np.ndarray, Slot]], weights: sampler_weights.SamplerWeights
  ) -> None:
    """Prefills prompts, given without their last token; empty ones need nothing."""
    self._stats.prefilled_tokens += self._read_prompts(prompts, weights)
    self._stats.prefilled_prompts += sum(len(ids) > 0 for ids, _ in prompts)

  def _read_prompts(
    self, prompts: list[tuple[np.ndarray, Slot]], weights: sampler_weights.SamplerWeights
  ) -> int:
    """Computes the pages of prompts, as `_prefill_all`; returns the number of their tokens."""
    self._begin_records(prompts)
    prompts = [(ids, slot) for ids, slot in prompts if len(ids)]
    if not prompts:
      return 0
    sizes, found = self._sizes, []
    pools = sizes.pools(self.options.config)
    for chunk in scheduling.make_chunks(prompts, pools=pools, tokens=sizes.prefill):
      options = sizes.applied(self.options)
      self._prompts, experts = self._programs.prefill(
        weights, self._prompts, chunk, options=options
      )
      found.append(experts)
    if self.options.experts is not None:
      read = [(slot.experts, len(ids)) for ids, slot in prompts if slot.experts is not None]
      self._readings.add(read, found)
    return sum(len(ids) for ids, _ in prompts)

  def _begin_records(self, prompts: list[tuple[np.ndarray, Slot]]) -> None:
    """Begins a record of the experts of each prompt that is read.

    Rows that have begun keep the record of an earlier reading.
    """
    shape = self.options.experts
    if shape is not None:
      for ids, slot in prompts:
        slot.experts = PromptExperts(shape, None if len(ids) else shape.unknown(0))

  def _decode_chunk(
    self, weights: sampler_weights.SamplerWeights
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the tokens sampled in one chunk, [R chunk], padded with -1, and their logprobs.

    Also returns the experts of the tokens that were fed, if they are recorded.
    """
    options = self._sizes.applied(self.options)
    rows = scheduling.make_rows(
      self._active,
      self._rows,
      self._slots,
      **sampler_programs.row_layout(options, self._sizes),
      moves=self._moves,
      step=self._step,
    )
    options = scheduling.options_for(self._active, options)
    stop_at = scheduling.leave_at(
      len(self._active), self._rows, self._counts, is_waiting=bool(self._waiting)
    )
    self._own, *found = self._programs.decode(
      weights, self._prompts, self._own, rows, np.int32(stop_at), options=options
    )
    self._readings.fetch()
    sampled, logprobs, experts = (None if each is None else np.asarray(each) for each in found)
    assert sampled is not None and logprobs is not None
    steps = int((sampled >= 0).sum(axis=1).max())
    self._step += steps
    self._stats.decode_steps += steps
    self._stats.row_steps += steps * self._rows
    return sampled, logprobs, experts
