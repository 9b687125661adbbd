"""JSON text that is broken in every way is a ValueError, whatever Python's reader raises."""

import pytest

from grpo_jax.values import json_text
from grpo_jax.values.json_text import MAX_DEPTH, parsed, parsed_object


def refused(text, **options):
  try:
    parsed(text, **options)
  except ValueError:
    return True
  return False


def test_what_is_not_json_is_a_value_error():
  broken = [
    "[" * 100_000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    "1" * 5000,
    "",
    "{",
    b"\xff",
    '{"a": 1}'.encode("utf-16"),
    b'"\xed\xa0\x80"',  # half a surrogate pair, which json.loads takes.
    bytes(range(256)),
  ]
  assert [text[:20] for text in broken if not refused(text)] == []


def test_the_depth_is_bounded_for_code_that_walks_through_values():
  nested = lambda depth: "[" * depth + "]" * depth
  assert not refused(nested(MAX_DEPTH)) and refused(nested(MAX_DEPTH + 1))
  assert refused('{"a": {}, "b": ' + nested(MAX_DEPTH) + "}")
  assert len(parsed(f"[{', '.join(['[0]'] * 1000)}]")) == 1000  # many, not deep.


def test_strict_text_has_only_what_this_package_writes():
  lenient = ["NaN", "-Infinity", "1e400", "[1" + "0" * 400 + "]", '"\\ud800"', '{"\\uD800": 1}']
  assert [text for text in lenient if refused(text)] == []
  assert [text for text in lenient if not refused(text, is_strict=True)] == []
  assert parsed('["\\ud83d\\ude00", 1e308, null]', is_strict=True) == ["\U0001f600", 1e308, None]


def test_text_begins_with_a_byte_order_mark_or_not():
  assert parsed(b'\xef\xbb\xbf{"a": 1}') == parsed(b'{"a": 1}') == {"a": 1}


def test_another_value_than_an_object_is_named():
  with pytest.raises(ValueError, match=r"it must be an object, but is \[1\]"):
    parsed_object("[1]")
  assert parsed_object('{"a": NaN}').keys() == {"a"}


def test_the_errors_of_data_in_another_form_are_all_of_them():
  def read(value):
    return int(value["a"][0]["b"].strip())

  for value in ({}, {"a": []}, {"a": 1}, {"a": [{"b": 1}]}, {"a": [{"b": "x"}]}, None):
    with pytest.raises(json_text.UNEXPECTED):
      read(value)
  with pytest.raises(json_text.UNEXPECTED):
    int(float("inf"))
