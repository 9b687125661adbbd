"""How an SGLang server is started: options and their checks, port, command line (I/O: sockets)."""

import dataclasses
import errno
import functools
import ipaddress
import itertools
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_jax.engines.sglang_options import DEVICES, SGLangOptions
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import package_data
from grpo_jax.http import redaction

SERVER_SIDE = pathlib.Path(__file__).parent / "server_side"
API_KEY_VARIABLE = "GRPO_JAX_SGLANG_API_KEY"
PLACEHOLDERS = ("model_path", "host", "port", "weight_version")
GRACE_S = 10.0  # between the request to end and SIGKILL.
# Below the range from which Linux takes ports for outgoing connections: there, one could be taken
# while the server loads its model.
FREE_PORTS = range(20_000, 32_000)
_LAST_PORT = 65_535
# Size of the prefix cache: 1.4 GB for a model of 135 M parameters, in float32.
TOKENS_ON_CPU = 32_768
# Variables of the trainer that must not reach the server's interpreter.
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", API_KEY_VARIABLE)

_KEY = f"put the key into the environment variable {API_KEY_VARIABLE}"
_ONE_HOST = "a server that the run starts is on this host alone"
# Arguments that decide who can reach a server, and what to use in their place.
_DECIDE_ACCESS = {
  "--host": "set engine.sglang.host",
  "--port": "set engine.sglang.port",
  "--api-key": _KEY,
  "--admin-api-key": _KEY,
  "--config": "list the arguments that the file holds",
  "--grpc-mode": "the run speaks HTTP",
  "--smg-grpc-mode": "the run speaks HTTP",
  "--ssl-keyfile": "the run speaks HTTP to servers that it starts",
  "--ssl-certfile": "the run speaks HTTP to servers that it starts",
  "--ssl-keyfile-password": "the run speaks HTTP to servers that it starts",
  "--dist-init-addr": _ONE_HOST,
  "--nccl-init-addr": _ONE_HOST,
  "--nnodes": _ONE_HOST,
}
# Arguments that the run makes from options of its own.
_SET_BY_RUN = {
  "--model-path": "set model.path",
  "--model": "set model.path",
  "--device": "set engine.sglang.device",
  "--dtype": "set model.compute_dtype",
  "--max-running-requests": "set engine.max_rows",
  "--weight-version": "it is that of the trainer's weights",
  "--tp-size": "set engine.sglang.gpus_per_server",
  "--tensor-parallel-size": "set engine.sglang.gpus_per_server",
  "--enable-deterministic-inference": "set engine.sglang.deterministic",
  "--enable-memory-saver": "set engine.sglang.release_memory",
  "--enable-return-routed-experts": "set loss.router_replay",
  "--enable-lora": "set model.lora.sync='adapter'",
  "--max-lora-rank": "set model.lora.rank",
  "--lora-target-modules": "set model.lora.targets",
  "--lora-paths": "the adapter is that of the trainer",
}


class ServerError(ExpectedFailure, RuntimeError):
  """A server that cannot be started, does not answer, or has died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
  """How servers are started; the servers of a fleet differ only in index, port and GPUs.

  Attributes:
    python: Interpreter of the server's environment.
    log_folder: Folder for the servers' output, server_INDEX.log; also their working directory.
    device: "cpu" or "cuda".
    arguments: More arguments of SGLang, except those that decide who can reach the server.
    command: Command line to run in place of SGLang's, which may contain {model_path}, {host},
      {port} and {weight_version}; it gets no other arguments, and runs in `log_folder`.
    environment: Variables that are added to those of the trainer.
    host: Address to listen on. An address other than loopback lets other hosts reach the server,
      and needs an API key.
    port: Port of the first server of the host; the others have the next ones. None: free ports are
      chosen.
    gpus: Numbers of GPUs as in nvidia-smi, divided among the servers of the host in order; ():
      each server sees all.
    gpus_per_server: Number of GPUs that a model is spread over.
    dtype: "float32", "bfloat16", "float16" or "auto" (the checkpoint's).
    max_running: Number of completions sampled at the same time.
    context_length: Largest number of tokens of a prompt and its completion; None: the model's.
    deterministic: Whether the seed of a request decides its completion.
    scratch: Folders to remove if the trainer ends without having closed its servers.
    grace_s: Time between the request to end and SIGKILL, in seconds.
    first: Number of the first server among all servers of the run, for names and logs.
    slot: Number of servers on this host before the first one: those of other processes of the run.
  """

  python: pathlib.Path
  log_folder: pathlib.Path
  device: str = "cuda"
  arguments: tuple[str, ...] = SGLangOptions.arguments
  command: tuple[str, ...] | None = SGLangOptions.command
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  host: str = SGLangOptions.host
  port: int | None = SGLangOptions.port
  gpus: tuple[int, ...] = SGLangOptions.gpus
  gpus_per_server: int = SGLangOptions.gpus_per_server
  dtype: str = "float32"
  max_running: int = 64
  context_length: int | None = None
  deterministic: bool = SGLangOptions.deterministic
  scratch: tuple[pathlib.Path, ...] = ()
  grace_s: float = GRACE_S
  first: int = 0
  slot: int = 0


def check(options: LaunchOptions, *, servers: int, api_key: str = "") -> None:
  """Raises if servers cannot be started with these options; takes 0.1 s, no model and no GPU.

  Args:
    options: Options of all servers.
    servers: Number of servers.
    api_key: Key that clients must send; "": none.

  Raises:
    ServerError: The message says what is wrong, and what to do about it.
  """
  if options.device not in DEVICES:
    known = " or ".join(DEVICES)
    raise ServerError(f"the device of a server must be {known}, got {options.device!r}")
  for refusal in (
    *_refused_arguments(options.arguments, _DECIDE_ACCESS),
    *_refused_command(options.command or ()),
    *_refused_variables(options.environment),
  ):
    raise ServerError(refusal)
  if not api_key and not is_loopback(options.host):
    raise ServerError(
      f"a server that listens on {options.host} can be reached by others: put an API key into the "
      f"environment variable {API_KEY_VARIABLE}, or listen on 127.0.0.1"
    )
  if options.gpus_per_server < 1:
    raise ServerError(
      f"a server needs at least 1 GPU, got gpus_per_server={options.gpus_per_server}"
    )
  if options.gpus and options.device == "cpu":
    raise ServerError(f"servers on the CPU use no GPUs, got gpus={options.gpus}")
  needed = (options.slot + servers) * options.gpus_per_server
  if options.gpus and len(options.gpus) < needed:
    others = f", after {options.slot} of other processes on this host," if options.slot else ""
    raise ServerError(
      f"{servers} servers of {options.gpus_per_server} GPUs{others} need {needed}, "
      f"but gpus lists {len(options.gpus)}: {options.gpus}"
    )
  if options.command is None:
    check_environment(options.python, options.device)
  else:
    program, *_ = _fill(options.command, {}) or [""]
    if shutil.which(program) is None:
      raise ServerError(f"engine.sglang.command: there is no program {program!r}")
  for index in range(servers if options.port is not None else 0):
    port_of(options, index)


def refusals(
  *,
  addresses: Sequence[str],
  arguments: Sequence[Any],
  command: Sequence[Any] | None,
  environment: Mapping[str, Any],
) -> Iterator[str]:
  """Yields why options of `engine.sglang` are refused: they would contradict other options.

  Values that may hold a key or a password are not shown.

  Args:
    addresses: Addresses of running servers.
    arguments: More arguments of servers that are launched.
    command: Command line of the user that replaces SGLang's.
    environment: Variables of servers that are launched.
  """
  for address in addresses:
    yield from _refused_address(address)
  yield from _refused_arguments(arguments, {**_DECIDE_ACCESS, **_SET_BY_RUN})
  yield from _refused_command(command or ())
  yield from _refused_variables(environment)


def _refused_address(address: str) -> Iterator[str]:
  try:
    parts = urllib.parse.urlsplit(address)
    is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
  except ValueError:
    yield "the address of a server is 'http://host:port'; one of the addresses cannot be read"
    return
  if "@" in parts.netloc or parts.query or parts.fragment:
    yield f"an address of a server is 'http://host:port', without a password or a query: {_KEY}"
  elif not is_whole:
    yield f"an address of a server is 'http://host:port', got {address!r}"


def _refused_arguments(arguments: Sequence[Any], instead: Mapping[str, str]) -> Iterator[str]:
  """Yields why arguments are refused; argparse also accepts unambiguous beginnings of names."""
  if isinstance(arguments, str) or not all(isinstance(each, str) for each in arguments):
    yield "engine.sglang.arguments must be a tuple of strings, such as ('--log-level=info',)"
    return
  for argument in arguments:
    given = re.split(r"[=\s]", argument.strip(), maxsplit=1)[0]
    meant = [name for name in instead if name.startswith(given)]
    if len(given) > len("--") and meant:
      name = given if given in meant else meant[0]
      what = given if given == name else f"{given} (short for {name})"
      yield f"{what} cannot be among engine.sglang.arguments: {instead[name]}"


def _refused_command(command: Sequence[Any]) -> Iterator[str]:
  """Yields why a command line is refused; words inside a command of a shell count as well."""
  if isinstance(command, str) or not all(isinstance(each, str) for each in command):
    yield "engine.sglang.command must be a tuple of strings, such as ('serve', '{port}')"
    return
  words = " ".join(command).replace("=", " ").replace("'", " ").replace('"', " ").split()
  for word, following in itertools.pairwise([*words, ""]):
    if word in ("--api-key", "--admin-api-key"):
      yield f"{word} cannot be in engine.sglang.command: {_KEY}, where the command finds it"
    is_host = len(word) > len("--") and "--host".startswith(word)
    if is_host and following != "{host}" and not is_loopback(following):
      yield (
        f"engine.sglang.command lets the server listen on {following}: write {word} {{host}}, and"
        " set engine.sglang.host"
      )


def _refused_variables(environment: Mapping[str, Any]) -> Iterator[str]:
  if API_KEY_VARIABLE in environment:
    yield (
      f"engine.sglang.environment cannot hold {API_KEY_VARIABLE}, since it is written to"
      " config.json: set it in the environment of the run"
    )


@functools.cache
def check_environment(python: pathlib.Path, device: str) -> None:
  """Raises if `python` is not an interpreter with SGLang for this device."""
  script = package_data.folder() / "scripts" / "install_sglang.sh"
  remedy = f"`bash {script} {device}` makes one"
  if not os.access(python, os.X_OK) or python.is_dir():
    raise ServerError(f"no server environment at {python}: {remedy}")
  code = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
  try:
    asked = subprocess.run(
      [str(python), "-I", "-c", code], capture_output=True, text=True, timeout=60
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    raise ServerError(f"{python} is not a working Python ({error}): {remedy}") from error
  if asked.returncode:
    missing = asked.stderr.strip().splitlines()[-1:] or ["it printed no reason"]
    raise ServerError(f"no SGLang in the environment of {python} ({missing[0]}): {remedy}")
  if device == "cuda" and asked.stdout.strip().endswith("+cpu"):
    raise ServerError(f"the environment of {python} is for the CPU: {remedy}")


def device_of(device: str | None) -> str:
  """Returns the device of the servers: the one that is chosen, or "cuda" if there is a GPU."""
  return device or ("cuda" if pathlib.Path("/dev/nvidia0").exists() else "cpu")


def is_loopback(host: str) -> bool:
  """Returns whether only this machine can reach a server that listens on `host`."""
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False  # a name, which is not looked up.


def free_port(host: str) -> int:
  """Returns a port that nobody listens on, from FREE_PORTS."""
  chooser = random.SystemRandom()  # independent of all seeds: two trainers must differ.
  for port in chooser.sample(FREE_PORTS, 200):
    try:
      _bind(host, port)
      return port
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise ServerError(f"cannot listen on {host}: {error}") from error
  raise ServerError(f"no free port on {host} among 200 of {FREE_PORTS}")


def check_port(host: str, port: int) -> None:
  """Raises ServerError if `port` cannot be listened on; names its owner where that is visible."""
  try:
    _bind(host, port)
  except OSError as error:
    if error.errno != errno.EADDRINUSE:
      raise ServerError(f"cannot listen on {host}, port {port}: {error}") from error
    raise ServerError(
      f"port {port} is taken{_owner(port)}: choose another with engine.sglang.port, "
      "or none, for a free one"
    ) from error


def _bind(host: str, port: int) -> None:
  """Listens on a port for a moment, as the server will."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  with socket.socket(family, socket.SOCK_STREAM) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind((host, port))
    probe.listen(1)


def _owner(port: int) -> str:
  """Returns " by process 123 (name ...)" if /proc shows who listens on a port, else ""."""
  listens = "0A"
  sockets = set()
  for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    try:
      rows = [line.split() for line in pathlib.Path(table).read_text().splitlines()[1:]]
    except OSError:
      continue
    sockets |= {
      f"socket:[{row[9]}]"
      for row in rows
      if row[3] == listens and int(row[1].rpartition(":")[2], 16) == port
    }
  for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if any(os.readlink(held) in sockets for held in (process / "fd").iterdir()):
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        command = redaction.shown(command, limit=80)
        return f" by process {process.name} ({command})"
    except OSError:
      continue  # it ended meanwhile, or belongs to another user.
  return ""


def port_of(options: LaunchOptions, index: int) -> int:
  """Returns the port of a server: the configured one, or any free one if none is configured.

  Raises:
    ServerError: The configured port is taken.
  """
  if options.port is None:
    return free_port(options.host)
  port = options.port + options.slot + index
  if port > _LAST_PORT:
    number = options.first + index
    raise ServerError(
      f"server {number} would listen on port {port}, above {_LAST_PORT}: lower engine.sglang.port"
    )
  check_port(options.host, port)
  return port


def _gpus(options: LaunchOptions, index: int) -> tuple[int, ...]:
  first = (options.slot + index) * options.gpus_per_server
  return options.gpus[first : first + options.gpus_per_server]


def _fill(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
  """Replaces the placeholders of a command by values; other braces stay (JSON has some)."""

  def value(match: re.Match[str]) -> str:
    name = match.group(1)
    if name not in PLACEHOLDERS:
      known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
      raise ServerError(f"engine.sglang.command knows {known}, got {{{name}}}")
    return values.get(name, "")

  return [re.sub(r"\{([a-z_]+)\}", value, part) for part in command]


def command_of(
  options: LaunchOptions, port: int, model_path: str | os.PathLike[str], weight_version: int
) -> list[str]:
  """Returns the command line of a server."""
  if options.command is not None:
    values = (str(model_path), options.host, str(port), str(weight_version))
    program, *rest = _fill(options.command, dict(zip(PLACEHOLDERS, values, strict=True)))
    return [os.path.abspath(program) if os.sep in program else program, *rest]
  made = {
    "--model-path": model_path,
    "--host": options.host,
    "--port": port,
    "--device": options.device,
    "--dtype": options.dtype,
    "--max-running-requests": options.max_running,
    "--weight-version": weight_version,
  }
  length = options.context_length
  if length is not None:
    made["--context-length"] = length
  if options.gpus_per_server > 1:
    made["--tp-size"] = options.gpus_per_server
  if options.device == "cpu" and length is not None:
    made["--max-total-tokens"] = min(options.max_running * length, max(TOKENS_ON_CPU, length))
  return [
    str(options.python.absolute()),
    str(SERVER_SIDE / "serve.py"),
    *(str(part) for pair in made.items() for part in pair),
    *(["--enable-deterministic-inference"] if options.deterministic else []),
    *options.arguments,
  ]


def environment_of(options: LaunchOptions, index: int, api_key: str) -> dict[str, str]:
  """Returns the variables of a server: the trainer's without NOT_INHERITED, and its own."""
  inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
  gpus = _gpus(options, index)
  return {
    **inherited,
    **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}),
    **({API_KEY_VARIABLE: api_key} if api_key else {}),
    **options.environment,
  }
