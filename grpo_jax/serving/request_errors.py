"""The refusal of a request, in OpenAI's form. Pure."""

import reprlib
from typing import Any

from grpo_jax.http import redaction


class RequestError(Exception):
  """A request cannot be served; answered in OpenAI's form of errors."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.kind = kind
    self.param = param
    self.code = code

  def body(self, *, hidden: str = "") -> dict[str, Any]:
    """Returns the answer, as JSON.

    Args:
      hidden: Secret that is removed from it.
    """
    message = redaction.without(str(self), hidden)
    fields = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
    return {"error": fields}


def shown(value: Any) -> str:
  """Returns a value of a request for a message; a long one is cut."""
  text = _SHORT.repr(value)
  return text if len(text) <= 80 else f"{text[:80]}…"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong = 3, 80, 40
