"""`grpo-jax plan --config=… --topology=…`: what a run needs on a machine that is not present."""

import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from grpo_jax.commands.arguments import Parser, WrongUse
from grpo_jax.files import disk, local_paths

USAGE = """\
Plans a run for a machine that need not be present: does it fit, what moves, how long does a step
take at least? It compiles the run's own programs; no weights and no accelerator are needed.

  grpo-jax plan                     says what this machine is, and which configs fit it
  grpo-jax plan CONFIG              plans a run for this machine
  grpo-jax plan --config=CONFIG --topology=MACHINE [--config.SECTION.FIELD=VALUE ...]

  --config    as for grpo-jax train, with the same overrides.
  --topology  TPU slices by Google's names: v5e-16 and v6e-8 (chips), v5p-8 and v4-8 (TensorCores,
              two a chip), 2xv5e-16 (two slices); GPUs: t4, l4, 4090, 5090, a100-40, a100:8,
              h100:8, h200:8, 2xh100:8 (two nodes); cpu:8 (simulated devices, to try it).
  --model-config=FILE   config.json (or folder) of the model, or a name such as Qwen3-8B; default:
              model.path: a folder, a model of the package's table, or the hub's config.json.
  --prompt-tokens=N, --completion-tokens=N   assumed length of every prompt and completion, for
              traffic and time; default: half of the largest that the config allows.
  --no-search compiles each program once, and does not search the largest microbatch and the
              longest row that fit. Another mesh.context that is chosen is compiled all the same.
  --all-shapes compiles each program in every shape that the run compiles, not only in its largest.
  --json=FILE writes the plan as JSON, too.
  --no-cache  compiles again what was compiled before; answers are kept in ~/.cache/grpo_jax/plans.

TPUs need the extra plan-tpu, GPUs the extra plan-cuda: pip install "grpo-jax[plan-tpu]".
docs/plan.md describes the numbers and what was never checked against a real machine.

Exit codes: 0 it fits; 1 it does not fit, or a program cannot be compiled; 2 wrong use.
"""
FITS, DOES_NOT_FIT = 0, 1

_OWN = ("topology", "model-config", "prompt-tokens", "completion-tokens", "json")
_SWITCHES = ("no-search", "no-cache", "all-shapes", "help")


def main(arguments: Sequence[str]) -> int:
  """Prints the plan; returns the exit code.

  Args:
    arguments: Words after `grpo-jax plan`.
  """
  own, rest = _divided(arguments)
  parser = Parser(USAGE)
  parser.add_argument("--topology")
  parser.add_argument("--model-config", metavar="FILE")
  parser.add_argument("--prompt-tokens", type=int)
  parser.add_argument("--completion-tokens", type=int)
  parser.add_argument("--no-search", action="store_true")
  parser.add_argument("--all-shapes", action="store_true")
  parser.add_argument("--no-cache", action="store_true")
  parser.add_argument("--json", type=local_paths.argument)
  options = parser.read(own)
  for name in ("prompt_tokens", "completion_tokens"):
    value = getattr(options, name)
    if value is not None and value < 1:
      raise WrongUse(f"--{name.replace('_', '-')}={value} must be at least 1")
  if options.json is not None:
    _check_output(options.json)
  prepare()
  if options.topology is None:
    from grpo_plan import here

    if not arguments:
      print(here.text())
      return FITS
    options.topology = here.named()
    _say(f"{here.found().line}; planned for {options.topology} (--topology names another machine)")
  return _plan(options, rest, list(arguments))


def _divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments of this command, and those of the configuration."""
  own, rest = [], []
  words = iter(arguments)
  for word in words:
    name = word.removeprefix("--").partition("=")[0]
    if word in ("-h", "--help") or (word.startswith("--") and name in _SWITCHES):
      own.append(word)
    elif word.startswith("--") and name in _OWN:
      own.append(word)
      if "=" not in word:
        own += [value for value in [next(words, None)] if value is not None]
    elif word.startswith(("--config", "--noconfig", "--flagfile")):
      rest.append(word)
      if word in ("--config", "--flagfile"):
        rest += [value for value in [next(words, None)] if value is not None]
    elif word.startswith("-"):
      own.append(word)  # unknown: the parser names the nearest.
    elif any(word.startswith("--config") for word in rest):
      own.append(word)
    else:
      rest.append(f"--config={word}")
  return own, rest


def _check_output(file: pathlib.Path) -> None:
  """Raises WrongUse if a file cannot be written: compiling first would take minutes."""
  is_new = not file.exists()
  try:
    file.open("a").close()
    if is_new:
      file.unlink()
  except OSError as error:
    raise WrongUse(f"--json={file} cannot be written: {error.strerror}") from error


def prepare() -> None:
  """Sets what JAX and the compilers read at their import: nothing may seek a device."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  if "xla_gpu_autotune_level" not in os.environ.get("XLA_FLAGS", ""):
    # There is no device on which variants of a kernel could be tried.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def _plan(options: Any, rest: Sequence[str], arguments: Sequence[str]) -> int:
  from grpo_plan import plan, plan_request, report, topologies, workload

  topology = topologies.parse(options.topology)
  topologies.check_compiler(topology)
  config = plan_request.config_of(rest)
  topology = plan_request.in_run(topology, config)
  assumed = workload.lengths(
    config, prompt=options.prompt_tokens, completion=options.completion_tokens
  )
  compile_job = _compiler(topology.name, uses_cache=not options.no_cache)
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    model, source = plan_request.model_of(config, options.model_config, folder)
    run = plan_request.run_of(config, model, topology, folder, source=source)
    made = plan.make(
      run,
      topology,
      functools.partial(compile_job, run),
      assumed=assumed,
      searches=not options.no_search,
      all_shapes=options.all_shapes,
    )
    describe = lambda other: plan_request.by_arithmetic(other, model, topology, folder)
    made = plan.with_rows(made, config, describe, compile_job)
  print(report.text(made, source=source))
  if options.json is not None:
    content = report.to_json(made, source=source, arguments=arguments)
    with disk.writing(options.json):
      options.json.write_text(json.dumps(content, indent=1) + "\n")
  return FITS if made.fits else DOES_NOT_FIT


def _compiler(machine: str, *, uses_cache: bool) -> Any:
  """Returns a function (run, job) → what the compiler says, which prints how long it takes."""
  from grpo_plan import compiling, programs

  folder = compiling.default_folder() if uses_cache else None

  def compile_job(run: Any, job: Any) -> Any:
    began = time.monotonic()
    _say(f"compiling {job.name} for {machine} …")
    found = compiling.compiled(job, programs.mesh_of(run, job), host=run.host, folder=folder)
    _say(f"compiling {job.name} for {machine}: {time.monotonic() - began:.0f} s")
    return found

  return compile_job


def _say(line: str) -> None:
  print(line, file=sys.stderr, flush=True)
