"""Answers of OpenAI's API, whole and as streams of server-sent events. Pure.

The fields for token ids are those of vLLM: `prompt_token_ids`, `token_ids`.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.engines.base import Generation, GivenScores
from grpo_jax.serving.completions import Finish
from grpo_jax.serving.request_fields import RequestOptions

TokenBytes = Callable[[int], bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """One completion of a prompt of a request."""

  name: str  # unique among the answers of a session.
  prompt_ids: Int[np.ndarray, " prompt"]
  generation: Generation
  message: Mapping[str, Any]  # of the assistant; of `/v1/completions` its `content` alone.
  finish: Finish
  scores: GivenScores | None = None  # of prompt and completion, if the request needs them.


def chat(
  answers: Sequence[Answer],
  options: RequestOptions,
  *,
  model: str,
  created: int,
  token_bytes: TokenBytes,
) -> dict[str, Any]:
  """Returns the body of a chat completion.

  Args:
    answers: Completions of the conversation.
    options: Options of the request.
    model: Name of the model.
    created: Unix time, in seconds.
    token_bytes: Function from a token id to its text in UTF-8; part of a character in some tokens.
  """
  choices = [
    {
      "index": index,
      "message": _shown(answer.message),
      "finish_reason": answer.finish,
      **_chat_extras(answer, options, token_bytes),
    }
    for index, answer in enumerate(answers)
  ]
  whole = {**_head(answers, "chat.completion", model, created), "choices": choices}
  return {**whole, "usage": _usage(answers, options), **_prompt_ids(answers[0], options)}


def text(
  answers: Sequence[Answer],
  options: RequestOptions,
  *,
  model: str,
  created: int,
  token_bytes: TokenBytes,
) -> dict[str, Any]:
  """Returns the body of an answer to `/v1/completions`; see `chat`.

  The choices are those of the first prompt, then those of the second, and so on.
  """
  choices = [
    {
      "index": index,
      "text": answer.message["content"] or "",
      "finish_reason": answer.finish,
      "logprobs": _text_logprobs(answer, options, token_bytes) if options.has_logprobs else None,
      **_token_ids(answer, options),
      **_prompt_ids(answer, options),
    }
    for index, answer in enumerate(answers)
  ]
  whole = {**_head(answers, "text_completion", model, created), "choices": choices}
  return {**whole, "usage": _usage(answers, options)}


def chat_events(
  answers: Sequence[Answer],
  options: RequestOptions,
  *,
  model: str,
  created: int,
  token_bytes: TokenBytes,
) -> Iterator[bytes]:
  """Yields the events of a streamed chat completion: each whole answer is in one of them."""
  head = _head(answers, "chat.completion.chunk", model, created)
  for index, answer in enumerate(answers):
    delta = dict(_shown(answer.message))
    if "tool_calls" in delta:
      delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
    first = {"index": index, "delta": delta, "finish_reason": None}
    first |= _chat_extras(answer, options, token_bytes)
    last = {"index": index, "delta": {}, "finish_reason": answer.finish}
    yield _event({**head, "choices": [first], **_prompt_ids(answer, options)})
    yield _event({**head, "choices": [last]})
  yield from _end(head, answers, options)


def text_events(
  answers: Sequence[Answer],
  options: RequestOptions,
  *,
  model: str,
  created: int,
  token_bytes: TokenBytes,
) -> Iterator[bytes]:
  """Yields the events of a streamed text completion: each whole answer is in one of them."""
  head = _head(answers, "text_completion", model, created)
  whole = text(answers, options, model=model, created=created, token_bytes=token_bytes)
  for choice in whole["choices"]:
    yield _event({**head, "choices": [choice]})
  yield from _end(head, answers, options)


def models(model: str, *, created: int, max_tokens: int | None) -> dict[str, Any]:
  """Returns the list of models: the one that is served.

  Args:
    model: Its name.
    created: Unix time, in seconds.
    max_tokens: Longest prompt and completion together, in tokens; None: not known.
  """
  one = {"id": model, "object": "model", "created": created, "owned_by": "grpo_jax"}
  return {"object": "list", "data": [{**one, "max_model_len": max_tokens}]}


def _head(answers: Sequence[Answer], kind: str, model: str, created: int) -> dict[str, Any]:
  name = f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{answers[0].name}"
  return {"id": name, "object": kind, "created": created, "model": model}


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a message with the arguments of its tool calls as strings, in OpenAI's form."""
  found = dict(message)
  if "tool_calls" in found:
    found["tool_calls"] = [
      {
        **call,
        "function": {
          "name": call["function"]["name"],
          "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
        },
      }
      for call in found["tool_calls"]
    ]
  return found


def _usage(answers: Sequence[Answer], options: RequestOptions) -> dict[str, int]:
  """Returns the numbers of tokens; a prompt counts once, however many completions it has."""
  prompt = sum(len(answer.prompt_ids) for answer in answers[:: options.choices])
  completion = sum(len(answer.generation.token_ids) for answer in answers)
  return {
    "prompt_tokens": prompt,
    "completion_tokens": completion,
    "total_tokens": prompt + completion,
  }


def _prompt_ids(answer: Answer, options: RequestOptions) -> dict[str, Any]:
  return {"prompt_token_ids": answer.prompt_ids.tolist()} if options.has_token_ids else {}


def _token_ids(answer: Answer, options: RequestOptions) -> dict[str, Any]:
  if not options.has_token_ids:
    return {}
  generation = answer.generation
  return {
    "token_ids": generation.token_ids.tolist(),
    "weight_versions": generation.weight_versions.tolist(),
  }


def _chat_extras(
  answer: Answer, options: RequestOptions, token_bytes: TokenBytes
) -> dict[str, Any]:
  """Returns the part of a choice that describes its tokens."""
  logprobs = None
  if options.has_logprobs:
    name = _namer(options, token_bytes)

    def one(token_id: int, logprob: float | None) -> dict[str, Any]:
      return {"token": name(token_id), "logprob": logprob, "bytes": [*token_bytes(token_id)]}

    content = [
      {**one(token_id, logprob), "top_logprobs": [one(*each) for each in top]}
      for token_id, logprob, top in _scored(answer, options)
    ]
    logprobs = {"content": content, "refusal": None}
  return {"logprobs": logprobs, **_token_ids(answer, options)}


def _text_logprobs(
  answer: Answer, options: RequestOptions, token_bytes: TokenBytes
) -> dict[str, Any]:
  name, found = _namer(options, token_bytes), _scored(answer, options)
  pieces = [token_bytes(token_id) for token_id, _, _ in found]
  if pieces and not (answer.message["content"] or "").encode().startswith(pieces[0]):
    pieces[0] = b""  # a BOS that the text does not have.
  return {
    "tokens": [name(token_id) for token_id, _, _ in found],
    "token_logprobs": [logprob for _, logprob, _ in found],
    "top_logprobs": [_by_name(each, name) for each in found] if options.alternatives else None,
    "text_offset": np.cumsum([0, *map(_characters, pieces)])[:-1].tolist(),
  }


# A token, its logprob, the most likely tokens in its place.
_Scored = tuple[int, float | None, Sequence[tuple[int, float]]]


def _characters(piece: bytes) -> int:
  """Returns the number of characters that begin in a piece of UTF-8."""
  return sum(byte & 0xC0 != 0x80 for byte in piece)


def _by_name(found: _Scored, name: Callable[[int], str]) -> dict[str, float] | None:
  """Returns the logprobs of the most likely tokens and of the token itself, by their texts.

  Of tokens with the same text the most likely one counts. None: nothing precedes the token.
  """
  token_id, logprob, top = found
  if logprob is None:
    return None
  named: dict[str, float] = {}
  for each, value in (*top, (token_id, logprob)):
    named.setdefault(name(each), value)
  return named


def _scored(answer: Answer, options: RequestOptions) -> list[_Scored]:
  """Returns the tokens that an answer describes; the first of a prompt has no logprob."""
  ids, scores = answer.generation.token_ids.tolist(), answer.scores
  if scores is None:
    return [(each, float(p), ()) for each, p in zip(ids, answer.generation.logprobs, strict=True)]
  first = len(answer.prompt_ids) - 1  # place of the completion in the scores.
  found: list[_Scored] = []
  if options.echoes:
    begun, *ids = answer.prompt_ids.tolist() + ids
    first = 0
    found.append((begun, None, ()))
  logprobs, most = scores.logprobs.tolist(), options.alternatives
  top_ids, top_logprobs = scores.top_ids[:, :most].tolist(), scores.top_logprobs[:, :most].tolist()
  for place, token_id in enumerate(ids, start=first):
    top = [*zip(top_ids[place], top_logprobs[place], strict=True)]
    found.append((token_id, logprobs[place], top))
  return found


def _namer(options: RequestOptions, token_bytes: TokenBytes) -> Callable[[int], str]:
  """Returns the function from a token id to its name in logprobs.

  A token that is not text by itself is named by its bytes, in OpenAI's form.
  """
  if options.names_tokens_by_id:
    return lambda token_id: f"token_id:{token_id}"

  def name(token_id: int) -> str:
    piece = token_bytes(token_id)
    try:
      return piece.decode()
    except UnicodeDecodeError:
      return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

  return name


def _end(
  head: Mapping[str, Any], answers: Sequence[Answer], options: RequestOptions
) -> Iterator[bytes]:
  if options.has_usage:
    yield _event({**head, "choices": [], "usage": _usage(answers, options)})
  yield b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
  return b"data: " + json.dumps(body).encode() + b"\n\n"
