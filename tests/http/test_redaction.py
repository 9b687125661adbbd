"""Text of servers: without the secret, however it is spelled, and harmless to a terminal."""

import base64
import json
import urllib.parse

import pytest

from grpo_jax.http import redaction

KEY = "sk-Secret+/0123456789&<x>"


def base64_of(text):
  return base64.b64encode(text.encode()).decode()


SPELLINGS = {
  "plain": KEY,
  "bearer": f"Bearer {KEY}",
  "upper": KEY.upper(),
  "url": urllib.parse.quote(KEY, safe=""),
  "url, every character": "".join(f"%{ord(c):02x}" for c in KEY),
  "url, twice": urllib.parse.quote(urllib.parse.quote(KEY, safe=""), safe=""),
  "json": "".join(f"\\u{ord(c):04x}" for c in KEY),
  "json in json": json.dumps("".join(f"\\u{ord(c):04x}" for c in KEY)),
  "slashes": KEY.replace("/", "\\/"),
  "python": "".join(f"\\x{ord(c):02x}" for c in KEY),
  "html": KEY.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"),
  "html numbers": "".join(f"&#{ord(c)};" for c in KEY),
  "html hexadecimal": "".join(f"&#x{ord(c):X};" for c in KEY),
  "hexadecimal": KEY.encode().hex(),
  "base64": base64_of(KEY),
  "base64, user:": base64_of(f"user:{KEY}"),
  "base64, u:": base64_of(f"u:{KEY}"),
  "base64, us:, and more": base64_of(f"us:{KEY} and more"),
  "base64 for urls": base64.urlsafe_b64encode(f"a?>{KEY}".encode()).decode(),
  "two lines": f"{KEY[:11]}\n  {KEY[11:]}",
  "two lines, escaped": f"{KEY[:11]}\\r\\n{KEY[11:]}",
  "a character a line": "\n".join(KEY),
  "zero width": "\u200b".join(KEY),
  "utf-16": "\0".join(KEY),
  "first half": KEY[:13],
  "last half": KEY[12:],
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_secret_is_removed_in_every_spelling_and_the_rest_stays(spelling):
  found = redaction.shown(f"before {spelling} after", KEY)
  assert found.startswith("before ") and found.endswith(" after")
  assert "***" in found and len(found) < 40
  of_key = {KEY[i : i + 8].lower() for i in range(len(KEY) - 7)}
  assert not [part for part in of_key if part in found.lower()]


def test_a_secret_that_looks_escaped_is_removed():
  for key in ("%41%42%43-abcdefgh", "a\\nb\\nc-abcdefgh", "&amp;&amp;-abcdefgh"):
    assert redaction.without(f"key {key}!", key) == "key ***!"


@pytest.mark.parametrize("secret", [None, "", "x" * 40, "another-secret-of-some-length"])
def test_other_text_stays_as_it_is(secret):
  text = "out of memory at 100% of 80 GB: C:\\new\\table & more, é 名 \U0001f600"
  assert redaction.without(text, secret) == text == redaction.shown(text, secret)


def test_a_short_secret_is_removed_as_a_whole_only():
  assert redaction.without("abc ab bc abcabc", "abc") == "*** ab bc ***"


def test_a_secret_across_the_end_of_what_is_shown_leaves_nothing_behind():
  for before in range(480, 500):
    found = redaction.shown("." * before + f" {KEY} {KEY}", KEY)
    assert len(found) <= redaction.SHOWN_CHARS + 4 and KEY[:6] not in found


@pytest.mark.parametrize(
  "hostile",
  [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "\x00\x08\x7f",
    "\u202eevil\u2066",
    "\u200f\u061c",
    "\u2028\u2029\x85\x0b\x0c",
    "\ufeff\U000e0041",
    "\ud800",
  ],
)
def test_what_a_terminal_would_obey_is_shown_as_characters(hostile):
  found = redaction.shown(f"a{hostile}b")
  assert found.isprintable() and "\\" in found
  assert found.startswith("a") and found.endswith("b")
  assert redaction.shown(f"a{hostile}b".encode("utf-8", "replace")).isprintable()


def test_an_endless_text_is_one_short_line():
  found = redaction.shown("word \n" * 1_000_000, KEY)
  assert len(found) == redaction.SHOWN_CHARS + 4 and "\n" not in found
  assert len(redaction.shown(b"\xff" * 1_000_000)) == redaction.SHOWN_CHARS + 4


@pytest.mark.parametrize("key", ["", "a b", "abc\ndef", "schlüssel", "\x1b[0m"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(key):
  with pytest.raises(ValueError, match="NAME: a key needs visible ASCII") as caught:
    redaction.check_secret(key, "NAME")
  assert not key or key not in str(caught.value)
