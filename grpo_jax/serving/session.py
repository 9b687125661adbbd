"""What was sampled for one attempt of an agent: turns, each of which may continue an earlier one.

The policy never reads a rendering of its own words: an assistant message that this session has
returned is represented by the tokens that were sampled, and only what the client added is encoded.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import GenerationRequest, GivenScores, SamplingParams
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models.chat.template import Tool
from grpo_jax.serving import completions, requests, turns
from grpo_jax.serving.answers import Answer
from grpo_jax.serving.completions import ToolForm
from grpo_jax.serving.request_errors import RequestError
from grpo_jax.serving.request_fields import RequestOptions
from grpo_jax.serving.request_scheduling import RequestScheduler
from grpo_jax.serving.requests import ChatRequest, Message, TextRequest
from grpo_jax.serving.terms import Terms
from grpo_jax.serving.turns import SampledTurn, TurnIndex
from grpo_jax.types import FinishReason

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
# Exceptions that end what is in progress, in our code or in that of a client library.
ENDINGS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)


@runtime_checkable
class Scorer(Protocol):
  """Scores tokens that are given; see `engines.given_tokens.GivenTokenScorer`."""

  async def score(
    self, ids: Int[np.ndarray, " _"], temperatures: Float[np.ndarray, " _"]
  ) -> GivenScores: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPolicy:
  """What answers for the policy, and the options that are the same for all conversations."""

  scheduler: RequestScheduler
  tokenizer: Tokenizer
  sampling: SamplingParams  # of requests that do not say otherwise.
  terms: Terms  # what requests may ask.
  max_tokens: int | None  # bound of prompt and completion; None: no bound here.
  tool_form: ToolForm | None  # how the model writes tool calls; None: they are not parsed.
  scorer: Scorer | None = None  # None: the terms grant nothing that needs one.

  def granted(self, wanted: RequestOptions, *, prompts: int = 1) -> RequestOptions:
    """Returns the options with which a request is answered; see `Terms.granted`."""
    return self.terms.granted(wanted, self.sampling, prompts=prompts)

  def room(self, tokens: int, options: RequestOptions) -> int:
    """Returns how many tokens a completion may have after a prompt of `tokens`."""
    most = self.sampling.max_tokens if options.max_tokens is None else options.max_tokens
    return most if self.max_tokens is None else min(most, self.max_tokens - tokens)


@dataclasses.dataclass(frozen=True)
class _Asked:
  """The prompt of a request, and how it came about."""

  ids: Int[np.ndarray, " prompt"]
  parent: SampledTurn | None


@dataclasses.dataclass(frozen=True)
class _Conversation:
  """The part of a conversation that is needed once its answer was sampled."""

  key: bytes  # of the whole conversation.
  messages: int
  answers: int  # messages of the assistant among them.
  tools: tuple[Mapping[str, Any], ...]  # tools whose calls are parsed.


@dataclasses.dataclass
class Counts:
  """What happened in a session."""

  requests: int = 0
  refused: int = 0  # answered with an error of the client.


class EngineFailed(Exception):
  """The engine failed; nothing that it answers can be relied on."""

  def __init__(self, cause: BaseException):
    super().__init__(str(cause))
    self.cause = cause


class Session:
  """The conversations of one attempt."""

  def __init__(
    self,
    policy: ServedPolicy,
    *,
    name: str,
    number: int = 0,
    seed: Callable[[int], int],
    first_ids: Int[np.ndarray, " prompt"] | None = None,
    first_messages: Sequence[Mapping[str, Any]] = (),
    first_tools: Sequence[Tool] = (),
    stop_strings: Sequence[str] = (),
    kept_turns: int | None = None,
  ):
    """Makes a session without turns.

    Args:
      policy: Policy that answers, with its options.
      name: Name of the attempt, for requests to the engine.
      number: Number of the conversation for the engine's queue.
      seed: Function from the number of turns before it to the seed of a request that continues
        the attempt's own conversation. Other requests also depend on their prompt.
      first_ids: Prompt of the attempt's own conversation.
      first_messages: Messages of that prompt. The same text at the same place in a request is
        trusted as it is there; see `control_tokens.TrustedText`.
      first_tools: Tools of that prompt, likewise.
      stop_strings: Strings that end every completion, with those of the sampling options.
      kept_turns: Number of newest turns that are kept; None: all.
    """
    self.counts = Counts()
    self.is_out_of_room = False  # whether the last request was refused because it was too long.
    self.mistake = ""  # kind and place of an exception of this program that a request met.
    self.number = number
    self._policy = policy
    self._name = name
    self._seed = seed
    self._first_ids = np.zeros(0, np.int32) if first_ids is None else first_ids
    self._first_messages = tuple(first_messages)
    self._first_tools = tuple(first_tools)
    self._stop_strings = tuple(stop_strings)
    self._turns = TurnIndex(kept=kept_turns)
    self._asked: collections.Counter[bytes | SampledTurn | None] = collections.Counter()

  @property
  def turns(self) -> list[SampledTurn]:
    """All turns that are kept, in the order in which they ended."""
    return self._turns.all

  @property
  def max_tokens(self) -> int | None:
    """Longest prompt and completion together, in tokens; None: no bound here."""
    return self._policy.max_tokens

  def token_bytes(self, token_id: int) -> bytes:
    """Returns the text of one token, special or not, in UTF-8."""
    return self._policy.tokenizer.token_bytes(token_id)

  def chat(self, request: ChatRequest) -> Callable[[], Awaitable[list[Answer]]]:
    """Reads a conversation; returns a function that samples the answers, once.

    Raises:
      RequestError: The request cannot be served; also raised by the function.
    """
    options = self._policy.granted(request.options)
    keys = turns.keys_of(request)
    asked = None if options.is_repeatable else self._extended(request, keys)
    asked = asked or self._rendered(request)
    conversation = _Conversation(
      key=keys[-1],
      messages=len(request.messages),
      answers=sum(message["role"] == "assistant" for message in request.messages),
      tools=request.tools if request.reads_calls else (),
    )
    return functools.partial(self._chat, asked, options, conversation)

  async def _chat(
    self, asked: _Asked, options: RequestOptions, before: _Conversation
  ) -> list[Answer]:
    answers, policy = [], self._policy
    for turn, scores in await self._sample_all([asked], options):
      parsed, finish = completions.parsed(
        turn.generation,
        policy.tokenizer,
        form=policy.tool_form,
        tools=before.tools,
        earlier=before.answers,
        keeps_stop=options.keeps_stop,
      )
      turn.messages, turn.reasoning = before.messages, parsed.reasoning
      turn.key = turns.key_with_answer(before.key, parsed.content, parsed.calls)
      self._keep(turn, asked)
      answers.append(_answer(turn, asked, completions.message(parsed), finish, scores))
    return answers

  def complete(self, request: TextRequest) -> Callable[[], Awaitable[list[Answer]]]:
    """Reads a request to `/v1/completions`; see `chat`."""
    options = self._policy.granted(request.options, prompts=len(request.prompts))
    asked = [self._continued(prompt, options) for prompt in request.prompts]
    return functools.partial(self._complete, asked, options, request.prompts)

  async def _complete(
    self,
    asked: Sequence[_Asked],
    options: RequestOptions,
    prompts: Sequence[str | tuple[int, ...]],
  ) -> list[Answer]:
    answers, tokenizer = [], self._policy.tokenizer
    for number, (turn, scores) in enumerate(await self._sample_all(asked, options)):
      one, prompt = asked[number // options.choices], prompts[number // options.choices]
      written = completions.content(turn.generation, tokenizer, keeps_stop=options.keeps_stop)
      is_text = isinstance(prompt, str)
      if len(turn.generation.token_ids):
        self._keep(turn, one, text=f"{prompt}{written}" if is_text else "")
      if options.echoes:
        written = (prompt if is_text else tokenizer.decode(prompt, skip_special=False)) + written
      finish = completions.finish(turn.generation)
      answers.append(_answer(turn, one, {"content": written}, finish, scores))
    return answers

  def _keep(self, turn: SampledTurn, asked: _Asked, *, text: str = "") -> None:
    if forgotten := self._turns.keep(turn, asked.ids, text=text):
      del self._asked[forgotten]

  def last_chain(self) -> list[SampledTurn]:
    """Returns the turns of the chain that was asked for last; empty if nothing was sampled."""
    return max(self.turns, key=lambda turn: turn.number).chain() if self.turns else []

  # --- what the policy reads ---

  def _extended(self, request: ChatRequest, keys: Sequence[bytes]) -> _Asked | None:
    """Returns the prompt of a request that continues an earlier turn; None: it does not."""
    for count in range(len(keys) - 2, 0, -1):
      turn = self._turns.by_key.get(keys[count])
      if turn is not None and turn.has_thoughts_of(request.messages):
        try:
          return self._suffixed(turn, request, count)
        except (ExpectedFailure, ValueError) as error:
          _warn_of_new_chain(request.messages[count:], str(error))
          return None
    return None

  def _suffixed(self, turn: SampledTurn, request: ChatRequest, count: int) -> _Asked:
    """Returns the tokens of a turn, and those of the messages after its answer."""
    rest, before = request.messages[count:], turn.token_ids
    self._check_length(rest, used=len(before))
    last = turn.generation.token_ids[-1:]
    more = self._policy.tokenizer.turn_ids(
      rest,
      after=int(last[0]) if len(last) else None,
      tools=request.tools,
      calls=request.messages[count - 1].get("tool_calls", ()),
    )
    return _Asked(np.concatenate([before, more]), turn)

  def _rendered(self, request: ChatRequest) -> _Asked:
    """Returns the prompt of a conversation that the chat template writes from its beginning."""
    self._check_length(request.messages, tools=request.tools)
    most = self._policy.max_tokens
    bound = _ANY_LENGTH if most is None else most
    try:
      prompt = self._policy.tokenizer.prompt(
        [*self._with_trust(request.messages)],
        max_tokens=bound,
        tools=self._first_tools if request.tools == self._first_tools else request.tools,
      )
    except ExpectedFailure as error:
      raise RequestError(f"the conversation cannot be written as a prompt: {error}") from error
    if prompt.too_many:
      raise self._too_long(prompt.too_many)
    return _Asked(prompt.ids, self._turns.begun_by(prompt.ids))

  def _with_trust(self, messages: Sequence[Message]) -> Iterator[Message]:
    """Yields messages; text of the attempt's own prompt is as trusted as in that prompt."""
    trusted = [message.get("content") for message in self._first_messages]
    for number, message in enumerate(messages):
      is_same = number < len(trusted) and message["content"] == trusted[number]
      yield {**message, "content": trusted[number]} if is_same else message

  def _continued(self, prompt: str | tuple[int, ...], options: RequestOptions) -> _Asked:
    """Returns the prompt of a request to `/v1/completions`."""
    tokenizer = self._policy.tokenizer
    if not isinstance(prompt, str):
      wrong = [each for each in prompt if not 0 <= each < tokenizer.vocab_size]
      if wrong:
        raise RequestError(
          f"token id {wrong[0]} is outside the vocabulary of {tokenizer.vocab_size}", param="prompt"
        )
      ids = np.asarray(prompt, np.int32)
      return _Asked(ids, self._turns.begun_by(ids))
    turn = None if options.is_repeatable else self._turns.begun_by_text(prompt)
    if turn is not None:
      before = turn.token_ids
      more = self._encoded(prompt[turn.characters :], used=len(before))
      return _Asked(np.concatenate([before, more]), turn)
    ids = self._encoded(prompt)
    return _Asked(ids, self._turns.begun_by(ids))

  def _encoded(self, text: str, *, used: int = 0) -> Int[np.ndarray, " tokens"]:
    self._check_length([{"content": text}], used=used)
    try:
      return self._policy.tokenizer.encode(text, begins=not used)
    except ExpectedFailure as error:
      raise RequestError(str(error), param="prompt") from error

  def _check_length(
    self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), used: int = 0
  ) -> None:
    """Raises RequestError if the messages are too long, however they are written and encoded."""
    if self._policy.max_tokens is None:
      return
    left = max(self._policy.max_tokens - used, 0)
    if len(messages) > left:  # every message has a token.
      raise self._too_long(f"{len(messages)} messages, where {left} tokens are left")
    longest = self._policy.tokenizer.longest_text(left)
    most = _UNWRITTEN * longest
    is_long = sum(len(message["content"]) for message in messages) > longest
    if is_long or requests.size([messages, tools], most) > most:
      raise self._too_long(f"at least {longest + 1} characters, where {left} tokens are left")

  # --- sampling ---

  async def _sample_all(
    self, prompts: Sequence[_Asked], options: RequestOptions
  ) -> list[tuple[SampledTurn, GivenScores | None]]:
    """Samples all completions of each prompt, and scores them if the answer has such logprobs.

    Raises:
      RequestError: A prompt leaves no room, or the engine gave up on the request.
      EngineFailed: The engine failed.
    """
    for asked in prompts:
      if len(asked.ids) + (options.max_tokens != 0) > (self._policy.max_tokens or _ANY_LENGTH):
        raise self._too_long(f"{len(asked.ids)} tokens")
    self.is_out_of_room = False
    works = [self._scored(each, options, i) for each in prompts for i in range(options.choices)]
    if len(works) == 1:
      return [await works[0]]
    tasks = [asyncio.create_task(work) for work in works]
    try:
      return await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _scored(
    self, asked: _Asked, options: RequestOptions, choice: int
  ) -> tuple[SampledTurn, GivenScores | None]:
    turn = await self._sample(asked, options, choice)
    if not options.needs_scores:
      return turn, None
    assert self._policy.scorer is not None, "the terms grant what nothing computes"
    sampled = turn.generation.token_ids
    own = self._sampling(options).temperature or 1.0  # that of the sampler's logprobs.
    temperatures = np.repeat([1.0, own], [len(asked.ids) - 1, len(sampled)])
    ids = np.concatenate([asked.ids, sampled])
    return turn, await _of_engine(self._policy.scorer.score(ids, temperatures))

  def _sampling(self, options: RequestOptions) -> SamplingParams:
    """Returns how a request is sampled, without its `max_tokens`."""
    stops = (*self._policy.sampling.stop_strings, *self._stop_strings, *options.stop)
    changes: dict[str, Any] = {**options.sampling, "stop_strings": tuple(dict.fromkeys(stops))}
    return dataclasses.replace(self._policy.sampling, **changes)

  async def _sample(self, asked: _Asked, options: RequestOptions, choice: int) -> SampledTurn:
    """Samples a completion of a prompt; the turn is not kept yet. `_sample_all` has the errors."""
    number, self.counts.requests = self.counts.requests, self.counts.requests + 1
    name, room = f"{self._name}.{number}", self._policy.room(len(asked.ids), options)
    depth = 0 if asked.parent is None else asked.parent.depth + 1
    if not room:
      nothing = completions.empty(name)
      return SampledTurn(number, len(asked.ids), nothing, asked.parent, depth)
    with self._seeded(asked, options.seed, choice) as (seed, is_own):
      asking = GenerationRequest(
        request_id=name,
        prompt_ids=asked.ids,
        sampling=dataclasses.replace(self._sampling(options), max_tokens=room),
        seed=seed,
        group=self._name.rpartition("#")[0],
      )
      generation = await _of_engine(self._policy.scheduler.sample(asking, of=self.number))
      if generation.finish_reason is FinishReason.ABORT:
        raise RequestError("the engine gave up on the request", status=503, kind="server_error")
    return SampledTurn(number, len(asked.ids), generation, asked.parent, depth, is_own)

  @contextlib.contextmanager
  def _seeded(self, asked: _Asked, wanted: int | None, choice: int) -> Iterator[tuple[int, bool]]:
    """Yields the seed of a request, and whether it is of the attempt's own conversation.

    The own conversation has the seeds of an ordinary one. The seeds of other requests depend on
    their prompts, so that requests at the same time are sampled with different random numbers, in
    whichever order they come. A request that fails, or whose client leaves, does not count: asked
    again, it gets the same seed.
    """
    depth = 0 if asked.parent is None else asked.parent.depth + 1
    prompt = hashlib.blake2b(asked.ids.astype("<i4").tobytes(), digest_size=16).digest()
    if wanted is not None:
      yield _seed_of(f"{wanted}/{choice}/", prompt), False
      return
    if asked.parent is not None:
      is_own = asked.parent.is_own and not self._asked[asked.parent]
    else:
      is_own = np.array_equal(asked.ids, self._first_ids) and not self._asked[prompt]
    seed = self._seed(depth)
    if not is_own:
      seed = _seed_of(f"{seed}/{self._asked[prompt]}", prompt)
    counted = (prompt, asked.parent)
    self._asked.update(counted)
    try:
      yield seed, is_own
    except BaseException:
      self._asked.subtract(counted)
      raise

  def _too_long(self, length: str) -> RequestError:
    self.is_out_of_room = True
    most = self._policy.max_tokens
    return RequestError(
      f"the conversation leaves no room for an answer: it has {length}, and prompt and completion"
      f" may have {most} tokens together",
      param="messages",
      code="context_length_exceeded",
    )


def _warn_of_new_chain(messages: Sequence[Message], reason: str) -> None:
  """Warns once of each set of roles, because clients choose the messages."""
  roles = frozenset(message["role"] for message in messages)
  if roles not in _WARNED:
    _WARNED.add(roles)
    _log.warning(
      "the chat template cannot continue a turn with messages of %s, so that the conversation is"
      " rendered from its beginning; earlier answers whose tokens change are not learned from: %s",
      *(", ".join(sorted(roles)), reason),
    )


_WARNED: set[frozenset[str]] = set()


async def _of_engine(work: Awaitable[_Result]) -> _Result:
  """Awaits something of the engine.

  Raises:
    RequestError: The engine cannot serve this request.
    EngineFailed: The engine failed.
  """
  try:
    return await work
  except (RequestError, *ENDINGS):
    raise
  except BaseException as error:
    raise EngineFailed(error) from error


def _seed_of(key: str, prompt: bytes) -> int:
  digest = hashlib.blake2b(key.encode() + prompt, digest_size=8).digest()
  return int.from_bytes(digest, "little") >> 1


def _answer(
  turn: SampledTurn,
  asked: _Asked,
  message: Mapping[str, Any],
  finish: completions.Finish,
  scores: GivenScores | None,
) -> Answer:
  return Answer(
    name=turn.generation.request_id,
    prompt_ids=asked.ids,
    generation=turn.generation,
    message=message,
    finish=finish,
    scores=scores,
  )


_ANY_LENGTH = 1 << 24  # tokens.
_UNWRITTEN = 4  # factor by which a request is larger than what templates write of it, at most.
