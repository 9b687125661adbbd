"""Why an endpoint returned no score. Pure."""


class EndpointError(Exception):
  """There is no score. Failures are counted by the class."""

  def __init__(self, message: str, *, retry_after_s: float = 0.0):
    super().__init__(message)
    self.retry_after_s = retry_after_s  # pause that the server asks for.


class EndpointUnreachable(EndpointError):
  """There was no connection, or it was lost."""


class EndpointTimeout(EndpointError):
  """There was no complete answer in time."""


class EndpointOverloaded(EndpointError):
  """The server answered 429."""


class EndpointFailed(EndpointError):
  """The server answered 5xx."""


class EndpointRefused(EndpointError):
  """The server answered something other than 2xx, 429 or 5xx: retrying cannot help."""


class EndpointUnreadable(EndpointError):
  """The answer is not JSON, or does not contain a score."""


class EndpointGivenUp(EndpointError):
  """Too many consecutive calls have failed: no more are made."""
