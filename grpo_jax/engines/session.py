"""One busy period of the sampler: its queue, its rows and slots, and their caches.

A session starts when the first request arrives and ends when none is left, so that its shapes
depend on what was asked for and not on what came before.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.engines import decoding, scheduling, stopping
from grpo_jax.engines.base import Generation
from grpo_jax.engines.scheduling import Completion
from grpo_jax.errors import ExpectedFailure

_OWN_LEAST = 64  # tokens of the smallest cache of a row.
_PROMPT_LEAST = 32  # tokens of the smallest slot.
_PREFILL_ROWS = 4  # prompts of one prefill.

_decode = jax.jit(decoding.decode, static_argnames="options", donate_argnames="own")
_prefill = jax.jit(decoding.prefill, static_argnames="options", donate_argnames="cache")
_resize = jax.jit(decoding.resize, static_argnames=("length", "options", "of_rows"))
_empty = jax.jit(decoding.empty_cache, static_argnums=(0, 1, 2), static_argnames="of_rows")


class NonFiniteLogits(ExpectedFailure, FloatingPointError):
  """The model gives NaN or infinite logits: its weights are damaged, or it has diverged."""


@dataclasses.dataclass(slots=True)
class Stats:
  """What the sampler has computed since it was made."""

  prefilled_prompts: int = 0
  prefilled_tokens: int = 0  # of prompts less their last token, which is fed by every row.
  decode_steps: int = 0
  row_steps: int = 0  # decode steps × rows computed, idle ones included.
  sampled_tokens: int = 0


@dataclasses.dataclass(slots=True)
class _Slot:
  """A prompt that was prefilled: where, and how many rows continue it."""

  index: int
  length: int
  users: int = 0


class Session:
  """Computes the completions that are submitted to it, until none is left."""

  def __init__(
    self,
    options: decoding.Options,
    *,
    max_rows: int,
    decode_text: stopping.Decode | None,
    stats: Stats,
  ):
    self._options = options
    self._sizes = scheduling.row_counts(max_rows)
    self._decode_text = decode_text
    self._stats = stats
    self._waiting: collections.deque[Completion] = collections.deque()
    self._active: list[Completion] = []
    self._slots: dict[tuple[bytes, int], _Slot] = {}  # by prompt and version of the weights.
    self._rows = self._own_length = self._slot_count = self._slot_length = 0
    self._own: decoding.Cache = []
    self._prompts: decoding.Cache = []

  @property
  def is_idle(self) -> bool:
    return not self._waiting and not self._active

  def submit(self, completions: Sequence[Completion]) -> None:
    """Puts completions behind those that wait."""
    self._waiting.extend(completions)

  def drop(self, is_unwanted: Callable[[Any], bool]) -> None:
    """Forgets the completions of owners that want them no more."""
    for completion in self._active:
      if is_unwanted(completion.owner):
        self._leave(completion)
    self._active = [c for c in self._active if not is_unwanted(c.owner)]
    self._waiting = collections.deque(c for c in self._waiting if not is_unwanted(c.owner))

  def advance(self, weights: decoding.Weights, version: int) -> list[tuple[Any, Generation]]:
    """Fills the rows, decodes one chunk, and returns (owner, generation) of what finished.

    Raises:
      FloatingPointError: the model's logits are not finite.
    """
    self._admit(weights, version)
    sampled, logprobs = self._decode_chunk(weights)
    finished, going_on = [], []
    for completion in self._active:
      count = int((sampled[completion.row] >= 0).sum())
      generation = self._extend(
        completion, sampled[completion.row, :count], logprobs[completion.row, :count], version
      )
      if generation is None:
        going_on.append(completion)
      else:
        finished.append((completion.owner, generation))
        self._leave(completion)
    self._active = going_on
    return finished

  def tokens_of(self, owner: Any) -> int:
    """Returns how many tokens the unfinished completions of an owner have."""
    return sum(len(c.token_ids) for c in self._active if c.owner is owner)

  def _extend(
    self, completion: Completion, ids: np.ndarray, logprobs: np.ndarray, version: int
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

  def _leave(self, completion: Completion) -> None:
    for slot in self._slots.values():
      if slot.index == completion.slot:
        slot.users -= 1

  def _admit(self, weights: decoding.Weights, version: int) -> None:
    """Moves waiting completions into free rows, prefills their prompts, fits the caches."""
    free = self._sizes[-1] - len(self._active)
    new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
    self._release_slots({c.key for c in new} | {c.key for c in self._waiting}, version)
    self._fit_rows(self._active + new)
    taken = {c.row for c in self._active}
    for completion, row in zip(new, (r for r in range(self._rows) if r not in taken), strict=False):
      completion.row = row
    self._active += new
    self._fill_slots(new, weights, version)

  def _release_slots(self, wanted: set[bytes], version: int) -> None:
    """Frees the slots that no row uses and no waiting completion will use."""
    self._slots = {
      (key, of): slot
      for (key, of), slot in self._slots.items()
      if slot.users or (of == version and key in wanted)
    }

  def _fit_rows(self, completions: list[Completion]) -> None:
    """Grows or compacts the rows' cache to fit these; renumbers the rows if it changes."""
    rows = scheduling.fitting(len(completions), self._sizes)
    longest = max(
      min(len(c.token_ids) + self._options.chunk, c.request.sampling.max_tokens)
      for c in completions
    )
    length = max(scheduling.power_of_two(longest, least=_OWN_LEAST), self._own_length)
    if (rows, length) == (self._rows, self._own_length):
      return
    if self._active:
      places = np.zeros(rows, np.int32)
      places[: len(self._active)] = [c.row for c in self._active]
      self._own = _resize(self._own, places, length=length, options=self._options, of_rows=True)
      for row, completion in enumerate(self._active):
        completion.row = row
    else:
      self._own = _empty(rows, length, self._options, of_rows=True)
    self._rows, self._own_length = rows, length

  def _fill_slots(self, new: list[Completion], weights: decoding.Weights, version: int) -> None:
    """Gives each new completion the slot of its prompt, prefilled now if it is a new one."""
    missing = {c.key: c for c in new if (c.key, version) not in self._slots}
    if missing:
      self._fit_slots(list(missing.values()))
      used = {slot.index for slot in self._slots.values()}
      free = (index for index in range(self._slot_count) if index not in used)
      for (key, completion), index in zip(missing.items(), free, strict=False):
        length = len(completion.request.prompt_ids) - 1
        self._slots[key, version] = _Slot(index, length)
      self._prefill_all(list(missing.values()), weights, version)
    for completion in new:
      slot = self._slots[completion.key, version]
      completion.slot = slot.index
      slot.users += 1

  def _fit_slots(self, missing: list[Completion]) -> None:
    """Grows the slots' cache to hold these prompts too."""
    coming = {c.key for c in (*missing, *self._waiting)} - {key for key, _ in self._slots}
    most = max(len(self._slots) + len(missing), min(len(self._slots) + len(coming), self._rows))
    count = max(scheduling.power_of_two(most), self._slot_count)
    longest = max(len(c.request.prompt_ids) - 1 for c in (*missing, *self._waiting))
    length = max(scheduling.power_of_two(longest, least=_PROMPT_LEAST), self._slot_length)
    if (count, length) == (self._slot_count, self._slot_length):
      return
    if self._slots:
      places = np.minimum(np.arange(count, dtype=np.int32), self._slot_count - 1)
      self._prompts = _resize(self._prompts, places, length=length, options=self._options)
    else:
      self._prompts = _empty(count, length, self._options)
    self._slot_count, self._slot_length = count, length

  def _prefill_all(
    self, prompts: list[Completion], weights: decoding.Weights, version: int
  ) -> None:
    """Prefills prompts, those of like length together; a prompt of one token needs none."""
    prompts = [c for c in prompts if len(c.request.prompt_ids) > 1]
    prompts.sort(key=lambda c: len(c.request.prompt_ids))
    for start in range(0, len(prompts), _PREFILL_ROWS):
      batch = prompts[start : start + _PREFILL_ROWS]
      count = 1 if len(batch) == 1 else _PREFILL_ROWS
      longest = scheduling.prefill_length(len(batch[-1].request.prompt_ids) - 1)
      tokens = np.zeros((count, min(longest, self._slot_length)), np.int32)
      lengths = np.zeros(count, np.int32)
      slots = np.full(count, self._slot_count, np.int32)
      for i, completion in enumerate(batch):
        slot, ids = self._slots[completion.key, version], completion.request.prompt_ids
        tokens[i, : slot.length] = ids[:-1]
        lengths[i], slots[i] = slot.length, slot.index
      self._prompts = _prefill(
        weights, self._prompts, tokens, lengths, slots, options=self._options
      )
      self._stats.prefilled_prompts += len(batch)
      self._stats.prefilled_tokens += int(lengths.sum())

  def _decode_chunk(self, weights: decoding.Weights) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens sampled in one chunk, [R chunk], -1 where none, and their logprobs."""
    of_index = {slot.index: slot.length for slot in self._slots.values()}
    lengths = [of_index[c.slot] for c in self._active]
    rows = scheduling.make_rows(self._active, self._rows, lengths)
    is_truncated = any(c.request.sampling.is_truncated for c in self._active)
    stop_at = scheduling.leave_at(
      len(self._active), self._rows, self._sizes, is_waiting=bool(self._waiting)
    )
    self._own, sampled, logprobs = _decode(
      weights,
      self._prompts,
      self._own,
      rows,
      np.int32(stop_at),
      options=dataclasses.replace(self._options, is_truncated=is_truncated),
    )
    sampled, logprobs = np.asarray(sampled), np.asarray(logprobs)
    steps = int((sampled >= 0).sum(axis=1).max())
    self._stats.decode_steps += steps
    self._stats.row_steps += steps * self._rows
    return sampled, logprobs
