"""What must be equal on all hosts of a run: compared before training; a difference ends the run.

Every process computes the same step from what it reads itself: the options, the versions of the
code, and digests of the model and of the data are compared here. The packed batch of each step is
compared by the loop.
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

import grpo_jax
from grpo_jax import data, processes, registry
from grpo_jax.config import configuration
from grpo_jax.config.options import Config
from grpo_jax.data import sources
from grpo_jax.files import manifest
from grpo_jax.models import safetensors
from grpo_jax.types import Prompt

# What must be equal, by the name with which a message shows it.
Facts = Mapping[str, str]

# Fields that may differ: those of the process, its servers and its disks. The model is compared by
# the files of its folder.
OWN_FIELDS = (
  "distributed.*",
  *(f"engine.sglang.{name}" for name in ("host", "port", "gpus", "python")),
  "engine.sglang.weights_folder",
  *("model.path", "model.fallback", "model.cache_dir"),
)
_WEIGHTS = (".safetensors", ".gguf")
_OF_MODELS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_LARGE = 64 << 20  # bytes; of larger files, and of weights, samples are compared.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16

# Variables that change what is computed, and those of them that belong to one process.
_VARIABLES = ("JAX_*", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
_OWN_VARIABLES = (
  *("JAX_COORDINATOR_*", "JAX_PROCESS_*", "JAX_NUM_PROCESSES", "JAX_LOCAL_*"),
  *("JAX_*CACHE*", "JAX_DUMP_*", "JAX_LOG*", "JAX_DEBUG_LOG*", "JAX_TRACEBACK_*"),
)
_OWN_FLAGS = re.compile(r"--xla_dump\S*|--xla_gpu_per_fusion_autotune_cache\S*")

_SHOWN = 20  # differences that a message lists.
_SHOWN_CHARACTERS = 120


class Disagreement(configuration.ConfigError):
  """Something that must be equal on all hosts differs; every process raises it alike."""


def check_start(config: Config) -> None:
  """Compares what is known before anything is loaded: options, code, variables, devices.

  Does nothing if there is one process.

  Args:
    config: Config of the run.

  Raises:
    Disagreement: Something differs between the processes.
  """
  if processes.count() == 1:
    return
  facts = {**_options(config), **_code(), **_variables(os.environ), **_devices()}
  _compare(facts, "what the processes start with")


def check_model(folder: pathlib.Path, *, option: str = "model.path") -> None:
  """Compares the files of a model's folder by their digests; see `digest_of`.

  Args:
    folder: Folder of the model on this host.
    option: Option that names the model, for messages.

  Raises:
    Disagreement: A file differs between the processes, or is missing on some.
  """
  if processes.count() == 1:
    return
  files = sorted(
    path
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*"))
    if path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in _OF_MODELS)
  )
  _compare({f"{option}: {path.relative_to(folder)}": _of_file(path) for path in files}, option)


def check_rows(prompts: data.PromptStream, held_out: Mapping[str, Sequence[Prompt]]) -> None:
  """Compares the rows of all sets: of files, and also of the hub, of tasks and of functions.

  Of training data the number of rows and 64 of them; all prompts of the evaluation sets.

  Args:
    prompts: Training data.
    held_out: Prompts of the evaluation sets, by name.

  Raises:
    Disagreement: The rows differ between the processes.
  """
  if processes.count() == 1:
    return
  facts: dict[str, str] = {}
  for each in prompts.datasets:
    sample = _digest(sources.sample(each.source))
    facts[f"training data {each.name!r}"] = f"{len(each.source)} rows, digest of some {sample}"
  for name, own in held_out.items():
    digest = _digest(*map(_as_bytes, own))
    facts[f"evaluation data {name!r}"] = f"{len(own)} prompts, digest {digest}"
  _compare(facts, "the rows of the data")


def differences(found: Sequence[Facts], hosts: Sequence[str]) -> list[str]:
  """Returns one line for each fact that is not equal on all processes. Pure.

  Args:
    found: Facts of each process.
    hosts: Host name of each process.

  Returns:
    Lines such as "loss.clip_low: 0.2 on process 0 (h1); 0.3 on processes 1, 2 (h2, h3)".
  """
  lines = []
  for name in dict.fromkeys(name for facts in found for name in facts):
    by_value: dict[str, list[int]] = {}
    for number, facts in enumerate(found):
      by_value.setdefault(facts.get(name, "absent"), []).append(number)
    if len(by_value) > 1:
      parts = (f"{value} on {_listed(who, hosts)}" for value, who in by_value.items())
      lines.append(f"{name}: {'; '.join(parts)}")
  return lines


def _compare(facts: Facts, what: str) -> None:
  """Exchanges facts, and raises Disagreement on all processes if they differ."""
  found = processes.exchange({"host": socket.gethostname(), "facts": dict(facts)}, what=what)
  lines = differences([each["facts"] for each in found], [each["host"] for each in found])
  if not lines:
    return
  more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
  listed = "".join(f"\n  - {line}" for line in [*lines[:_SHOWN], *more])
  raise processes.of_all(
    Disagreement(
      f"the processes of this run differ in what must be equal on all hosts:{listed}\n"
      "Start all processes with the same options, code and data: keep them on storage that all"
      " hosts share, or copy them to every host again"
    )
  )


def _listed(numbers: Sequence[int], hosts: Sequence[str]) -> str:
  """Returns "processes 1, 2, 5 (h1, h2)"; of many only the first ones."""
  shown, left = numbers[:8], len(numbers) - 8
  words = [*map(str, shown), *([f"{left} more"] if left > 0 else [])]
  names = ", ".join(dict.fromkeys(hosts[number] for number in shown))
  return f"process{'es' * (len(words) > 1)} {', '.join(words)} ({names})"


def _options(config: Config) -> dict[str, str]:
  """Returns the value of every option; of an option that names a file, the file's contents."""
  facts: dict[str, str] = {}
  for name, value in _leaves(configuration.to_json(config), ""):
    field = re.split(r"[\[ ]", name, maxsplit=1)[0]
    if any(fnmatchcase(field, pattern) for pattern in OWN_FIELDS):
      continue
    text = json.dumps(value)
    if isinstance(value, str) and _is_file(value):
      text = _of_file(pathlib.Path(value))
    elif len(text) > _SHOWN_CHARACTERS:
      text = f"{text[:_SHOWN_CHARACTERS]} ... (digest {_digest(text.encode())})"
    facts[name] = text
  return facts


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
  """Yields every value below a JSON value by its dotted name: data.datasets[0].path."""
  if isinstance(value, Mapping) and value:
    for key, each in value.items():
      yield from _leaves(each, f"{name}.{key}" if name else str(key))
  elif isinstance(value, list) and value:
    yield f"{name} (length)", len(value)
    for number, each in enumerate(value):
      yield from _leaves(each, f"{name}[{number}]")
  else:
    yield name, value


def _is_file(value: str) -> bool:
  try:
    return pathlib.Path(value).is_file()
  except (OSError, ValueError):  # too long for a path, or with a null character.
    return False


def _of_file(path: pathlib.Path) -> str:
  """Returns the fact on the contents of a file."""
  try:
    return f"{path.stat().st_size} bytes, digest {digest_of(path)}"
  except OSError as error:
    return f"cannot be read: {error}"


def digest_of(path: pathlib.Path) -> str:
  """Returns the digest of a file: of its contents, or of its size and 64 samples of 64 KiB.

  Weights, where each process reads only its own part, and files above 64 MiB are sampled.

  Raises:
    OSError: The file cannot be read.
  """
  size = path.stat().st_size
  if path.suffix.lower() not in _WEIGHTS and size < _LARGE:
    return manifest.digest(path)[:16]
  last = max(size - _SAMPLE_BYTES, 0)
  digest = hashlib.blake2b(str(size).encode(), digest_size=8)
  with path.open("rb") as file:
    for sample in range(_SAMPLES):
      file.seek(last * sample // (_SAMPLES - 1))
      digest.update(file.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def digest_of_weights(folder: pathlib.Path) -> str:
  """Returns one digest of the files of weights in a model's folder, in the order of their names.

  Raises:
    MissingModel, ModelError: The folder has no weights, or they are damaged.
  """
  files = {entry.file for entry in safetensors.open_folder(folder).entries.values()}
  return _digest(*(digest_of(path).encode() for path in sorted(files)))


def _digest(*parts: bytes) -> str:
  digest = hashlib.blake2b(digest_size=8)
  for part in parts:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
  return digest.hexdigest()


def _as_bytes(prompt: Prompt) -> bytes:
  fields = {each.name: getattr(prompt, each.name) for each in dataclasses.fields(prompt)}
  fields["token_ids"] = prompt.token_ids.tolist()
  return json.dumps(fields, default=_described, sort_keys=True).encode()


def _described(value: Any) -> str:
  """Returns a description of a value that is not JSON, without its address in memory."""
  return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _code() -> dict[str, str]:
  """Returns the versions of Python, of this package and of what it needs."""
  needed = importlib.metadata.requires("grpo_jax") or [] if _version("grpo_jax") else []
  names = {re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in needed if "extra ==" not in each}
  names |= {"jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"}
  versions = {name: version for name in sorted(names) if (version := _version(name))}
  versions["grpo_jax"] = f"{grpo_jax.__version__}, digest of its files {_digest_of_package()}"
  versions["Python"] = f"{platform.python_version()} for {platform.machine()}"
  return {f"version of {name}": version for name, version in versions.items()}


def _version(name: str) -> str:
  """Returns the version of an installed package; "": it is not installed."""
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return ""


def _digest_of_package() -> str:
  """Returns the digest of the source files of this distribution's packages."""
  found = filter(None, map(importlib.util.find_spec, registry.OURS))
  roots = [pathlib.Path(path) for spec in found for path in spec.submodule_search_locations or ()]
  files = [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]
  return _digest(
    *(
      f"{root.name}/{path.relative_to(root).as_posix()} {manifest.digest(path)}".encode()
      for root, path in files
    )
  )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment variables that change what is computed."""
  facts = {}
  for name, value in sorted(environment.items()):
    is_own = any(fnmatchcase(name, pattern) for pattern in _OWN_VARIABLES)
    if is_own or not any(fnmatchcase(name, pattern) for pattern in _VARIABLES):
      continue
    if compared := " ".join(sorted(_OWN_FLAGS.sub("", value).split())):
      facts[f"environment variable {name}"] = repr(compared)
  return facts


def _devices() -> dict[str, str]:
  """Returns the number and kind of this process's devices."""
  kinds = sorted(f"{device.platform} {device.device_kind}" for device in jax.local_devices())
  shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
  return {"devices of a process": shown}
