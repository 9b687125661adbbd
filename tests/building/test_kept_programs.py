"""Every process of a run keeps its compiled programs, by a private name of JAX."""

import inspect

import jax
import pytest
from jax._src import compiler, distributed
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax.building import kept_programs

HINT = (
  f"jax {jax.__version__} has changed what grpo_jax/building/kept_programs.py replaces so that"
  " processes other than the main one write to their caches, too: "
)


def test_jax_has_the_private_name():
  found = getattr(compiler, "distributed", None)
  assert found is distributed, f"{HINT}jax._src.compiler.distributed is {found}"
  used = "distributed.global_state.process_id != 0"
  source = inspect.getsource(compiler._cache_write)
  assert used in source, f"{HINT}jax._src.compiler._cache_write does not ask for `{used}`"


@pytest.fixture
def cache(tmp_path, monkeypatch):
  """The folder of an empty cache of process 1, in which all programs are kept."""
  monkeypatch.setattr(distributed.global_state, "process_id", 1)
  monkeypatch.setattr(compiler, "distributed", compiler.distributed)  # put back afterwards.
  options = {
    "jax_compilation_cache_dir": str(tmp_path),
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: jax.config.values[name] for name in options}

  def use(values):
    for name, value in values.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()

  use(options)
  yield tmp_path
  use(before)


def test_another_process_than_the_main_one_keeps_its_programs(cache):
  jax.jit(lambda x: x * 3 + 1)(2.0)
  assert not list(cache.glob("*-cache")), "JAX keeps them by itself now"
  kept_programs._keep_on_every_process()
  jax.jit(lambda x: x * 5 - 1)(2.0)
  assert list(cache.glob("*-cache")), f"{HINT}nothing was written"


def test_xla_keeps_what_it_found_about_kernels_beside_the_programs(cache):
  kept_programs._keep_on_every_process()
  options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
  debug = options.executable_build_options.debug_options
  # docs/compiling.md names this folder. Only what JAX takes for process 0 writes to it.
  assert debug.xla_gpu_per_fusion_autotune_cache_dir == str(
    cache / "xla_gpu_per_fusion_autotune_cache_dir"
  )
  assert str(debug.xla_gpu_experimental_autotune_cache_mode).endswith("UPDATE")
