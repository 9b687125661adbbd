"""Answers of HTTP servers, read within bounds.

A server that is broken, or not ours, can send any number of bytes, or a few compressed ones that
become gigabytes. Bytes are counted after decompression, and large JSON is parsed in a thread, so
that the event loop is not blocked. The time is bounded by the caller.
"""

import asyncio
import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")

_PIECE_BYTES = 1 << 16
_PARSED_IN_LOOP = 1 << 16  # bytes of JSON; parsing them takes a millisecond.
_GZIP_OR_ZLIB = 47  # zlib's wbits: the header says which.


class UnreadableBody(Exception):
  """The body of an answer is too long, broken, or not JSON. Messages quote nothing of the body."""


class NotJson(UnreadableBody):
  """The body of an answer is not JSON."""

  def __init__(self, content: bytes):
    super().__init__("the answer is not JSON")
    self.content = content


async def read(response: aiohttp.ClientResponse, *, limit: int) -> bytes:
  """Returns the body of an answer.

  Args:
    response: Answer whose body was not yet read, of a session that does not decompress.
    limit: Largest number of bytes that is accepted, after decompression.

  Raises:
    UnreadableBody: The body is too long, or cannot be decompressed.
    aiohttp.ClientError: The connection broke off.
  """
  inflate = _decompressor(response)
  content = bytearray()
  async for piece in response.content.iter_chunked(_PIECE_BYTES):
    content += _decompressed(inflate, piece, limit + 1 - len(content)) if inflate else piece
    if len(content) > limit:
      raise UnreadableBody(f"the answer is longer than {limit} bytes")
  if inflate and content and not inflate.eof:
    raise UnreadableBody("the compressed answer breaks off")
  return bytes(content)


async def parse(content: bytes, read: Callable[[Any], T]) -> T:
  """Returns what `read` makes of a body of JSON; in a thread, if the body is large.

  Args:
    content: Body of the answer; an empty one is read as None.
    read: Function from decoded JSON to the result. It may run in any thread.

  Raises:
    NotJson: The body is not JSON. Exceptions of `read` are raised unchanged.
  """
  if len(content) <= _PARSED_IN_LOOP:
    return read(_from_json(content))
  return await asyncio.to_thread(lambda: read(_from_json(content)))


def _from_json(content: bytes) -> Any:
  if not content:
    return None
  try:
    return json.loads(content.decode("utf-8", errors="replace"), parse_float=_float)
  except (ValueError, RecursionError):
    raise NotJson(content) from None


def _float(digits: str) -> float:
  # A function of Python's, unlike `float`, lets other threads run between two numbers.
  return float(digits)


def _decompressor(response: aiohttp.ClientResponse) -> Any:
  """Returns the object that decompresses a body; None if the body is not compressed."""
  encoding = response.headers.get("Content-Encoding", "").strip().lower()
  if encoding in ("", "identity"):
    return None
  if encoding in ("gzip", "x-gzip", "deflate"):
    return zlib.decompressobj(wbits=_GZIP_OR_ZLIB)
  raise UnreadableBody("the answer has a Content-Encoding other than gzip and deflate")


def _decompressed(inflate: Any, piece: bytes, most: int) -> bytes:
  try:
    content = inflate.decompress(piece, most)
  except zlib.error as error:
    raise UnreadableBody(f"the compressed answer is broken: {error}") from None
  if inflate.unused_data:
    raise UnreadableBody("the compressed answer continues after its end")
  return content
