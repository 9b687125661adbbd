"""Keeps compiled programs between runs."""

import logging
import math
import os
import tempfile
import types
from typing import Any

import jax

from grpo_jax import processes
from grpo_jax.files import shared_places
from grpo_jax.models import sources

_log = logging.getLogger(__name__)


def keep() -> None:
  """Keeps compiled programs in the user's cache, so that a resumed run starts at once.

  JAX_COMPILATION_CACHE_DIR names another folder. Programs are code that runs as this user, so a
  folder that other users can write is not used. All programs are kept unless a variable of JAX says
  otherwise; by default JAX keeps only those that take over a second to compile.
  """
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  named = jax.config.values["jax_compilation_cache_dir"]
  if named is not None and "://" in named:
    return  # a bucket, whose errors JAX reports.
  try:
    if named is None:
      named = str(shared_places.private_folder(sources.default_cache() / "xla"))
      jax.config.update("jax_compilation_cache_dir", named)
    os.makedirs(named, exist_ok=True)
    tempfile.TemporaryFile(dir=named).close()
    if not processes.is_main():
      _keep_on_every_process()
  except OSError as error:
    _log.warning("compiled programs are not kept: %s", error)
    # Existing programs can still be read. JAX would warn about every program that it cannot write.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    if named is not None and not os.path.isdir(named):
      jax.config.update("jax_compilation_cache_dir", None)


def _keep_on_every_process() -> None:
  """Has this process keep its programs, too; JAX lets only process 0 of a run write to its cache.

  Hosts with caches of their own, and processes whose programs have keys of their own, would compile
  everything at every start while the main process reads its programs in seconds.
  """
  if jax.config.values["jax_share_binary_between_hosts"]:
    return  # then JAX sends the programs of the first process to the others.
  from jax._src import compiler, distributed

  class First:
    process_id = 0

    def __getattr__(self, name: str) -> Any:
      return getattr(distributed.global_state, name)

  compiler.distributed = types.SimpleNamespace(global_state=First())  # pyright: ignore
