"""Logprobs of given tokens, from HTTP servers that hold another model, such as a teacher.

  sglang  POST URL/generate with `return_logprob` and `logprob_start_len`
  vllm    POST URL/completions with `prompt_logprobs`, which names the ids; URL ends in /v1
  openai  POST URL/completions with `echo` and `logprobs`, which names no ids; URL ends in /v1

Tokens are sent as ids and never as text. All three report logprobs at temperature 1, of the full
distribution.
"""

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.errors import ExpectedFailure
from grpo_jax.http import addresses, retries
from grpo_jax.http.client import JsonClient, Request
from grpo_jax.http.failures import HttpFailure, Unusable

# Of an answer, in bytes: per token an id, its logprob, its text and the names of fields.
_TOKEN_BYTES, _FIXED_BYTES = 512, 1 << 16
_ROUNDING = 1e-3  # nats above 0 that a server may report for a certain token.
_LARGEST = float(np.finfo(np.float32).max)


class ScoringError(ExpectedFailure, RuntimeError):
  """The servers have not scored a sequence; the message names the last server and its failure."""


class Unscored(Unusable):
  """The answer does not have one usable logprob for each token."""


@dataclasses.dataclass(frozen=True)
class Passage:
  """A sequence of tokens, and the part of it that is scored.

  Attributes:
    tokens: Ids of all tokens.
    first: Index of the first token that is scored; at least 1.
  """

  tokens: Int[np.ndarray, " _"]
  first: int


@dataclasses.dataclass(frozen=True)
class Api:
  """The requests and answers of a kind of server.

  Attributes:
    route: Path that is appended to the address.
    body: Function (ids, index of the first token that is scored, name of the model) → the body.
    read: Function (answer, ids, the same index) → logprobs from that token on, as they came.
    needs_model: Whether a request names the model.
  """

  route: str
  body: Callable[[list[int], int, str | None], dict[str, Any]]
  read: Callable[[Any, list[int], int], list[Any]]
  needs_model: bool


class PromptScorer:
  """Scores sequences on one or several servers of the same model."""

  def __init__(
    self,
    urls: Sequence[str],
    *,
    api: str,
    model: str | None,
    key: str | None,
    patience: retries.RetryPolicy,
    concurrency: int,
    http: JsonClient | None = None,
  ):
    """Makes a scorer; nothing is sent yet.

    Args:
      urls: Addresses of the servers, over which sequences are spread in turn.
      api: Kind of the servers, one of APIS.
      model: Name of the model at the servers; None: requests name none.
      key: Key, sent as "Authorization: Bearer KEY"; never in an error or a log.
      patience: Time-outs and tries of one sequence; each try goes to the next server.
      concurrency: Number of simultaneous requests.
      http: Client that sends the requests; None: a new one.
    """
    self._urls = [addresses.address(url, APIS[api].route) for url in urls]
    self._api, self._model = APIS[api], model
    self._patience, self._concurrency = patience, concurrency
    self._http = http or JsonClient(key=key)
    self._random = random.Random()

  async def check(self, tokens: Int[np.ndarray, " _"]) -> None:
    """Has every server score some tokens once.

    Raises:
      ScoringError: A server cannot be reached, or does not score; names it.
    """
    for url in self._urls:
      try:
        await self._ask(url, Passage(tokens, 1), self._patience.timeout_s)
      except HttpFailure as error:
        raise ScoringError(str(error)) from None

  async def score(self, sequences: Sequence[Passage]) -> list[Float[np.ndarray, " _"]]:
    """Returns the logprobs of the tokens from `first` on, in nats, for each sequence.

    Raises:
      ScoringError: A sequence has not been scored in all its tries; the others are cancelled.
    """
    places = asyncio.Semaphore(self._concurrency)

    async def one(number: int, sequence: Passage) -> Float[np.ndarray, " _"]:
      turns = itertools.count(number)
      async with places:
        return await retries.until_answered(
          lambda limit_s: self._ask(self._urls[next(turns) % len(self._urls)], sequence, limit_s),
          self._patience,
          randomness=self._random,
        )

    try:
      async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*numbered)) for numbered in enumerate(sequences)]
    except* HttpFailure as failures:
      tries = self._patience.retries + 1
      raise ScoringError(
        f"a completion was not scored in up to {tries} tries: {failures.exceptions[0]}"
      ) from None
    return [task.result() for task in tasks]

  async def close(self) -> None:
    """Closes the connections."""
    await self._http.close()

  async def _ask(self, url: str, sequence: Passage, timeout_s: float) -> Float[np.ndarray, " _"]:
    ids = [int(i) for i in sequence.tokens]
    request = Request(
      url=url,
      body=self._api.body(ids, sequence.first, self._model),
      timeout_s=timeout_s,
      limit=_FIXED_BYTES + _TOKEN_BYTES * len(ids),
    )

    def read(answer: Any) -> Float[np.ndarray, " _"]:
      try:
        return _checked(self._api.read(answer, ids, sequence.first))
      except Unscored as error:
        raise Unscored(f"{url}: {error}") from None

    return await self._http.ask(request, read)


def _checked(found: Sequence[Any]) -> Float[np.ndarray, " _"]:
  """Returns logprobs as an array; raises Unscored unless each is usable."""
  for value in found:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and -_LARGEST <= value <= _ROUNDING):  # NaN is not, either.
      raise Unscored(f"logprobs must be finite numbers of at most 0, got {value!r:.80}")
  return np.minimum(np.asarray(found, np.float32), 0.0)


def _sglang_body(ids: list[int], first: int, model: str | None) -> dict[str, Any]:
  return {
    "input_ids": ids,
    "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    "return_logprob": True,
    "logprob_start_len": first - 1,  # the first entry has no logprob.
    **({"model": model} if model else {}),
  }


def _read_sglang(answer: Any, ids: list[int], first: int) -> list[Any]:
  wanted = ids[first:]
  entries = _list_at(answer, "meta_info", "input_token_logprobs")[-len(wanted) :]
  came = [_at(entry, 1) for entry in entries]
  if len(came) != len(wanted):
    raise Unscored(f"logprobs were requested for {len(wanted)} tokens, came for {len(came)}")
  for number, (own, other) in enumerate(zip(wanted, came, strict=True), start=first):
    if other not in (own, 0):  # SGLang reports the last id of the vocabulary as 0.
      raise Unscored(f"token {number} has the id {own}, its logprob came for the id {other!r:.40}")
  return [_at(entry, 0) for entry in entries]


def _vllm_body(ids: list[int], first: int, model: str | None) -> dict[str, Any]:
  del first
  asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
  return {"model": model, "prompt": ids, **asked}


def _read_vllm(answer: Any, ids: list[int], first: int) -> list[Any]:
  entries = _list_at(answer, "choices", 0, "prompt_logprobs")
  if len(entries) != len(ids):
    raise Unscored(f"logprobs were requested for {len(ids)} tokens, came for {len(entries)}")
  return [
    _at(entry, str(token), "logprob")
    for entry, token in zip(entries[first:], ids[first:], strict=True)
  ]


def _openai_body(ids: list[int], first: int, model: str | None) -> dict[str, Any]:
  del first
  asked = {"max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}
  return {"model": model, "prompt": ids, **asked}


def _read_openai(answer: Any, ids: list[int], first: int) -> list[Any]:
  found = _list_at(answer, "choices", 0, "logprobs", "token_logprobs")
  if len(found) not in (len(ids), len(ids) + 1):  # the token that was sampled may follow.
    raise Unscored(f"logprobs were requested for {len(ids)} tokens, came for {len(found)}")
  return found[first : len(ids)]


def _at(answer: Any, *path: str | int) -> Any:
  """Follows keys and indices into JSON; raises Unscored if there is nothing."""
  value = answer
  for key in path:
    try:
      value = value[key]
    except (KeyError, IndexError, TypeError):
      where = ".".join(map(str, path))
      raise Unscored(f"the answer has no {where}: {answer!r:.200}") from None
  return value


def _list_at(answer: Any, *path: str | int) -> list[Any]:
  """Follows keys and indices to a list; raises Unscored if there is none."""
  value = _at(answer, *path)
  if not isinstance(value, list):
    raise Unscored(f"the answer's {'.'.join(map(str, path))} is not a list: {value!r:.80}")
  return value


APIS: Mapping[str, Api] = {
  "sglang": Api("/generate", _sglang_body, _read_sglang, needs_model=False),
  "vllm": Api("/completions", _vllm_body, _read_vllm, needs_model=True),
  "openai": Api("/completions", _openai_body, _read_openai, needs_model=True),
}
