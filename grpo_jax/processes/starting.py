"""Joins this process to the others of a run, by `jax.distributed`."""

import logging
import socket
from typing import Any

from grpo_jax import processes

_log = logging.getLogger(__name__)


def start(options: Any) -> None:
  """Joins this process to the others; must come before anything that starts a JAX backend.

  Args:
    options: Section `distributed` of a config.
  """
  if options is None or options.coordinator is None:
    return
  import jax

  # It would take SIGTERM from `interrupts.Flag`.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    options.coordinator,
    options.processes,
    options.index,
    initialization_timeout=int(options.join_s),
    heartbeat_timeout_seconds=int(options.heartbeat_s),
  )
  processes.wait_s = options.wait_s
  _log.info("%s on %s", processes.named(), socket.gethostname())
