"""The teacher of a run: found and checked, then its weights are read or its servers asked."""

import contextlib
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from grpo_jax import processes
from grpo_jax.batching import layout
from grpo_jax.building import checks, stored
from grpo_jax.building.computation import Teacher
from grpo_jax.config import run_options, teacher_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.data import vocabularies
from grpo_jax.engines import multihost, probe, prompt_scoring
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import scoring, sharding
from grpo_jax.models import parameter_reading
from grpo_jax.processes import arrays, bulk
from grpo_jax.rollouts import work_sharing
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.types import Batch, Minibatch

# Logprobs of the teacher at `loss_places`, by minibatch and microbatch; on the devices.
Logprobs = tuple[tuple[Float[Array, "B N"], ...], ...]
# (minibatches on the devices) → the teacher's logprobs of them.
Score = Callable[[Sequence[Minibatch]], Logprobs]

_WHAT = "the logprobs of the teacher's servers"


def find(config: Config, tokenizer_folder: Any, mesh: Mesh) -> stored.StoredWeights | None:
  """Finds and checks the teacher in the trainer; its weights are not read yet.

  Args:
    config: Config of the run.
    tokenizer_folder: Folder with the tokenizer of the policy.
    mesh: Mesh of the devices.

  Returns:
    The teacher; None if there is none in the trainer.

  Raises:
    ConfigError: There is no such model, or it cannot read what the policy writes.
  """
  path = config.teacher.path
  if not path:
    return None
  if stored.is_adapter(pathlib.Path(path).expanduser()):
    raise ConfigError(
      f"teacher.path={path} is an adapter, and a teacher needs whole weights: name the run of the"
      f" adapter, or export it with its base: grpo-jax export {shlex.quote(path)} OUT --base=MODEL"
    )
  try:
    found = stored.find(path, cache_dir=config.model.cache_dir)
    wrong = vocabularies.difference(tokenizer_folder, found.directory)
  except (ExpectedFailure, OSError) as error:
    raise ConfigError(f"teacher.path: {error}") from error
  if wrong is not None:
    raise ConfigError(
      f"teacher.path={path}: a teacher reads the policy's token ids, so its tokenizer must be the"
      f" same: comparing {tokenizer_folder} with {found.directory}, {wrong}"
    )
  needed = run_options.limits(config).max_tokens or 0
  if needed > found.config.context:
    raise ConfigError(
      f"teacher.path={path}: a prompt with its completion may have {needed} tokens, but the teacher"
      f" reads {found.config.context} (max_position_embeddings): lower"
      " rollout.max_tokens"
    )
  checks.check_split(mesh, found.model)
  return found


def at_servers(
  config: Config, *, mesh: Mesh, vocab_size: int, stack: contextlib.ExitStack, stop: Any
) -> Score | None:
  """Tries the servers of the teacher.

  Args:
    config: Config of the run.
    mesh: Mesh of the devices.
    vocab_size: Number of ids of the policy's tokenizer.
    stack: Stack that closes what is opened here.
    stop: Flag that becomes true when the run is asked to end.

  Returns:
    Function that scores batches; None if the teacher has no servers.

  Raises:
    ConfigError: A server cannot be reached, or does not score.
    Stopped: The run is asked to end.
  """
  if not config.teacher.urls:
    return None
  servers = _AtServers(teacher_options.scorer(config), mesh, stop)
  stack.callback(servers.close)
  try:
    servers.check(vocab_size)
  except prompt_scoring.ScoringError as error:
    raise ConfigError(f"teacher.urls: {error}") from error
  return servers


def in_trainer(found: stored.StoredWeights | None, program: Teacher | None) -> Score | None:
  """Reads the weights of the teacher in the trainer.

  Args:
    found: Teacher in the trainer; None: there is none.
    program: Its program; None: there is none.

  Returns:
    Function that scores batches; None if there is no teacher.

  Raises:
    ConfigError: The weights cannot be read any more.
  """
  if found is None or program is None:
    return None
  return _InTrainer(program, read(found, program))


def read(found: stored.StoredWeights, program: Teacher) -> Any:
  """Reads the teacher's weights directly into their sharding and dtype.

  Raises:
    ConfigError: The weights cannot be read any more.
  """
  shardings = jax.tree.map(lambda leaf: leaf.sharding, program.weights)
  dtype = jax.tree.leaves(program.weights)[0].dtype
  try:
    return parameter_reading.read_params(
      found.tensors, found.config, sharding=lambda _: shardings, dtype=dtype
    )
  except (ExpectedFailure, OSError) as error:
    raise ConfigError(f"teacher.path: {error}") from error


class _InTrainer:
  """A second model on the mesh of the policy."""

  def __init__(self, program: Teacher, weights: Any):
    self._score = program.score
    self._weights = weights

  def __call__(self, minibatches: Sequence[Minibatch]) -> Logprobs:
    return tuple(
      tuple(self._score(self._weights, _read(batch)) for batch in minibatch.microbatches)
      for minibatch in minibatches
    )


class _AtServers:
  """A model behind HTTP servers."""

  def __init__(self, scorer: prompt_scoring.PromptScorer, mesh: Mesh, stop: Any):
    self._scorer, self._mesh, self._stop = scorer, mesh, stop
    self._loop = LoopThread()

  def check(self, vocab_size: int) -> None:
    """Has every server score a few ids from all over the vocabulary, the last one included."""
    ids = np.asarray([*probe.probe_ids(vocab_size), vocab_size - 1], np.int32)
    self._together(lambda early: self._loop.run(self._scorer.check(ids), stop=early))

  def __call__(self, minibatches: Sequence[Minibatch]) -> Logprobs:
    parts = [batch for minibatch in minibatches for batch in minibatch.microbatches]
    batches = [arrays.fetch(_read(batch)) for batch in parts]
    found = [layout.completions(batch) for batch in batches]
    passages = [prompt_scoring.Passage(one.tokens, one.prompt_tokens) for of in found for one in of]
    try:
      scores = iter(self._scored(passages))
    except prompt_scoring.ScoringError as error:
      raise prompt_scoring.ScoringError(f"teacher.urls: {error}") from None
    placed = [
      sharding.put(_at_loss_places(batch, [(one, next(scores)) for one in of]), self._mesh)
      for batch, of in zip(batches, found, strict=True)
    ]
    each = iter(placed)
    return tuple(tuple(next(each) for _ in part.microbatches) for part in minibatches)

  def _scored(
    self, passages: Sequence[prompt_scoring.Passage]
  ) -> Sequence[Float[np.ndarray, " _"]]:
    """Returns the logprobs of all passages; each process asks for a share of them."""
    own = work_sharing.share(passages)
    scores = self._together(lambda early: self._loop.run(self._scorer.score(own), stop=early))
    if processes.count() == 1:
      return scores
    sent = np.concatenate([np.zeros(0, np.float32), *scores]).astype(np.float32).tobytes()
    parts = bulk.exchange_bytes(sent, what=_WHAT)
    found: list[Any] = [None] * len(passages)
    for number, part in enumerate(parts):
      places = range(number, len(passages), len(parts))
      lengths = [len(passages[i].tokens) - passages[i].first for i in places]
      ends = np.cumsum(lengths)
      values = np.frombuffer(part, np.float32)
      for place, end, length in zip(places, ends, lengths, strict=True):
        found[place] = values[end - length : end]
    return found

  def _together(self, work: Callable[[Any], Any]) -> Any:
    """Asks the servers on all processes; if one of them fails, all do."""
    failure = prompt_scoring.ScoringError
    return multihost.together(work, what=_WHAT, failure=failure, stop=self._stop)

  def close(self) -> None:
    """Closes the connections and ends the thread."""
    with contextlib.suppress(RuntimeError):  # the loop has ended.
      self._loop.run(self._scorer.close())
    self._loop.close()


def _at_loss_places(
  batch: Batch, scored: Sequence[tuple[layout.Completion, Float[np.ndarray, " _"]]]
) -> Float[np.ndarray, "B N"]:
  """Returns the logprobs of completions at the places of the loss tokens; 0 on padding."""
  by_place = np.zeros(np.shape(batch.tokens), np.float32)
  for one, values in scored:
    by_place[one.row, one.start : one.start + len(values)] = values
  places = np.asarray(batch.loss_places)
  at_places = np.take_along_axis(by_place, np.maximum(places, 0), axis=-1)
  return np.where(places >= 0, at_places, 0).astype(np.float32)


def _read(batch: Batch) -> Batch:
  """Returns what a teacher reads of a batch: a router of its own chooses its experts."""
  return scoring.unreplayed(scoring.bare(batch))
