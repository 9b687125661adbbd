"""Failures that a user can repair, explained in one message."""


class ExpectedFailure(Exception):
  """A failure whose message is all that a user needs: `main` prints it without a traceback.

  The message says what was needed, what came instead, and where. Subclasses also derive from the
  built-in exception that fits them, so that callers of single functions can catch `ValueError` or
  `OSError` as usual.

  Attributes:
    exit_code: Exit code of a program that the failure ends: 1, or 2 for wrong use.
  """

  exit_code: int = 1
