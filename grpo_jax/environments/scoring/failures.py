"""Why a score could not be had from an endpoint. Pure."""


class EndpointError(Exception):
  """A score could not be had. The class is what failures are counted by."""

  def __init__(self, message: str, *, retry_after_s: float = 0.0):
    super().__init__(message)
    self.retry_after_s = retry_after_s  # what the server asks for.


class EndpointUnreachable(EndpointError):
  """No connection, or it broke off."""


class EndpointTimeout(EndpointError):
  """No whole answer in time."""


class EndpointOverloaded(EndpointError):
  """The server answered 429."""


class EndpointFailed(EndpointError):
  """The server answered 5xx."""


class EndpointRefused(EndpointError):
  """The server answered something else than 2xx, 429 or 5xx: no try can help."""


class EndpointUnreadable(EndpointError):
  """The answer is no JSON, or does not hold a score."""


class EndpointGivenUp(EndpointError):
  """Too many calls in a row have failed: no more are made."""
