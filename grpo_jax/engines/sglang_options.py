"""The options of SGLang servers: their names, defaults and kinds, written once.

They are the section `engine.sglang` of a config; `grpo_jax/config/base.py` explains each.
"""

import dataclasses
from collections.abc import Mapping

from grpo_jax.values import checked

_SIZE = checked.whole(low=1)
_TIME = checked.number(above=0)

KINDS: Mapping[str, checked.Kind] = {
  "addresses": checked.several(checked.text()),
  "servers": _SIZE,
  "python": checked.path(),
  "arguments": checked.several(checked.text()),
  "command": checked.several(checked.text(), least=1, none=True),
  "environment": checked.mapping(),
  "device": checked.choice(("cuda", "cpu"), none=True),
  "gpus": checked.several(checked.whole(low=0)),
  "gpus_per_server": _SIZE,
  "host": checked.text(),
  "port": checked.whole(low=1, high=65535, none=True),
  "deterministic": checked.switch(),
  "weights_folder": checked.path(none=True),
  "release_memory": checked.switch(),
  "probe_tolerance": checked.number(above=0, none=True),
  "start_timeout_s": _TIME,
  "request_timeout_s": _TIME,
  "control_timeout_s": _TIME,
  "health_timeout_s": _TIME,
  "health_every_s": _TIME,
  "max_restarts": checked.whole(low=0),
  "max_attempts": _SIZE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangOptions:
  """How SGLang servers are found or launched, supervised and given weights.

  Raises:
    ValueError: A value is of the wrong type or out of range; the message lists all of them.
  """

  addresses: tuple[str, ...] = ()
  servers: int = 1
  python: str = ".venv-sglang/bin/python"
  arguments: tuple[str, ...] = ()
  command: tuple[str, ...] | None = None
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  device: str | None = None
  gpus: tuple[int, ...] = ()
  gpus_per_server: int = 1
  host: str = "127.0.0.1"
  port: int | None = None
  deterministic: bool = True
  weights_folder: str | None = None
  release_memory: bool = False
  probe_tolerance: float | None = None
  start_timeout_s: float = 600.0
  request_timeout_s: float = 1800.0
  control_timeout_s: float = 300.0
  health_timeout_s: float = 60.0
  health_every_s: float = 15.0
  max_restarts: int = 3
  max_attempts: int = 5

  def __post_init__(self):
    checked.require(KINDS, checked.fields_of(self), of="engine.sglang")
    for name in ("addresses", "arguments", "command", "gpus"):
      value = getattr(self, name)
      object.__setattr__(self, name, None if value is None else tuple(value))
