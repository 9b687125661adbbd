"""scripts/start_tpu_vm.sh with stand-ins for Python, pip and grpo-jax: which commands it runs."""

import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "start_tpu_vm.sh"
# A Python that answers for its version and makes an environment of stand-ins.
PYTHON = """#!/bin/sh
echo "{name} $*" >> {log}
case "$*" in
  *"version_info[:2] <= (3, 13)"*) exit {fits} ;;
  *"-m pip install --user"*) exit 0 ;;
  *venv*)
    mkdir -p .venv/bin
    printf '#!/bin/sh\\necho "pip $*" >> {log}\\n' > .venv/bin/pip
    printf '#!/bin/sh\\necho 12\\n' > .venv/bin/python
    printf '#!/bin/sh\\necho "grpo-jax $*" >> {log}\\n[ "$1" != doctor ] || exit {doctor}\\n' \\
      > .venv/bin/grpo-jax
    chmod +x .venv/bin/* ;;
esac
"""


@pytest.fixture
def vm(tmp_path):
  """Runs a copy of the script on a VM whose Pythons are `fits` (name -> whether it is usable)."""
  copy = tmp_path / "checkout" / "scripts" / SCRIPT.name
  copy.parent.mkdir(parents=True)
  shutil.copy(SCRIPT, copy)
  programs, log = tmp_path / "bin", tmp_path / "log"
  programs.mkdir()

  def run(*arguments, fits, doctor=0, endpoints="", **environment):
    log.write_text("")
    known = dict.fromkeys(("python3", "python3.11", "python3.12", "python3.13"), False) | fits
    for name, is_usable in known.items():
      text = PYTHON.format(name=name, log=log, fits=int(not is_usable), doctor=doctor)
      (programs / name).write_text(text)
      (programs / name).chmod(0o755)
    for name, text in (("bwrap", ""), ("curl", f"printf %s '{endpoints}'\n")):
      (programs / name).write_text(f"#!/bin/sh\n{text}")
      (programs / name).chmod(0o755)
    done = subprocess.run(
      ["bash", copy, *arguments],
      env={"PATH": f"{programs}:/usr/bin:/bin", **environment},
      capture_output=True,
      text=True,
    )
    asked = [line for line in log.read_text().splitlines() if "version_info" not in line]
    return done, asked

  return run


def test_a_vm_with_a_python_that_fits_uses_it_and_trains(vm):
  done, ran = vm(fits={"python3.12": True})
  assert done.returncode == 0, done.stderr
  install = "install --quiet --disable-pip-version-check -c constraints/py312.txt -e .[tpu]"
  train = "grpo-jax train quickstart --workdir=runs/quickstart"
  assert ran == ["python3.12 -m venv .venv", f"pip {install}", "grpo-jax doctor", train]
  _, again = vm("math_1b", "--workdir=w", fits={"python3.12": True})
  assert again == ["grpo-jax doctor", "grpo-jax train math_1b --workdir=w"]


def test_a_vm_with_an_old_python_gets_a_newer_one(vm):
  done, ran = vm("--prepare", fits={})
  assert done.returncode == 0 and "installing 3.12 with uv" in done.stdout
  assert ran[:2] == [
    "python3 -m pip install --user --quiet uv",
    "python3 -m uv venv --quiet --seed --python 3.12 .venv",
  ]
  assert ran[-1] == "grpo-jax doctor"


def test_a_vm_that_cannot_train_is_not_trained_on(vm):
  done, ran = vm(fits={"python3": True}, doctor=1)
  assert done.returncode == 1 and "cannot train" in done.stderr
  assert ran[-1] == "grpo-jax doctor"


@pytest.mark.parametrize("given", ({"TPU_WORKER_HOSTNAMES": "t-0,t-1"}, {"endpoints": "t-0,t-1"}))
def test_a_host_of_several_is_prepared_but_trains_only_in_a_folder_that_all_share(vm, given):
  done, ran = vm(fits={"python3.12": True}, **given)
  assert done.returncode == 1 and "several hosts (t-0,t-1)" in done.stderr and ran == []
  done, ran = vm("--prepare", fits={"python3.12": True}, **given)
  assert done.returncode == 0 and ran[-1].startswith("pip install"), "the doctor needs all hosts"
  _, ran = vm("math_1b", "--workdir=/shared/w", fits={"python3.12": True}, **given)
  assert ran == ["grpo-jax train math_1b --workdir=/shared/w"]
