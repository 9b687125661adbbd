"""What becomes of completions under way while servers take new weights: three modes. Pure.

| mode | tokens that a completion already has | keys and values of its context |
|---|---|---|
| retract | stay | computed again with the new weights |
| abort | thrown away: it begins again | those of the new weights |
| in_place | stay | stay: of all weights since it began |

In each of them a token's logprob is that of the distribution that it was drawn from. With the
first two that is the model of the token's version, given the tokens before it; with in_place no
version of the model computes it.
"""

from typing import Any

RETRACT, ABORT, IN_PLACE = MODES = ("retract", "abort", "in_place")

_DRAINED = "--disable-overlap-schedule"


def arguments(mode: str) -> tuple[str, ...]:
  """Returns the arguments of a server that is launched for a mode.

  With overlapped scheduling SGLang notes the change of weights before it has read the tokens of the
  newest batch, so that these would have the next version. A server that retracts reads them first.
  """
  return (_DRAINED,) if mode == IN_PLACE else ()


def refusal(info: Any) -> str | None:
  """Returns why a server cannot pause in place; None if it can.

  Args:
    info: Answer to GET /server_info.
  """
  if isinstance(info, dict) and info.get("disable_overlap_schedule") is True:
    return None
  return (
    "it overlaps scheduling and computing, and would then give tokens of the old weights the"
    f" version of the new ones. Start it with {_DRAINED}, or set engine.sglang.pause='retract'"
  )


def cache_key(mode: str, run: str, version: int | None) -> str | None:
  """Returns the part of a server's prefix cache that a request uses; None: all of it.

  A server keeps its prefix cache if it pauses in place. Requests of different versions use
  different parts of it, so that none begins from keys and values of older weights.

  Args:
    mode: One of `MODES`.
    run: Name that no other run has.
    version: Version of the weights that the request is sent for.
  """
  return f"{run}-{version}" if mode == IN_PLACE else None
