"""How an SGLang server is started: options and their checks, port, command line (I/O: sockets)."""

import dataclasses
import errno
import functools
import ipaddress
import os
import pathlib
import random
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

SERVER_SIDE = pathlib.Path(__file__).parent / "server_side"
API_KEY_VARIABLE = "GRPO_JAX_SGLANG_API_KEY"
PLACEHOLDERS = ("model_path", "host", "port", "weight_version")
DEVICES = ("cpu", "cuda")
GRACE_S = 10.0  # between the request to end and SIGKILL.
# Below the range from which Linux takes ports for outgoing connections: there, one could be taken
# while the server loads its model.
FREE_PORTS = range(20_000, 32_000)
TOKENS_ON_CPU = 32_768  # of the prefix cache: 1.4 GB for a model of 135 M parameters, in float32.
# What the trainer's environment must not say to the server's interpreter.
OF_THE_TRAINER = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", API_KEY_VARIABLE)


class ServerError(RuntimeError):
  """A server that cannot be started, does not answer, or has died."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
  """How servers are started; those of one fleet differ in `index`, port and GPUs only.

  Attributes:
    python: interpreter of the server's environment.
    log_folder: for the output of the servers, server_INDEX.log; also their working directory.
    device: "cpu" or "cuda".
    arguments: more arguments of SGLang, which override those made here.
    command: a command line of your own instead, which may hold {model_path}, {host}, {port} and
      {weight_version}; it is given none of the arguments made here, and runs in `log_folder`.
    environment: variables, added to those of the trainer.
    host: address to listen on. Other hosts can reach only a server that listens elsewhere than on
      loopback, which needs an API key.
    port: of the first server, the next has the next; None: free ones are chosen.
    gpus: numbers as nvidia-smi shows them, shared out in order; (): each server sees all.
    gpus_per_server: a model is spread over so many.
    dtype: "float32", "bfloat16", "float16" or "auto" (the checkpoint's).
    max_running: completions sampled side by side.
    context_length: tokens of a prompt and its completion; None: as many as the model knows.
    deterministic: the seed of a request decides its completion.
    scratch: folders removed if the trainer ends without having closed its servers.
    grace_s: seconds between the request to end and SIGKILL.
  """

  python: pathlib.Path
  log_folder: pathlib.Path
  device: str = "cuda"
  arguments: tuple[str, ...] = ()
  command: tuple[str, ...] | None = None
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  host: str = "127.0.0.1"
  port: int | None = None
  gpus: tuple[int, ...] = ()
  gpus_per_server: int = 1
  dtype: str = "float32"
  max_running: int = 64
  context_length: int | None = None
  deterministic: bool = True
  scratch: tuple[pathlib.Path, ...] = ()
  grace_s: float = GRACE_S


def check(options: LaunchOptions, *, servers: int, api_key: str = "") -> None:
  """Raises if servers cannot be started so; needs some 0.1 s, no model and no GPU.

  Args:
    options: of all of them.
    servers: how many.
    api_key: that they will ask for; "": none.

  Raises:
    ServerError: with what is wrong, and what to do about it.
  """
  if options.device not in DEVICES:
    raise ServerError(f"device of a server: {' or '.join(DEVICES)}, got {options.device!r}")
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
  needed = servers * options.gpus_per_server
  if options.gpus and len(options.gpus) < needed:
    raise ServerError(
      f"{servers} servers of {options.gpus_per_server} GPUs need {needed}, "
      f"but gpus lists {len(options.gpus)}: {options.gpus}"
    )
  if options.command is None:
    _check_environment(options.python, options.device)
  else:
    program, *_ = _fill(options.command, {}) or [""]
    if shutil.which(program) is None:
      raise ServerError(f"engine.sglang.command: there is no program {program!r}")
  for index in range(servers if options.port is not None else 0):
    port_of(options, index)


@functools.cache
def _check_environment(python: pathlib.Path, device: str) -> None:
  """Raises if `python` is no interpreter with SGLang for this device."""
  remedy = f"`scripts/install_sglang.sh {device}` makes one"
  if not os.access(python, os.X_OK) or python.is_dir():
    raise ServerError(f"no server environment at {python}: {remedy}")
  code = "import importlib.metadata as m; print(m.version('sglang'), m.version('torch'))"
  try:
    told = subprocess.run(
      [str(python), "-I", "-c", code], capture_output=True, text=True, timeout=60
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    raise ServerError(f"{python} is no Python that runs ({error}): {remedy}") from error
  if told.returncode:
    missing = told.stderr.strip().splitlines()[-1:] or ["it says nothing"]
    raise ServerError(f"no SGLang in the environment of {python} ({missing[0]}): {remedy}")
  if device == "cuda" and told.stdout.strip().endswith("+cpu"):
    raise ServerError(f"the environment of {python} is for the CPU: {remedy}")


def is_loopback(host: str) -> bool:
  """Returns whether only this machine can reach a server that listens on `host`."""
  try:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False  # a name, of which we do not ask where it leads.


def free_port(host: str) -> int:
  """Returns a port that nobody listens on, from FREE_PORTS."""
  chooser = random.SystemRandom()  # two trainers must not choose alike, whatever they seeded.
  for port in chooser.sample(FREE_PORTS, 200):
    try:
      _bind(host, port)
      return port
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise ServerError(f"cannot listen on {host}: {error}") from error
  raise ServerError(f"no free port on {host} among 200 of {FREE_PORTS}")


def check_port(host: str, port: int) -> None:
  """Raises ServerError if `port` cannot be listened on; says who has it, where this can be seen."""
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
  """Returns " by process 123 (name ...)" if /proc tells who listens on a port, else ""."""
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
        return f" by process {process.name} ({command.strip()[:80]})"
    except OSError:
      continue  # it ended meanwhile, or is somebody else's.
  return ""


def port_of(options: LaunchOptions, index: int) -> int:
  """Returns the port for a server: its own, if that is free, else any free one.

  Raises:
    ServerError: its own is taken.
  """
  if options.port is None:
    return free_port(options.host)
  check_port(options.host, options.port + index)
  return options.port + index


def _gpus(options: LaunchOptions, index: int) -> tuple[int, ...]:
  first = index * options.gpus_per_server
  return options.gpus[first : first + options.gpus_per_server]


def _fill(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
  """Puts values into the placeholders of a command; other braces stay, as those of JSON."""

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
  """Returns the variables of a server: the trainer's, less what is only its own business."""
  inherited = {name: value for name, value in os.environ.items() if name not in OF_THE_TRAINER}
  gpus = _gpus(options, index)
  return {
    **inherited,
    **({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}),
    **({API_KEY_VARIABLE: api_key} if api_key else {}),
    **options.environment,
  }
