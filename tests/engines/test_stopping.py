"""Where a completion ends, and the shapes in which completions are computed."""

import numpy as np
import pytest

from grpo_jax.engines import scheduling, stopping
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.prompt_pages import Pool
from grpo_jax.types import FinishReason
from tests.engines import tiny

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


@pytest.mark.parametrize(
  ("max_rows", "sizes"),
  [(1, (1,)), (8, (8,)), (12, (8, 12)), (32, (8, 16, 32)), (64, (8, 24, 64)), (256, (8, 48, 256))],
)
def test_there_are_at_most_three_row_counts_up_to_the_limit(max_rows, sizes):
  assert scheduling.row_counts(max_rows) == sizes
  assert scheduling.fitting(max_rows, sizes) == max_rows


def test_prompts_are_cut_into_chunks_and_only_the_last_is_padded():
  slots = [((0, 1), 6), ((4,), 3), ((2,), 1)]
  slots = [scheduling.Slot((pages,), length) for pages, length in slots]
  prompts = [(np.arange(10 * i, 10 * i + slot.length), slot) for i, slot in enumerate(slots)]
  pools = [Pool(None, table=3, page=4, count=9)]
  chunks = [*scheduling.make_chunks(prompts, tokens=4, pools=pools)]
  of = lambda name: [getattr(chunk, name).tolist() for chunk in chunks]
  assert of("tokens") == [[0, 1, 2, 3], [4, 5, 10, 11], [12, 20, 0, 0]]
  assert of("segment_ids") == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 0, 0]]
  assert of("positions") == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 0, 0, 0]]
  pages = [chunk.pages[0].tolist() for chunk in chunks]
  assert pages == [[0, 0, 0, 0], [1, 1, 4, 4], [4, 2, 9, 9]]
  past = [chunk.past_pages[0] for chunk in chunks]
  assert [tables.pages.tolist() for tables in past] == [[0, 0, 0], [0, 0, 0], [4, 0, 0]]
  assert {tables.starts for tables in past} == {None}
  assert of("past") == [0, 4, 2]


def test_rows_of_one_prompt_form_tiles_and_others_do_not():
  slots = {b"a": scheduling.Slot(((3,),), 1), b"b": scheduling.Slot(((5,),), 1)}
  active = [
    scheduling.RunningCompletion(tiny.request(row, [1, 2]), None, key.encode(), row=row)
    for row, key in enumerate("abaabaa")
  ]
  pools = [Pool(None, table=1)]
  tiles = scheduling.make_rows(active, 8, slots, group=4, pools=pools).prompts[0].shared
  # Of the five rows of "a" four fill a tile; the fifth is alone; "b" has two.
  assert tiles.places.tolist() == [0, 4, 1, 2, 5, 3, -1, -1]
  assert tiles.rows[:2].tolist() == [[0, 2, 3, 5], [1, 4, 0, 0]]
  assert tiles.pages[:2, 0].tolist() == [3, 5] and tiles.lengths.tolist() == [1, 1, 0, 0]
  alone = scheduling.make_rows(active, 8, slots, group=1, pools=pools).prompts[0]
  assert alone.shared.places.tolist() == [-1] * 8


def test_a_longer_ring_holds_every_block_of_the_shorter_at_its_step():
  for newest in range(12):
    places = scheduling.regrown(2, 8, newest)
    for number in range(max(newest - 1, 0), newest + 1):
      assert places[number % 8] == number % 2


def test_leave_at_leaves_when_rows_can_be_refilled_or_compacted():
  sizes = (8, 16, 32)
  assert scheduling.leave_at(32, 32, sizes, is_waiting=True) == 28
  assert scheduling.leave_at(1, 32, sizes, is_waiting=True) == 0
  assert scheduling.leave_at(30, 32, sizes, is_waiting=False) == 16
  assert scheduling.leave_at(16, 16, sizes, is_waiting=False) == 8
  assert scheduling.leave_at(7, 8, sizes, is_waiting=False) == 0
