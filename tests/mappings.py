"""The mappings of memory of a process that compiles for hours.

Linux allows a process 65,530 of them (vm.max_map_count). Each program that XLA compiles for a CPU
takes up to twenty, and JAX keeps all programs. When the last mapping is taken, XLA crashes.
"""

import gc
import pathlib

MOST = 20_000
MAPS = pathlib.Path("/proc/self/maps")


def count() -> int:
  """Returns the number of mappings of this process; 0 where the system does not list them."""
  return MAPS.read_bytes().count(b"\n") if MAPS.exists() else 0


def forget_programs(most: int = MOST) -> None:
  """Forgets all compiled programs if this process has more than `most` mappings."""
  if count() > most:
    import jax  # only now: the suite first sets the variables that it reads.

    jax.clear_caches()
    gc.collect()
