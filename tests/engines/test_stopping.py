"""Where a completion ends, and the shapes in which completions are computed."""

import pytest

from grpo_jax.engines import scheduling, stopping
from grpo_jax.engines.base import SamplingParams
from grpo_jax.types import FinishReason

# Bytes as tokens: "é" is two of them, and alone neither is a character.
decode = lambda ids: bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
  ("text", "seen", "strings", "wanted"),
  [
    ("12\n\nand", 0, ("\n\n",), (4, "\n\n")),
    ("12\n\nand", 3, ("\n\n",), (4, "\n\n")),  # begins in what was seen, ends in what is new.
    ("12\n\nand", 4, ("nd",), (7, "nd")),
    ("abcab", 0, ("ab", "abc"), (2, "ab")),  # the first to be complete.
    ("xabc", 0, ("abc", "bc"), (4, "abc")),  # both with one token: the first of the list.
    ("café.", 0, ("é",), (5, "é")),
    ("caf", 0, ("é",), None),
    ("none", 0, (), None),
  ],
)
def test_find_stop_string_gives_the_token_that_completes_the_first(text, seen, strings, wanted):
  assert stopping.find_stop_string(list(text.encode()), seen, strings, decode) == wanted


def test_check_prefers_the_string_that_is_complete_before_the_stop_id():
  sampling = SamplingParams(max_tokens=9, stop_ids=(10,), stop_strings=("b",))
  ids = list(b"abc\n")
  assert stopping.check(ids, 0, sampling, decode) == (2, FinishReason.STOP, "b")
  assert stopping.check(list(b"acd\n"), 2, sampling, decode) == (4, FinishReason.STOP, 10)
  sampling = SamplingParams(max_tokens=9, stop_ids=(10,), stop_strings=("\n",))
  assert stopping.check(ids, 0, sampling, decode) == (4, FinishReason.STOP, 10)


def test_check_calls_a_stop_at_the_limit_a_stop_and_the_rest_truncated():
  sampling = SamplingParams(max_tokens=3, stop_ids=(10,), stop_strings=("c",))
  assert stopping.check(list(b"ab\n"), 0, sampling, decode) == (3, FinishReason.STOP, 10)
  assert stopping.check(list(b"abc"), 2, sampling, decode) == (3, FinishReason.STOP, "c")
  assert stopping.check(list(b"abd"), 2, sampling, decode) == (3, FinishReason.LENGTH, None)
  assert stopping.check(list(b"ab"), 0, sampling, decode) == (2, None, None)


def test_prefill_lengths_are_few_and_waste_at_most_a_quarter_above_sixteen():
  lengths = {n: scheduling.prefill_length(n) for n in range(1, 5000)}
  assert all(n <= length <= max(1.25 * n + 4, 16) for n, length in lengths.items())
  assert len(set(lengths.values())) < 40


@pytest.mark.parametrize(
  ("max_rows", "sizes"), [(1, (1,)), (8, (8,)), (12, (8, 12)), (64, (8, 16, 32, 64))]
)
def test_row_counts_double_up_to_the_limit(max_rows, sizes):
  assert scheduling.row_counts(max_rows) == sizes
  assert scheduling.fitting(max_rows, sizes) == max_rows


def test_leave_at_leaves_when_rows_can_be_refilled_or_compacted():
  sizes = (8, 16, 32)
  assert scheduling.leave_at(32, 32, sizes, is_waiting=True) == 28
  assert scheduling.leave_at(1, 32, sizes, is_waiting=True) == 0
  assert scheduling.leave_at(30, 32, sizes, is_waiting=False) == 16
  assert scheduling.leave_at(16, 16, sizes, is_waiting=False) == 8
  assert scheduling.leave_at(7, 8, sizes, is_waiting=False) == 0
