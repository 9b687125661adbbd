"""Compares this trainer with TRL and Tunix on one workload, in turns, each run a whole process.

  python scripts/benchmark/compare.py --model DIR --workload w1 --rounds 3 \\
    --trl-python TRL_ENV/bin/python --tunix-python TUNIX_ENV/bin/python --json OUT.json

A peer without an interpreter is left out. `--warm` first runs every program that
compiles, with its own cache folder, and reports these runs separately, so that the rounds measure
no compilation. `--show OUT.json` prints the summary of an earlier run. How to create the
environments: docs/benchmark.md.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import sys
import tempfile
from collections.abc import Collection
from typing import Any

import processes
import summary
import workload as workloads

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
FORMS_OF_OURS = (summary.OURS, summary.OURS_ALL)
COMPILING = (*FORMS_OF_OURS, "tunix")  # programs that run on JAX.
SCRIPTS = {
  summary.OURS: "ours.py",
  summary.OURS_ALL: "ours.py",
  "trl": "peer_trl.py",
  "tunix": "peer_tunix.py",
}
OUR_PATH = os.pathsep.join(str(REPOSITORY / part) for part in ("", "kernels", "packages"))
OFFLINE_ON_CPU = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
KEEP_ALL_COMPILED = {
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
  "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
  """Parses the command line; sizes that are not given come from the preset."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="print an earlier result")
  parser.add_argument("--model", type=pathlib.Path, help="Hugging Face folder, read by all")
  parser.add_argument("--workload", choices=sorted(workloads.PRESETS), default="w1")
  for size in ("prompts", "group", "completion", "steps"):
    parser.add_argument(f"--{size}", type=int, help=f"{size} in place of the workload's")
  parser.add_argument("--rounds", type=int, default=3, help="times that each program runs")
  parser.add_argument(
    "--warm", action="store_true", help="compile in a run before the rounds, which is not counted"
  )
  types = ("float32", "bfloat16")
  parser.add_argument("--dtype", choices=types, default="float32", help="dtype of our products")
  parser.add_argument("--peer-dtype", choices=types, default="float32", help="dtype of the peers'")
  parser.add_argument("--peer-recompute", action="store_true", help="peers keep fewer activations")
  parser.add_argument("--full-length", action="store_true", help="no completion ends early")
  parser.add_argument("--learning-rate", type=float, default=1e-5)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--override", action="append", default=[], metavar="SECTION.FIELD=VALUE")
  parser.add_argument("--without-ours", action="store_true", help="run only the peers")
  parser.add_argument("--trl-python", metavar="PYTHON", help="interpreter of TRL's environment")
  parser.add_argument("--tunix-python", metavar="PYTHON", help="interpreter of Tunix's environment")
  parser.add_argument("--json", type=pathlib.Path, help="file for the result")
  options = parser.parse_args(arguments)
  if not options.show and not (options.model and options.json):
    parser.error("--model and --json are needed (or --show)")
  if options.rounds < 1:
    parser.error(f"--rounds must be at least 1, got {options.rounds}")
  return options


def interpreters(options: argparse.Namespace) -> dict[str, str]:
  """Returns the programs that will run, in their order, each with its interpreter."""
  ours = None if options.without_ours else sys.executable
  wanted = {
    summary.OURS: ours,
    summary.OURS_ALL: ours,
    "trl": options.trl_python,
    "tunix": options.tunix_python,
  }
  return {program: python for program, python in wanted.items() if python}


def workload_for(
  program: str, options: argparse.Namespace, *, model: pathlib.Path, problems: pathlib.Path
) -> workloads.Workload:
  """Returns the workload of one program; programs differ only in what the options say."""
  sizes = {
    name: size if getattr(options, name) is None else getattr(options, name)
    for name, size in workloads.PRESETS[options.workload].items()
  }
  is_ours = program in FORMS_OF_OURS
  computes_all = ("batching.skip_zero_advantage=False",) if program == summary.OURS_ALL else ()
  return workloads.Workload(
    model=str(model),
    problems=str(problems),
    **sizes,
    dtype=options.dtype if is_ours else options.peer_dtype,
    learning_rate=options.learning_rate,
    seed=options.seed,
    recompute=options.peer_recompute and not is_ours,
    overrides=(*computes_all, *options.override) if is_ours else (),
  )


def environment_of(program: str, compiled: pathlib.Path) -> dict[str, str]:
  """Returns the environment variables of a program.

  No program benefits from what another one has compiled, or from the user's own cache.

  Args:
    program: Key of `SCRIPTS`.
    compiled: Folder of compiled programs, one folder inside it for each program.
  """
  kept = {"JAX_COMPILATION_CACHE_DIR": str(compiled / program)} | KEEP_ALL_COMPILED
  ours = OUR_PATH if program in FORMS_OF_OURS else ""
  return OFFLINE_ON_CPU | {"PYTHONPATH": ours} | (kept if program in COMPILING else {})


def run_program(
  program: str,
  python: str,
  workload: workloads.Workload,
  folder: pathlib.Path,
  compiled: pathlib.Path,
) -> dict[str, Any]:
  """Runs one program on the workload and returns its record, with the usage of its process."""
  folder.mkdir(parents=True)
  workload.write(folder / "workload.json")
  usage = processes.run(
    [python, str(HERE / SCRIPTS[program]), str(folder / "workload.json"), str(folder / "run.json")],
    log=folder / "log.txt",
    environment=environment_of(program, compiled),
  )
  recorded = json.loads((folder / "run.json").read_text())
  return recorded | {"process": dataclasses.asdict(usage)}


def measure_ceiling(folder: pathlib.Path, name: str) -> dict[str, float]:
  """Returns the machine's rates of matrix products, measured in a separate process."""
  path = folder / f"{name}.json"
  processes.run(
    [sys.executable, str(HERE / "ceiling.py"), str(path)],
    log=folder / f"{name}.txt",
    environment=OFFLINE_ON_CPU,
  )
  return json.loads(path.read_text())


def processor() -> str:
  """Returns the processor's name as the system reports it."""
  cpuinfo = pathlib.Path("/proc/cpuinfo")
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.processor()


def compare(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
  """Runs all programs in turns and returns the result; `folder` keeps logs and inputs."""
  problems = folder / "problems.jsonl"
  workloads.write_problems(problems)
  model = options.model.resolve()
  end_token = None
  if options.full_length:
    end_token = workloads.write_endless_model(model, folder / "model")
    model = folder / "model"

  def turn(name: str, programs: Collection[str]) -> dict[str, Any]:
    """Runs each of these programs once and prints the result."""
    runs = {}
    for program, python in interpreters(options).items():
      if program not in programs:
        continue
      given = workload_for(program, options, model=model, problems=problems)
      into = folder / f"{name}_{program}".replace(" ", "_")
      runs[program] = run = run_program(program, python, given, into, folder / "compiled")
      print(
        f"{name} {program}: step {summary.median_of_steps(run, 'wall_s'):.2f} s, "
        f"process {run['process']['wall_s']:.1f} s, peak {run['process']['peak_mib']:.0f} MiB, "
        f"load before {run['process']['load_average_before']:.2f}",
        flush=True,
      )
    return runs

  ceilings = [measure_ceiling(folder, "ceiling_before")]
  cold = turn("cold", COMPILING) if options.warm else {}
  rounds = [turn(f"round {number}", SCRIPTS) for number in range(options.rounds)]
  ceilings.append(measure_ceiling(folder, "ceiling_after"))
  return {
    "machine": {
      "processor": processor(),
      "cores": len(os.sched_getaffinity(0)),
      "system": platform.platform(),
    },
    "model": json.loads((options.model / "config.json").read_text()),
    "end_token": end_token,
    "ceilings": ceilings,
    "cold": cold,
    "rounds": rounds,
  }


def main() -> None:
  """Runs the command line, writes the result, prints its summary."""
  options = parse()
  if options.show:
    print(summary.text(json.loads(options.show.read_text())))
    return
  if not pathlib.Path(options.model).is_dir():
    sys.exit(f"error: --model={options.model} is not a folder")
  with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
    try:
      result = compare(options, pathlib.Path(folder))
    except RuntimeError as error:  # a program failed; the message has its traceback.
      sys.exit(str(error))
  options.json.write_text(json.dumps(result, indent=1))
  print(summary.text(result))


if __name__ == "__main__":
  main()
