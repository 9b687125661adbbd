"""Joins this process to the others of a run, by `jax.distributed`."""

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import processes
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import exchanges, launchers, meeting, proofs, roles, watch
from grpo_jax.processes.places import Place, WrongStartError, joined, parsed

_log = logging.getLogger(__name__)

# Of `distributed`, where a config has no such section.
DEFAULTS = {"join_s": 300.0, "heartbeat_s": 60.0, "wait_s": 1800.0}
# JAX aborts a process from C++; the watch, which names who is lost, comes first.
LATER_S = 30
CONNECT_S = 120  # all processes are there.
LEAVE_S = 30  # all processes are at the end.
SECRET_LENGTH = 16  # fewest characters of a secret.


def start(options: Any, stop: Any = False) -> None:
  """Joins this process to the others; must come before anything that starts a JAX backend.

  Does nothing if this process is alone: no options are given, and nothing has started it beside
  others.

  Args:
    options: Section `distributed` of a config; None: as if nothing were given.
    stop: Flag that becomes true when the run is asked to end.

  Raises:
    WrongStartError: Options are missing, wrong, or contradict those of another process.
    JoinError: The processes do not find each other in time.
    Stopped: The run is asked to end.
  """
  if processes.count() > 1:
    return  # the caller has called `jax.distributed.initialize`, or this function before.
  times = {name: _given(options, name) or default for name, default in DEFAULTS.items()}
  found = launchers.find() if _given(options, "processes") != 1 else None
  place = placed(options, found, join_s=times["join_s"])
  if place is None:
    return
  key = own_key(options, found)
  if not key.secret and place.index == 0:
    _log.warning(
      "this run has no secret: any program that reaches %s can join it or end it; set %s to the"
      " same random text in all processes (docs/hosts.md)",
      *(place.address, key.variable),
    )
  met = meeting.meet(place, key, join_s=times["join_s"], stop=stop)
  os.environ.pop(key.variable, None)  # programs that the run starts do not need it.
  _initialize(place, met, launchers.own_gpus(found) if found else None, times["heartbeat_s"])
  exchanges.wait_s = times["wait_s"]
  watch.current = watch.Watch(
    roles.client(),
    place.index,
    met.hosts,
    coordinator=met.service,
    heartbeat_s=times["heartbeat_s"],
    wait_s=times["wait_s"],
  )
  watch.current.start()
  watch.current.on_abort()
  if place.index == 0:
    number = len(set(met.hosts))
    _log.info("%d processes on %d %s", place.processes, number, "hosts" if number > 1 else "host")


def placed(options: Any, found: launchers.Found | None, *, join_s: float) -> Place | None:
  """Returns the place of this process, from options and from what has started it.

  Args:
    options: Section `distributed` of a config.
    found: Report of a launcher on this process; None: there is none.
    join_s: Longest wait for the coordinator's name, in seconds.

  Returns:
    None if this process is alone.

  Raises:
    WrongStartError: Options are missing or wrong.
  """
  names = ("coordinator", "processes", "index")
  given: dict[str, Any] = {name: _given(options, name) for name in names}
  if given["processes"] == 1 or (found is None and all(v is None for v in given.values())):
    return None
  if given["coordinator"] is None:
    given["coordinator"] = os.environ.get("JAX_COORDINATOR_ADDRESS")
  if found is not None:
    if given["coordinator"] is None:
      given["coordinator"] = found.coordinator(join_s)
    for name in ("processes", "index"):
      given[name] = getattr(found, name) if given[name] is None else given[name]
  missing = [f"distributed.{name}" for name in names if given[name] is None]
  if missing:
    raise WrongStartError(_incomplete(missing, given, found))
  if not 0 <= given["index"] < given["processes"]:
    raise WrongStartError(
      f"distributed.index must be from 0 to {given['processes'] - 1} with distributed.processes="
      f"{given['processes']}, got {given['index']}"
    )
  host, port = parsed(str(given["coordinator"]))
  is_one_host = found is not None and found.local_processes == given["processes"]
  return Place(host, port, given["processes"], given["index"], is_one_host)


def own_key(options: Any, found: launchers.Found | None) -> proofs.Key:
  """Returns the key with which the processes of this start of the run recognize each other.

  Args:
    options: Section `distributed` of a config.
    found: Report of a launcher on this process; None: there is none.

  Raises:
    WrongStartError: The variable that options name is not set, or a secret is too short.
  """
  name = _given(options, "secret_env")
  variable = name or proofs.VARIABLE
  secret = os.environ.get(variable)
  if secret is None and name:
    raise WrongStartError(
      f"distributed.secret_env names {name}, which is not set in the environment"
    )
  if secret is not None and len(secret := secret.strip()) < SECRET_LENGTH:
    raise WrongStartError(
      f"{variable}, the secret of the run, needs at least {SECRET_LENGTH} characters, such as those"
      f" of `openssl rand -hex 32`; it has {len(secret)}"
    )
  is_of_launcher = _given(options, "processes") is None and _given(options, "index") is None
  start = found.start if found is not None and is_of_launcher else ""
  return proofs.Key(secret or "", start, variable)


def _incomplete(
  missing: Sequence[str], given: Mapping[str, Any], found: launchers.Found | None
) -> str:
  listed = " and ".join(missing)
  if found is not None:
    return (
      f"{found.launcher} has started {found.processes} processes, but JAX cannot find the address"
      f" of the first: set {listed}=HOST:PORT"
    )
  has = ", ".join(f"distributed.{k}={v}" for k, v in given.items() if v is not None)
  return (
    f"{has} needs {listed}, too: nothing has started this process that JAX could ask (Slurm, Open"
    " MPI, a TPU pod, GKE)"
  )


def _initialize(
  place: Place, met: meeting.Met, gpus: Sequence[int] | None, heartbeat_s: float
) -> None:
  import jax

  if met.own:
    _listen_with_gloo(met.own)
  # It would take SIGTERM from `interrupts.Flag`.
  jax.config.update("jax_enable_preemption_service", False)
  jax.distributed.initialize(
    joined(*met.service),
    place.processes,
    place.index,
    coordinator_bind_address=joined(met.bind, met.service[1]) if met.bind else None,
    local_device_ids=None if gpus is None else list(gpus),
    cluster_detection_method="deactivate",  # everything has been found above.
    initialization_timeout=CONNECT_S,
    heartbeat_timeout_seconds=int(heartbeat_s + LATER_S),
    shutdown_timeout_seconds=LEAVE_S,
  )


def _listen_with_gloo(address: str) -> None:
  """Has gloo, which connects CPUs, listen at an address; JAX has it look up the host's name."""
  from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

  make: Any = functools.partial(_jax.make_gloo_tcp_collectives, hostname=address)
  _jax.make_gloo_tcp_collectives = make


def finish(code: int) -> int:
  """Waits until all processes have come to their end, and ends the connection to them.

  Nothing may follow but the end of the program: this process forgets that there were others. Does
  not wait for others after a failure that is not theirs.

  Args:
    code: Exit code of this process.

  Returns:
    The exit code; that of another process if this one has none.

  Raises:
    OtherProcessError: Another process has failed.
    ProcessesError: Another process does not come to its end in time.
  """
  current = watch.current
  if current is not None and current.failure is not None:
    return code or current.failure.exit_code
  try:
    codes = processes.exchange(code, what="the end of the run")
  except Stopped:
    return code
  if current is not None and not any(codes):
    import jax

    current.end()
    watch.current = None
    jax.distributed.shutdown()
  return code or next((other for other in codes if other), 0)


def _given(options: Any, name: str) -> Any:
  return None if options is None else options.get(name)
