"""The experts that SGLang servers return with a completion, as plain data. Pure.

A server that was started with `ARGUMENT` returns `meta_info.routed_experts` to requests that ask
for it: base64 of int32 [tokens - 1, layers, k], for all tokens of prompt and completion but the
last, which was never fed to the model. Without the argument it ignores the field of the request.
Written against SGLang 0.5.23.
"""

import base64
from typing import Any

import numpy as np
from jaxtyping import Int

from grpo_jax.http.failures import Unusable
from grpo_jax.types import ExpertShape

ARGUMENT = "--enable-return-routed-experts"
ASKED = {"return_routed_experts": True}  # the field of a request.

_NEEDED = (
  f"start servers with {ARGUMENT}, or set loss.router_replay=False, with which the trainer's router"
  " chooses again"
)


class WrongExperts(Unusable, ValueError):
  """The experts that a server returned do not match the request or the model."""


def refusal(info: Any) -> str | None:
  """Returns why a server cannot return experts, and what to do; None if it can.

  Args:
    info: Answer to GET /server_info.
  """
  if isinstance(info, dict) and info.get("enable_return_routed_experts") is True:
    return None
  return f"it does not return the experts that it chooses: {_NEEDED}"


def answer_bytes(shape: ExpertShape, tokens: int) -> int:
  """Returns a bound on the bytes of the experts of that many tokens in an answer."""
  return 4 * -(-4 * tokens * shape.layers * shape.chosen // 3) + 64


def read(
  meta: dict[str, Any], shape: ExpertShape, *, prompt: int, completion: int
) -> tuple[Int[np.ndarray, "prompt L k"], Int[np.ndarray, "completion L k"]]:
  """Reads the experts of an answer.

  Args:
    meta: Field `meta_info` of the answer.
    shape: Shape of the model's records.
    prompt: Number of tokens of the prompt.
    completion: Number of tokens that were sampled.

  Returns:
    The experts of the prompt's tokens, and those of the sampled tokens; the last has none.

  Raises:
    WrongExperts: The experts are missing, are not base64, or have another size or range.
  """
  text = meta.get("routed_experts")
  if not isinstance(text, str):
    raise WrongExperts(f"no routed_experts came (got {text!r:.100}): {_NEEDED}")
  try:
    data = base64.b64decode(text, validate=True)
  except ValueError as error:
    raise WrongExperts(f"routed_experts is not base64: {error}; got {text!r:.100}") from error
  wanted = (prompt + completion - 1, shape.layers, shape.chosen)
  if len(data) != 4 * np.prod(wanted, dtype=np.int64):
    raise WrongExperts(
      f"routed_experts has {len(data)} bytes; int32 [tokens - 1, layers, k] = {list(wanted)} takes"
      f" {4 * np.prod(wanted, dtype=np.int64)}"
    )
  found = np.frombuffer(data, "<i4").reshape(wanted)
  outside = found[(found < 0) | (found >= shape.experts)]
  if outside.size:
    raise WrongExperts(
      f"routed_experts names expert {outside[0]}, and the model has experts 0 to"
      f" {shape.experts - 1}"
    )
  found = found.astype(shape.dtype)
  return found[:prompt].copy(), np.concatenate([found[prompt:], shape.unknown(1)])
