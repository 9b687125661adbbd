"""`grpo-jax doctor` on machines that lack something: what it says, and its exit code."""

import pathlib
import shutil
import subprocess
import sys
import time
import types
from importlib import metadata

import pytest

import grpo_jax
from grpo_jax import main
from grpo_jax.api import training
from grpo_jax.commands import cli, diagnosis, doctor, jax_probe
from grpo_jax.commands.diagnosis import FATAL, NOTE, OK, PROBLEM
from grpo_jax.compilation import accelerators, containers
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import installed

FACTS = {
  **dict(platform="cpu", used="1 x cpu (cpu, 2 cores)", bytes_limits=[None], product_s=0.1),
  **dict(trainer="grpo_jax.train", hub=""),
}


def only(findings):
  (found,) = findings
  return found


@pytest.fixture
def healthy(monkeypatch):
  """A machine on which everything works; nothing is run."""
  facts = dict(FACTS)
  monkeypatch.setattr(diagnosis, "_ask_jax", lambda: facts)
  monkeypatch.setattr(diagnosis, "_refusal", lambda kind: "")
  monkeypatch.setattr(diagnosis.host_memory, "available_bytes", lambda: 16 << 30)
  monkeypatch.setattr(accelerators, "unused", lambda platform: None)
  monkeypatch.setattr(accelerators, "gpus", lambda: None)
  return facts


def test_a_healthy_machine_trains(healthy, capsys, tmp_path):
  assert doctor.main([f"--workdir={tmp_path / 'runs' / 'first'}", "--sglang=/nowhere"]) == 0
  printed = capsys.readouterr().out
  assert "fatal" not in printed and "problem" not in printed
  assert printed.splitlines()[-1].startswith("Training can run here. Try: grpo-jax train")
  assert list(tmp_path.iterdir()) == [], "nothing is left behind"
  assert doctor.SGLANG_PYTHON == SGLangOptions().python


def test_a_gpu_that_jax_does_not_use_is_a_problem_with_its_repair(healthy, monkeypatch, capsys):
  cause = accelerators.Cause("no CUDA plug-in of JAX is installed", 'pip install "jax[cuda12]"')
  monkeypatch.setattr(accelerators, "unused", lambda platform: ("1 x NVIDIA L4", cause))
  assert doctor.main([]) == 0
  printed = capsys.readouterr().out
  assert "problem  devices    1 x NVIDIA L4 not used: no CUDA plug-in" in printed
  assert '→ pip install "jax[cuda12]"' in printed
  assert printed.splitlines()[-1] == "Training can run here, with problems: devices."


@pytest.mark.parametrize(
  "facts, text",
  [
    ({"error": "no answer in 60 s"}, "importing JAX and finding devices failed: no answer"),
    ({**FACTS, "error": "ImportError: flax", "trainer": None}, None),
    ({"used": "1 x a", "bytes_limits": [], "error": "bad sum"}, "computing on the devices failed"),
  ],
)
def test_jax_that_does_not_work_is_fatal(healthy, facts, text, capsys):
  healthy.clear()
  facts = {name: value for name, value in facts.items() if value is not None}
  healthy.update({**facts, "platform": "cpu"})
  assert doctor.main([]) == 1
  printed = " ".join(capsys.readouterr().out.split())
  assert (text or "importing the trainer failed: ImportError: flax") in printed
  assert printed.endswith("Training cannot run here: devices.")


@pytest.mark.long
def test_the_probe_is_bounded_in_time_and_what_it_said_is_kept(monkeypatch):
  slow = 'import time; print(\'{"platform": "cpu"}\', flush=True); time.sleep(60)'
  monkeypatch.setattr(jax_probe, "CODE", slow)
  monkeypatch.setattr(diagnosis, "JAX_TIMEOUT_S", 1.0)
  began = time.monotonic()
  facts = diagnosis._ask_jax()
  assert facts == {"platform": "cpu", "error": "no answer in 1 s"}
  assert time.monotonic() - began < 20
  monkeypatch.setattr(jax_probe, "CODE", "import os; os.write(2, b'no\\nbus'); os.abort()")
  monkeypatch.setattr(diagnosis, "JAX_TIMEOUT_S", 60.0)
  assert diagnosis._ask_jax() == {"error": "the process ended with code -6: bus"}


def test_the_probe_reports_what_jax_says(monkeypatch):
  monkeypatch.setattr(jax_probe, "CODE", "import sys; sys.modules['jax'] = None\n" + jax_probe.CODE)
  assert diagnosis._ask_jax()["error"].startswith("ModuleNotFoundError: ")


def test_a_missing_bubblewrap_is_named_with_what_is_refused(monkeypatch):
  monkeypatch.setenv("PATH", "")
  found = only(diagnosis.sandbox())
  assert found.level == PROBLEM and "there is no program bwrap" in found.text
  assert "`code` is refused" in found.text and found.repair == "apt-get install -y bubblewrap"


def test_a_bubblewrap_that_may_not_make_namespaces_is_found_by_running_it(tmp_path, monkeypatch):
  program = tmp_path / "bwrap"
  program.write_text(
    "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
  )
  program.chmod(0o755)
  monkeypatch.setenv("PATH", str(tmp_path))
  found = only(diagnosis.sandbox())
  assert found.level == PROBLEM and "No permissions to create new namespace" in found.text
  assert "apparmor_restrict_unprivileged_userns" in found.repair


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_sandbox_of_this_machine_is_run():
  reason = diagnosis._refusal("bubblewrap")
  assert only(diagnosis.sandbox()).level == (PROBLEM if reason else OK)


@pytest.mark.parametrize("free, level", [(0.5, FATAL), (3, NOTE), (50, OK)])
def test_a_full_disk_is_fatal(monkeypatch, tmp_path, free, level):
  usage = types.SimpleNamespace(free=int(free * diagnosis.GIB))
  monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda folder: usage)
  found = only(diagnosis.disk(tmp_path / "a" / "b"))
  assert found.level == level and f"{free:.1f} GiB free" in found.text


def test_a_folder_that_cannot_be_written_is_fatal(monkeypatch):
  found = only(diagnosis.disk(pathlib.Path("/proc/runs")))
  assert found.level == FATAL and found.text.startswith("/proc cannot be written: ")


@pytest.mark.parametrize("free, level", [(0.5, FATAL), (3, NOTE), (8, OK)])
def test_memory_is_compared_with_what_runs_need(monkeypatch, free, level):
  monkeypatch.setattr(diagnosis.host_memory, "available_bytes", lambda: int(free * diagnosis.GIB))
  monkeypatch.setattr(containers, "memory", lambda: (8 << 30, 0))
  found = only(diagnosis.memory())
  assert found.level == level and "the container's limit is 8.0 GiB" in found.text


def test_the_processes_that_a_launcher_starts_are_counted(monkeypatch):
  assert list(diagnosis.several_processes()) == []
  for name, value in (("SIZE", "4"), ("RANK", "3"), ("LOCALRANKID", "1"), ("LOCALNRANKS", "2")):
    monkeypatch.setenv(f"{'PMI' if name in ('SIZE', 'RANK') else 'MPI'}_{name}", value)
  found = only(diagnosis.several_processes())
  assert found.text == "4, started by MPI; this is number 3, one of 2 on this host"


def test_a_quota_of_cores_is_reported(monkeypatch):
  monkeypatch.setattr(containers, "cores", lambda: 0.5)
  found = only(diagnosis.cores())
  assert found.level == NOTE and "may use 0.5 at a time" in found.text
  monkeypatch.setattr(containers, "cores", lambda: None)
  assert only(diagnosis.cores()).level == OK


@pytest.fixture
def fake(monkeypatch):
  """Versions of packages that are not the installed ones; None: the package is missing."""
  versions, version = {}, metadata.version

  def pretended(name):
    if versions.get(name, "") is None:
      raise metadata.PackageNotFoundError(name)
    return versions.get(name) or version(name)

  monkeypatch.setattr(metadata, "version", pretended)
  monkeypatch.delenv("GRPO_JAX_ANY_VERSIONS", raising=False)
  installed.check.cache_clear()
  yield versions
  installed.check.cache_clear()


def test_packages_outside_of_the_bounds_are_named_with_the_command(fake, monkeypatch):
  assert only(diagnosis.packages()).level == OK
  fake |= {"flax": "0.11.2", "optax": None, "jaxlib": "0.6.2"}
  found = {finding.text.split()[0]: finding for finding in diagnosis.packages()}
  assert found["optax"].level == FATAL and found["optax"].repair == 'pip install "optax>=0.2.5"'
  assert "flax 0.11.2 is installed; " in found["flax"].text
  assert found["jaxlib"].repair.startswith('pip install "jaxlib'), "what the installed jax needs"
  monkeypatch.setenv("GRPO_JAX_ANY_VERSIONS", "1")
  assert {finding.level for finding in diagnosis.packages()} == {PROBLEM}


def test_what_computes_refuses_wrong_packages_as_the_doctor_does(fake, monkeypatch, capsys):
  fake["jax"] = "0.6.2"
  (found,) = diagnosis.packages()
  words = (found.text, found.repair.removeprefix("pip install "))
  for command in ("train", "launch", "evaluate", "serve", "export", "plan"):
    assert cli.run([command, "anything"]) == 1, command
    printed = capsys.readouterr().err
    assert all(each in printed for each in words), (command, printed)
    assert cli.run([command, "--help"]) == 0, command
  assert main.main(["--config=quickstart"]) == 1
  printed = capsys.readouterr().err
  assert all(each in printed for each in words), printed
  for name in ("train", "open", "api"):
    with pytest.raises(ExpectedFailure, match="jax 0.6.2 is installed"):
      grpo_jax.__getattr__(name)
  with pytest.raises(ExpectedFailure, match="jax 0.6.2 is installed"):
    training.train("quickstart", "runs")
  assert cli.run(["report", "/no/run"]) == 2 and "0.6.2" not in capsys.readouterr().err
  installed.check.cache_clear()
  monkeypatch.setenv("GRPO_JAX_ANY_VERSIONS", "1")
  installed.check()


def test_packages_without_a_readable_version_are_named_with_the_command(fake):
  fake["optax"] = "of an interrupted installation"
  with pytest.raises(ExpectedFailure, match='optax is not completely .*pip install "optax>=0.2.5"'):
    installed.check()
  assert only(diagnosis.packages()).level == FATAL


@pytest.mark.parametrize(("name", "version"), [("jax", "0.7.2"), ("numpy", "2.0.2")])
def test_an_old_package_that_was_imported_before_another_was_installed_is_named(
  fake, monkeypatch, name, version
):
  monkeypatch.setattr(sys.modules[name], "__version__", version)  # as Colab has it.
  there = metadata.version(name)
  named = f"{name} {version} was imported before {name} {there} was installed: restart Python"
  with pytest.raises(ExpectedFailure, match=named):
    installed.check()


def test_a_folder_that_hides_the_package_is_named(fake, monkeypatch):
  monkeypatch.setattr(grpo_jax, "__file__", None)  # as of a folder without __init__.py.
  monkeypatch.setattr(grpo_jax, "__path__", ["/home/me/grpo_jax"])
  with pytest.raises(ExpectedFailure, match="the folder /home/me/grpo_jax hides the package"):
    installed.check()


def test_without_a_checkout_the_bounds_are_those_of_the_installation(monkeypatch, tmp_path):
  assert installed.project()["requires-python"] != ">=3.99"
  monkeypatch.setattr(installed.package_data, "folder", lambda: tmp_path)
  monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": ">=3.99"})
  monkeypatch.setattr(metadata, "requires", lambda name: ["absent>=3"] * (name == "grpo-jax"))
  assert only(diagnosis.python()).level == FATAL
  assert only(diagnosis.packages()).text == "absent is not installed"


def test_sglang_is_looked_for_where_it_is_named(monkeypatch, tmp_path):
  monkeypatch.setattr(accelerators, "gpus", lambda: None)
  found = only(diagnosis.sglang(str(tmp_path / "python")))
  assert found.level == NOTE and "embedded sampler" in " ".join(found.text.split())
  script = found.repair.split()[-2]
  assert found.repair.endswith("install_sglang.sh cpu") and pathlib.Path(script).is_file()
  found = only(diagnosis.sglang(sys.executable))
  assert found.level == PROBLEM and "has no SGLang: " in found.text
  program = tmp_path / "python"
  program.write_text("#!/bin/sh\necho 0.5.23 2.13.0\n")
  program.chmod(0o755)
  assert only(diagnosis.sglang(str(program))).text.startswith("0.5.23, torch 2.13.0")
  program.write_text("#!/bin/sh\nexec sleep 60\n")
  monkeypatch.setattr(diagnosis, "SGLANG_TIMEOUT_S", 0.2)
  assert "does not run" in only(diagnosis.sglang(str(program))).text


def test_checks_that_hang_or_crash_do_not_stop_the_others():
  def broken():
    raise RuntimeError("what a machine")

  checks = {
    "slow": lambda: time.sleep(30),
    "broken": broken,
    "good": lambda: [diagnosis.Finding(OK, "good", "yes")],
  }
  found = {finding.subject: finding for finding in doctor.findings(checks, deadline_s=0.3)}
  assert list(found) == ["slow", "broken", "good"]
  assert found["slow"].text == "could not be checked in 0.3 s" and found["slow"].level == PROBLEM
  assert found["broken"].text == "could not be checked: RuntimeError: what a machine"
  assert found["good"].level == OK


def test_lines_fit_the_terminal_and_commands_stay_whole(monkeypatch):
  monkeypatch.setenv("COLUMNS", "70")
  long = diagnosis.Finding(NOTE, "disk", "word " * 40, "a command " * 12)
  *text, repair = doctor.shown(long).splitlines()
  assert len(text) > 3 and all(len(line) < 70 for line in text)
  assert repair.strip() == "→ " + long.repair.strip() or repair.strip().startswith("→ a command")


@pytest.mark.long
def test_the_verdict_of_this_machine_agrees_with_its_exit_code(tmp_path):
  """Runs the real command once."""
  code = "import sys; from grpo_jax.commands import cli; sys.exit(cli.run(sys.argv[1:]))"
  done = subprocess.run(
    [sys.executable, "-c", code, "doctor", f"--workdir={tmp_path}"],
    capture_output=True,
    text=True,
    timeout=120,
  )
  last = done.stdout.splitlines()[-1]
  assert (done.returncode, last.split(",")[0].split(".")[0]) in (
    (0, "Training can run here"),
    (1, "Training cannot run here: memory"),
  ), done.stdout + done.stderr
  assert "1 x cpu, " in done.stdout and "packages" in done.stdout
