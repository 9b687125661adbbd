"""`grpo-jax report RUN`: report.html of a run, or a page in the browser that renews itself."""

import time
from collections.abc import Sequence

from grpo_jax import interrupts, report
from grpo_jax.commands.arguments import Parser, WrongUse

USAGE = """\
Writes report.html of a run, finished or not: curves, and a browser of the sampled groups.

  grpo-jax report RUN [--watch [--port=N]]

  RUN       folder of the run; the page is written into it, and its path is printed.
  --watch   serve the page on this machine instead, until Ctrl-C: it renews itself after every step.
  --port    port on 127.0.0.1; without it, any that is free.

Example:
  grpo-jax report runs/first --watch
"""


def main(arguments: Sequence[str]) -> int:
  """Writes or serves the report; returns the exit code.

  Args:
    arguments: Words after `grpo-jax report`.

  Raises:
    HelpWanted, WrongUse: The arguments cannot be understood.
    NoRunError, NotLocal, CannotListen: The report cannot be served.
  """
  parser = Parser(USAGE)
  parser.add_argument("run", metavar="RUN")
  parser.add_argument("--watch", action="store_true")
  parser.add_argument("--port", type=int)
  read = parser.read(arguments)
  if not read.watch:
    if read.port is not None:
      raise WrongUse("--port is the port of --watch, which is missing")
    return report.main([read.run])
  port = 0 if read.port is None else read.port
  if not 0 <= port < 65536:
    raise WrongUse(f"--port needs a number below 65536, got {port}")
  from grpo_jax.files import local_paths
  from grpo_jax.report import watching

  folder = local_paths.checked("RUN", read.run)
  with interrupts.Flag() as stop:

    def wait(seconds: float) -> bool:
      until = time.monotonic() + seconds
      while not stop and time.monotonic() < until:
        time.sleep(0.1)
      return bool(stop)

    watching.watch(folder, port=port, say=lambda line: print(line, flush=True), wait=wait)
  return 0
