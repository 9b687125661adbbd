"""A reward model: a Hugging Face sequence classifier, computed by our own JAX code.

The prompt's messages and the completion are rendered by the reward model's own chat
template; the logit at the end is the reward. Attempts that end at about the same time are
scored together. Every sequence is padded to a length that depends on it alone, and every batch
to the same number of rows. The score of a completion therefore does not depend on the others,
and one program is compiled per length.
"""

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from grpo_kernels.attention import Attention, choice

from grpo_jax.compilation import precision
from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.scoring import conversation
from grpo_jax.environments.scoring.batcher import Batcher
from grpo_jax.models import classifier, loading, sources
from grpo_jax.models.products import Products
from grpo_jax.types import Prompt

_SHORTEST = 64  # smallest length that is compiled, in tokens.
_DTYPES = ("float32", "bfloat16")


class TooLong(ValueError):
  """A conversation has more tokens than the reward model accepts."""


class RewardModelEnvironments(EnvironmentFactory):
  """Makes the environments, which share the reward model."""

  observation_roles = ()

  def __init__(
    self,
    model: loading.LoadedClassifier,
    encoder: conversation.ConversationEncoder,
    *,
    label: int,
    max_tokens: int,
    batch_size: int,
    batch_wait_s: float,
    compute_dtype: str,
    attention: Attention,
    shift: float,
    scale: float,
  ):
    self._model = model
    self._encoder = encoder
    self._label = label
    self._max_tokens = max_tokens
    self._batch_size = batch_size
    self._shift = shift
    self._scale = scale
    self._scores = jax.jit(
      precision.scoped(
        functools.partial(classifier.scores, products=Products(compute_dtype), attention=attention),
        precision.resolve(None, compute_dtype),
      ),
      static_argnums=1,
    )
    self._batcher = Batcher(
      self._score_batch, key=self._row_length, max_items=batch_size, wait_s=batch_wait_s
    )

  def __call__(self, prompt: Prompt) -> Environment:
    return SingleTurn(self._judge, prompt)

  def metrics(self) -> dict[str, float]:
    """Returns the number of calls and batches, and how full the batches were."""
    counts = self._batcher.counts()
    rows = counts["batches"] * self._batch_size
    return {**counts, "batch_fill": counts["calls"] / rows if rows else 0.0}

  def close(self) -> None:
    """Ends the scoring thread."""
    self._batcher.close()

  async def _judge(self, prompt: Prompt, text: str) -> StepResult:
    messages = conversation.from_attempt(prompt, text)
    ids = self._encoder.encode(messages)
    if len(ids) > self._max_tokens:
      raise TooLong(
        f"prompt {prompt.prompt_id} and its completion are {len(ids)} tokens of the reward"
        f" model, max_tokens is {self._max_tokens}"
      )
    score = await asyncio.wrap_future(self._batcher.submit(ids))
    reward = (score - self._shift) * self._scale
    return StepResult(reward, done=True, metrics={"score": score, "score_tokens": float(len(ids))})

  def _row_length(self, ids: np.ndarray) -> int:
    """Returns the length that a sequence is padded to: a power of two, at most `max_tokens`."""
    return min(self._max_tokens, max(_SHORTEST, 1 << (len(ids) - 1).bit_length()))

  def _score_batch(self, row_length: int, batch: Sequence[np.ndarray]) -> list[float]:
    tokens = np.zeros((self._batch_size, row_length), np.int32)
    lengths = np.ones(self._batch_size, np.int32)  # an unused row has one token.
    pool_at = np.zeros(self._batch_size, np.int32)
    for row, ids in enumerate(batch):
      tokens[row, : len(ids)] = ids
      lengths[row] = len(ids)
      pool_at[row] = classifier.pooled_place(ids, self._model.pad_id)
    inputs = jax.device_put((tokens, lengths, pool_at))
    scores = self._scores(self._model.params, self._model.config, *inputs)
    return [float(score) for score in jax.device_get(scores)[: len(batch), self._label]]


def make(
  *,
  path: str | Path,
  label: int | None = None,
  max_tokens: int = 4096,
  batch_size: int = 8,
  batch_wait_s: float = 0.005,
  compute_dtype: str = "bfloat16",
  attention: str | None = None,
  shift: float = 0.0,
  scale: float = 1.0,
  chat_template: str | None = None,
  cache_dir: str | Path | None = None,
) -> RewardModelEnvironments:
  """Makes the environment of a reward model. The model is loaded onto the default device.

  Args:
    path: Hugging Face folder or hub name of a LlamaForSequenceClassification,
      Qwen2ForSequenceClassification or Qwen3ForSequenceClassification.
    label: Index of the logit that is the score; not needed if the model has only one.
    max_tokens: Longest conversation, in the reward model's tokens; a longer one cannot be
      scored (counted as TooLong).
    batch_size: Number of conversations computed together. No more than
      `rollout.environment_concurrency` can arrive at once.
    batch_wait_s: Longest time that the first of a batch waits for others, in seconds.
    compute_dtype: Type of weights and matrix products, "bfloat16" or "float32".
    attention: Implementation of attention, as `model.attention`, whose value it gets in a run
      unless it has one of its own; None: chosen by chip and dtype.
    shift: Offset of the reward, which is (score - shift) * scale; e.g. the mean score of the base
      model.
    scale: Factor of the reward; see shift.
    chat_template: Template or name of a .jinja file; None: that of the reward model's tokenizer.
    cache_dir: Folder of downloads, as in `model.cache_dir`.

  Returns:
    A factory of environments. Metrics of an attempt: score (before shift and scale) and
    score_tokens.

  Raises:
    FileNotFoundError: There is no such model.
    ValueError: The model is not a supported sequence classifier, or a setting does not fit it.
  """
  if compute_dtype not in _DTYPES:
    raise ValueError(f"compute_dtype is one of {_DTYPES}, got {compute_dtype!r}")
  if max_tokens < 1 or batch_size < 1:
    raise ValueError(f"need max_tokens >= 1, batch_size >= 1, got {max_tokens}, {batch_size}")
  _check_attention(attention, compute_dtype, width=None)
  folder = sources.resolve(path, cache_dir=cache_dir)
  encoder = conversation.load_encoder(folder, chat_template=chat_template)
  model = loading.load_classifier(folder, dtype=jnp.dtype(compute_dtype))
  _check_attention(attention, compute_dtype, width=model.config.head_dim)
  if encoder.vocab_size > model.config.vocab_size:
    raise ValueError(
      f"{folder}: the tokenizer has {encoder.vocab_size} ids, the reward model only"
      f" {model.config.vocab_size}"
    )
  return RewardModelEnvironments(
    model,
    encoder,
    label=_label(label, model),
    max_tokens=min(max_tokens, model.config.context),
    batch_size=batch_size,
    batch_wait_s=batch_wait_s,
    compute_dtype=compute_dtype,
    attention=Attention(attention),
    shift=shift,
    scale=scale,
  )


def _check_attention(name: str | None, dtype: str, *, width: int | None) -> None:
  """Raises ValueError for an implementation of attention that cannot run here."""
  try:
    choice.pick(name, choice.current_chip(), dtype=dtype, width=width)
  except NotImplementedError as error:
    raise ValueError(str(error)) from error


def _label(label: int | None, model: loading.LoadedClassifier) -> int:
  if label is None and model.num_labels > 1:
    several = f"{model.directory} has {model.num_labels} labels"
    raise ValueError(f"{several}: set label to the index of the score")
  if not 0 <= (label or 0) < model.num_labels:
    raise ValueError(f"{model.directory} has {model.num_labels} labels, but label is {label}")
  return label or 0
