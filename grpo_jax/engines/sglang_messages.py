"""The requests to an SGLang server and its answers, as plain data. Pure.

Written against SGLang 0.5.23. Tokens and logprobs are read from `output_token_logprobs` alone:
the text that comes with them is never tokenised again. sglang-jax answers in the same form, with
two defects that are handled here: it repeats logprobs of long completions, and reports no version.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.engines import routed_experts
from grpo_jax.engines.base import Generation, GenerationRequest
from grpo_jax.http.failures import Unusable
from grpo_jax.types import ExpertShape, FinishReason
from grpo_jax.values import json_text

# Size of an answer in bytes. A token is [logprob, id, null], its id again in `output_ids`, and its
# text in `text`: some 50 bytes, and up to 300 for the longest tokens of a vocabulary (128 line
# breaks, escaped). sglang-jax repeats logprobs.
_ANSWER_BYTES, _TOKEN_BYTES = 80 << 10, 512


# Has a request answered with `output_token_sampling_logprobs`, those of the tokens that the filters
# keep, and with the ids of these tokens, which are not read.
_TRUNCATED = "return_sampling_mask"
_KEPT_BYTES = 12  # of an id in the answer.
_MAX_TIES = 64  # kept tokens beyond top-k, as likely as the last one, that an answer has room for.

_LONGEST_NAME = 200  # characters of the name of a tensor, which messages show.


class Garbled(Unusable, ValueError):
  """The answer of a server does not match the request."""


class Aborted(Unusable):
  """A server aborted a request that nobody cancelled."""


def signed(seed: int) -> int:
  """Returns a seed of 64 bits as the signed integer that SGLang expects, bit for bit."""
  return seed - 2**64 if seed >= 2**63 else seed


def sampling_params(request: GenerationRequest, *, seeded: bool) -> dict[str, Any]:
  """Returns SGLang's `sampling_params` of one request.

  Args:
    request: Request for one completion.
    seeded: Whether the server honours seeds (--enable-deterministic-inference).
  """
  sampling = request.sampling
  params: dict[str, Any] = {
    "max_new_tokens": sampling.max_tokens,
    "temperature": sampling.temperature,
    "top_k": sampling.top_k or -1,
    "top_p": sampling.top_p,
    "min_p": sampling.min_p,
    "stop_token_ids": list(sampling.stop_ids),
    "ignore_eos": not sampling.stop_ids,  # True would ignore `stop_token_ids` as well.
    "skip_special_tokens": False,  # stop strings may contain special tokens.
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
  }
  if sampling.stop_strings:
    params["stop"] = list(sampling.stop_strings)
  if seeded:
    params["sampling_seed"] = signed(request.seed)
  return params


def generate_body(
  request: GenerationRequest,
  name: str,
  *,
  seeded: bool,
  adapter: str | None = None,
  has_experts: bool = False,
) -> dict[str, Any]:
  """Returns the body of POST /generate for one completion.

  Args:
    request: Completion to sample.
    name: SGLang's request id, unique during the life of the server.
    seeded: Argument of `sampling_params`.
    adapter: Name of the adapter to sample with; None: the server's weights alone.
    has_experts: Whether the answer is to have the experts of its tokens.
  """
  return {
    "input_ids": [int(i) for i in request.prompt_ids],
    "sampling_params": sampling_params(request, seeded=seeded),
    "rid": name,
    "return_logprob": True,
    **_named(adapter),
    **(routed_experts.ASKED if has_experts else {}),
    # Of a request without filters SGLang refuses the logprobs of the distribution that it sampled.
    **({_TRUNCATED: True} if request.sampling.reports_truncated else {}),
  }


def _named(adapter: str | None) -> dict[str, str]:
  """Returns the field that names an adapter; SGLang calls it a path, but takes its name."""
  return {} if adapter is None else {"lora_path": adapter}


def lacks_adapter(refusal: str) -> bool:
  """Returns whether a server refused a request because it does not have the adapter.

  It never had it, for instance because it was restarted; or it has unloaded it, and could not load
  it again because its folder is gone.
  """
  return any(sign in refusal for sign in _LACKING)


_LACKING = (
  "has never been loaded",
  "Failed to implicitly load LoRA adapter",
  "LoRA adapters are not loaded",
)


def refuses_all_adapters(refusal: str) -> bool:
  """Returns whether a server that refused to load an adapter would refuse every other one, too."""
  return any(sign in refusal for sign in _FOR_GOOD)


_FOR_GOOD = (
  "incompatible with the current LoRA memory pool",
  "LoRA is not enabled",
  "data-parallel replicas are not supported",
  "No such file or directory",
  "Repo id must",  # it takes the path of a folder that it does not see for the name of a model.
  "Permission denied",
)


def kept_its_cache(refusal: str) -> bool:
  """Returns whether a server has loaded weights but kept its cache, because requests hold it.

  A request whose grammar is still being compiled holds it also while the server is paused.
  """
  return "the cache was not flushed" in refusal


def answer_bytes(request: GenerationRequest, experts: ExpertShape | None = None) -> int:
  """Returns a bound on the size of a correct answer to `generate_body`, in bytes."""
  sampling, extra = request.sampling, 0
  kept = sampling.top_k + _MAX_TIES if sampling.reports_truncated else 0
  if experts is not None:
    tokens = len(request.prompt_ids) + sampling.max_tokens
    extra = routed_experts.answer_bytes(experts, tokens)
  return _ANSWER_BYTES + (_TOKEN_BYTES + _KEPT_BYTES * kept) * sampling.max_tokens + extra


def prompt_answer_bytes(ids: Sequence[int]) -> int:
  """Returns a bound on the size of a correct answer to `prompt_body`, in bytes."""
  return _ANSWER_BYTES + _TOKEN_BYTES * (len(ids) + 1)


def generation(
  answer: Any,
  request: GenerationRequest,
  *,
  vocab_size: int,
  version: int,
  is_named: bool = False,
  experts: ExpertShape | None = None,
) -> Generation:
  """Reads the answer to `generate_body`.

  Args:
    answer: Answer, decoded from JSON.
    request: Request that it answers.
    vocab_size: Size of the vocabulary; ids are smaller.
    version: Version of the weights, for servers that report none.
    is_named: Whether the request named the adapter of that version, so that all tokens are of it
      whatever the server reports: that is the version of the base.
    experts: Shape of the experts that were asked for; None: they were not.

  Raises:
    Garbled: The answer does not match the request; the message says how.
    WrongExperts: The experts do not match it.
    Aborted: The server aborted the request.
  """
  with _garbled("the answer"):
    made = _generation(answer, request, vocab_size=vocab_size, version=version, is_named=is_named)
    if experts is None:
      return made
    sizes = {"prompt": len(request.prompt_ids), "completion": len(made.token_ids)}
    of_prompt, own = routed_experts.read(answer["meta_info"], experts, **sizes)
    return dataclasses.replace(made, prompt_experts=of_prompt, experts=own)


def _generation(
  answer: Any, request: GenerationRequest, *, vocab_size: int, version: int, is_named: bool
) -> Generation:
  meta = _field(answer, "meta_info", dict)
  reason = _field(meta, "finish_reason", dict)
  kind = _field(reason, "type", str)
  if kind == "abort":
    raise Aborted(str(reason.get("message", "aborted")))
  if kind not in ("stop", "length"):
    raise Garbled(f"finish_reason is {kind!r}; it must be stop, length or abort")
  count = _field(meta, "completion_tokens", int)
  ids, logprobs = _tokens(_field(meta, "output_token_logprobs", list), count)
  if request.sampling.reports_truncated:
    logprobs = _truncated(_field(meta, "output_token_sampling_logprobs", list), count)
  _check(ids, logprobs, request, vocab_size)
  return Generation(
    request_id=request.request_id,
    token_ids=ids,
    logprobs=np.minimum(logprobs, 0.0),  # a certain token may be reported as 1e-8.
    weight_versions=np.full(count, version, np.int32)
    if is_named
    else versions_of(meta, count, default=version),
    finish_reason=FinishReason(kind),
    matched_stop=_matched(reason) if kind == "stop" else None,
  )


def _tokens(
  entries: Sequence[Any], count: int
) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
  """Splits [[logprob, id, text], ...]; of a longer list the last `count` are used."""
  if len(entries) < count:
    raise Garbled(f"{count} tokens were sampled, logprobs came for {len(entries)}")
  with _garbled("output_token_logprobs does not hold [logprob, id, ...]"):
    counted = entries[len(entries) - count :]
    ids = np.asarray([_integer(entry[1]) for entry in counted], np.int32)
    return ids, _logprobs(counted)


def _truncated(entries: Sequence[Any], count: int) -> Float[np.ndarray, " n"]:
  """Reads the logprobs of the distribution that was sampled from."""
  if len(entries) != count:
    raise Garbled(f"{count} tokens were sampled, {len(entries)} truncated logprobs came")
  with _garbled("output_token_sampling_logprobs does not hold numbers"):
    return _logprobs([[entry] for entry in entries])


def _logprobs(entries: Sequence[Any]) -> Float[np.ndarray, " n"]:
  with np.errstate(over="ignore"):  # overflows to infinity, which is rejected.
    return np.asarray([_number(entry[0]) for entry in entries], np.float64).astype(np.float32)


def _integer(value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(f"{value!r:.100} is not an integer")
  return value


def _number(value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(f"{value!r:.100} is not a number")
  return float(value)


@contextlib.contextmanager
def _garbled(what: str) -> Iterator[None]:
  """Turns errors of reading data in another form into Garbled."""
  try:
    yield
  except (Garbled, routed_experts.WrongExperts):
    raise
  except (*json_text.UNEXPECTED, RecursionError) as error:
    raise Garbled(f"{what}: {type(error).__name__}: {error!s:.300}") from error


def _check(
  ids: Int[np.ndarray, " n"],
  logprobs: Float[np.ndarray, " n"],
  request: GenerationRequest,
  vocab_size: int,
) -> None:
  if not 1 <= len(ids) <= request.sampling.max_tokens:
    raise Garbled(f"{len(ids)} tokens came, 1 to {request.sampling.max_tokens} were requested")
  if ((ids < 0) | (ids >= vocab_size)).any():
    raise Garbled(f"a token id is outside the vocabulary of {vocab_size}: {_some(ids)}")
  _check_logprobs(logprobs)


def _check_logprobs(logprobs: Float[np.ndarray, " n"]) -> None:
  if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
    raise Garbled(f"logprobs must be finite and at most 0, got {_some(logprobs)}")


def _some(values: np.ndarray) -> str:
  """Returns values for a message, shortened if there are many."""
  return f"{values.tolist()!s:.300}"


def versions_of(meta: Mapping[str, Any], count: int, *, default: int) -> Int[np.ndarray, " n"]:
  """Returns the version of the weights that sampled each token.

  Args:
    meta: Field `meta_info` of an answer.
    count: Number of sampled tokens.
    default: Version for servers that report none.

  Raises:
    Garbled: A version is not a number, or the spans do not cover the tokens.
  """
  spans = meta.get("weight_versions")
  if spans is None:
    if "weight_version" not in meta:
      return np.full(count, default, np.int32)
    spans = [{"version": meta["weight_version"], "start": 0, "end": count}]
  versions = np.full(count, -1, np.int32)
  with _garbled(f"weight_versions are not those that were set: {spans!r:.300}"):
    for span in spans:
      start, end = _integer(span["start"]), _integer(span["end"])
      if not 0 <= start <= end:
        raise ValueError(f"no tokens from {start} to {end}")
      versions[start:end] = _version(span["version"])
  if (versions < 0).any():
    raise Garbled(f"weight_versions do not cover the {count} tokens: {spans!r:.300}")
  return versions


def _version(value: Any) -> int:
  """Returns the number of a version; SGLang gives it as a string."""
  return int(value) if isinstance(value, str) else _integer(value)


def _matched(reason: Mapping[str, Any]) -> int | str | None:
  matched = reason.get("matched")
  is_known = isinstance(matched, int | str) and not isinstance(matched, bool)
  return matched if is_known else None


def prompt_body(
  ids: Sequence[int], name: str, *, adapter: str | None = None, first: int = 1
) -> dict[str, Any]:
  """Returns the body that asks for the logprobs of a prompt's own tokens; see `generate_body`.

  Args:
    ids: Token ids.
    name: Name of the request.
    adapter: Name of the adapter; None: the server's own weights.
    first: Index of the first token whose logprob is needed; at least 1.
  """
  return {
    "input_ids": [int(i) for i in ids],
    "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": first - 1,  # the first entry has no logprob.
    "rid": name,
    **_named(adapter),
  }


def prompt_logprobs(answer: Any, ids: Sequence[int], first: int = 1) -> Float[np.ndarray, " n"]:
  """Reads the answer to `prompt_body`: the logprob of each id from `first` on, in nats.

  Raises:
    Garbled: The logprobs are missing, not finite or positive, or belong to other ids.
  """
  entries = _field(_field(answer, "meta_info", dict), "input_token_logprobs", list)
  with _garbled("input_token_logprobs does not hold [logprob, id, ...]"):
    found = [_integer(entry[1]) for entry in entries]
    logprobs = _logprobs(entries[1:])
  wanted = [int(i) for i in ids[first - 1 :]]
  # SGLang reports the last id of the vocabulary as 0.
  if len(found) != len(wanted) or any(f not in (w, 0) for f, w in zip(found, wanted, strict=True)):
    raise Garbled(f"logprobs were requested for {wanted!s:.300}, came for {found!s:.300}")
  _check_logprobs(logprobs)
  return logprobs


def checksums_of(answer: Any) -> dict[str, dict[int, str]]:
  """Reads the answer of /weights_checker to the action "checksum".

  Returns:
    The checksum of each tensor, by its name in the server and by the number of the device.

  Raises:
    Garbled: The answer has another form.
  """
  found: dict[str, dict[int, str]] = {}
  with _garbled("ranks does not hold objects with checksums"):
    for device, rank in enumerate(_field(answer, "ranks", list)):
      if any(part["role"] == "target" for part in rank["parallelism_info"]):  # else of a draft.
        for name, checksum in rank["checksums"].items():
          if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"a tensor is named {name!r:.100}")
          found.setdefault(name, {})[device] = checksum
  return found


def prompt_version(answer: Any) -> int:
  """Reads the version of the weights from the answer to `prompt_body`; -1 if it reports none.

  Raises:
    Garbled: The value is not a number.
  """
  return int(versions_of(_field(answer, "meta_info", dict), 1, default=-1)[0])


def _field(answer: Any, name: str, kind: type) -> Any:
  """Returns a field of an answer; raises Garbled if it is missing or of another type."""
  found = answer.get(name) if isinstance(answer, dict) else None
  if isinstance(found, kind) and not isinstance(found, bool):
    return found
  with _garbled(f"an object with {name!r} ({kind.__name__}) was expected"):
    raise Garbled(f"an object with {name!r} ({kind.__name__}) was expected, got {answer!r:.300}")
