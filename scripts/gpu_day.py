"""Measures on an accelerator what this project needs to know about it, in 25 minutes.

  python scripts/gpu_day.py                             all parts; runs/gpu_day/gpu_day.json
  python scripts/gpu_day.py --parts device,tests        only some parts
  python scripts/gpu_day.py --resume                    the parts that are not done yet
  python scripts/gpu_day.py --tiny                      on a CPU, to try the script
  python scripts/gpu_day.py --write-docs runs/gpu_day/gpu_day.json
  python scripts/gpu_day.py --wheels wheels             what to copy to a machine without a network

Each part is a separate process with a time limit; the next part also runs if one fails, and the
JSON file is updated after each. The exit code is 0 if the script ran to its end, even if parts
failed (--strict: 1), and 2 without an accelerator. docs/gpu.md says what is measured and how.
"""

import argparse
import pathlib
import signal
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path += [str(HERE / "benchmark"), str(HERE.parent)]
sys.path += [str(HERE.parent / name) for name in ("kernels", "packages")]

from gpu_day_parts import document, running, schedule, summary, wheels  # noqa: E402

from grpo_jax.files import local_paths  # noqa: E402


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  names = [part.name for part in schedule.PARTS]
  parser.add_argument("--out", type=local_paths.argument, default=pathlib.Path("runs/gpu_day"))
  parser.add_argument("--parts", metavar="A,B", help=f"only these of {', '.join(names)}")
  parser.add_argument("--skip", metavar="A,B", help="all except these")
  parser.add_argument("--minutes", type=float, default=schedule.MINUTES, help="time for all parts")
  parser.add_argument("--resume", action="store_true", help="skip parts that are done")
  parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
  parser.add_argument("--strict", action="store_true", help="exit code 1 if a part failed")
  parser.add_argument("--model", metavar="FOLDER", help="folder of the quickstart's model")
  parser.add_argument("--wheelhouse", metavar="FOLDER", help="folder of wheels copied here")
  parser.add_argument("--liger-python", metavar="PYTHON", help="Python with liger-kernel installed")
  parser.add_argument("--scratch", metavar="FOLDER", help="for large files; default: a new folder")
  parser.add_argument("--list", action="store_true", help="print the parts and their limits")
  parser.add_argument(
    "--show", type=local_paths.argument, metavar="JSON", help="print a result's table"
  )
  documents = parser.add_argument_group("docs/gpu.md")
  documents.add_argument("--write-docs", type=local_paths.argument, metavar="JSON")
  documents.add_argument(
    "--docs", type=local_paths.argument, help="in place of docs/gpu.md; README stays"
  )
  documents.add_argument(
    "--allow-cpu", action="store_true", help="with --docs: accept a CPU result"
  )
  wheel = parser.add_argument_group("a machine without a network")
  wheel.add_argument(
    "--wheels", type=local_paths.argument, metavar="FOLDER", help="fill it, list sizes"
  )
  wheel.add_argument(
    "--have", type=local_paths.argument, metavar="FILE", help="`pip freeze` of that machine"
  )
  options = parser.parse_args(arguments)
  options.names = _chosen(options, names, parser)
  if options.minutes <= 0:
    parser.error(f"--minutes must be above 0, got {options.minutes}")
  return options


def _chosen(
  options: argparse.Namespace, names: Sequence[str], parser: argparse.ArgumentParser
) -> list[str]:
  """Returns the names of the parts to run, in order."""
  listed = lambda text: [name for name in (text or "").split(",") if name]
  for name in (*listed(options.parts), *listed(options.skip)):
    if name not in names:
      parser.error(f"there is no part {name!r}; the parts are {', '.join(names)}")
  wanted = listed(options.parts) or names
  chosen = [name for name in names if name in wanted and name not in listed(options.skip)]
  if not chosen:
    parser.error("--parts and --skip leave no part")
  return chosen


def run(options: argparse.Namespace) -> int:
  """Runs the parts; returns the exit code."""
  try:
    result = running.resume(options.out, tiny=options.tiny)
  except ValueError as error:
    print(error, file=sys.stderr)
    return 2
  if result is not None and not options.resume:
    print(
      f"{options.out / running.RESULT} exists: --resume adds to it; or choose another --out",
      file=sys.stderr,
    )
    return 2
  command = ["python", "scripts/gpu_day.py", *sys.argv[1:]]
  result = result or running.new_result(command, tiny=options.tiny)
  parts = [schedule.BY_NAME[name] for name in options.names]
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  with tempfile.TemporaryDirectory(prefix="gpu_day_", dir=options.scratch) as scratch:
    settings = running.Settings(
      tiny=options.tiny,
      scratch=scratch,
      model=options.model,
      wheels=options.wheelhouse,
      liger_python=options.liger_python,
    )
    try:
      running.run(parts, settings, options.out, result, minutes=options.minutes, log=_log)
    except KeyboardInterrupt:
      print("interrupted; --resume continues with the part that was running")
      return 130
  print(summary.text(result))
  print(f"\n{options.out / running.RESULT}")
  if any(entry["status"] == "no accelerator" for entry in result["parts"].values()):
    return 2
  return 1 if options.strict and summary.failures(result) else 0


def _log(line: str) -> None:
  """Prints a line and flushes it."""
  print(line, flush=True)


def write_docs(options: argparse.Namespace) -> int:
  """Writes the page of a result; returns the exit code."""
  try:
    written = document.write(options.write_docs, options.docs, allow_cpu=options.allow_cpu)
  except document.Refused as reason:
    print(f"nothing was written: {reason}", file=sys.stderr)
    return 2
  for path in written:
    print(f"written: {path}")
  return 0


def list_parts() -> None:
  """Prints the parts and their limits."""
  for part in schedule.PARTS:
    print(f"{part.name:<20}{part.limit_s:>5.0f} s   {part.title}")
  print(f"{'all':<20}{sum(part.limit_s for part in schedule.PARTS):>5.0f} s")


def main(arguments: Sequence[str]) -> int:
  """Runs the command line; returns the exit code."""
  options: Any = parse(arguments)
  if options.list:
    list_parts()
    return 0
  if options.show:
    print(summary.text(document.read(options.show)))
    return 0
  if options.write_docs:
    return write_docs(options)
  if options.wheels:
    print(wheels.carry(options.wheels, options.have))
    return 0
  return run(options)


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
