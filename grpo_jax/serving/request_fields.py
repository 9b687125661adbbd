"""The fields of a request that say how it is answered: what they ask for, what is refused. Pure.

No field is ignored: what cannot be done is refused by name, and what changes nothing is listed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.engines.options import SamplingOptions
from grpo_jax.serving.request_errors import RequestError, shown
from grpo_jax.values import checked, options

MAX_STOPS = 64  # strings that end a completion; every token is compared with all of them.
MAX_STOP = 1000  # characters of one of them.
MAX_ALTERNATIVES = 20  # most likely tokens at each place whose logprobs are reported.
MAX_CHOICES = 1024  # completions of one request.

# Options of `SamplingParams` that a request may have.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_KINDS = {
  **{name: kind for name, kind in options.kinds(SamplingOptions).items() if name in SAMPLING},
  # In float32, logits divided by a smaller number may be infinite.
  "temperature": checked.Kind(
    "0, or a number from 1e-06 to 100",
    lambda x: x == 0 or checked.number(low=1e-6, high=100).fits(x),
  ),
  "top_k": checked.whole(low=0, high=2**31 - 1),  # int32 on devices.
}

_READ = {
  *("model", "max_tokens", "max_completion_tokens", "stop", "n", "seed", "logprobs"),
  *("stream", "stream_options", "include_stop_str_in_output"),
  *("return_token_ids", "return_tokens_as_token_ids", *SAMPLING),
}
CHAT_FIELDS = frozenset({*_READ, "messages", "tools", "tool_choice", "top_logprobs"})
TEXT_FIELDS = frozenset({*_READ, "prompt", "echo"})
# What does not change the answer.
WITHOUT_EFFECT = frozenset(
  {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt", "priority", "request_id"),
  }
)
# What would change the answer, with the value that does not.
NEUTRAL: Mapping[str, Any] = {
  "presence_penalty": 0,
  "frequency_penalty": 0,
  "repetition_penalty": 1,
  "length_penalty": 1,
  "min_tokens": 0,
  "ignore_eos": False,
  "use_beam_search": False,
  "response_format": {"type": "text"},
  "parallel_tool_calls": True,
  "echo": False,
  "suffix": "",
  "top_logprobs": 0,
  "add_generation_prompt": True,
  "continue_final_message": False,
  "skip_special_tokens": True,
  "spaces_between_special_tokens": True,
  "modalities": ["text"],
}
_WHY = {
  **dict.fromkeys(
    (
      *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
      *("logit_bias", "response_format", "min_tokens", "ignore_eos", "use_beam_search"),
      *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
      *("bad_words", "allowed_token_ids"),
    ),
    "the sampler has no such option",
  ),
  "best_of": "all `n` completions are returned",
  "functions": "declare tools",
  "parallel_tool_calls": "nothing keeps the policy from calling several tools",
  "prompt_logprobs": "/v1/completions has `echo` with `logprobs`",
  "suffix": "text is continued, not inserted",
  "continue_final_message": "use /v1/completions to continue text",
  "chat_template_kwargs": "they are an option of the run, model.chat_template_args",
  "modalities": "this policy writes text only",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOptions:
  """The part of a request that chat and text completions have in common."""

  max_tokens: int | None = None  # None: as many as the run's options allow. 0: nothing is sampled.
  sampling: Mapping[str, int | float] = dataclasses.field(default_factory=dict)  # some of SAMPLING.
  seed: int | None = None  # None: the session has its own seeds.
  choices: int = 1  # completions of each prompt.
  echoes: bool = False  # whether the answer begins with the prompt.
  is_repeatable: bool = False  # whether the answer depends on nothing but the request.
  stop: tuple[str, ...] = ()
  has_logprobs: bool = False
  alternatives: int = 0  # most likely tokens at each place that have logprobs, too.
  alternatives_field: str = "top_logprobs"  # that asks for them.
  has_token_ids: bool = False  # whether the answer has token ids, as vLLM's.
  names_tokens_by_id: bool = False  # whether logprobs name tokens "token_id:ID", as vLLM's.
  keeps_stop: bool = False  # whether the text of the answer includes the stop string.
  is_stream: bool = False
  has_usage: bool = False  # whether a stream ends with the numbers of tokens.

  @property
  def needs_scores(self) -> bool:
    """Whether the answer has logprobs that sampling alone does not give."""
    return self.has_logprobs and (self.echoes or self.alternatives > 0)


def read_chat_options(body: Mapping[str, Any]) -> RequestOptions:
  """Reads the options of a chat completion.

  Raises:
    RequestError: A field is wrong, or asks for what no terms allow.
  """
  _check_names(body, CHAT_FIELDS)
  found = _options(body)
  alternatives = _whole(body, "top_logprobs", high=MAX_ALTERNATIVES) or 0
  has_logprobs = _flag(body, "logprobs")
  if alternatives and not has_logprobs:
    raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
  return dataclasses.replace(found, has_logprobs=has_logprobs, alternatives=alternatives)


def read_text_options(body: Mapping[str, Any]) -> RequestOptions:
  """Reads the options of a request to `/v1/completions`; see `read_chat_options`."""
  _check_names(body, TEXT_FIELDS)
  echoes, logprobs = _flag(body, "echo"), body.get("logprobs")
  if isinstance(logprobs, bool):
    logprobs = 0 if logprobs else None
  elif logprobs is not None:
    logprobs = _whole(body, "logprobs", high=MAX_ALTERNATIVES)
  return dataclasses.replace(
    _options(body, least_tokens=0 if echoes else 1),
    echoes=echoes,
    has_logprobs=logprobs is not None,
    alternatives=logprobs or 0,
    alternatives_field="logprobs",
  )


def _check_names(body: Mapping[str, Any], known: frozenset[str]) -> None:
  """Raises RequestError for a field that asks for what cannot be done."""
  for name, value in body.items():
    if name in known or name in WITHOUT_EFFECT or value is None or value in ([], {}):
      continue
    if name in NEUTRAL and value == NEUTRAL[name]:
      continue
    if name == "best_of" and value == (body.get("n") or 1):
      continue
    if name == "parallel_tool_calls" and not body.get("tools"):
      continue
    why = f": {_WHY[name]}" if name in _WHY else ""
    raise RequestError(f"{shown_field(name, value)} is not supported{why}", param=name[:100])


def _options(body: Mapping[str, Any], *, least_tokens: int = 1) -> RequestOptions:
  given = body.get("stream_options") or {}
  if not isinstance(given, Mapping) or not given.keys() <= {"include_usage", "include_obfuscation"}:
    message = f"stream_options may have include_usage, got {shown(given)}"
    raise RequestError(message, param="stream_options")
  return RequestOptions(
    max_tokens=_max_tokens(body, least_tokens),
    sampling=_sampling(body),
    seed=_whole(body, "seed", low=-(2**63), high=2**63 - 1),
    choices=_whole(body, "n", low=1, high=MAX_CHOICES) or 1,
    stop=_stop(body.get("stop")),
    has_token_ids=_flag(body, "return_token_ids"),
    names_tokens_by_id=_flag(body, "return_tokens_as_token_ids"),
    keeps_stop=_flag(body, "include_stop_str_in_output"),
    is_stream=_flag(body, "stream"),
    has_usage=_flag(given, "include_usage"),
  )


def _sampling(body: Mapping[str, Any]) -> dict[str, int | float]:
  """Returns the sampling options that a request has; a top_k of -1 is vLLM's for none."""
  found = {name: body[name] for name in SAMPLING if body.get(name) is not None}
  if found.get("top_k") == -1:
    found["top_k"] = 0
  for name, value in found.items():
    _check(name, value, _KINDS[name])
  return {name: value if name == "top_k" else float(value) for name, value in found.items()}


def _max_tokens(body: Mapping[str, Any], least: int) -> int | None:
  most, other = (_whole(body, name, low=least) for name in ("max_tokens", "max_completion_tokens"))
  if most is not None and other is not None and most != other:
    message = f"max_tokens={most} and max_completion_tokens={other} contradict each other"
    raise RequestError(message, param="max_tokens")
  return other if most is None else most


def _whole(
  body: Mapping[str, Any], name: str, *, low: int = 0, high: int | None = None
) -> int | None:
  value = body.get(name)
  if value is not None:
    _check(name, value, checked.whole(low=low, high=high))
  return value


def _check(name: str, value: Any, kind: checked.Kind) -> None:
  if not kind.fits(value):
    raise RequestError(f"{name} must be {kind.needed}, got {shown(value)}", param=name)


def _flag(body: Mapping[str, Any], name: str) -> bool:
  value = body.get(name)
  if value is not None and not isinstance(value, bool):
    raise RequestError(f"{name} must be true or false, got {shown(value)}", param=name)
  return bool(value)


def _stop(value: Any) -> tuple[str, ...]:
  strings = [value] if isinstance(value, str) else value or []
  if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
    message = f"stop must be a string or a list of non-empty strings, got {shown(value)}"
    raise RequestError(message, param="stop")
  if len(strings) > MAX_STOPS or any(len(each) > MAX_STOP for each in strings):
    message = f"stop may have {MAX_STOPS} strings of {MAX_STOP} characters each"
    raise RequestError(message, param="stop")
  return tuple(strings)


def shown_field(name: str, value: Any) -> str:
  """Returns a field with its value for a message."""
  return f"{name[:100]}={shown(value)}"
