"""Behavior logprobs of recorded responses: from the file, or scored once by the initial policy.

Scored logprobs are kept in a folder of the run, so that a resumed run finds them although the
initial weights are gone. Groups are scored in batches, and the composition of a batch depends on
the data and options only. So a result does not depend on when a run was stopped.
"""

import dataclasses
import hashlib
import io
import itertools
import json
import logging
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from jaxtyping import Float, Int, Shaped

from grpo_jax import processes
from grpo_jax.data.formats import RowError
from grpo_jax.data.groups import UNKNOWN_VERSION
from grpo_jax.files import atomic
from grpo_jax.processes import bulk
from grpo_jax.types import RecordedGroup, Rollout, RolloutGroup
from grpo_jax.values import json_text

_log = logging.getLogger(__name__)

T = TypeVar("T")

Score = Callable[[Sequence[RolloutGroup]], list[list[Float[np.ndarray, " _"]]]]


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobsChunk:
  """Logprobs of the groups of one batch, all of them in one array."""

  datasets: Shaped[np.ndarray, " groups"]  # name of the dataset of each group.
  numbers: Int[np.ndarray, " groups"]  # number of each group in its dataset.
  digests: Shaped[np.ndarray, " groups"]  # digest of the tokens of each group.
  counts: Int[np.ndarray, " groups"]  # responses of each group.
  lengths: Int[np.ndarray, " responses"]  # tokens of each response; 0 if the file has its logprobs.
  logprobs: Float[np.ndarray, " tokens"]


class BehaviorLogprobs:
  """Logprobs by group."""

  def __init__(self, chunks: Iterable[LogprobsChunk]):
    self._scored: dict[tuple[str, int], tuple[int, list[np.ndarray]]] = {}
    for chunk in chunks:
      each = np.split(chunk.logprobs, np.cumsum(chunk.lengths)[:-1]) if len(chunk.lengths) else []
      responses = iter(each)
      columns = (chunk.datasets, chunk.numbers, chunk.digests, chunk.counts)
      for dataset, number, digest, count in zip(*columns, strict=True):
        known = int(digest), [next(responses) for _ in range(count)]
        self._scored[str(dataset), int(number)] = known

  def complete(self, item: RecordedGroup) -> RolloutGroup:
    """Returns the group with behavior logprobs on all of its responses.

    Raises:
      RowError: Some logprobs are neither in the file nor scored.
      ValueError: The tokens of the group have changed since it was scored.
    """
    place = item.dataset, item.number
    if place not in self._scored:
      if all(item.is_known):
        return item.group
      number = item.is_known.index(False) + 1
      raise RowError(item.where, f"response {number} has no logprobs (offline.behavior)")
    digest, logprobs = self._scored[place]
    if digest != _digest(item.group):
      raise ValueError(
        f"{item.where}: the tokens of this group are not those whose behavior logprobs were scored "
        "when the run began: its data or tokenizer has changed; use another --workdir"
      )
    rollouts = [
      _with_logprobs(rollout, values) if len(values) else rollout
      for rollout, values in zip(item.group.rollouts, logprobs, strict=True)
    ]
    return dataclasses.replace(item.group, rollouts=tuple(rollouts))


def score_all(
  batches: Iterable[Sequence[RecordedGroup]],
  *,
  folder: Path,
  score: Score,
  from_file: bool,
  steps: int,
  on_progress: Callable[[int], None] = lambda groups: None,
) -> BehaviorLogprobs:
  """Scores the groups that a run will see, except those that are in the folder already.

  Args:
    batches: Batches of groups; a resumed run has the same ones, and more for more steps.
    folder: Folder of the chunks.
    score: Function that scores groups under the initial policy.
    from_file: Whether logprobs of the file are used if it has them.
    steps: Number of steps of the run for which the batches suffice.
    on_progress: Function called with the number of groups of a batch that was scored.
  """
  files = _Chunks(folder)
  found = files.of_whole_run(steps)
  if found is not None:
    return BehaviorLogprobs(found)
  chunks: list[LogprobsChunk] = []
  coming = iter(batches)
  for number in itertools.count():
    items = processes.together(lambda: next(coming, None), what="reading recorded groups")
    if items is None:
      break
    chunk = files.read(number)
    if chunk is None:
      _agree(items, number)
      chunk = _scored(items, score, from_file)
      files.write(number, chunk)
      on_progress(len(items))
    chunks.append(chunk)
  files.finish(steps)
  return BehaviorLogprobs(chunks)


class _Chunks:
  """The files of the chunks. Only the main process reads and writes them; all have what it reads.

  So all processes score the same chunks, whatever they see of the folder.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    self._done = folder / "done.json"
    self._on_main(lambda: folder.mkdir(parents=True, exist_ok=True))

  def of_whole_run(self, steps: int) -> list[LogprobsChunk] | None:
    """Returns all chunks, if they suffice for that many steps."""
    names = lambda: sorted(path.name for path in self._folder.glob("chunk_*.npz"))
    listed = lambda: names() if self._steps_done() >= steps else None
    found = processes.broadcast(self._on_main(listed))
    if found is None:
      return None
    chunks = [self._read(name) for name in found]
    whole = [chunk for chunk in chunks if chunk is not None]
    return whole if len(whole) == len(chunks) else None

  def read(self, number: int) -> LogprobsChunk | None:
    """Returns a chunk; None if it is not there, or damaged."""
    name = _name(number)
    is_there = processes.broadcast(self._on_main((self._folder / name).exists))
    return self._read(name) if is_there else None

  def write(self, number: int, chunk: LogprobsChunk) -> None:
    """Writes a chunk atomically."""
    self._on_main(lambda: atomic.replace_file(self._folder / _name(number), _encoded(chunk)))

  def finish(self, steps: int) -> None:
    """Notes that the chunks suffice for that many steps."""
    self._on_main(lambda: atomic.replace_file(self._done, json.dumps({"steps": steps})))

  def _steps_done(self) -> int:
    """Returns for how many steps the chunks suffice; 0 if that is not known."""
    try:
      return int(json_text.parsed(self._done.read_bytes())["steps"])
    except (OSError, *json_text.UNEXPECTED):
      return 0

  def _read(self, name: str) -> LogprobsChunk | None:
    """Returns a chunk; None, with a warning, if its file is damaged."""
    content = self._on_main((self._folder / name).read_bytes)
    sent = bulk.exchange_bytes(content or b"", what=f"the behavior logprobs in {name}")
    try:
      return _decoded(bytes(sent[0]))
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, *json_text.UNEXPECTED) as error:
      _log.warning("%s is damaged and computed again: %s", self._folder / name, error)
      return None

  def _on_main(self, work: Callable[[], T]) -> T | None:
    """Does what only the main process does; returns its result there, and None elsewhere."""
    alone = lambda: work() if processes.is_main() else None
    return processes.together(alone, what=f"the behavior logprobs in {self._folder}")


def _name(number: int) -> str:
  return f"chunk_{number:06d}.npz"


def _agree(items: Sequence[RecordedGroup], number: int) -> None:
  """Raises DisagreementError if the processes do not have the same groups."""
  own = hashlib.blake2b(digest_size=8)
  for item in items:
    own.update(f"{item.dataset} {item.number} {_digest(item.group)} ".encode())
  processes.agree(own.hexdigest(), what=f"the digest of recorded groups (batch {number})")


def _scored(items: Sequence[RecordedGroup], score: Score, from_file: bool) -> LogprobsChunk:
  """Scores the responses whose logprobs are not known."""
  missing = [[not (known and from_file) for known in item.is_known] for item in items]
  parts = [
    RolloutGroup(
      item.group.prompt,
      tuple(r for r, needed in zip(item.group.rollouts, wanted, strict=True) if needed),
    )
    for item, wanted in zip(items, missing, strict=True)
  ]
  asked = [part for part in parts if part.rollouts]
  answers = iter([values for group in score(asked) for values in group] if asked else [])
  logprobs = [
    np.nan_to_num(next(answers), nan=0.0) if needed else np.zeros(0, np.float32)
    for wanted in missing
    for needed in wanted
  ]
  return LogprobsChunk(
    datasets=np.asarray([item.dataset for item in items], np.str_),
    numbers=np.asarray([item.number for item in items], np.int64),
    digests=np.asarray([_digest(item.group) for item in items], np.uint64),
    counts=np.asarray([len(item.is_known) for item in items], np.int64),
    lengths=np.asarray([len(values) for values in logprobs], np.int64),
    logprobs=np.concatenate([np.zeros(0, np.float32), *logprobs]).astype(np.float32),
  )


def _with_logprobs(rollout: Rollout, logprobs: np.ndarray) -> Rollout:
  """Returns the rollout with these logprobs, as sampled by weights of version 0."""
  mask = rollout.loss_mask
  return dataclasses.replace(
    rollout,
    behavior_logprobs=np.where(mask, np.minimum(logprobs, 0.0), 0.0).astype(np.float32),
    weight_versions=np.where(mask, 0, UNKNOWN_VERSION).astype(np.int32),
  )


def _digest(group: RolloutGroup) -> int:
  """Returns 64 bits that distinguish the tokens of a group from those of others."""
  hashed = hashlib.blake2b(digest_size=8)
  for ids in (group.prompt.token_ids, *(rollout.completion_ids for rollout in group.rollouts)):
    hashed.update(len(ids).to_bytes(8, "little"))
    hashed.update(np.ascontiguousarray(ids, np.int32).tobytes())
  return int.from_bytes(hashed.digest(), "little")


def _encoded(chunk: LogprobsChunk) -> bytes:
  """Returns the content of a chunk's file."""
  file = io.BytesIO()
  np.savez(file, **dataclasses.asdict(chunk))
  return file.getvalue()


def _decoded(content: bytes) -> LogprobsChunk:
  with np.load(io.BytesIO(content)) as arrays:
    return LogprobsChunk(
      **{field.name: arrays[field.name] for field in dataclasses.fields(LogprobsChunk)}
    )
