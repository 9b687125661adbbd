"""A device that has less memory than was counted for the sampler."""

import contextlib
import logging

import jax
import numpy as np
import pytest

from grpo_jax.engines import sampler_programs
from tests.engines import test_preemption, tiny

CONFIG = test_preemption.CONFIG


def nbytes(cache):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def exhausted(size):
  return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: Out of memory allocating {size} bytes.")


@contextlib.contextmanager
def memory_of(engine, room, *, growth=None, lost=()):
  """Lets programs fail where the cache of sampled tokens is too large, and count the failures.

  Args:
    engine: Sampler.
    room: Bytes of the cache with which a chunk of decode steps fails; the cache, which is donated,
      is then deleted.
    growth: Bytes of a cache and of the longer one with which growth fails, after its first layer;
      None: any number.
    lost: Calls of reading prompts that fail, by number, with their pages deleted.
  """
  failures, reads = [], 0
  programs, grow = engine._programs, sampler_programs.grow
  decode, prefill = programs.decode, programs.prefill

  def failed(kind, cache):
    failures.append(kind)
    if cache is not None:
      jax.tree.map(lambda x: x.delete(), cache)
    raise exhausted(room)

  def decodes(weights, prompts, own, *arguments, **named):
    if nbytes(own) > room:
      failed("decode", own)
    return decode(weights, prompts, own, *arguments, **named)

  def reading(weights, pages, *arguments, **named):
    nonlocal reads
    reads += 1
    if reads - 1 in lost:
      failed("prefill", pages)
    return prefill(weights, pages, *arguments, **named)

  def grows(own, *arguments):
    before = own[1:]
    grow(own, *arguments)
    if growth is not None and nbytes(before) + nbytes(own) > growth:
      own[1:] = before
      failed("grow", None)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(programs, "decode", decodes)
    patch.setattr(programs, "prefill", reading)
    patch.setattr(sampler_programs, "grow", grows)
    yield failures


@pytest.mark.parametrize("form", ["ring", "rows"])
@pytest.mark.long
def test_a_step_continues_with_less_memory_and_samples_the_same(form, caplog):
  requests, settings = test_preemption.requests_of(70, 110), {"form": form, "record_experts": True}
  sizes = {"max_rows": 9, "group_size": 3}
  with tiny.sampler(CONFIG, **sizes, **settings) as engine:
    wanted = tiny.run(engine, requests)
  sizes |= {"prompt_tokens": 80, "completion_tokens": 110}
  with tiny.sampler(CONFIG, **sizes, **settings) as engine, caplog.at_level(logging.WARNING):
    room = nbytes(sampler_programs.caches(engine._options, engine._sizes)[0]) // 2
    with memory_of(engine, room, lost={1}) as failures:
      found = tiny.run(engine, requests)
      assert failures.count("prefill") == 1 and failures.count("decode") >= 2
      assert engine._sizes.sampled_bytes is not None and engine.stats.preemptions > 0
      before = failures.copy()
      again = tiny.run(engine, requests)
      assert failures == before  # what was found is kept.
    assert "the sampler's memory ended" in caplog.text and "GiB for keys and values" in caplog.text
  for name, generation in wanted.items():
    for same in (found[name], again[name]):
      assert same.token_ids.tolist() == generation.token_ids.tolist()
      np.testing.assert_allclose(same.logprobs, generation.logprobs, atol=2e-5)
      np.testing.assert_array_equal(same.prompt_experts, generation.prompt_experts)
      np.testing.assert_array_equal(same.experts, generation.experts)


@pytest.mark.long
def test_a_cache_that_cannot_grow_beside_the_old_one_replaces_it():
  config = tiny.config()
  requests = test_preemption.requests_of(100, 140)
  with tiny.sampler(config, max_rows=9, group_size=3) as engine:
    wanted = tiny.run(engine, requests)
  with tiny.sampler(config, max_rows=9, group_size=3) as engine:
    with memory_of(engine, 1 << 40, growth=1) as failures:
      found = tiny.run(engine, requests)
    assert failures and set(failures) == {"grow"} and engine._sizes.sampled_bytes is None
  for name, generation in wanted.items():
    assert found[name].token_ids.tolist() == generation.token_ids.tolist()
    np.testing.assert_allclose(found[name].logprobs, generation.logprobs, atol=2e-5)


def test_an_error_says_so_where_one_row_of_the_longest_does_not_fit():
  config = tiny.config(num_layers=1)
  with tiny.sampler(config, max_rows=2) as engine:
    with memory_of(engine, 0), pytest.raises(Exception, match="RESOURCE_EXHAUSTED"):
      tiny.run(engine, [tiny.request("x", [1, 2])])
    assert len(tiny.run(engine, [tiny.request("y", [1, 2])])) == 1  # the engine is usable.
