"""Several processes of a run as threads of a test: what they exchange, without a service."""

import contextlib
import copy
import itertools
import threading
import types
from unittest import mock

from grpo_jax import processes
from grpo_jax.processes import bulk, exchanges, watchdog

WAIT_S = 20.0


class Store:
  """The key-value store of the coordination service."""

  def __init__(self):
    self.values: dict[str, str] = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_try_get(self, key):
    if key not in self.values:
      raise RuntimeError(f"NOT_FOUND: {key}")
    return self.values[key]

  def key_value_delete(self, key):
    self.values.pop(key, None)


class Room:
  """Processes 0, 1, … in threads."""

  def __init__(self, count):
    self.count, self.store = count, Store()
    self._local = threading.local()
    self._arrived = threading.Condition()
    self._sent: dict[tuple, dict[int, object]] = {}

  def index(self):
    return self._local.index

  def number(self, kind):
    """Returns how often this process has done something before."""
    return next(self._local.numbers.setdefault(kind, itertools.count()))

  def meet(self, kind, value):
    """Returns the values of all processes."""
    key = (kind, self.number(kind))
    with self._arrived:
      sent = self._sent.setdefault(key, {})
      sent[self.index()] = value
      self._arrived.notify_all()
      if not self._arrived.wait_for(lambda: len(sent) == self.count, WAIT_S):
        raise processes.ProcessesError(f"{key}: only {sorted(sent)} came")
    return [copy.deepcopy(sent[i]) for i in range(self.count)]

  def exchanged(self, channel, data, what, timeout_s):
    return self.meet(channel, data)

  def exchanged_piece(self, piece):
    return [bulk.np.frombuffer(each, bulk.np.uint8) for each in self.meet("piece", piece)]

  def run(self, work):
    """Returns what `work(index)` returns in each process, or the error that it raises."""
    results = [None] * self.count

    def of_process(index):
      self._local.index, self._local.numbers = index, {}
      try:
        results[index] = work(index)
      except BaseException as error:
        results[index] = error

    threads = [threading.Thread(target=of_process, args=(i,)) for i in range(self.count)]
    with self._patched():
      for thread in threads:
        thread.start()
      for thread in threads:
        thread.join()
    return results

  @contextlib.contextmanager
  def _patched(self):
    room = self

    class Numbers:
      def __next__(self):
        return room.number("elsewhere")

    with (
      mock.patch.object(watchdog, "distributed", lambda: _Distributed(self)),
      mock.patch.object(
        processes.Channel, "_exchanged", lambda channel, *given: self.exchanged(channel, *given)
      ),
      mock.patch.object(processes, "broadcast", lambda value, **_: self.meet("sent", value)[0]),
      mock.patch.object(exchanges, "_works", Numbers()),
      mock.patch.object(exchanges, "LOOK_S", 0.01),
      mock.patch.object(bulk, "_exchanged_piece", self.exchanged_piece),
    ):
      yield


class _Distributed:
  """The state of `jax.distributed` in a thread."""

  def __init__(self, room):
    self._room = room
    self.num_processes, self.client = room.count, room.store

  @property
  def process_id(self):
    return self._room.index()


def pretend(monkeypatch, index, *, count=2):
  """Makes this process one of several, without a service through which it could exchange."""
  state = types.SimpleNamespace(num_processes=count, process_id=index)
  monkeypatch.setattr(watchdog, "distributed", lambda: state)


def run(count, work):
  """Returns what `work(index)` returns, or raises, in each of `count` processes."""
  return Room(count).run(work)
