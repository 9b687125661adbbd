"""Times the fused LM head against other ways to compute the same, in turns, on one GPU.

  python scripts/benchmark/linear_logprobs.py --json h100.json --liger-python LIGER_ENV/bin/python

For each size: forward alone, and forward with both gradients, of Σ log p over N tokens. Our
kernel (mosaic_gpu) is compared with our chunked XLA, XLA with all logits in memory, XLA by tiles of
1024 × 2048, tokamax's own if it is installed, and Liger-Kernel's fused linear cross-entropy in a
separate process. A large matrix product is timed in the same turns, as the limit of the device. A
variant that cannot run has a row with the reason. `--show h100.json` prints an earlier result;
`--device cpu` is for trying the script. How to install the peers: docs/linear_logprobs.md.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import head_table

HERE = pathlib.Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "kernels"))
# N, D, V: the heads of SmolLM2-135M, Qwen2.5-1.5B, Qwen2.5-7B and Llama-3-8B.
SHAPES = ["16384,576,49152", "16384,1536,151936", "16384,3584,152064", "16384,4096,128256"]
LEAST_SAMPLE_S = 0.03  # duration of a sample, long enough to hide the cost of starting a call.
MATMUL_SIZE = {"gpu": 8192, "tpu": 8192, "cpu": 1024}
LIGER = "liger"
# Device → the kernel that does not run on it, and gets no row.
KERNEL_OF_OTHERS = {"gpu": "pallas_tpu", "tpu": "mosaic_gpu", "cpu": "pallas_tpu"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print an earlier result")
  parser.add_argument("--json", type=pathlib.Path, help="file for the result")
  parser.add_argument("--device", choices=("gpu", "tpu", "cpu"), default="gpu")
  parser.add_argument("--shape", action="append", metavar="N,D,V", help="in place of the four")
  parser.add_argument("--variant", action="append", help="only these, in place of all")
  parser.add_argument("--rounds", type=int, default=7, help="samples of each; all take turns")
  parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
  parser.add_argument("--layout", choices=("vd", "dv"), default="vd", help="of the head")
  parser.add_argument("--liger-python", help="interpreter that has liger-kernel; default: this one")
  options = parser.parse_args(arguments)
  if not options.show and not options.json:
    parser.error("--json is needed (or --show)")
  if options.rounds < 1:
    parser.error(f"--rounds must be at least 1, got {options.rounds}")
  options.shapes = [_shape(text, parser) for text in options.shape or SHAPES]
  return options


def _shape(text: str, parser: argparse.ArgumentParser) -> dict[str, int]:
  """Parses N,D,V."""
  sizes = text.split(",")
  if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
    parser.error(f"--shape is three numbers above 0, N,D,V; got {text!r}")
  return dict(zip(("tokens", "width", "vocabulary"), map(int, sizes), strict=True))


class Refused(Exception):
  """A variant cannot run; the message says why."""


class Liger:
  """The process in which Liger-Kernel runs; requests and answers are lines."""

  def __init__(self, python: str | None, device: str):
    self.why = None
    if device != "gpu":
      self.why = f"Liger-Kernel needs a GPU; this measures on {device}"
    elif python is None and importlib.util.find_spec("liger_kernel") is None:
      self.why = (
        "liger-kernel is not installed here; --liger-python names an interpreter that has it"
      )
    self.log = tempfile.TemporaryFile("w+")
    self.process = None
    if self.why is None:
      self.process = subprocess.Popen(
        [python or sys.executable, str(HERE / "peer_liger.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self.log,
        text=True,
      )

  def ask(self, **request: Any) -> dict[str, Any]:
    """Returns the answer to one request.

    Raises:
      Refused: The case cannot run, or its process has ended.
    """
    if self.process is None:
      raise Refused(self.why)
    assert self.process.stdin and self.process.stdout
    answer = ""
    with contextlib.suppress(BrokenPipeError):
      self.process.stdin.write(json.dumps(request) + "\n")
      self.process.stdin.flush()
      answer = self.process.stdout.readline()
    if not answer:
      self.process.wait()
      self.log.seek(0)
      last = self.log.read().strip().splitlines()[-1:] or ["no message"]
      raise Refused(f"its process ended: {last[0]}")
    found = json.loads(answer)
    if "why" in found:
      raise Refused(found["why"])
    return found

  def close(self) -> None:
    """Ends the process."""
    if self.process is not None:
      assert self.process.stdin
      with contextlib.suppress(BrokenPipeError):
        self.process.stdin.close()
      self.process.wait()
    self.log.close()


def programs(
  shape: dict[str, int], options: argparse.Namespace, liger: Liger
) -> Iterator[tuple[dict[str, Any], Callable[[int], float] | None]]:
  """Compiles all variants for one size; yields a record and a timer for each.

  A variant that cannot run has no timer, and its record gives the reason.
  """
  import head_variants  # needs JAX, whose platform `main` has chosen by now.

  inputs = head_variants.make_inputs(**shape, dtype=options.dtype)
  usual = [x for x in (*head_variants.VARIANTS, LIGER) if x != KERNEL_OF_OTHERS[options.device]]
  for name in options.variant or usual:
    for which in head_table.PASSES:
      record = {"shape": shape, "variant": name, "pass": which, "why": None}
      timer = None
      try:
        if name == LIGER:
          request = {"pass": which, **shape, "dtype": options.dtype}
          record |= liger.ask(do="prepare", **request)
          timer = lambda calls, which=which: liger.ask(do="time", calls=calls, **{"pass": which})[
            "seconds"
          ]
        else:
          variant = head_variants.VARIANTS[name]
          program = head_variants.compile_program(variant, inputs, which, options.layout)
          record |= {
            "temporary_bytes": program.temporary_bytes,
            "peak_bytes": program.peak_bytes,
            "loss": program.loss,
          }
          timer = program.seconds
      except (Refused, *head_variants.REFUSALS) as error:
        record["why"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
      yield record, timer


def take_turns(timers: dict[Any, Callable[[int], float]], rounds: int) -> dict[Any, list[float]]:
  """Returns `rounds` samples of each timer, taken in turns; the order rotates by one each round.

  Each timer is warmed up first, which also determines how many calls make a sample.
  """
  calls = {}
  for key, timer in timers.items():
    timer(1)
    calls[key] = max(1, round(LEAST_SAMPLE_S / max(timer(1), 1e-6)))
  samples = {key: [] for key in timers}
  keys = list(timers)
  for number in range(rounds):
    start = number % len(keys)
    for key in keys[start:] + keys[:start]:
      samples[key].append(timers[key](calls[key]))
  return samples


def measure(
  options: argparse.Namespace,
  *,
  alone: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> dict[str, Any]:
  """Measures everything and returns the result.

  Args:
    options: The command line.
    alone: Makes a context in which nothing else runs on the machine, for what is timed.
  """
  import head_variants
  import jax

  device = jax.devices()[0]
  size = MATMUL_SIZE[options.device]
  matmul = head_variants.make_matmul(size, options.dtype)
  liger = Liger(options.liger_python, options.device)
  measurements, matmul_samples = [], []
  try:
    for shape in options.shapes:
      made = list(programs(shape, options, liger))
      timers = {i: timer for i, (_, timer) in enumerate(made) if timer is not None}
      with alone():
        samples = take_turns({**timers, "matmul": matmul}, options.rounds)
      matmul_samples += samples.pop("matmul")
      for i, (record, _) in enumerate(made):
        measurements.append(record | {"samples_s": samples.get(i, [])})
        print(
          f"{head_table.describe(shape)} {record['variant']} {record['pass']}: done", flush=True
        )
  finally:
    liger.close()
  return {
    "date": datetime.date.today().isoformat(),
    "command": shlex.join(["python", "scripts/benchmark/linear_logprobs.py", *sys.argv[1:]]),
    "device": device.device_kind,
    "versions": f"jax {jax.__version__}",
    "dtype": options.dtype,
    "layout": options.layout,
    "rounds": options.rounds,
    "matmul": {"size": size, "samples_s": matmul_samples},
    "measurements": measurements,
  }


def choose_platform(device: str) -> None:
  """Makes JAX use a kind of device; exits if there is none."""
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # Liger's process needs memory too.
  if device == "cpu":
    os.environ["JAX_PLATFORMS"] = "cpu"
  import jax

  if jax.default_backend() != device:
    sys.exit(
      f"no {device} here: JAX computes on {jax.devices()[0].device_kind}."
      " Run this on a machine that has one, with jax installed for it (pip install -e '.[cuda]');"
      " --device cpu --shape 64,32,1000 tries the script."
    )


def main() -> None:
  """Runs the command line, writes the result, prints its table."""
  options = parse()
  if options.show:
    print(head_table.text(json.loads(options.show.read_text())))
    return
  choose_platform(options.device)
  result = measure(options)
  options.json.write_text(json.dumps(result, indent=1))
  print(head_table.text(result))


if __name__ == "__main__":
  main()
