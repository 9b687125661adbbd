"""The interface of engines: token ids in, sampled token ids and their logprobs out.

An engine never sees text, except to find stop strings, and never tokenises again: the ids that
it returns are the ids that it sampled.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.engines.options import SamplingOptions
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.errors import ExpectedFailure
from grpo_jax.types import FinishReason
from grpo_jax.values import checked, options

# (completions done, completions requested, tokens sampled so far), all of one `generate` call.
OnProgress = Callable[[int, int, int], None]


class EngineFailure(ExpectedFailure, RuntimeError):
  """An engine cannot continue, and cannot be restarted. What was learned is not affected."""


class WrongWeights(EngineFailure):
  """An engine does not sample from the weights that it was given."""


_KINDS = {**options.kinds(SamplingOptions), "stop_ids": checked.several(checked.whole(low=0))}


@dataclasses.dataclass(frozen=True)
class SamplingParams(SamplingOptions):
  """How one completion is sampled, checked when made.

  The filters apply in the order top-k, top-p, min-p. Logits are divided by the temperature, and at
  0 the most likely token is taken. A completion that reaches `max_tokens` is truncated,
  `FinishReason.LENGTH`. The token that completes a stop string is part of the completion.

  Attributes:
    stop_ids: Token ids; each of them ends the completion and is part of it.
  """

  stop_ids: tuple[int, ...] = ()

  def __post_init__(self):
    checked.require(_KINDS, checked.fields_of(self), of="sampling")

  @classmethod
  def of(cls, sampling: SamplingOptions, stop_ids: tuple[int, ...] = ()) -> "SamplingParams":
    """Returns the sampling of a section of the config, with the ids that end a completion.

    Raises:
      ValueError: An option has a wrong value.
    """
    return cls(**options.values(sampling), stop_ids=stop_ids)

  @property
  def is_truncated(self) -> bool:
    """Whether top-k, top-p or min-p may exclude tokens."""
    return bool(_filters(self)) and self.temperature > 0

  @property
  def reports_truncated(self) -> bool:
    """Whether logprobs are those of a truncated distribution."""
    return self.logprobs == "truncated" and self.is_truncated


def _filters(sampling: SamplingParams) -> dict[str, float]:
  """Returns the filters that are on, by name."""
  values = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p")}
  return {name: value for name, value in values.items() if value != getattr(SamplingOptions, name)}


def mismatch_warning(sampling: SamplingParams) -> str | None:
  """Describes how the distribution that is sampled differs from the one that is trained.

  Args:
    sampling: Sampling options of completions that are learned from.

  Returns:
    A warning; None if training computes the distribution that is sampled.
  """
  if not sampling.is_truncated or sampling.reports_truncated:
    return None
  filters = ", ".join(f"sampling.{name}={value!r}" for name, value in _filters(sampling).items())
  return (
    f"{filters}: tokens are sampled from a truncated distribution, but logprobs, of the engine and"
    " in training, are of softmax(logits / temperature) over the whole vocabulary;"
    " sampling.logprobs='truncated' trains the distribution that is sampled"
  )


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationRequest:
  """One completion to be sampled."""

  request_id: str  # unique within a call; the `Generation` has it too.
  prompt_ids: Int[np.ndarray, " prompt"]  # requests with equal prompts share its computation.
  sampling: SamplingParams
  seed: int  # 0 <= seed < 2**64; the same seed samples the same completion.
  group: str = ""  # requests of one group start with the same tokens and may be kept together.


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
  """One sampled completion."""

  request_id: str
  token_ids: Int[np.ndarray, " completion"]  # stop id included, or the last token of a string.
  # In nats: log softmax(logits / temperature), or that of the truncated distribution, as
  # `SamplingParams.logprobs` says.
  logprobs: Float[np.ndarray, " completion"]
  weight_versions: Int[np.ndarray, " completion"]  # version of the weights that sampled each token.
  finish_reason: FinishReason
  matched_stop: int | str | None = None  # the stop id or stop string that ended it, if any.
  # Experts of each token, if the engine records them; see `types.ExpertShape`. The last sampled
  # token has none, because it was never fed to the model.
  prompt_experts: Int[np.ndarray, "prompt L k"] | None = None
  experts: Int[np.ndarray, "completion L k"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GivenScores:
  """Scores of the n tokens of a sequence after the first; nats.

  Attributes:
    logprobs: Logarithm of softmax(logits / temperature) of each token, given those before it.
    top_ids: Most likely tokens in its place, most likely first.
    top_logprobs: Their logprobs.
  """

  logprobs: Float[np.ndarray, " n"]
  top_ids: Int[np.ndarray, "n k"]
  top_logprobs: Float[np.ndarray, "n k"]


@runtime_checkable
class Engine(Protocol):
  """Samples completions from weights that training replaces after every step."""

  @property
  def weight_version(self) -> int:
    """Version of the weights in use; -1 before any were loaded."""
    ...

  def generate(
    self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
  ) -> AsyncIterator[Generation]:
    """Yields one generation for each request, as they finish, in any order.

    All requests of a call enter the queue together, so what is computed side by side depends on
    the requests only. Several calls may be in flight. Closing the iterator, or cancelling its
    reader, cancels the rest.

    Args:
      requests: Completions to sample; their ids differ.
      on_progress: Function that is called now and then, in the caller's event loop.

    Raises:
      ValueError: A request cannot be served; raised by the call itself, before anything is
        computed, with the request's id and the reason.
      Exception: The engine failed; raised by the iteration.
    """
    ...

  def load_weights(self, params: Any, *, version: int) -> None:
    """Samples from these weights from now on; their tokens are marked with `version`.

    Unfinished completions continue with the new weights from their next token, or from one
    soon after; no token is lost or sampled twice. `Generation.weight_versions` has the version that
    sampled each token, and never falls within a completion. Random numbers still depend on the seed
    and on the token's index only. The logprobs of later tokens are those of their versions if the
    engine computes the keys and values of earlier tokens again, as those of the package do.

    All processes of a run call this at the same time, each for its own engine.
    """
    ...

  def metrics(self) -> dict[str, float]:
    """Returns the metrics to log every step; may be empty."""
    ...

  def release(self) -> None:
    """Frees the memory of the weights until the next `load_weights`; nothing may be in flight.

    For an update on the same devices.
    """
    ...

  def close(self) -> None:
    """Stops the engine and frees what it holds; calls in flight fail. May be called twice."""
    ...


@runtime_checkable
class ScoresGiven(Protocol):
  """An engine that can score tokens which are given; it is optional."""

  def score_given(self, passages: Sequence[Passage]) -> dict[str, list[Float[np.ndarray, " _"]]]:
    """Returns the logprobs of passages under the weights in use, at temperature 1; nats.

    Completions may be under way. Called on the main thread.

    Args:
      passages: Sequences to score: of each of them the tokens from `first` on.

    Returns:
      For each part of the engine that has weights of its own, such as a server, by its name: the
      logprobs of each passage. A part that does not answer is left out.
    """
    ...


def check_requests(
  requests: Sequence[GenerationRequest],
  *,
  vocab_size: int,
  max_length: int,
  can_decode: bool,
  max_completion: int | None = None,
) -> None:
  """Rejects requests that cannot be served, all of them in one message.

  Args:
    requests: Requests of one call.
    vocab_size: Size of the vocabulary; ids must be below it.
    max_length: Longest prompt and completion together, in tokens.
    can_decode: Whether completions can be decoded, to look for stop strings.
    max_completion: Tokens of the longest completion that the engine has memory for; None: any
      number.

  Raises:
    ValueError: Names each request and what is wrong with it (the first eight).
  """
  limits: dict[str, Any] = {
    "vocab_size": vocab_size,
    "max_length": max_length,
    "can_decode": can_decode,
    "max_completion": max_completion,
  }
  problems = [
    f"request {request.request_id!r}: {problem}"
    for request in requests
    for problem in _problems(request, **limits)
  ]
  ids = [request.request_id for request in requests]
  problems += [f"request {i!r} appears twice in one call" for i in set(ids) if ids.count(i) > 1]
  if problems:
    more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
    raise ValueError("; ".join(problems[:8]) + more)


def _problems(
  request: GenerationRequest,
  *,
  vocab_size: int,
  max_length: int,
  can_decode: bool,
  max_completion: int | None,
) -> list[str]:
  ids, sampling = request.prompt_ids, request.sampling
  problems = []
  if not len(ids):
    problems.append("the prompt is empty")
  outside = [int(i) for i in ids if not 0 <= i < vocab_size]
  if outside:
    problems.append(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
  if len(ids) + sampling.max_tokens > max_length:
    problems.append(
      f"prompt of {len(ids)} + max_tokens {sampling.max_tokens} = "
      f"{len(ids) + sampling.max_tokens} tokens exceeds the limit of {max_length}"
    )
  if max_completion is not None and sampling.max_tokens > max_completion:
    problems.append(
      f"max_tokens {sampling.max_tokens} exceeds {max_completion}, the tokens of the longest"
      " completion whose keys and values fit into the cache"
    )
  if not 0 <= request.seed < 2**64:
    problems.append(f"seed must be in [0, 2**64), got {request.seed}")
  if sampling.stop_strings and not can_decode:
    problems.append("stop_strings need an engine that was given `decode`")
  return problems
