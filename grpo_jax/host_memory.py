"""What the process has freed goes back to the system."""

import ctypes
import sys


def trim() -> None:
  """Returns freed heap memory to the system; does nothing without glibc.

  glibc keeps freed blocks of up to 32 MiB for later ones of like size. The sampler's copies of
  the layers are such blocks, and the gradients that come after them are not: without this both
  count in the peak (measured: 3.8 against 3.1 GiB with a model of 135M parameters).
  """
  if sys.platform != "linux":
    return
  libc = ctypes.CDLL(None)
  if hasattr(libc, "malloc_trim"):
    libc.malloc_trim(0)
