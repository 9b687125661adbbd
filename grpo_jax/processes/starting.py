"""Joins this process to the others of a run, by `jax.distributed`.

JAX knows what starts processes beside each other (`jax._src.clusters`: Slurm, Open MPI, TPU pods,
GKE), but it would also join a single process to itself, ask the metadata server for what is known,
and give each process of Slurm or Open MPI one GPU although it is the only one of its host.
"""

import dataclasses
import functools
import logging
import os
import pathlib
import re
import resource
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import processes
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import connections, exchanges, rendezvous, watchdog
from grpo_jax.processes.connections import Place, WrongStartError, joined, parsed
from grpo_jax.processes.options import DistributedOptions

_log = logging.getLogger(__name__)

_TIMES = ("join_s", "heartbeat_s", "wait_s")  # have a default where there is no config.
# JAX aborts a process from C++; the watchdog names who is lost before that.
LATER_S = 30
CONNECT_S = 120  # all processes are there.
LEAVE_S = 30  # all processes are at the end.
SECRET_LENGTH = 16  # fewest characters of a secret.

# --- what has started this process ---


# Variables of launchers whose coordinator JAX cannot find: count, number, number on this host, and
# count on this host.
_WITHOUT_ADDRESS = {
  "Open MPI": (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
  ),
  "MPI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclasses.dataclass(frozen=True)
class LauncherInfo:
  """What a launcher says of this process."""

  launcher: str
  processes: int
  index: int
  cluster: Any = None  # JAX's class, which finds the coordinator; None: it cannot.
  local_index: int | None = None  # number among the processes of this host.
  local_processes: int = 1
  start: str = ""  # name of this start of the job, the same in all processes; "": it has none.

  def coordinator(self, join_s: float) -> str | None:
    """Returns the address of process 0, "host:port"; None if it is not known."""
    if self.cluster is None:
      return None
    port = os.environ.get("JAX_COORDINATOR_PORT")
    return self.cluster.get_coordinator_address(
      timeout_secs=max(1, int(join_s)), override_coordinator_port=port
    )


def find_launcher(environment: Mapping[str, str] = os.environ) -> LauncherInfo | None:
  """Returns what has started this process beside others; None if it is alone.

  Args:
    environment: Environment variables.
  """
  cluster = _cluster(environment)
  if cluster is not None and cluster.name == "slurm":
    return _slurm(cluster, environment)
  start = environment.get("PMIX_NAMESPACE", "")
  if cluster is not None and (processes := cluster.get_process_count()) > 1:
    local = cluster.get_local_process_id()
    here = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", 1))
    return LauncherInfo(
      cluster.name, processes, cluster.get_process_id(), cluster, local, here, start
    )
  if cluster is None:
    for launcher, names in _WITHOUT_ADDRESS.items():
      count, index, local_index, local = (environment.get(name, "") for name in names)
      if count.isdigit() and index.isdigit() and int(count) > 1:
        number = int(local_index) if local_index.isdigit() else None
        return LauncherInfo(launcher, int(count), int(index), None, number, int(local or 1), start)
  return None


def _cluster(environment: Mapping[str, str]) -> Any:
  """Returns JAX's class of the launcher; None if there is none."""
  from jax._src import clusters

  for each in clusters.ClusterEnv._cluster_types:
    if each.opt_in_only_method:
      continue
    if each.__name__ == "K8sCluster" and "JOB_COMPLETION_INDEX" not in environment:
      continue  # a pod, such as one of a notebook, that is not one of an indexed job.
    if each.is_env_present():
      return each
  return None


def _slurm(cluster: Any, environment: Mapping[str, str]) -> LauncherInfo | None:
  """Returns what `srun` says; the number of tasks of an allocation is not that of its step."""
  processes = int(environment.get("SLURM_STEP_NUM_TASKS") or cluster.get_process_count())
  if processes == 1:
    return None
  node = int(environment.get("SLURM_NODEID", 0))
  tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
  here = tasks_per_node(tasks or "1")
  names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
  return LauncherInfo(
    "Slurm",
    processes,
    cluster.get_process_id(),
    cluster,
    cluster.get_local_process_id(),
    here[min(node, len(here) - 1)],
    ".".join(environment.get(name, "") for name in names),
  )


def tasks_per_node(text: str) -> list[int]:
  """Returns the number of tasks of each node from Slurm's "2(x3),1": 2, 2, 2, 1."""
  found = []
  for part in text.split(","):
    match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
    if match:
      found += [int(match[1])] * int(match[2] or 1)
  return found or [1]


def own_gpus(
  found: LauncherInfo, environment: Mapping[str, str] = os.environ
) -> Sequence[int] | None:
  """Returns the GPUs of this process, counted among those it can see; None: all of them.

  The GPUs of a host are divided among its processes in equal parts. If a launcher has already given
  each process its own, there are fewer than processes or they cannot be divided: all are its own.

  Args:
    found: Report of the launcher on this process.
    environment: Environment variables.
  """
  if found.local_index is None or found.local_processes < 2:
    return None
  gpus = _visible_gpus(environment)
  each, rest = divmod(gpus, found.local_processes)
  if not each or rest:
    return None
  return range(found.local_index * each, (found.local_index + 1) * each)


def _visible_gpus(environment: Mapping[str, str]) -> int:
  visible = environment.get("CUDA_VISIBLE_DEVICES")
  if visible is not None:
    return len([part for part in visible.split(",") if part.strip()])
  nvidia = [each for each in pathlib.Path("/dev").glob("nvidia*") if each.name[6:].isdigit()]
  return len(nvidia) or len(list(pathlib.Path("/sys/class/kfd").glob("kfd/topology/nodes/*/gpu*")))


# --- joining the others ---


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
  times = {name: _given(options, name) or getattr(DistributedOptions, name) for name in _TIMES}
  found = find_launcher() if _given(options, "processes") != 1 else None
  place = placed(options, found, join_s=times["join_s"])
  if place is None:
    return
  key = own_key(options, found)
  if not key.secret and place.index == 0:
    _log.warning(
      "this run has no secret: any program that reaches %s can join it or end it; set %s to the"
      " same random text in all processes (docs/hosts.md)",
      *(place.address, connections.SECRET_VARIABLE),
    )
  met = rendezvous.meet(place, key, join_s=times["join_s"], stop=stop)
  os.environ.pop(connections.SECRET_VARIABLE, None)  # programs that the run starts do not need it.
  _initialize(place, met, own_gpus(found) if found else None, times["heartbeat_s"])
  exchanges.wait_s = times["wait_s"]
  watchdog.current = watchdog.Watchdog(
    watchdog.client(),
    place.index,
    met.hosts,
    coordinator=met.service,
    heartbeat_s=times["heartbeat_s"],
    wait_s=times["wait_s"],
  )
  watchdog.current.start()
  watchdog.current.on_abort()
  if place.index == 0:
    number = len(set(met.hosts))
    _log.info("%d processes on %d %s", place.processes, number, "hosts" if number > 1 else "host")


def placed(options: Any, found: LauncherInfo | None, *, join_s: float) -> Place | None:
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


def own_key(options: Any, found: LauncherInfo | None) -> connections.Key:
  """Returns the key with which the processes of this start of the run recognize each other.

  Args:
    options: Section `distributed` of a config.
    found: Report of a launcher on this process; None: there is none.

  Raises:
    WrongStartError: The secret is too short.
  """
  secret = os.environ.get(connections.SECRET_VARIABLE)
  if secret is not None and len(secret := secret.strip()) < SECRET_LENGTH:
    raise WrongStartError(
      f"{connections.SECRET_VARIABLE}, the secret of the run, needs at least {SECRET_LENGTH}"
      f" characters, such as those of `openssl rand -hex 32`; it has {len(secret)}"
    )
  is_of_launcher = _given(options, "processes") is None and _given(options, "index") is None
  start = found.start if found is not None and is_of_launcher else ""
  return connections.Key(secret or "", start)


def _incomplete(
  missing: Sequence[str], given: Mapping[str, Any], found: LauncherInfo | None
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
  place: Place, met: rendezvous.RendezvousResult, gpus: Sequence[int] | None, heartbeat_s: float
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
  """Has gloo (it connects CPUs) listen at an address; JAX has it look up the host's name."""
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
  current = watchdog.current
  if current is not None and current.failure is not None:
    return code or current.failure.exit_code
  try:
    codes = processes.exchange(code, what="the end of the run")
  except Stopped:
    return code
  if current is not None and not any(codes):
    import jax

    current.end()
    watchdog.current = None
    jax.distributed.shutdown()
  return code or next((other for other in codes if other), 0)


def _given(options: Any, name: str) -> Any:
  return None if options is None else options.get(name)


# --- what a process may use ---


def allow_open_files(most: int = 65536) -> None:
  """Raises the limit of open files to what the system allows, at most to `most`.

  Every attempt of a conversation has an environment with an event loop, which holds three; the
  usual limit of 1024 is that of about 340 attempts.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
