"""Proofs that what arrives on a connection was sent by a process of the same start of a run.

All processes of a start have a key, made from the secret of the run. Each side of a connection
sends a random number, and signs what follows with the key, its role and both numbers
(HMAC-SHA256). So a recorded message is worth nothing on another connection, and what one side has
signed is worth nothing if it is sent back. Content is not encrypted.
"""

import dataclasses
import hmac
import os
import re
import secrets

VARIABLE = "GRPO_JAX_RUN_SECRET"  # environment variable with the secret of a run.
PROTOCOL = 2  # changes whenever what the processes say to each other does.
_GREETING = re.compile(rb"grpo_jax %d ([0-9a-f]{64})" % PROTOCOL)


@dataclasses.dataclass(frozen=True)
class Key:
  """Key of one start of a run.

  Attributes:
    secret: Secret of the run; "": it has none, and anyone can make its proofs.
    start: Name of the start by its launcher, such as a job with the number of its restarts.
    variable: Environment variable of the secret, for messages.
  """

  secret: str = dataclasses.field(default="", repr=False)
  start: str = ""
  variable: str = VARIABLE

  @property
  def described(self) -> str:
    """Returns "has the secret of VARIABLE", or that there is none."""
    if self.secret:
      return f"has the secret of {self.variable}"
    return f"has no secret, as {self.variable} is not set"

  def proof(self, message: bytes) -> bytes:
    """Returns the proof that the owner of this key has written a message."""
    key = hmac.digest(os.fsencode(self.secret), os.fsencode(self.start), "sha256")
    return hmac.digest(key, message, "sha256").hex().encode()


@dataclasses.dataclass(frozen=True)
class Session:
  """What both ends of a connection sign their messages with.

  Attributes:
    key: Key of the run.
    numbers: Random numbers of the process that has connected and of process 0.
  """

  key: Key
  numbers: tuple[bytes, bytes]

  def signed(self, role: str, content: bytes) -> bytes:
    """Returns a line with a message and its proof.

    Args:
      role: Kind of message; each is sent in one direction only.
      content: Message, without line breaks.
    """
    return b"%s %s\n" % (self._proof(role, content), content)

  def content(self, role: str, line: bytes) -> bytes | None:
    """Returns the message of a line; None if its proof is wrong."""
    proof, _, content = line.partition(b" ")
    return content if hmac.compare_digest(proof, self._proof(role, content)) else None

  def _proof(self, role: str, content: bytes) -> bytes:
    return self.key.proof(b"\n".join((role.encode(), *self.numbers, content)))


def number() -> bytes:
  """Returns a random number for one end of a connection, as 64 hexadecimal digits."""
  return secrets.token_hex(32).encode()


def greeting(own: bytes) -> bytes:
  """Returns the first line that either side sends, with its random number."""
  return b"grpo_jax %d %s\n" % (PROTOCOL, own)


def greeted(line: bytes) -> bytes | None:
  """Returns the random number of a greeting; None if a line is not one of this protocol."""
  match = _GREETING.fullmatch(line)
  return match[1] if match else None
