"""A program that was compiled ahead serves the calls that fit it, and no other."""

import contextlib
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.compilation import compiling, programs
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.interrupts import Stopped
from grpo_jax.rl.custom_functions import CustomFunctionError


@pytest.fixture
def watch():
  made = compiling.CompilationMonitor()
  with made.listening():
    yield made


@pytest.fixture(scope="module")
def mesh():
  return Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "fsdp"))


def placed(mesh, *spec):
  return NamedSharding(mesh, PartitionSpec(*spec))


def shape(*sizes, dtype=jnp.float32, sharding=None):
  return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def scale(x, factor):
  return x * factor + 1


def names(watch):
  return [one.name for one in watch.take()]


def test_calls_that_fit_compile_nothing(watch):
  program = Program(jax.jit(scale))
  x = np.arange(5, dtype=np.float32)
  on_device = jax.device_put(x)
  program.job(shape(5), 1.0)()
  assert names(watch) == ["scale"]
  for fitting in (x, on_device):
    np.testing.assert_array_equal(program(fitting, 2.0), x * 2 + 1)
  assert names(watch) == []


@pytest.mark.parametrize(
  "arguments",
  [
    (np.zeros(6, np.float32), 2.0),
    (np.zeros(5, np.int32), 2.0),
    (np.zeros(5, np.float32), 2),
    (np.zeros(5, np.float32), np.float32(2.0)),  # NumPy's do not give way to other dtypes.
    (np.zeros((1, 5), np.float32), 2.0),
  ],
  ids=["length", "dtype", "whole_number", "numpy_number", "rank"],
)
def test_other_arguments_compile_as_ever_and_are_counted(arguments, watch):
  program = Program(jax.jit(lambda x, factor: x * factor + 3))
  program.job(shape(5), 1.0)()
  watch.take()
  wanted = arguments[0] * arguments[1] + 3
  got = program(*arguments)
  np.testing.assert_array_equal(got, wanted)
  assert got.dtype == jax.jit(lambda x, factor: x * factor + 3)(*arguments).dtype
  assert len(names(watch)) >= 1


def test_shardings_that_lie_alike_fit_and_others_do_not(mesh, watch):
  program = Program(jax.jit(lambda x: x * 5 + 1))
  program.job(shape(8, 4, sharding=placed(mesh, "data")))()
  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  alike, other = (jax.device_put(x, placed(mesh, *spec)) for spec in (("data", None), ("fsdp",)))
  watch.take()
  np.testing.assert_array_equal(program(alike), x * 5 + 1)
  np.testing.assert_array_equal(program(x), x * 5 + 1)  # is put where it belongs.
  assert names(watch) == []
  np.testing.assert_array_equal(program(other), x * 5 + 1)
  assert len(names(watch)) == 1


def test_arguments_of_one_shape_may_be_compiled_for_in_several_places(mesh, watch):
  program = Program(jax.jit(lambda x: x * 6 + 1))
  x = np.arange(32, dtype=np.float32).reshape(8, 4)
  places = [placed(mesh, "data"), placed(mesh, "fsdp")]
  for place in places:
    program.job(shape(8, 4, sharding=place))()
  arrays = [jax.device_put(x, place) for place in places]
  watch.take()
  for array in arrays:
    np.testing.assert_array_equal(program(array), x * 6 + 1)
  assert names(watch) == []


def test_donated_and_static_arguments_keep_their_meaning(mesh, watch):
  @functools.partial(jax.jit, static_argnames="times", donate_argnames="x")
  def repeated(x, times):
    return x * times

  program = Program(repeated, static=["times"])
  whole = placed(mesh)
  program.job(shape(8, sharding=whole), times=3)()
  x = jax.device_put(np.ones(8, np.float32), whole)
  watch.take()
  assert program(x, times=3).tolist() == [3.0] * 8
  assert x.is_deleted() and names(watch) == []
  again = jax.device_put(np.ones(8, np.float32), whole)
  assert program(again, times=4).tolist() == [4.0] * 8
  assert names(watch) == ["repeated"]


def test_what_one_program_returns_fits_the_next(mesh, watch):
  """The state of an update goes round and round."""
  by_row = placed(mesh, "data")
  program = Program(jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0))
  tree = {name: shape(8, 2, sharding=by_row) for name in ("m", "v")}
  program.job(tree)()
  state = {name: jax.device_put(np.zeros((8, 2), np.float32), by_row) for name in tree}
  watch.take()
  for _ in range(3):
    state = program(state)
  assert names(watch) == [] and state["m"].sum() == 48


def test_a_program_within_another_is_part_of_it():
  program = Program(jax.jit(lambda x: x * 7))
  program.job(shape(3))()
  np.testing.assert_array_equal(jax.jit(lambda x: program(x) + 1)(jnp.ones(3)), [8, 8, 8])


def test_jobs_run_in_threads_and_are_counted_by_name(watch, noticed):
  program = Program(jax.jit(lambda x: jnp.sin(x) * 11), name="update")
  jobs = [program.job(shape(1, n), detail=f"1 × {n}") for n in (3, 4, 5)]
  with compiling.BackgroundCompiler(jobs, watch, threads=2) as ahead:
    ahead.wait(silent)
  done = watch.take()
  assert {one.job for one in done} == {"update 1 × 3", "update 1 × 4", "update 1 × 5"}
  assert len(noticed) == 1 and noticed[0].startswith("programs: 0 of ")
  for n in (3, 4, 5):
    program(np.ones((1, n), np.float32))
  assert watch.take() == []


def test_programs_are_lowered_one_after_another_and_compiled_side_by_side(watch):
  """XLA needs no Python: while it compiles one program, the next one is lowered."""
  lowering, most, both = [], [], threading.Barrier(2, timeout=60)

  class Lowered:
    def compile(self):
      both.wait()  # two are compiled at the same time, or this fails.

  class Jitted:
    __name__ = "slow"

    def lower(self, *_):
      lowering.append(None)
      most.append(len(lowering))
      time.sleep(0.02)
      lowering.pop()
      return Lowered()

  program = Program(Jitted())
  jobs = [program.job(shape(n), detail=str(n)) for n in (1, 2, 3, 4)]
  with compiling.BackgroundCompiler(jobs, watch, threads=4) as ahead:
    ahead.wait(silent)
  assert most == [1] * 4


def silent(description, total):
  return contextlib.nullcontext(lambda count=1: None)


def test_an_error_names_the_program_and_its_shapes(watch):
  def wrong(x):
    raise ValueError("rows must be even")

  job = Program(jax.jit(wrong), name="score").job(shape(3), detail="3 × 128")
  with pytest.raises(programs.CompilationError, match="compiling score 3 × 128 failed.*even"):
    with compiling.BackgroundCompiler([job], watch) as ahead:
      ahead.wait(silent)


def test_a_failure_of_user_code_keeps_its_own_message():
  def run():
    raise CustomFunctionError("loss my_paper.loss must return an array [8, 8]")

  with pytest.raises(CustomFunctionError, match="^loss my_paper"):
    CompileJob("update 8 × 8", run)()


def test_a_lack_of_memory_says_what_to_lower():
  def run():
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm")

  job = CompileJob("update 8 × 4096", run, remedy="lower batching.microbatch_tokens")
  with pytest.raises(programs.OutOfMemory, match="update 8 × 4096.*lower batching.microbatch_tok"):
    job()


def test_a_stop_ends_the_wait_at_once_and_what_has_not_begun_is_given_up(watch):
  gate, ran = threading.Event(), []
  jobs = [CompileJob("a", gate.wait)] + [CompileJob("b", lambda: ran.append(1)) for _ in range(3)]
  with pytest.raises(Stopped), compiling.BackgroundCompiler(jobs, watch, threads=1) as ahead:
    ahead.wait(silent, stop=True)
  gate.set()
  ahead._pool.shutdown()
  assert ran == []
