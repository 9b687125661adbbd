"""scripts/launch/ with stand-ins for srun, gcloud and grpo-jax; shellcheck of all scripts."""

import os
import pathlib
import shutil
import subprocess
import time

import pytest
import yaml

from grpo_jax.config import command_line
from grpo_jax.processes import connections

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "scripts" / "launch"
SCRIPTS = [*ROOT.glob("scripts/**/*.sh"), *LAUNCH.glob("*.sbatch"), ROOT / ".ci" / "run"]
NAMES = [path.name for path in SCRIPTS]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck: apt-get install it")
def test_shellcheck_finds_nothing():
  assert {"slurm.sbatch", "mpirun.sh", "tpu_pod.sh", "start_tpu_vm.sh"} <= set(NAMES)
  done = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh", "tpu_pod.sh"])
def test_help_is_the_comment_at_the_top(name):
  done = subprocess.run([LAUNCH / name, "--help"], capture_output=True, text=True)
  assert done.returncode == 0 and f"scripts/launch/{name}" in done.stdout
  assert "set -" not in done.stdout and "#" not in done.stdout


@pytest.fixture
def programs(tmp_path):
  """Returns a function that runs a script with stand-ins for other programs, and their calls."""
  folder, calls = tmp_path / "bin", tmp_path / "calls"
  folder.mkdir()

  def substitute(name, text):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/bash\necho "{path.name} $*" >> {calls}\n{text}\n')
    path.chmod(0o755)
    return path

  def run(name, *arguments, cwd=None, **environment):
    calls.write_text("")
    done = subprocess.run(
      [LAUNCH / name, *arguments],
      env={"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path), **environment},
      cwd=cwd,
      capture_output=True,
      text=True,
    )
    return done, calls.read_text().splitlines()

  run.substitute = substitute
  return run


@pytest.fixture
def job(programs, tmp_path):
  """Runs the Slurm script as a job of two nodes in which `srun` ends with an exit code."""
  programs.substitute("scontrol", "")
  venv = tmp_path / "venv"
  (venv / "bin").mkdir(parents=True)
  (venv / "bin" / "grpo-jax").write_text("#!/bin/sh\n")
  (venv / "bin" / "grpo-jax").chmod(0o755)

  def run(*arguments, code=0, **environment):
    programs.substitute("srun", f'echo "secret $GRPO_JAX_RUN_SECRET"; exit {code}')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    return programs("slurm.sbatch", *arguments, VENV=str(venv), **slurm, **environment)

  return run


TRAIN = ("math_1b", "--workdir=/shared/run")


@pytest.mark.parametrize("code, is_queued", [(0, 0), (1, 0), (2, 0), (130, 0), (137, 1), (143, 1)])
def test_a_job_is_queued_again_if_it_was_stopped_or_killed(job, code, is_queued):
  done, calls = job(*TRAIN, code=code)
  assert done.returncode == (0 if is_queued else code)
  assert [line for line in calls if "scontrol" in line] == ["scontrol requeue 7"] * is_queued
  done, calls = job(*TRAIN, code=code, SLURM_RESTART_COUNT="3", REQUEUES="3")
  assert done.returncode == code and "scontrol requeue 7" not in calls


def test_each_start_of_a_job_has_a_secret_that_no_argument_shows(job, programs, tmp_path):
  (tmp_path / "bin").mkdir(exist_ok=True)
  programs.substitute("mpirun", 'echo "secret $GRPO_JAX_RUN_SECRET"')
  starts = [
    *(job(*TRAIN, GRPO_JAX_RUN_SECRET="of an earlier start") for _ in range(2)),
    programs("mpirun.sh", "--host", "a,b", "--", *TRAIN, VENV=str(tmp_path / "venv")),
  ]
  secrets = [done.stdout.rpartition("secret ")[2].strip() for done, _ in starts]
  assert len(set(secrets)) == 3 and {len(secret) for secret in secrets} == {64}
  assert not any(secret in " ".join(calls) for secret in secrets for _, calls in starts)
  assert " -x GRPO_JAX_RUN_SECRET " in starts[2][1][0] and " --export=ALL " in starts[0][1][0]


def test_a_job_needs_a_folder_in_which_it_can_continue(job):
  done, calls = job("math_1b")
  assert done.returncode == 2 and "--workdir" in done.stderr and calls == []


def test_sglang_servers_and_the_trainer_get_different_gpus_of_a_node(job):
  done, calls = job(*TRAIN, SGLANG_GPUS="6,7", SLURM_GPUS_ON_NODE="8")
  assert done.returncode == 0, done.stderr
  assert "env CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 " in calls[0]
  name, *options, workdir = calls[0].partition(" train ")[2].split()
  assert (name, workdir) == TRAIN, "options that follow override those of the script"
  config = command_line.parse([f"--config={ROOT / 'configs' / 'math_1b.py'}", *options]).config
  assert config.engine.name == "sglang" and config.engine.sglang.servers == 2
  assert tuple(config.engine.sglang.gpus) == (6, 7)
  several = {"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "4"}
  done, calls = job(*TRAIN, SGLANG_GPUS="4,5,6,7", **several)
  assert done.returncode == 0 and "--config.engine.sglang.servers=1" in calls[0]
  done, calls = job(*TRAIN, SGLANG_GPUS="6,7", **several)
  assert done.returncode == 2 and "4 processes a node" in done.stderr and calls == []
  for wrong in ({"SLURM_GPUS_ON_NODE": "2", "SGLANG_GPUS": "0,1"}, {"SGLANG_GPUS": "0"}):
    done, calls = job(*TRAIN, **wrong)
    assert done.returncode == 2 and "to the trainer" in done.stderr and calls == []


def test_dry_runs_start_nothing(job, programs, tmp_path):
  done, calls = job("--dry-run", "math_1b", "--workdir=/shared/a b")
  assert done.stdout.startswith("srun ") and "--workdir=/shared/a\\ b" in done.stdout and not calls
  programs.substitute("mpirun", "")
  arguments = ("--dry-run", "--host", "a,b", "--", *TRAIN)
  done, calls = programs("mpirun.sh", *arguments, VENV=str(tmp_path / "venv"))
  assert done.stdout.startswith("mpirun ") and "grpo-jax train math_1b" in done.stdout and not calls
  programs.substitute("gcloud", "")
  done, calls = programs("tpu_pod.sh", "--dry-run", "stop", TPU="t", ZONE="z")
  assert done.stdout.startswith("gcloud compute tpus tpu-vm ssh t --worker=all") and not calls


# gcloud that runs the command of `tpu-vm ssh` here, once for each host, in the host's home folder.
GCLOUD = """
hosts="0 1" command=
for word in "$@"; do
  case $word in
    --worker=all) ;;
    --worker=*) hosts=${word#--worker=} ;;
    --command=*) command=${word#--command=} ;;
  esac
done
for host in $hosts; do
  [ "$4" != scp ] || cp "$5" "$HOSTS/$host"
  [ "$4" = ssh ] || continue
  (cd "$HOSTS/$host" && HOME=$PWD bash -c "$command")
done
"""
# Ends with code 143 at SIGTERM.
TRAINER = """import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(sys.argv[1:], "secret", os.environ["GRPO_JAX_RUN_SECRET"], flush=True)
time.sleep(30)
"""


@pytest.fixture
def pod(programs, tmp_path):
  """Runs scripts/launch/tpu_pod.sh against two hosts that are folders of this machine."""
  programs.substitute("gcloud", GCLOUD)
  for host in "01":
    program = tmp_path / "hosts" / host / "grpo-jax" / ".venv" / "bin" / "grpo-jax"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/usr/bin/env python3\n{TRAINER}")
    program.chmod(0o755)
  of_pod = {"TPU": "grpo", "ZONE": "us-west4-a", "HOSTS": str(tmp_path / "hosts")}
  return lambda *arguments, **more: programs("tpu_pod.sh", *arguments, **of_pod | more)


def test_all_hosts_of_a_pod_train_in_the_background_until_they_are_stopped(pod, tmp_path):
  done, calls = pod("train", "math_1b", "--workdir=/shared/run", "--config.data.path=a 'b' $c")
  assert done.returncode == 0 and done.stdout.split() == ["started"] * 2, done
  assert "tpu-vm ssh grpo --worker=all" in calls[1] and calls[1].endswith("--zone=us-west4-a")
  logs = [tmp_path / "hosts" / host / "grpo.log" for host in "01"]
  words = str(["train", "math_1b", "--workdir=/shared/run", "--config.data.path=a 'b' $c"])
  try:
    _until(lambda: all(words in log.read_text() for log in logs))
    assert pod("status")[0].stdout.count("grpo-jax train math_1b") >= 2
    secrets = {log.read_text().rpartition("secret ")[2].strip() for log in logs}
    (secret,) = secrets
    assert len(secret) == 64 and secret not in "".join(calls)
    assert not list(tmp_path.glob("hosts/*/grpo_run_secret"))
  finally:
    pod("stop")
  _until(lambda: all("exit code 143" in log.read_text() for log in logs))
  assert pod("status")[0].stdout.count("exit code 143") == 2


def _until(is_so, timeout=10):
  deadline = time.monotonic() + timeout
  while not is_so():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_a_pod_is_given_what_its_hosts_share(pod):
  done, calls = pod("train", "math_1b")
  assert done.returncode == 2 and "--workdir" in done.stderr and calls == []
  done, calls = pod("mount", "/disk")
  assert done.returncode == 2 and "gs://BUCKET" in done.stderr and calls == []
  commands = [pod("--dry-run", "mount", each)[0].stdout for each in ("1.2.3.4:/vol", "gs://b")]
  assert r"mount\ -t\ nfs\ 1.2.3.4:/vol\ /shared" in commands[0]
  assert r"--metadata-cache-ttl-secs=0" in commands[1] and r"\ b\ /shared" in commands[1]


def test_a_pod_is_created_installed_and_deleted(pod):
  _, calls = pod("create", "v5litepod-16", "v2-alpha-tpuv5-lite", "--spot", PROJECT="mine")
  assert calls == [
    "gcloud compute tpus tpu-vm create grpo --accelerator-type=v5litepod-16"
    " --version=v2-alpha-tpuv5-lite --spot --zone=us-west4-a --project=mine"
  ]
  assert "tpu-vm delete grpo" in pod("delete")[1][0]
  done, calls = pod("--dry-run", "install")
  assert "scp" in done.stdout and r"grpo-jax/scripts/start_tpu_vm.sh\ --prepare" in done.stdout
  assert pod("delete", TPU="")[0].returncode == 2 and pod("delte")[0].returncode == 2


def test_the_jobset_names_what_it_uses():
  claim, policy, jobset = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
  assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  assert jobset["spec"]["network"]["enableDNSHostnames"] is True
  (replicated,) = jobset["spec"]["replicatedJobs"]
  spec = replicated["template"]["spec"]
  assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
  assert spec["backoffLimit"] == 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
  (container,) = spec["template"]["spec"]["containers"]
  (rule,) = spec["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"]["containerName"] == container["name"]
  (volume,) = spec["template"]["spec"]["volumes"]
  assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
  assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"]]
  pods = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}}
  assert policy["spec"]["podSelector"] == pods
  assert policy["spec"]["ingress"] == [{"from": [{"podSelector": pods}]}]
  assert [each["name"] for each in container["env"]][-1] == connections.SECRET_VARIABLE
  assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
  assert all(
    argument.partition("=")[2].startswith("/shared/")
    for argument in container["args"]
    if "path=" in argument or argument.startswith("--workdir=")
  )


def test_the_jobsets_command_is_understood():
  *_, jobset = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
  job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
  (container,) = job["template"]["spec"]["containers"]
  assert container["command"] == ["grpo-jax", "train"]
  assert container["args"][0] == "math_1b" and container["args"][1].startswith("--workdir=")
  words = [f"--config={ROOT / 'configs' / 'math_1b.py'}", *container["args"][1:]]
  assert command_line.parse(words).config.mesh.fsdp == -1
