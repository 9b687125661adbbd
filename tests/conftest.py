"""Settings of the whole suite: eight CPU devices, exact matmuls, no silent broadcasting."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

from tests import mappings, quick_compilation
from tests.own_process import Process, noticing, only_device

# Tests of the real model start processes without these flags: what users run is optimised.
os.environ.setdefault("XLA_FLAGS", quick_compilation.FLAGS)

# A shell that starts a suite in the background has it ignore SIGINT, and so would the processes
# that tests start, wait for and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)

# What one test compiled, others do not compile again: neither in the workers of `pytest -n` nor in
# processes that tests start. All inherit the folder from the first process, which removes it unless
# the gate keeps it for another part.
if "PYTEST_XDIST_WORKER" not in os.environ:
  CACHE = os.environ.get("GRPO_JAX_TEST_PROGRAMS")
  if not CACHE:
    CACHE = tempfile.mkdtemp(prefix="xla-cache-")
    atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
  os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
  os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(4 << 30)  # JAX locks a limited cache only.
  os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
  os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax
import pytest

# Collections, which go through all that JAX keeps, took 50 of 670 s in tests of four folders.
gc.set_threshold(20_000, 20, 20)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
  """Forgets the programs of earlier modules before this process has too many mappings."""
  result = yield
  if nextitem is None or nextitem.path != item.path:
    mappings.forget_programs()
  return result


@pytest.fixture(scope="session")
def own_process(tmp_path_factory):
  """Calls functions of a test module in a process of its own: all that signals is called there."""
  process = Process(tmp_path_factory.mktemp("own_process") / "log")
  yield process
  process.close()


@pytest.fixture(scope="module")
def one_device():
  """One device of the eight: a run takes all there are."""
  with only_device():
    yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """The folder of a tiny Llama."""
  from grpo_jax.models import tiny  # only now: what is set above comes first.

  return tiny.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def small_heap():
  """What exists already is left out of collections, which take a second with all of JAX in them."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()


@pytest.fixture
def noticed():
  """The lines that the package logs during the test, notices included."""
  with noticing() as lines:
    yield lines
