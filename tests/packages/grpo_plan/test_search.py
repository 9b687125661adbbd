"""The search of what fits, on memory that is a known function."""

from grpo_plan import search
from grpo_plan.search import Point


def machine(fixed, place, *, refused_from=None):
  """Returns a function that measures, and the list of what it measured."""
  asked = []

  def measure(rows, row_tokens):
    places = rows * row_tokens
    asked.append((rows, row_tokens))
    is_refused = refused_from is not None and places >= refused_from
    return Point(rows, row_tokens, fixed + place * places, is_refused)

  return measure, asked


def test_largest_microbatch_is_found_by_a_line_and_verified():
  measure, asked = machine(1000, 1)
  limit = search.largest_microbatch(measure, 21_000, start=measure(3, 1000), most_rows=100)
  assert limit.point is not None
  assert (limit.point.rows, limit.is_capped) == (20, False)
  assert (20, 1000) in asked and len(asked) <= 6


def test_more_rows_than_a_step_has_are_not_tried():
  measure, asked = machine(0, 1)
  limit = search.largest_microbatch(measure, 10**9, start=measure(3, 1000), most_rows=7)
  assert limit.point is not None
  assert (limit.point.rows, limit.is_capped) == (7, True)
  assert max(rows for rows, _ in asked) == 7


def test_a_start_that_does_not_fit_is_lowered():
  measure, _ = machine(500, 1)
  limit = search.largest_microbatch(measure, 4_600, start=measure(9, 1000), most_rows=50)
  assert limit.point is not None
  assert limit.too_large is not None
  assert (limit.point.rows, limit.too_large.rows) == (4, 5)


def test_nothing_fits():
  measure, _ = machine(10_000, 1)
  limit = search.largest_microbatch(measure, 5_000, start=measure(3, 1000), most_rows=50)
  assert limit.point is None


def test_what_the_compiler_refuses_does_not_fit_whatever_its_bytes():
  measure, _ = machine(0, 1, refused_from=9_000)
  limit = search.largest_microbatch(measure, 10**9, start=measure(3, 1000), most_rows=100)
  assert limit.point is not None
  assert limit.point.places < 9_000


def test_longest_row_is_a_multiple_and_stays_in_the_context():
  measure, _ = machine(0, 1)
  start = measure(1, 2304)
  limit = search.longest_row(measure, 10_000, start=start, per_place=1.0, most_tokens=32768)
  assert limit.point is not None
  assert limit.point.row_tokens == 9984  # the largest multiple of 256.
  limit = search.longest_row(measure, 10**9, start=start, per_place=1.0, most_tokens=4096)
  assert limit.point is not None
  assert (limit.point.row_tokens, limit.is_capped) == (4096, True)
