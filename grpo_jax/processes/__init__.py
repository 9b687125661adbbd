"""The processes of a run: how many there are, which one this is, and what they exchange.

All processes run the same program and make the same decisions. What only one of them can know (a
clock, a file, a failure, what it sampled) is exchanged by the functions of this room, which go
through the key-value store of JAX's coordination service: on the host, with a time-out that names
who is missing. Collectives of devices have neither.

Only the main process writes, prints, claims a folder or decides from clocks. Nothing here starts a
JAX backend or imports JAX: a program without `jax.distributed` is a single process.
"""

from grpo_jax.processes.exchanges import (
  Channel,
  agree,
  all_reach,
  any_of,
  barrier,
  broadcast,
  exchange,
  stop_together,
  together,
  waited_s,
)
from grpo_jax.processes.failures import (
  DisagreementError,
  OtherProcessError,
  PartedError,
  ProcessesError,
  continues,
  exit_code,
  failing,
  give_up,
  is_of_all,
  is_printed_elsewhere,
  leave,
  lines_of,
  may_report,
  of_all,
  watching,
)
from grpo_jax.processes.watchdog import count, index, is_main, named, where

__all__ = [
  "Channel",
  "DisagreementError",
  "OtherProcessError",
  "PartedError",
  "ProcessesError",
  "agree",
  "all_reach",
  "any_of",
  "barrier",
  "broadcast",
  "continues",
  "count",
  "exchange",
  "exit_code",
  "failing",
  "give_up",
  "index",
  "is_main",
  "is_of_all",
  "is_printed_elsewhere",
  "leave",
  "lines_of",
  "may_report",
  "named",
  "of_all",
  "stop_together",
  "together",
  "waited_s",
  "watching",
  "where",
]
