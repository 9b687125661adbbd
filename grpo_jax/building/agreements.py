"""What must be equal on all hosts of a run: compared before training; a difference ends the run.

Every process computes the same step from what it reads itself. A stale copy of the data, another
version of the code or another option on one host would not be noticed later: the processes would
exchange gradients of different batches.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import platform
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax

import grpo_jax
from grpo_jax import data, processes, registry
from grpo_jax.config import configuration
from grpo_jax.data import file_cache, sources
from grpo_jax.files import fetched, local_paths, manifest
from grpo_jax.models import safetensors
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)

# A ConfigDict, whose fields a type checker cannot know.
Config = Any

# By the name of what is compared: what must be equal, and how a message shows it.
Facts = Mapping[str, tuple[str, str]]

# Fields that may differ: those of the process, its servers and its disks. The model is compared by
# the files of its folder.
OWN_FIELDS = (
  "distributed.*",
  *(f"engine.sglang.{name}" for name in ("host", "port", "gpus", "python")),
  "engine.sglang.weights_folder",
  *("model.path", "model.fallback", "model.cache_dir"),
)
# Fields whose value may be a folder that is read, or a file that is missing here. A field of
# another name may name a file, too.
_PATHS = re.compile(r"(^|[._])(path|paths|file|files|folder|directory|dir)(\[\d+\])*$")
_NOT_READ = re.compile(r"^(logging|export|checkpoint|teacher)\.")
_WEIGHTS = (".safetensors", ".gguf")
_OF_MODELS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_LARGE = 64 << 20  # bytes; digests of larger files are kept until the file changes.
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16  # of a file of weights.
_SLOW_S = 5.0

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
  """Compares what is known before anything is loaded: options, files, code, variables, devices.

  Does nothing if there is one process. Files that options name are compared by their contents, so
  their paths may differ.

  Args:
    config: Config of the run.

  Raises:
    Disagreement: Something differs between the processes.
  """
  if processes.count() == 1:
    return
  began = time.monotonic()
  facts = {**_options(config), **_code(), **_variables(os.environ), **_devices()}
  if (took := time.monotonic() - began) > _SLOW_S:
    _log.info("digests of the files that the run reads: %.0f s", took)
  _compare(facts, "what the processes start with")


def check_model(folder: pathlib.Path, *, option: str = "model.path") -> None:
  """Compares the files of a model's folder.

  Config, tokenizer and templates are compared as a whole; of a file of weights its size and 64
  samples of 64 KiB, since every process reads only its own part of the weights.

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
  facts = {f"{option}: {path.relative_to(folder)}": _of_file(path) for path in files}
  _compare(facts, "the model")


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
  facts: dict[str, tuple[str, str]] = {}
  for dataset in prompts.datasets:
    digest = _digest(sources.sample(dataset.source))
    shown = f"{len(dataset.source)} rows, digest of a sample {digest}"
    facts[f"training data {dataset.name!r}"] = (shown, shown)
  for name, own in held_out.items():
    shown = f"{len(own)} prompts, digest {_digest(*map(_as_bytes, own))}"
    facts[f"evaluation data {name!r}"] = (shown, shown)
  _compare(facts, "the rows of the data")


def check_modules() -> None:
  """Compares the source files of the user's modules that are imported: rewards, losses, and so on.

  A module that only some processes have imported is not compared.

  Raises:
    Disagreement: A source file differs between the processes.
  """
  if processes.count() == 1:
    return
  facts = {
    f"module {name}": _of_file(pathlib.Path(file))
    for name, file in registry.users_modules().items()
  }
  _compare(facts, "the modules of the user", ignores_absent=True)


def differences(
  found: Sequence[Facts], hosts: Sequence[str], *, ignores_absent: bool = False
) -> list[str]:
  """Returns one line for each fact that is not equal on all processes. Pure.

  Args:
    found: Facts of each process.
    hosts: Host name of each process.
    ignores_absent: Whether a fact that a process does not have is not a difference.

  Returns:
    Lines such as "loss.clip_low: 0.2 on process 0 (h1); 0.3 on processes 1 and 2 (h2, h3)".
  """
  lines = []
  for name in dict.fromkeys(name for facts in found for name in facts):
    by_identity: dict[str | None, list[int]] = {}
    for number, facts in enumerate(found):
      by_identity.setdefault(facts[name][0] if name in facts else None, []).append(number)
    if ignores_absent:
      by_identity.pop(None, None)
    if len(by_identity) > 1:
      parts = [
        f"{_shown(found[who[0]], name)} on {_listed(who, hosts)}" for who in by_identity.values()
      ]
      lines.append(f"{name}: {'; '.join(parts)}")
  return lines


def same_fallback(reason: str) -> str:
  """Returns why the fallback of the model is used, if any process has to use it; otherwise "".

  Args:
    reason: Why this process has to use it; "": it found the model itself.
  """
  reasons = processes.exchange(reason, what="whether the model was found")
  return reason or next((each for each in reasons if each), "")


def _compare(facts: Facts, what: str, *, ignores_absent: bool = False) -> None:
  """Exchanges facts, and raises Disagreement on all processes if they differ."""
  own = {"host": socket.gethostname(), "facts": dict(facts)}
  found = processes.exchange(own, what=what)
  lines = differences(
    [{name: (fact[0], fact[1]) for name, fact in each["facts"].items()} for each in found],
    [each["host"] for each in found],
    ignores_absent=ignores_absent,
  )
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


def _shown(facts: Facts, name: str) -> str:
  return facts[name][1] if name in facts else "absent"


def _listed(numbers: Sequence[int], hosts: Sequence[str]) -> str:
  """Returns "processes 1, 2 and 5 (h1, h2)"; of many only the first ones."""
  shown, left = list(numbers[:8]), len(numbers) - 8
  words = [*map(str, shown), *([f"{left} more"] if left > 0 else [])]
  joined = " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
  names = ", ".join(dict.fromkeys(hosts[number] for number in shown))
  return f"process{'es' * (len(words) > 1)} {joined} ({names})"


def _options(config: Config) -> dict[str, tuple[str, str]]:
  """Returns the value of every option; of an option that names a file, the file's contents."""
  facts: dict[str, tuple[str, str]] = {}
  for name, value in _leaves(configuration.to_json(config), ""):
    field = re.split(r"[\[ ]", name, maxsplit=1)[0]
    if any(fnmatchcase(field, pattern) for pattern in OWN_FIELDS):
      continue
    text = json.dumps(value)
    shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
    if text != shown:
      shown += f" (digest {_digest(text.encode())})"
    named = isinstance(value, str) and _of_input(name, value)
    facts[name] = named or (text, shown)
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


def _of_input(name: str, value: str) -> tuple[str, str] | None:
  """Returns the fact on the file or folder that an option names; None if it names none here."""
  if _NOT_READ.match(name) or not value.strip() or len(value) > 4096 or "\n" in value:
    return None
  is_path = bool(_PATHS.search(name))
  try:
    is_remote = is_path and local_paths.is_url(value)
    path = fetched.local(value) if is_remote else pathlib.Path(value)
    if path.is_file():
      identity, shown = _of_file(path)
    elif is_path and path.is_dir():
      identity, shown = _of_folder(path)
    elif is_path and ("/" in value or not name.startswith("environments.")):
      return value, f"{value} (no such file)"
    else:
      return None
  except (OSError, ValueError) as error:  # a string that names no file; storage without an answer.
    if not is_path:
      return None
    return f"{value}: {error}", f"{value} ({error})"
  return identity, f"{value} ({shown})"


def _of_file(path: pathlib.Path) -> tuple[str, str]:
  """Returns the fact on the contents of a file."""
  try:
    digest = digest_of(path)
    shown = f"{path.stat().st_size} bytes, digest {digest}"
  except OSError as error:
    shown = f"cannot be read: {error}"
  return shown, shown


def _of_folder(folder: pathlib.Path) -> tuple[str, str]:
  """Returns the fact on the contents of all files in a folder, except hidden ones."""
  files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  names = [path.relative_to(folder).as_posix() for path in files]
  kept = [
    (name, path) for name, path in zip(names, files, strict=True) if not f"/{name}".count("/.")
  ]
  digest = _digest(*(f"{name} {digest_of(path)}".encode() for name, path in kept))
  shown = f"{len(kept)} files, digest {digest}"
  return shown, shown


def digest_of(path: pathlib.Path) -> str:
  """Returns the digest of a file's contents; of a file of weights, of its size and samples of it.

  Digests of large files are kept in the user's cache until the file changes.

  Args:
    path: File to read.

  Raises:
    OSError: The file cannot be read.
  """
  if path.suffix.lower() in _WEIGHTS:
    return _sampled(path)
  if path.stat().st_size < _LARGE:
    return manifest.digest(path)[:16]

  def build(folder: pathlib.Path) -> None:
    (folder / "digest").write_text(manifest.digest(path)[:16])

  return (file_cache.derived(path, "digest-1", build) / "digest").read_text()


def digest_of_all(paths: Iterable[pathlib.Path]) -> str:
  """Returns one digest of several files, in this order; raises as `digest_of`."""
  return _digest(*(digest_of(path).encode() for path in paths))


def digest_of_weights(folder: pathlib.Path) -> str:
  """Returns one digest of the files of weights in a model's folder, in the order of their names.

  Raises:
    MissingModel, ModelError: The folder has no weights, or they are damaged.
  """
  files = {entry.file for entry in safetensors.open_folder(folder).entries.values()}
  return digest_of_all(sorted(files))


def _sampled(path: pathlib.Path) -> str:
  """Returns the digest of a file's size and of samples, the first and the last bytes among them."""
  size = path.stat().st_size
  last = max(size - _SAMPLE_BYTES, 0)
  digest = hashlib.blake2b(str(size).encode(), digest_size=8)
  with path.open("rb") as file:
    for sample in range(_SAMPLES):
      file.seek(last * sample // (_SAMPLES - 1))
      digest.update(file.read(_SAMPLE_BYTES))
  return digest.hexdigest()


def _digest(*parts: bytes) -> str:
  digest = hashlib.blake2b(digest_size=8)
  for part in parts:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
  return digest.hexdigest()


def _as_bytes(prompt: Prompt) -> bytes:
  fields = {
    field.name: getattr(prompt, field.name)
    for field in dataclasses.fields(prompt)
    if field.name != "token_ids"
  }
  text = json.dumps(fields, default=_described, sort_keys=True)
  return text.encode("utf-8", "surrogatepass") + prompt.token_ids.tobytes()


def _described(value: Any) -> str:
  """Returns a description of a value that is not JSON, without its address in memory."""
  return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _code() -> dict[str, tuple[str, str]]:
  """Returns the versions of Python, of this package and of what it needs."""
  needed = importlib.metadata.requires("grpo_jax") or [] if _is_installed("grpo_jax") else []
  names = {re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in needed if "extra ==" not in each}
  names |= {"jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"}
  versions = {name: importlib.metadata.version(name) for name in names if _is_installed(name)}
  versions["grpo_jax"] = f"{grpo_jax.__version__}, digest of its files {_digest_of_package()}"
  versions["Python"] = f"{platform.python_version()} for {platform.machine()}"
  return {f"version of {name}": (text, text) for name, text in sorted(versions.items())}


def _is_installed(name: str) -> bool:
  try:
    importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return False
  return True


@functools.cache
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


def _variables(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
  """Returns the environment variables that change what is computed."""
  facts = {}
  for name, value in sorted(environment.items()):
    is_own = any(fnmatchcase(name, pattern) for pattern in _OWN_VARIABLES)
    if is_own or not any(fnmatchcase(name, pattern) for pattern in _VARIABLES):
      continue
    compared = " ".join(sorted(_OWN_FLAGS.sub("", value).split()))
    if compared:
      facts[f"environment variable {name}"] = (compared, repr(value))
  return facts


def _devices() -> dict[str, tuple[str, str]]:
  """Returns the number and kind of this process's devices."""
  kinds = sorted(f"{device.platform} {device.device_kind}" for device in jax.local_devices())
  shown = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
  return {"devices of a process": (shown, shown)}
