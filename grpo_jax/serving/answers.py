"""Answers of OpenAI's API, whole and as streams of server-sent events. Pure.

The fields for token ids are those of vLLM: `prompt_token_ids`, `token_ids`.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from grpo_jax.engines.base import Generation
from grpo_jax.serving.requests import RequestOptions

Finish = Literal["stop", "length", "tool_calls"]
DecodeToken = Callable[[int], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What the policy answered to one request."""

  name: str  # unique among the answers of a session.
  prompt_ids: Int[np.ndarray, " prompt"]
  generation: Generation
  message: Mapping[str, Any]  # of the assistant; of `/v1/completions` its `content` alone.
  finish: Finish


def chat(
  answer: Answer, options: RequestOptions, *, model: str, created: int, decode: DecodeToken
) -> dict[str, Any]:
  """Returns the body of a chat completion.

  Args:
    answer: Answer of the policy.
    options: Options of the request.
    model: Name of the model.
    created: Unix time, in seconds.
    decode: Function from a token id to its text.
  """
  choice = {"index": 0, "message": _shown(answer.message), "finish_reason": answer.finish}
  choice |= _chat_extras(answer, options, decode)
  whole = _head(answer, "chat.completion", model, created)
  return {**whole, "choices": [choice], "usage": _usage(answer), **_prompt_ids(answer, options)}


def text(
  answer: Answer, options: RequestOptions, *, model: str, created: int, decode: DecodeToken
) -> dict[str, Any]:
  """Returns the body of an answer to `/v1/completions`; see `chat`."""
  choice = {
    "index": 0,
    "text": answer.message["content"] or "",
    "finish_reason": answer.finish,
    "logprobs": _text_logprobs(answer, options, decode) if options.has_logprobs else None,
    **_token_ids(answer, options),
    **_prompt_ids(answer, options),
  }
  whole = _head(answer, "text_completion", model, created)
  return {**whole, "choices": [choice], "usage": _usage(answer)}


def chat_events(
  answer: Answer, options: RequestOptions, *, model: str, created: int, decode: DecodeToken
) -> Iterator[bytes]:
  """Yields the events of a streamed chat completion: the whole answer is in the first one."""
  head = _head(answer, "chat.completion.chunk", model, created)
  delta = dict(_shown(answer.message))
  if "tool_calls" in delta:
    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta["tool_calls"])]
  first = {"index": 0, "delta": delta, "finish_reason": None}
  first |= _chat_extras(answer, options, decode)
  last = {"index": 0, "delta": {}, "finish_reason": answer.finish}
  yield _event({**head, "choices": [first], **_prompt_ids(answer, options)})
  yield _event({**head, "choices": [last]})
  yield from _end(head, answer, options)


def text_events(
  answer: Answer, options: RequestOptions, *, model: str, created: int, decode: DecodeToken
) -> Iterator[bytes]:
  """Yields the events of a streamed text completion: the whole answer is in the first one."""
  head = _head(answer, "text_completion", model, created)
  whole = text(answer, options, model=model, created=created, decode=decode)
  yield _event({**head, "choices": whole["choices"]})
  yield from _end(head, answer, options)


def models(model: str, *, created: int, max_tokens: int | None) -> dict[str, Any]:
  """Returns the list of models: the one that is served.

  Args:
    model: Its name.
    created: Unix time, in seconds.
    max_tokens: Longest prompt and completion together, in tokens; None: not known.
  """
  one = {"id": model, "object": "model", "created": created, "owned_by": "grpo_jax"}
  return {"object": "list", "data": [{**one, "max_model_len": max_tokens}]}


def _head(answer: Answer, kind: str, model: str, created: int) -> dict[str, Any]:
  prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
  return {"id": f"{prefix}-{answer.name}", "object": kind, "created": created, "model": model}


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


def _usage(answer: Answer) -> dict[str, int]:
  prompt, completion = len(answer.prompt_ids), len(answer.generation.token_ids)
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


def _chat_extras(answer: Answer, options: RequestOptions, decode: DecodeToken) -> dict[str, Any]:
  """Returns the part of a choice that describes its tokens."""
  logprobs = None
  if options.has_logprobs:
    tokens = zip(_names(answer, options, decode), _logprobs(answer), strict=True)
    content = [
      {"token": token, "logprob": logprob, "bytes": [*token.encode()], "top_logprobs": []}
      for token, logprob in tokens
    ]
    logprobs = {"content": content, "refusal": None}
  return {"logprobs": logprobs, **_token_ids(answer, options)}


def _text_logprobs(answer: Answer, options: RequestOptions, decode: DecodeToken) -> dict[str, Any]:
  names = _names(answer, options, decode)
  offsets = np.cumsum([0, *map(len, names)])[:-1]
  return {
    "tokens": names,
    "token_logprobs": _logprobs(answer),
    "top_logprobs": None,
    "text_offset": offsets.tolist(),
  }


def _names(answer: Answer, options: RequestOptions, decode: DecodeToken) -> list[str]:
  ids = answer.generation.token_ids.tolist()
  if options.names_tokens_by_id:
    return [f"token_id:{each}" for each in ids]
  return [decode(each) for each in ids]


def _logprobs(answer: Answer) -> list[float]:
  return [float(each) for each in answer.generation.logprobs]


def _end(head: Mapping[str, Any], answer: Answer, options: RequestOptions) -> Iterator[bytes]:
  if options.has_usage:
    yield _event({**head, "choices": [], "usage": _usage(answer)})
  yield b"data: [DONE]\n\n"


def _event(body: Mapping[str, Any]) -> bytes:
  return b"data: " + json.dumps(body).encode() + b"\n\n"
