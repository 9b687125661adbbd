"""The options of SGLang servers: the section `engine.sglang` of a config. Pure."""

import dataclasses
from collections.abc import Mapping

from grpo_jax.values import checked, options
from grpo_jax.values.options import option

DEVICES = ("cuda", "cpu")
_SIZE = checked.whole(low=1)
_TIME = checked.number(above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangOptions:
  """How SGLang servers are found or launched, supervised and given weights.

  Raises:
    ValueError: A value is of the wrong type or out of range; the message lists all of them.
  """

  addresses: tuple[str, ...] = option((), 'running servers, "http://host:port"; (): launch')
  servers: int = option(1, "number of servers that each process launches", _SIZE)
  python: str = option(
    ".venv-sglang/bin/python",
    "Python of the servers' environment; scripts/install_sglang.sh makes one",
    checked.path(),
  )
  arguments: tuple[str, ...] = option(
    (), 'more arguments of the server, such as "--mem-fraction-static=0.5"; not --host or --port'
  )
  command: tuple[str, ...] | None = option(
    None,
    "whole command line in place of SGLang's; it may contain {model_path} {host} {port}",
    checked.several(checked.text(), least=1, none=True),
  )
  environment: Mapping[str, str] = option({}, "extra variables of the servers")
  device: str | None = option(
    None,
    '"cuda" or "cpu"; None: "cuda" if there is an NVIDIA GPU',
    checked.choice(DEVICES, none=True),
  )
  gpus: tuple[int, ...] = option(
    (),
    "GPUs of a host for its servers: (4, 5, 6, 7); (): all of them",
    checked.several(checked.whole(low=0)),
  )
  gpus_per_server: int = option(1, "GPUs over which a server is split", _SIZE)
  host: str = option(
    "127.0.0.1",
    "address that the servers listen on; the servers that a run launches always require a key",
  )
  port: int | None = option(
    None,
    "of the first server of a host, then the next; None: any free",
    checked.whole(low=1, high=65535, none=True),
  )
  deterministic: bool = option(True, "the same seed gives the same completion; slower on GPUs")
  weights_folder: str | None = option(
    None,
    "folder for the weights; None: in memory if they fit, otherwise in the run folder",
    checked.path(none=True),
  )
  release_memory: bool = option(
    False, "free the servers' memory during updates, if they share GPUs with the trainer"
  )
  probe_tolerance: float | None = option(
    None,
    "largest allowed difference of probe logprobs, in nats; None: 3e-4, or 1.5 in bfloat16",
    checked.number(above=0, none=True),
  )
  start_timeout_s: float = option(600.0, "until a launched server answers", _TIME)
  request_timeout_s: float = option(
    1800.0, "limit of one request, including the time that it waits at the server", _TIME
  )
  control_timeout_s: float = option(300.0, "limit of a change of weights", _TIME)
  health_timeout_s: float = option(
    60.0, "a server that takes longer to answer /health is replaced", _TIME
  )
  health_every_s: float = option(15.0, "time between two health checks", _TIME)
  max_restarts: int = option(
    3, "restarts of one server within an hour before the run stops", checked.whole(low=0)
  )
  max_attempts: int = option(
    5, "attempts for a request that servers answer incorrectly, before the run stops", _SIZE
  )

  def __post_init__(self):
    options.require(self, of="engine.sglang")
    for name in ("addresses", "arguments", "command", "gpus"):
      value = getattr(self, name)
      object.__setattr__(self, name, None if value is None else tuple(value))
