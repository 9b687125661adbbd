"""How several processes find each other: the section `distributed` of a config."""

import dataclasses

from grpo_jax.values import checked
from grpo_jax.values.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedOptions:
  """Several processes, on one host or many."""

  coordinator: str | None = option(
    None, 'address of process 0, "host:port"; None: found by JAX, or there is one process'
  )
  processes: int | None = option(
    None, "number of processes; None: found by JAX", checked.whole(low=1, none=True)
  )
  index: int | None = option(
    None, "number of this process, from 0; None: found by JAX", checked.whole(low=0, none=True)
  )
  join_s: float = option(300.0, "longest wait for all processes to start", checked.number(above=0))
  heartbeat_s: float = option(
    60.0, "a process without a sign of life for so long ends the others", checked.number(above=0)
  )
  wait_s: float = option(
    1800.0,
    "longest wait for a process that is alive, such as a slow sampler",
    checked.number(above=0),
  )
