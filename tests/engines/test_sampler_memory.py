"""How many rows of the sampler fit, by arithmetic."""

import dataclasses

import jax
import pytest
from grpo_kernels.implementations import Chip

from grpo_jax.engines import (
  kv_cache,
  row_cache,
  sampler_inputs,
  sampler_memory,
  sampler_sizes,
)
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.models.config import LayerKind, ModelConfig
from grpo_jax.models.products import Products

MODEL = ModelConfig("llama", 512, 64, 96, 4, 8, 4, 16)
LENGTHS = {"prompt_tokens": 200, "completion_tokens": 300, "group_size": 8, "own_prompts": False}


def part(**options):
  return sampler_memory.SamplerPart(MODEL, Products("bfloat16"), LENGTHS, **options)


def bytes_of(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


SLIDING = dataclasses.replace(
  MODEL, layer_kinds=(LayerKind(100), LayerKind(70), LayerKind(), LayerKind(5000))
)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("model", [MODEL, SLIDING], ids=["alike", "windows"])
def test_caches_take_what_the_arrays_of_the_planned_sizes_take(model, cache_dtype):
  settings = {"cache_dtype": cache_dtype}
  part = lambda **devices: sampler_memory.SamplerPart(
    model, Products("bfloat16"), LENGTHS, **devices, **settings
  )
  options = sampler_inputs.ProgramOptions(model, Products("bfloat16"), chunk=1, **settings)
  sizes = sampler_sizes.planned(
    128,
    prompt_tokens=200,
    completion_tokens=300,
    long_prompts=16,
    token_bytes=kv_cache.token_bytes(options),
    form="rows",
  )
  empty = lambda: (
    row_cache.empty(sizes.blocks, sizes.rows, sizes.columns, options),
    kv_cache.empty_pages(tuple(pool.count for pool in sizes.pools(model)), sizes.page, options),
  )
  found = part().of(128, whole_caches=True)
  assert found.caches == bytes_of(jax.eval_shape(empty))
  assert part(heads=2).of(128, whole_caches=True).caches == found.caches // 2
  apart = part(rows=4)
  assert apart.of(128, whole_caches=True).caches < found.caches  # pages lie on every device.
  assert apart.of(127, whole_caches=True).caches > apart.of(128, whole_caches=True).caches


def test_codes_leave_room_for_more_rows():
  most = lambda **settings: sampler_memory.most_rows(part(**settings), 1024, 1 << 27)
  own, codes = most(), most(cache_dtype="int8")
  assert codes.count == 2 * own.count
  # Of each 16 codes of a head there are 4 bytes of a scale; a program's float32 are as many.
  one, other = (part(cache_dtype=name).of(64, whole_caches=True) for name in (None, "int8"))
  assert other.caches * 32 == one.caches * 20


@pytest.mark.parametrize("wanted", [5, 64, 500, 512])
def test_all_rows_that_are_wanted_if_they_fit_else_a_power_of_two(wanted):
  needs = lambda rows: rows.caches + rows.program
  best = sampler_memory.most_rows(part(), wanted, 1 << 50)
  assert best.count == wanted and best.whole_caches == (wanted > USUAL_ROWS)
  if wanted < 8:
    return
  fewer = sampler_memory.most_rows(part(), wanted, needs(best) - 1)
  assert fewer.count == 1 << ((wanted - 1).bit_length() - 1) and needs(fewer) < needs(best)
  assert sampler_memory.most_rows(part(), wanted, 0).count == 8


def test_the_longest_completion_that_four_gib_hold_counts_windows():
  longest = 7 * 9 << 14  # a multiple of both answers.
  limits = {"prompt_tokens": 30, "completion_tokens": longest, "long_prompts": 64, "form": "rows"}
  columns = lambda sizes: sampler_sizes.planned(64, **limits, token_bytes=sizes).columns
  room = (4 << 30) // 64
  assert columns({None: 1 << 12}) == room >> 12
  assert columns({None: 1 << 12, 1024: 7 << 12}) == (room >> 12) - 7 * 1024
  assert columns({1024: 8 << 12}) == longest


QWEN = ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128)  # 28 KiB a token.
LONG = {"prompt_tokens": 1024, "completion_tokens": 31744, "long_prompts": 4, "form": "rows"}


def levels_of(gib):
  """Returns rows and columns of the caches that 64 rows of up to 31,744 tokens grow to."""
  options = sampler_inputs.ProgramOptions(QWEN, Products("bfloat16"), chunk=16)
  room = None if gib is None else int(gib * 2**30)
  settings = {**LONG, "token_bytes": kv_cache.token_bytes(options), "sampled_bytes": room}
  levels = sampler_sizes.planned(64, **settings).within(options).levels(options)
  assert all(level.rows == 64 for level in levels)
  return [(x.rows_of(x.blocks, options), x.blocks * x.columns) for x in levels]


def test_a_cache_grows_to_the_longest_completion_and_no_further():
  whole = [(64, 1984 * n) for n in (1, 2, 4, 8, 16)]  # 31,744 is 16 times 1984.
  assert levels_of(None) == whole and levels_of(54.25) == whole
  assert levels_of(28.5) == [*whole[:4], (33, 31744)]
  least = levels_of(0.5)
  assert least[:2] == [(64, 256), (36, 512)] and least[-1] == (1, 18688)  # longer ones are refused.


@pytest.mark.parametrize(
  ("chip", "copies"),
  [("gpu 9.0", 0), ("gpu 8.0", 0), ("gpu 12.0", 0), ("gpu 7.5", 1), ("tpu ", 1), ("cpu ", 1)],
)
def test_only_gpus_with_bfloat16_units_write_into_the_cache_in_place(chip, copies):
  """tests/kernels/test_programs_for_devices.py compiles it."""
  platform, _, capability = chip.partition(" ")
  found = sampler_memory.copies_cache(Chip(platform, "", capability))
  apart = part(copies_cache=False).of(64, whole_caches=True)
  counted = part(copies_cache=found).of(64, whole_caches=True)
  columns = row_cache.held_columns(320, None)
  own = 64 * columns * sum(kv_cache.token_bytes(part()._options).values())
  # In place, a row of each layer is apart while it moves.
  assert counted.program - apart.program == copies * (own - own // 64)
  assert counted.caches == apart.caches
  logits = 6 * 4 * 64 * MODEL.vocab_size
  assert apart.program >= logits + own // 64


def test_whole_caches_are_not_bounded_by_four_gib():
  limits = {"prompt_tokens": 3000, "completion_tokens": 5000, "long_prompts": 64}
  settings = {**limits, "token_bytes": {None: 46080}, "form": "rows"}
  whole = sampler_sizes.planned(512, **settings, whole_caches=True)
  assert whole.blocks * whole.columns >= 5000 and whole.pages == 64 * whole.table
  bounded = sampler_sizes.planned(512, **settings)
  assert bounded.blocks * bounded.columns < 5000 and bounded.pages < whole.pages


def test_the_memory_of_sampled_tokens_is_what_caches_and_programs_leave():
  """Of caches that begin with all rows, and end with the longest completions in fewer of them."""
  longest = {**LENGTHS, "completion_tokens": 1 << 15}
  wide = sampler_memory.SamplerPart(dataclasses.replace(MODEL, head_dim=1024), Products(), longest)
  of_row = kv_cache.row_bytes(1 << 15, wide._options)
  most = lambda room, part=wide: part.most_sampled(64, room, whole_caches=False) * 2**30
  found = [most(room << 30) for room in (1, 40, 80, 1 << 20)]
  # One row at least; all rows at most. Between them, a program needs about as much as the cache.
  assert 0 <= found[0] - of_row < 2**26 and 0 <= found[3] - 64 * of_row < 2**26
  assert found[0] < found[1] < found[2] < found[3] and found[1] < 20 << 30
  planned = wide._planned(64, whole_caches=False)
  rows = int(found[1]) // of_row
  taken = lambda rows: sum(wide._taken(rows, 1 << 15, planned, has_reserve=True))
  fits = lambda rows: taken(rows) <= 40 << 30
  assert fits(rows) and not fits(2 * rows + 2)
  # Where there is room for one row and not for two, it is one.
  both = taken(2)
  assert most(both - 1) < 2 * of_row
  halved = dataclasses.replace(wide, rows=2)
  assert abs(most(40 << 30, halved) - found[1]) < 1 << 30  # of each device, with half of the rows.
