"""One thread and one event loop for a run: results, errors, Ctrl-C, work that does not end."""

import asyncio
import contextlib
import gc
import signal
import threading
import time

import pytest

from grpo_jax.interrupts import Stopped
from grpo_jax.rollouts.loop_thread import LoopThread
from tests.engines.processes import eventually


class Switch:
  """A stop flag that a test raises."""

  def __init__(self):
    self.is_up = False

  def __bool__(self) -> bool:
    return self.is_up


BEFORE: set[threading.Thread] = set()  # threads that earlier tests have left behind.


def rollout_threads() -> list[threading.Thread]:
  return [t for t in threading.enumerate() if t.name == "rollout" and t not in BEFORE]


@pytest.fixture
def loop():
  BEFORE.update(threading.enumerate())
  with LoopThread() as loop:
    yield loop
  eventually(lambda: rollout_threads() == [])  # one whose loop has ended may still be ending.


@pytest.fixture(autouse=True)
def nothing_pending(caplog, small_heap):
  """No task is destroyed while it is pending, and no exception is lost."""
  yield
  gc.collect()
  assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def here():
  return asyncio.get_running_loop(), threading.current_thread()


async def count_to(n, *, seen=None):
  for number in range(n):
    await asyncio.sleep(0)
    if seen is not None:
      seen.append(number)
    yield number


async def forever(log):
  log.append("began")
  try:
    await asyncio.Event().wait()
  finally:
    log.append("ended")


def await_began(log) -> None:
  deadline = time.monotonic() + 10
  while not log and time.monotonic() < deadline:
    time.sleep(0.001)
  assert log == ["began"]


@pytest.mark.long
def test_all_calls_share_one_thread_and_one_loop(loop):
  assert rollout_threads() == []  # it starts with the first call.
  places = {loop.run(here()) for _ in range(50)}
  (place,) = places
  assert place[1].name == "rollout" and rollout_threads() == [place[1]]
  loop.close()
  assert place[0].is_closed() and not place[1].is_alive()


def test_what_belongs_to_the_loop_outlives_a_call(loop):
  async def wait(event):
    async with asyncio.timeout(10):
      await event.wait()
    return "set"

  async def set_later(event):
    asyncio.get_running_loop().call_later(0.01, event.set)

  event = asyncio.Event()
  loop.run(set_later(event))
  assert loop.run(wait(event)) == "set"


def test_calls_from_several_threads_run_side_by_side(loop):
  async def meet(own, other):
    own.set()
    async with asyncio.timeout(10):
      await other.wait()
    return "met"

  one, other, results = asyncio.Event(), asyncio.Event(), []
  thread = threading.Thread(target=lambda: results.append(loop.run(meet(one, other))))
  thread.start()
  results.append(loop.run(meet(other, one)))
  thread.join()
  assert results == ["met", "met"]


@pytest.mark.parametrize("error", [ValueError("mine"), TimeoutError("its own"), SystemExit(3)])
def test_an_exception_of_the_work_is_raised_in_the_caller_and_the_next_call_works(loop, error):
  async def work():
    raise error

  async def in_a_task():
    await asyncio.gather(asyncio.create_task(work()), asyncio.sleep(0))

  async def items():
    yield 1
    await in_a_task()

  for make in (work, in_a_task):
    with pytest.raises(type(error)) as raised:
      loop.run(make())
    assert raised.value is error
  seen = []
  with pytest.raises(type(error)):
    for item in loop.iterate(items()):
      seen.append(item)
  assert seen == [1]
  assert loop.run(asyncio.sleep(0, "fine")) == "fine"


def cancelled(kind):
  """Stops two calls of a loop while they work, and asserts that their work has ended."""
  log, stop = [], Switch()
  act = (
    (lambda: setattr(stop, "is_up", True))
    if kind == "flag"
    else (lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
  )
  with LoopThread() as loop:
    for call in (
      lambda: loop.run(forever(log), stop=stop),
      lambda: list(loop.iterate(endless(log), stop=stop)),
    ):
      timer = threading.Timer(0.3, act)
      timer.start()
      with pytest.raises(Stopped if kind == "flag" else KeyboardInterrupt):
        call()
      timer.join()
      stop.is_up = False
      assert log == ["began", "ended"]
      log.clear()
    assert loop.run(asyncio.sleep(0, "fine")) == "fine"
    return len(rollout_threads())


def test_a_stop_flag_cancels_the_work_and_waits_for_its_end():
  BEFORE.update(threading.enumerate())
  assert cancelled("flag") == 1


@pytest.mark.long
def test_ctrl_c_cancels_the_work_and_waits_for_its_end(own_process):
  assert own_process(cancelled, "signal") == 1


async def endless(log):
  await forever(log)
  yield 1


def test_a_stop_flag_is_seen_while_items_come_faster_than_anybody_looks(loop):
  stop, seen = Switch(), []
  with pytest.raises(Stopped):
    for item in loop.iterate(count_to(10**9), stop=stop):
      seen.append(item)
      stop.is_up = len(seen) == 3
  assert len(seen) == 3


@pytest.mark.long
def test_work_that_blocks_the_loop_is_left_behind_and_the_next_call_gets_a_new_thread(loop):
  gate, stop = threading.Event(), Switch()
  stop.is_up = True

  async def block():
    gate.wait(20)

  began = time.monotonic()
  with pytest.raises(Stopped):
    loop.run(block(), stop=stop)
  assert time.monotonic() - began < 10
  (lost,) = rollout_threads()
  assert loop.run(here())[1] is not lost
  gate.set()
  lost.join(10)
  assert not lost.is_alive()  # once it comes back it ends, and nothing is left.


def test_work_that_refuses_to_be_cancelled_once_is_cancelled_again(loop):
  cancels, stop = [], Switch()
  stop.is_up = True

  async def stubborn():
    while len(cancels) < 2:
      try:
        await asyncio.Event().wait()
      except asyncio.CancelledError:
        cancels.append(1)

  with pytest.raises(Stopped):
    loop.run(stubborn(), stop=stop)
  assert len(cancels) == 2 and len(rollout_threads()) == 1


def test_items_come_as_they_are_made_and_the_work_continues_meanwhile(loop):
  seen: list[int] = []
  items = loop.iterate(count_to(5, seen=seen))
  assert seen == []  # nothing runs before the first item is asked for.
  assert next(items) == 0
  deadline = time.monotonic() + 10
  while len(seen) < 5 and time.monotonic() < deadline:
    time.sleep(0.001)
  assert seen == [0, 1, 2, 3, 4]
  assert list(items) == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["close", "forget", "raise"])
def test_leaving_an_iterator_early_ends_its_work(loop, how):
  log = []

  async def items():
    yield 1
    await forever(log)

  found = loop.iterate(items())
  if how == "raise":
    with pytest.raises(KeyError), contextlib.closing(found):
      assert next(found) == 1
      await_began(log)
      raise KeyError
  else:
    assert next(found) == 1
    await_began(log)
  if how == "close":
    found.close()
  del found
  gc.collect()
  assert log == ["began", "ended"]

  async def others():
    return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

  assert loop.run(others()) == []


def test_close_ends_what_is_left_and_later_calls_are_refused(loop):
  log, results = [], []

  def wait():
    with pytest.raises(RuntimeError, match="the event loop was closed"):
      loop.run(forever(log))
    results.append("refused")

  thread = threading.Thread(target=wait)
  thread.start()
  await_began(log)
  loop.close()
  loop.close()
  thread.join(10)
  assert log == ["began", "ended"] and results == ["refused"] and rollout_threads() == []
  with pytest.raises(RuntimeError, match="the event loop is closed"):
    loop.run(forever(log))


@pytest.mark.long
def test_close_does_not_wait_for_work_that_blocks_the_loop(loop):
  gate, entered, errors = threading.Event(), threading.Event(), []

  async def block():
    entered.set()
    gate.wait(20)

  async def work():
    await block()
    await asyncio.sleep(9)

  def wait():
    with pytest.raises(RuntimeError, match="the event loop was closed"):
      loop.run(work())
    errors.append("closed")

  thread = threading.Thread(target=wait)
  thread.start()
  entered.wait(10)
  began = time.monotonic()
  loop.close()
  assert time.monotonic() - began < 8
  (lost,) = rollout_threads()
  gate.set()
  thread.join(10)
  lost.join(10)
  assert errors == ["closed"] and not lost.is_alive()


def test_a_coroutine_of_the_loop_cannot_wait_for_it(loop):
  async def wait():
    loop.run(asyncio.sleep(0))

  with pytest.raises(RuntimeError, match="await the work instead"):
    loop.run(wait())


def test_a_caller_in_a_notebook_has_a_loop_of_its_own(loop):
  async def cell():
    return loop.run(asyncio.sleep(0, "fine"))

  assert asyncio.run(cell()) == "fine"
