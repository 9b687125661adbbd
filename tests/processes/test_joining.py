"""How processes find each other, and what is wrong if they do not."""

import concurrent.futures
import socket

import pytest

from grpo_jax.interrupts import Stopped
from grpo_jax.processes import connections, rendezvous, starting
from grpo_jax.processes.connections import JoinError, Place, WrongStartError
from tests import several


def meet(*places, join_s=5.0, stop=False):
  """Returns the hosts or the error that each process gets."""

  def one(place):
    try:
      return rendezvous.meet(place, connections.Key(), join_s=join_s, stop=stop).hosts
    except (JoinError, WrongStartError, Stopped) as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
    return list(pool.map(one, places))


def place(index, processes=2, port=0, host="127.0.0.1"):
  return Place(host, port, processes, index)


def test_processes_learn_the_hosts_of_all_and_leave_the_port_free():
  port = several.free_port()
  for _ in range(2):  # the port can be used again at once, as JAX does.
    found = meet(*(place(index, 3, port) for index in (2, 0, 1)))
    assert found == [[socket.gethostname()] * 3] * 3


@pytest.mark.long
def test_a_process_that_does_not_come_is_named_on_all():
  port = several.free_port()
  first, third = meet(place(0, 4, port), place(2, 4, port), join_s=1.0)
  assert isinstance(first, JoinError) and first.exit_code == 1
  expected = f"processes 1, 3 of 4 did not come to process 0 at 127.0.0.1:{port} on"
  assert str(first).startswith(expected) and "1 s (distributed.join_s)" in str(first)
  assert str(third) == str(first)


def test_two_processes_with_one_number_end_all_with_one_message():
  port = several.free_port()
  found = meet(*(place(index, 3, port) for index in (0, 1, 1)))
  assert {type(each) for each in found} == {WrongStartError}
  assert {str(each).partition(":")[0] for each in found} == {
    "two processes have the number 1 (distributed.index)"
  }
  assert found[0].exit_code == 2


def test_processes_that_expect_other_numbers_of_processes_end_all():
  port = several.free_port()
  found = meet(place(0, 2, port), place(1, 3, port))
  host = socket.gethostname()
  assert {str(each) for each in found} == {
    f"distributed.processes is 2 in process 0 ({host}) and 3 in process 1 ({host})"
  }


def test_a_port_that_is_taken_is_named():
  with socket.create_server(("", 0)) as taken:
    (error,) = meet(place(0, 2, taken.getsockname()[1]))
  assert isinstance(error, JoinError) and "cannot listen at port" in str(error)


def test_a_coordinator_that_is_not_there_is_named():
  port = several.free_port()
  (error,) = meet(place(1, 2, port), join_s=0.5)
  text = f"did not reach process 0 at 127.0.0.1:{port} within 0.5 s (distributed.join_s)"
  assert isinstance(error, JoinError) and text in str(error)
  assert str(error).startswith("process 1 of 2 (")


def test_a_signal_ends_the_wait():
  (found,) = meet(place(0, 2, several.free_port()), stop=True)
  assert isinstance(found, Stopped)


OPTIONS = {"coordinator": "node1:1234", "processes": 4, "index": 3}
FOUND = starting.LauncherInfo("Open MPI", 8, 5)


@pytest.mark.parametrize(
  ("options", "found", "message"),
  [
    ({"coordinator": "node1:1234"}, None, "needs distributed.processes and distributed.index, too"),
    ({"processes": 2, "index": 0}, None, "needs distributed.coordinator, too"),
    ({"index": 0}, None, "needs distributed.coordinator and distributed.processes"),
    ({**OPTIONS, "index": 4}, None, "distributed.index must be from 0 to 3"),
    ({**OPTIONS, "coordinator": "node1"}, None, "with a port, such as node1:12345, got 'node1'"),
    ({**OPTIONS, "coordinator": "node1:0"}, None, "with a port"),
    ({**OPTIONS, "coordinator": ":80"}, None, "with a port"),
    ({**OPTIONS, "coordinator": "2001:db8::1:80"}, None, "with a port"),
    ({**OPTIONS, "coordinator": "node1:²"}, None, "with a port"),
    ({}, FOUND, "Open MPI has started 8 processes"),
  ],
)
def test_wrong_options_are_refused(options, found, message, monkeypatch):
  monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
  with pytest.raises(WrongStartError, match=message.replace("(", r"\(")) as error:
    starting.placed(options, found, join_s=1.0)
  assert error.value.exit_code == 2


def test_options_come_before_what_a_launcher_says():
  assert starting.placed(OPTIONS, None, join_s=1.0) == Place("node1", 1234, 4, 3)
  assert starting.placed({"coordinator": "[::1]:80"}, FOUND, join_s=1.0) == Place("::1", 80, 8, 5)
  assert starting.placed({"processes": 1}, FOUND, join_s=1.0) is None
  assert starting.placed({}, None, join_s=1.0) is None


SLURM = {
  "SLURM_JOB_ID": "77",
  "SLURM_STEP_NODELIST": "h[17-18]",
  "SLURM_NTASKS": "4",
  "SLURM_PROCID": "3",
  "SLURM_LOCALID": "1",
  "SLURM_NODEID": "1",
  "SLURM_STEP_NUM_TASKS": "4",
  "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def found(monkeypatch, variables):
  for name, value in variables.items():
    monkeypatch.setenv(name, value)
  return starting.find_launcher()


def test_slurm_is_found(monkeypatch):
  it = found(monkeypatch, SLURM)
  assert it is not None and (it.processes, it.index) == (4, 3)
  assert it.start == "77.."
  assert (
    starting.find_launcher({**SLURM, "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}).start
    == "77.0.2"
  )
  assert it.coordinator(5.0) == f"h17:{77 + 65535 - 2**12 + 1}"
  assert starting.own_gpus(it, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}) == range(4, 8)
  assert starting.own_gpus(it, {"CUDA_VISIBLE_DEVICES": "3"}) is None  # --gpus-per-task=1


@pytest.mark.parametrize(
  "variables",
  [
    {},
    {**SLURM, "SLURM_STEP_NUM_TASKS": "1"},  # a notebook in an allocation of several tasks.
    {name: value for name, value in SLURM.items() if "STEP" not in name},  # a script of sbatch.
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},  # a notebook in a pod.
    {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
  ],
)
def test_a_process_that_is_alone_stays_alone(variables, monkeypatch):
  assert found(monkeypatch, variables) is None


@pytest.mark.long
def test_open_mpi_5_is_found_but_not_its_address(monkeypatch):
  variables = {"SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
  monkeypatch.setenv("PMIX_NAMESPACE", "prterun-a-77@1")
  it = found(monkeypatch, {f"OMPI_COMM_WORLD_{k}": v for k, v in variables.items()})
  assert it is not None and it.start == "prterun-a-77@1"
  assert (it.processes, it.index, it.coordinator(1.0)) == (4, 2, None)
  assert starting.own_gpus(it, {"CUDA_VISIBLE_DEVICES": "0,1"}) == range(1)


def test_the_key_is_of_the_runs_secret_and_of_the_launchers_start(monkeypatch):
  monkeypatch.delenv(connections.SECRET_VARIABLE, raising=False)
  of_launcher = starting.LauncherInfo("Slurm", 2, 0, start="7.0.1")
  assert starting.own_key({}, None) == connections.Key()
  assert starting.own_key({}, of_launcher) == connections.Key("", "7.0.1")
  monkeypatch.setenv(connections.SECRET_VARIABLE, "a secret of this run\n")
  assert starting.own_key(None, None) == connections.Key("a secret of this run")
  # Processes that were numbered by hand may be of several jobs.
  options = {"processes": 2, "index": 0}
  assert starting.own_key(options, of_launcher) == connections.Key("a secret of this run")
  for wrong in ("", "short", " " * 40):
    monkeypatch.setenv(connections.SECRET_VARIABLE, wrong)
    with pytest.raises(WrongStartError, match="the secret of the run, needs at least 16 char"):
      starting.own_key(options, None)


LISTENERS = """
import os, sys
import numpy, psutil
from grpo_jax.processes import connections, starting

address, index = sys.argv[1], int(sys.argv[2])
starting.start({"coordinator": address, "processes": 2, "index": index})
assert connections.SECRET_VARIABLE not in os.environ  # programs that the run starts do not get it.
from jax.experimental import multihost_utils
assert multihost_utils.process_allgather(numpy.ones(1)).sum() == 2
found = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"]
print("listens:", *sorted(each.removeprefix("::ffff:") for each in found))
starting.finish(0)
"""


@pytest.mark.processes
def test_jax_and_gloo_listen_at_the_coordinators_address_only(tmp_path):
  command = lambda address, index: [
    *("-c", LISTENERS, address.replace("127.0.0.1", "127.0.0.5"), index)
  ]
  started = several.start_python(command, tmp_path / "worker", devices=1)
  started.succeed(120)
  assert "listens: 127.0.0.5 127.0.0.5\n" in started.text(0)  # JAX's service and gloo
  assert "listens: 127.0.0.5\n" in started.text(1)


def test_tasks_of_each_node_are_read():
  assert starting.tasks_per_node("2(x3),1") == [2, 2, 2, 1]
  assert starting.tasks_per_node("") == [1]
