"""Measures on an accelerator what this project needs to know about it, in nine minutes.

  python scripts/gpu_day.py                             all parts; runs/gpu_day/gpu_day.json
  python scripts/gpu_day.py --parts device,tests        only some parts
  python scripts/gpu_day.py --resume                    the parts that are not done yet
  python scripts/gpu_day.py --tiny                      on a CPU, to try the script
  python scripts/gpu_day.py --write-docs runs/gpu_day/gpu_day.json
  python scripts/gpu_day.py --bundle FOLDER --have freeze.txt     for a machine without a network

Each part is a separate process with a time limit. Several run at once, and all others are stopped
while one times something; if one fails, the others still run. The JSON file is updated after
each. The exit code is 0 if the script ran to its end, even if parts failed (--strict: 1), and 2
without an accelerator. docs/gpu.md says what is measured and how.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE / "benchmark"), str(HERE.parent)]
sys.path += [str(HERE.parent / name) for name in ("kernels", "packages")]

from gpu_day_parts import bundle, running, schedule, summary  # noqa: E402

from grpo_jax.files import local_paths  # noqa: E402

CORES_OF_A_PART = 4  # while it compiles.


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  path: dict[str, Any] = {"type": local_paths.argument}
  names = list(schedule.NAMES)
  parser.add_argument(
    "--out",
    **path,
    default=pathlib.Path("runs/gpu_day"),
    metavar="FOLDER",
    help="folder of the result (%(default)s)",
  )
  parser.add_argument("--parts", metavar="A,B", help=f"only these of {', '.join(names)}")
  parser.add_argument(
    "--minutes", type=float, default=schedule.MINUTES, help="time for all parts (%(default)g)"
  )
  parser.add_argument("--resume", action="store_true", help="skip parts that are done")
  parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
  parser.add_argument("--strict", action="store_true", help="exit code 1 if a part failed")
  parser.add_argument("--model", metavar="PATH", help="the quickstart's model: a folder or .gguf")
  parser.add_argument("--list", action="store_true", help="print the parts and their limits")
  parser.add_argument("--show", **path, metavar="JSON", help="print a result's table")
  parser.add_argument("--write-docs", **path, metavar="JSON", help="into docs/gpu.md")
  copied = parser.add_argument_group("a machine without a network")
  copied.add_argument("--bundle", **path, metavar="FOLDER", help="make the folder to copy there")
  copied.add_argument("--have", **path, metavar="FILE", help="`pip freeze` of that machine")
  copied.add_argument(
    "--piece-mb",
    type=float,
    default=60.0,
    metavar="MB",
    help="largest size of a file (%(default)g)",
  )
  options = parser.parse_args(arguments)
  asked = options.parts.split(",") if options.parts else names
  if unknown := [name for name in asked if name not in names]:
    parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(names)}")
  options.names = [name for name in names if name in asked]
  for name in ("minutes", "piece_mb"):
    if getattr(options, name) <= 0:
      parser.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(options, name)}")
  return options


def run(options: argparse.Namespace) -> int:
  """Runs the parts; returns the exit code."""
  result = running.resume(options.out, tiny=options.tiny)
  if result is not None and not options.resume:
    place = options.out / running.RESULT
    raise ValueError(f"{place} exists: --resume adds to it; or choose another --out")
  command = ["python", "scripts/gpu_day.py", *sys.argv[1:]]
  result = result or running.new_result(command, tiny=options.tiny)
  at_once = max(2, (os.cpu_count() or 1) // CORES_OF_A_PART)
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with tempfile.TemporaryDirectory(prefix="gpu_day_") as scratch:
    settings = running.Settings(options.tiny, scratch, options.model)
    day = running.Day(
      settings, options.out, result, minutes=options.minutes, at_once=at_once, log=_log
    )
    try:
      day.run([schedule.PARTS[name] for name in options.names])
    except KeyboardInterrupt:
      print("interrupted; --resume continues with the parts that were running")
      return 130
  print(summary.text(result))
  print(f"\n{options.out / running.RESULT}")
  if any(entry["status"] == "no accelerator" for entry in result["parts"].values()):
    return 2
  return 1 if options.strict and summary.failures(result) else 0


def _log(line: str) -> None:
  """Prints a line and flushes it."""
  print(line, flush=True)


def main(arguments: Sequence[str]) -> int:
  """Runs the command line; returns the exit code."""
  options: Any = parse(arguments)
  try:
    if options.list:
      for part in schedule.PARTS.values():
        print(f"{part.name:<12}{part.limit_s:>5.0f} s   {part.title}")
    elif options.show:
      print(summary.text(running.read(options.show)))
    elif options.write_docs:
      print(f"written: {summary.write(options.write_docs)}")
    elif options.bundle:
      wanted = bundle.requirements()
      print(bundle.make(options.bundle, options.have, options.piece_mb, wanted))
    else:
      return run(options)
  except (ValueError, OSError, RuntimeError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
