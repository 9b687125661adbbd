"""Starts one SGLang server by hand, for `engine.sglang.addresses`; Ctrl-C ends it.

    python scripts/serve_sglang.py MODEL_FOLDER [--port 30000] [--device cpu] [-- SGLANG ARGUMENTS]

Any Python works, with or without the trainer's packages. The server listens on this machine only;
with another --host it needs an API key in the environment variable GRPO_JAX_SGLANG_API_KEY, where
the trainer looks for it too.
"""

import argparse
import os
import pathlib
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).absolute().parents[1]
sys.path.insert(0, str(ROOT))

from grpo_jax.engines.server_process import (  # noqa: E402
  API_KEY_VARIABLE,
  LaunchOptions,
  ServerError,
  ServerProcess,
)
from grpo_jax.files import local_paths  # noqa: E402


def parse(arguments: list[str]) -> argparse.Namespace:
  """Parses the command line; arguments after "--" are passed to SGLang."""
  end = arguments.index("--") if "--" in arguments else len(arguments)
  parser = argparse.ArgumentParser(
    description=(__doc__ or "").partition("\n")[0],
    epilog="Arguments after -- are passed to SGLang: see `python -m sglang.launch_server --help`.",
  )
  parser.add_argument("model", type=local_paths.argument, help="Hugging Face folder")
  parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
  parser.add_argument("--port", type=int, default=30000)
  parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
  parser.add_argument(
    "--python",
    type=local_paths.argument,
    default=ROOT / ".venv-sglang" / "bin" / "python",
    help="Python of the server's environment, see scripts/install_sglang.sh",
  )
  parser.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, else the model's")
  parser.add_argument("--max-running", type=int, default=64, help="simultaneous completions")
  parser.add_argument(
    "--context-length", type=int, help="length of prompt and completion, in tokens"
  )
  options = parser.parse_args(arguments[:end])
  options.arguments = tuple(arguments[end + 1 :])
  return options


def follow(server: ServerProcess) -> None:
  """Prints the log until none of the server's processes is left."""
  log = open(server.log, errors="replace")
  is_running = True
  while is_running:
    is_running = server.is_running  # before reading, so that the last lines are read too.
    sys.stdout.write(log.read())
    sys.stdout.flush()
    if server.log.exists() and os.stat(server.log).st_ino != os.fstat(log.fileno()).st_ino:
      log.close()
      log = open(server.log, errors="replace")  # the old one was full.
    time.sleep(0.1)
  log.close()


def main(arguments: list[str]) -> int:
  """Serves until it is asked to end; returns the exit code of the command."""
  options = parse(arguments)
  device = options.device or ("cuda" if pathlib.Path("/dev/nvidia0").exists() else "cpu")
  dtype = "float32" if (options.dtype, device) == ("auto", "cpu") else options.dtype
  if not (options.model / "config.json").exists():
    print(f"{options.model} is not a Hugging Face folder: it has no config.json", file=sys.stderr)
    return 2
  with tempfile.TemporaryDirectory(prefix="sglang-") as folder:
    launch = LaunchOptions(
      python=options.python,
      log_folder=pathlib.Path(folder),
      device=device,
      arguments=options.arguments,
      host=options.host,
      port=options.port,
      dtype=dtype,
      max_running=options.max_running,
      context_length=options.context_length,
      scratch=(pathlib.Path(folder),),
    )
    key = os.environ.get(API_KEY_VARIABLE, "")
    try:
      server = ServerProcess.start(launch, 0, options.model, weight_version=-1, api_key=key)
    except ServerError as error:
      print(error, file=sys.stderr)
      return 2

    was_asked = False

    def stop(*_: object) -> None:  # first Ctrl-C: asks; second: kills.
      nonlocal was_asked
      server.kill() if was_asked else server.terminate()
      was_asked = True

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    print(f"Starting the server; it will answer at {server.address}", flush=True)
    follow(server)
    print(f"The server has ended: {server.exit_text()}.")
    server.wait()
  return 0 if was_asked else 1


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
