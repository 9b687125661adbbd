"""Runs of the program, and other programs, as several processes on this machine, for tests.

PYTHONPATH=.:kernels:packages python tests/several.py FOLDER --processes=2 --devices=2 ARGUMENTS
writes the tiny model, rows and a config to FOLDER/input and runs it with run folder FOLDER/run.
"""

import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from tests import quick_compilation

ROOT = pathlib.Path(__file__).parents[1]
# Of processes that tests start: the packages, and torch hidden, whose import takes 2.4 s.
SOURCES = (
  ROOT / "tests" / "without_torch",
  ROOT,
  *(ROOT / name for name in ("kernels", "packages")),
)
PYTHONPATH = os.pathsep.join(map(str, SOURCES))

CONFIG = """
import configs.base

def get_config():
  config = configs.base.get_config()
  config.total_steps = 3
  config.model.path = MODEL
  config.model.compute_dtype = "float32"
  config.model.chat_template = "plain"
  config.data.path = ROWS
  config.data.environment = "own"
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  config.rollout.prompts_per_step = 4
  config.rollout.group_size = 4
  config.sampling.max_tokens = 12
  config.batching.row_tokens = 64
  config.batching.microbatch_tokens = 256
  config.engine.max_rows = 8  # each size of the sampler is a program that every process compiles.
  config.learn.report_kl_every_steps = 0
  config.data.max_prompt_tokens = 32
  config.loss.kl_coef = 0.01
  config.optim.learning_rate = 1e-3
  config.evaluation.every_steps = 2
  config.evaluation.at_start = False
  config.evaluation.data.path = HELD_OUT
  config.evaluation.num_prompts = 5
  config.checkpoint.every_steps = 1
  return config
"""


@dataclasses.dataclass
class Started:
  """The processes of a run."""

  processes: list[subprocess.Popen]
  logs: list[pathlib.Path]  # standard output and error of each.

  def wait(self, timeout: float = 240) -> list[int]:
    """Returns the exit codes; kills all if one takes longer than `timeout` seconds."""
    try:
      return [process.wait(timeout) for process in self.processes]
    finally:
      self.kill()

  def succeed(self, timeout: float = 240) -> None:
    """Waits for all, and fails with the end of what they have written if one fails."""
    codes = self.wait(timeout)
    ends = [log.read_text()[-4000:] for log in self.logs]
    assert not any(codes), "\n".join([f"exit codes {codes}", *ends])

  def kill(self) -> None:
    """Kills what still runs, and the processes that it started."""
    for process in self.processes:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

  def text(self, index: int) -> str:
    """Returns what a process has written."""
    return self.logs[index].read_text()


def write_input(folder: pathlib.Path, *, rows: int = 11, family: str = "llama") -> pathlib.Path:
  """Writes a tiny model, rows and a config; returns the config's path."""
  from grpo_jax.models import tiny

  model = tiny.write(folder / "model", family=family)
  lines = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(rows)]
  data, held_out = folder / "rows.jsonl", folder / "held_out.jsonl"
  data.write_text("".join(json.dumps(line) + "\n" for line in lines))
  other = [{"problem": f"{i} - {i}", "expected_answer": "0"} for i in range(5)]
  held_out.write_text("".join(json.dumps(line) + "\n" for line in other))
  config, text = folder / "config.py", CONFIG
  for name, path in {"MODEL": model, "ROWS": data, "HELD_OUT": held_out}.items():
    text = text.replace(name, repr(str(path)))
  config.write_text(text)
  return config


def free_port() -> int:
  """Returns a port that is free now."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return free.getsockname()[1]


def start(
  config: pathlib.Path,
  workdir: pathlib.Path,
  arguments: Sequence[str] = (),
  *,
  processes: int = 2,
  devices: int = 2,
  logs: pathlib.Path | None = None,
  own: Mapping[int, Sequence[str]] | None = None,
  environment: Mapping[str, str] | None = None,
) -> Started:
  """Starts the program as several processes.

  Args:
    config: Path of the config.
    workdir: Run folder.
    arguments: Further arguments of all processes.
    processes: Number of processes.
    devices: Number of simulated CPU devices of each process.
    logs: Folder of the processes' output; None: beside the run folder.
    own: Further arguments by the number of the process that gets them.
    environment: Further environment variables.
  """

  def command(address: str, index: int) -> list[object]:
    joined = [
      f"--config.distributed.coordinator={address}",
      f"--config.distributed.processes={processes}",
      f"--config.distributed.index={index}",
    ]
    program = ["-m", "grpo_jax.main", f"--config={config}", f"--workdir={workdir}", *arguments]
    return [*program, *(joined if processes > 1 else []), *(own or {}).get(index, ())]

  folder = logs or workdir.parent
  folder.mkdir(parents=True, exist_ok=True)
  options = {"processes": processes, "devices": devices, "environment": environment}
  return start_python(command, folder / workdir.name, **options)


def start_python(
  command: Callable[[str, int], Sequence[object]],
  log: pathlib.Path,
  *,
  processes: int = 2,
  devices: int | None = None,
  environment: Mapping[str, str] | None = None,
) -> Started:
  """Starts any Python program as several processes.

  Args:
    command: Function (address of a coordinator, number of the process) → arguments of Python.
    log: Path of the processes' output, which their numbers are added to.
    processes: Number of processes.
    devices: Number of simulated CPU devices of each process; None: as the program chooses.
    environment: Further environment variables.
  """
  address = f"127.0.0.1:{free_port()}"
  inherited = os.environ.keys() - {"JAX_NUM_CPU_DEVICES"}
  variables = {
    **{name: os.environ[name] for name in inherited},
    **({} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": quick_compilation.FLAGS,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # the next start reads every program.
    "GRPO_JAX_RUN_SECRET": "the secret of a run of the tests",
    "PYTHONPATH": f"{PYTHONPATH}:{ROOT / 'tests'}",
    **(environment or {}),
  }
  started = Started([], [log.with_name(f"{log.name}.{index}.log") for index in range(processes)])
  for index, path in enumerate(started.logs):
    with path.open("w") as output:
      started.processes.append(
        subprocess.Popen(
          [sys.executable, *map(str, command(address, index))],
          env=variables,
          stdout=output,
          stderr=subprocess.STDOUT,
          start_new_session=True,
        )
      )
  return started


if __name__ == "__main__":
  folder = pathlib.Path(sys.argv[1]).resolve()
  sizes = {"processes": 2, "devices": 2}
  rest = []
  for argument in sys.argv[2:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name in sizes:
      sizes[name] = int(value)
    else:
      rest.append(argument)
  path = folder / "input" / "config.py"
  if not path.exists():
    path = write_input(folder / "input")
  run = start(path, folder / "run", rest, **sizes)
  print(run.wait())
  for number in range(sizes["processes"]):
    print(f"--- {number}\n{run.text(number)}")
