"""A Slurm cluster of two nodes on this machine, for tests: real daemons, no system files.

The names of the nodes must lead to this machine, since JAX takes the first one as the address of
process 0: they are "localhost" and the name of the host.
"""

import contextlib
import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
SBIN = "/usr/sbin:/usr/local/sbin"
# States that a job does not leave. A job that is queued again is COMPLETING for some seconds: its
# counter of restarts rises when it is put in the queue, not when its processes have ended.
ENDED = (
  *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
  "TIMEOUT",
)

# Nodes are lent by core, so that jobs of two nodes need two cores. A job that is queued again waits
# until its credential has expired.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ReturnToService=2
KillWait=30
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
  """Returns why there can be no cluster on this machine; "" if there can be one."""
  absent = [name for name in PROGRAMS if _path(name) is None]
  if absent:
    return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
  try:
    socket.gethostbyname(socket.gethostname())
  except OSError as error:
    return f"the name of this host has no address: {error}"
  return "" if os.getuid() == 0 else "slurmd can start jobs as root only"


def without_slurm() -> dict[str, str]:
  """Returns the environment variables without those of a job in which the tests may run."""
  return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}


class Cluster:
  """A running cluster."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.environment = {
      **without_slurm(),
      "SLURM_CONF": str(folder / "slurm.conf"),
      "PATH": f"{os.environ['PATH']}:{SBIN}",
    }

  def run(self, *command: str | os.PathLike, **options) -> str:
    """Returns what a command of Slurm prints."""
    done = subprocess.run(
      command, env=self.environment, capture_output=True, text=True, timeout=60, **options
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()

  def field(self, job: str, name: str) -> str:
    """Returns a field of a job, such as JobState."""
    shown = self.run("scontrol", "show", "job", job).split()
    return next(word.partition("=")[2] for word in shown if word.startswith(f"{name}="))

  def wait(self, job: str, *states: str, timeout: float = 90) -> str:
    """Returns the state of a job once it is one of these."""
    deadline = time.monotonic() + timeout
    while (state := self.field(job, "JobState")) not in states:
      assert time.monotonic() < deadline, f"job {job} is {state} and not {states}"
      time.sleep(0.2)
    return state


@contextlib.contextmanager
def cluster(folder: pathlib.Path) -> Iterator[Cluster]:
  """Starts a cluster with its files in a folder, and stops it."""
  (folder / "state").mkdir(parents=True)
  key = folder / "munge.key"
  key.write_bytes(secrets.token_bytes(256))
  key.chmod(0o600)
  host = socket.gethostname()
  config = CONFIG.format(
    folder=folder, host=host, user=pathlib.Path(folder).owner(), ports=_free_ports(3)
  )
  (folder / "slurm.conf").write_text(config)
  commands = [
    ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    + [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")],
    ["slurmctld", "-D"],
    ["slurmd", "-D", "-N", "localhost"],
    ["slurmd", "-D", "-N", host],
  ]
  started = Cluster(folder)
  with contextlib.ExitStack() as stack:
    for number, command in enumerate(commands):
      output = stack.enter_context((folder / f"{number}-{command[0]}.log").open("w"))
      daemon = subprocess.Popen(
        [_path(command[0]), *command[1:]], env=started.environment, stdout=output, stderr=output
      )
      stack.callback(_end, daemon)
      if number == 0:
        _until(lambda: (folder / "munge.socket").exists(), "munged has no socket")
    _until(lambda: _idle(started) == 2, "the two nodes are not idle")
    yield started
    for job in started.run("squeue", "-h", "-o", "%A").split():
      started.run("scancel", "--signal=KILL", "--full", job)
      started.run("scancel", job)


def _idle(started: Cluster) -> int:
  done = subprocess.run(
    ["sinfo", "-h", "-N", "-o", "%T"], env=started.environment, capture_output=True, text=True
  )
  return done.stdout.split().count("idle")


def _path(name: str) -> str | None:
  return shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")


def _free_ports(number: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    found = [stack.enter_context(socket.socket()) for _ in range(number)]
    for one in found:
      one.bind(("127.0.0.1", 0))
    return [one.getsockname()[1] for one in found]


def _until(is_so, what: str, timeout: float = 20) -> None:
  deadline = time.monotonic() + timeout
  while not is_so():
    assert time.monotonic() < deadline, what
    time.sleep(0.1)


def _end(daemon: subprocess.Popen) -> None:
  daemon.terminate()
  try:
    daemon.wait(5)
  except subprocess.TimeoutExpired:
    daemon.kill()
    daemon.wait()
