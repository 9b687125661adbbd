"""What has started this process beside others: Slurm, Open MPI, a TPU pod, GKE.

JAX knows these (`jax._src.clusters`), but it would also join a single process to itself, ask the
metadata server for what is known, and give each process of Slurm or Open MPI one GPU although it is
the only one of its host. Nothing here starts a backend or waits.
"""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

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
class Found:
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


def find(environment: Mapping[str, str] = os.environ) -> Found | None:
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
    return Found(cluster.name, processes, cluster.get_process_id(), cluster, local, here, start)
  if cluster is None:
    for launcher, names in _WITHOUT_ADDRESS.items():
      count, index, local_index, local = (environment.get(name, "") for name in names)
      if count.isdigit() and index.isdigit() and int(count) > 1:
        number = int(local_index) if local_index.isdigit() else None
        return Found(launcher, int(count), int(index), None, number, int(local or 1), start)
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


def _slurm(cluster: Any, environment: Mapping[str, str]) -> Found | None:
  """Returns what `srun` says; the number of tasks of an allocation is not that of its step."""
  processes = int(environment.get("SLURM_STEP_NUM_TASKS") or cluster.get_process_count())
  if processes == 1:
    return None
  node = int(environment.get("SLURM_NODEID", 0))
  tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
  here = tasks_per_node(tasks or "1")
  names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
  return Found(
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


def own_gpus(found: Found, environment: Mapping[str, str] = os.environ) -> Sequence[int] | None:
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
