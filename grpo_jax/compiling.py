"""Says when XLA is compiling, which is when nothing else of a run moves."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

# JAX sends this name as a scalar when a compilation begins, and as a duration when it ends.
EVENT = "/jax/core/compile/backend_compile_duration"
SLOW_S = 1.0  # a compilation that takes longer is worth a word.
PATIENCE_S = 5.0  # and one that takes this long is worth a line that stays.


class Watch:
  """Follows the compilations of this process while `listening`."""

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    """Makes a watch.

    Args:
      clock: seconds, monotonic.
    """
    self._clock = clock
    self._lock = threading.Lock()
    self._began: dict[int, float] = {}  # thread -> when its compilation began.
    self._patience: dict[int, threading.Timer] = {}
    self._tell: Callable[[str], None] | None = None  # None: said already, or nobody listens.

  @contextlib.contextmanager
  def listening(self, tell: Callable[[str], None]) -> Iterator[None]:
    """Follows what JAX compiles within the block.

    Args:
      tell: is called with one line, once, when a compilation takes longer than PATIENCE_S.
    """
    self._tell = tell
    jax.monitoring.register_scalar_listener(self._begin)
    jax.monitoring.register_event_duration_secs_listener(self._end)
    try:
      yield
    finally:
      jax.monitoring.unregister_scalar_listener(self._begin)
      jax.monitoring.unregister_event_duration_listener(self._end)
      self._tell = None
      with self._lock:
        for timer in self._patience.values():
          timer.cancel()
        self._patience.clear()
        self._began.clear()

  def note(self) -> str:
    """Returns "compiling, 12 s" if a compilation has been under way for a second, or ""."""
    with self._lock:
      longest = max((self._clock() - began for began in self._began.values()), default=0.0)
    return f"compiling, {longest:.0f} s" if longest >= SLOW_S else ""

  def _begin(self, event: str, value: float | int, **_: Any) -> None:
    if event != EVENT:
      return
    thread = threading.get_ident()
    with self._lock:
      self._began.setdefault(thread, self._clock())
      if self._tell is not None and thread not in self._patience:
        timer = self._patience[thread] = threading.Timer(PATIENCE_S, self._explain)
        timer.daemon = True
        timer.start()

  def _end(self, event: str, duration_secs: float, **_: Any) -> None:
    if event != EVENT:
      return
    with self._lock:
      self._began.pop(threading.get_ident(), None)
      timer = self._patience.pop(threading.get_ident(), None)
    if timer is not None:
      timer.cancel()

  def _explain(self) -> None:
    with self._lock:
      tell, self._tell = self._tell, None
    if tell is not None:
      folder = jax.config.values.get("jax_compilation_cache_dir")
      kept = f"once: what is compiled is kept in {folder}" if folder else "in every start"
      tell(f"compiling; nothing else moves meanwhile. This happens {kept}")
