"""A program for tests: `grpo_jax.main` whose run is an endless loop of collectives, with no model.

python looping.py MODE ARGUMENTS: process 1 leaves the loop after 20 passes in the way of MODE. Only
with "asked" does the loop ask whether to stop.
"""

import sys
import time

from grpo_jax import errors, main, processes


class BrokenError(errors.ExpectedFailure, OSError):
  """A failure that a user can repair."""

  exit_code = 3


def leave(mode: str) -> None:
  if mode == "mistake":
    raise ValueError("a wrong line on one host")
  if mode == "failure":
    raise BrokenError("a disk of one host")
  if mode == "hanging":
    time.sleep(1000)
  if mode == "sleeping in pieces":
    while True:
      time.sleep(0.01)


def loop(command, stop, streams=()) -> int:
  del streams
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from grpo_jax.compilation import programs

  processes.continues(main.how_to_continue(command.workdir))
  mesh = Mesh(np.array(jax.devices()), "x")
  sharding = NamedSharding(mesh, PartitionSpec("x"))
  x = jax.make_array_from_callback((2, 4), sharding, lambda at: np.ones((1, 4), np.float32))
  update = programs.Program(jax.jit(lambda a: a - a.mean() * 0.5), name="update")
  for number in range(10**9):
    x = update(x)
    x.block_until_ready()
    if number == 20:
      print("looping", flush=True)
      if processes.index() == 1:
        leave(sys.argv[1])
    if sys.argv[1] == "asked":
      processes.stop_together(stop)
    time.sleep(0.01)
  return 0


if __name__ == "__main__":
  main.run_joined = loop
  main.interrupts.leave(main.main(sys.argv[2:]))
