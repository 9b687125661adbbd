"""Starts SGLang's HTTP server; run by the interpreter of the server's environment.

    SERVER_PYTHON serve.py [any argument of `python -m sglang.launch_server`]

It works like SGLang's own launcher, with these differences:
* The API key comes from the variable GRPO_JAX_SGLANG_API_KEY, so that no command line shows it.
* No process of the server outlives its parent, from its first line on.
* With `--device cpu`, or without CUDA: what the CPU needs (cpu_shims.py) and DEFAULTS_ON_CPU, which
  come first, so that given arguments override them.
"""

import ctypes
import os
import signal
import sys

import cpu_shims  # in the same folder, which is on sys.path as the script's folder.

# pyright: reportMissingImports=false
# (SGLang and torch are in the server's environment.)

API_KEY_VARIABLE = "GRPO_JAX_SGLANG_API_KEY"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEFAULTS_ON_CPU = (
  *("--device", "cpu"),
  *("--dtype", "float32"),  # as fast as bfloat16 here; off the trainer by 1e-5 instead of 0.1.
  *("--attention-backend", "torch_native"),
  *("--sampling-backend", "pytorch"),
  *("--cuda-graph-backend-decode", "disabled"),
  *("--cuda-graph-backend-prefill", "disabled"),
  *("--max-total-tokens", "32768"),  # the default is a share of all the memory of the machine.
  "--disable-overlap-schedule",  # it hides CPU work behind that of a GPU.
  "--sleep-on-idle",  # otherwise an idle server keeps a core busy.
  "--skip-server-warmup",  # nothing needs compilation.
  *("--lora-backend", "torch_native"),  # the others are Triton kernels.
)


def die_with_parent() -> None:
  """Makes the kernel kill this process when its parent dies.

  SGLang's processes do so themselves, but only after their imports: for about ten seconds
  they would outlive a server that is killed.
  """
  ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  if os.getsid(os.getppid()) != os.getsid(0):
    os._exit(1)  # the parent has died already.


def wants_cpu(arguments: list[str]) -> bool:
  """Returns whether to serve on the CPU: by the last --device; without one, if CUDA is missing."""
  devices = [
    following if argument == "--device" else argument.partition("=")[2]
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
    if argument == "--device" or argument.startswith("--device=")
  ]
  if devices:
    return devices[-1] == "cpu"
  os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported.
  import torch

  return not torch.cuda.is_available()


def main(arguments: list[str]) -> None:
  """Serves until the process is asked to end."""
  key = os.environ.pop(API_KEY_VARIABLE, "")
  if wants_cpu(arguments):
    cpu_shims.install()  # sets a variable that spawned processes check, see below.
    os.register_at_fork(after_in_child=die_with_parent)
    arguments = [*DEFAULTS_ON_CPU, *arguments]

  from sglang.launch_server import run_server
  from sglang.srt.plugins import load_plugins
  from sglang.srt.server_args import prepare_server_args
  from sglang.srt.utils import kill_process_tree

  load_plugins()
  server_args = prepare_server_args(arguments)
  if key:
    server_args.api_key = key
  try:
    run_server(server_args)
  finally:
    kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
  main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that the server spawned also runs this file.
  die_with_parent()
  if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    cpu_shims.install()
