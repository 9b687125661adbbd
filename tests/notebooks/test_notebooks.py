"""The notebooks: the .ipynb is what its script makes, and the first cell installs on Colab alone.

`make test-long` runs them in their fast form (pytest --nbmake notebooks); a slow test here runs the
quickstart with the real model.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

from scripts import make_notebooks

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
NAMES = ["quickstart", "reading_a_run", "your_own_loss", "your_own_reward"]


def cells(path):
  return json.loads(path.with_suffix(".ipynb").read_text())["cells"]


def test_every_script_has_a_notebook_and_every_notebook_a_script():
  assert [path.stem for path in SCRIPTS] == NAMES
  assert sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_is_what_its_script_makes(path):
  """`make notebooks` makes them."""
  assert path.with_suffix(".ipynb").read_text() == make_notebooks.notebook_of(path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_a_badge(path):
  code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
  assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
  badge = f"https://colab.research.google.com/github/grpo-jax/grpo-jax/blob/main/notebooks/{path.stem}.ipynb"
  assert badge in "".join(cells(path)[0]["source"])
  assert badge in (ROOT / "README.md").read_text()


def install_cell(path):
  """The source of the first cell of code."""
  first = next(cell for cell in cells(path) if cell["cell_type"] == "code")
  assert first["metadata"]["tags"] == ["install"]
  return "".join(first["source"])


def test_all_notebooks_install_in_the_same_way():
  assert len({install_cell(path) for path in SCRIPTS}) == 1


@pytest.fixture
def installs(monkeypatch):
  """Runs the cell that installs; returns the arguments of pip, or None if it installs nothing."""

  def run(*, colab=True, gpu=False, tpu=False):
    called = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if gpu else None)
    monkeypatch.setattr(pathlib.Path, "glob", lambda self, pattern: iter([]))
    for name, value, is_set in (
      ("COLAB_RELEASE_TAG", "release-colab", colab),
      ("TPU_ACCELERATOR_TYPE", "v5e-1", tpu),
    ):
      monkeypatch.setenv(name, value) if is_set else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    exec(compile(INSTALL, "install", "exec"), {})
    assert len(called) <= 1
    return called[0] if called else None

  return run


INSTALL = install_cell(SCRIPTS[0])


def test_outside_of_colab_nothing_is_installed(installs):
  assert installs(colab=False, gpu=True) is None


@pytest.mark.parametrize(
  "machine, extra",
  [({}, "[notebook]"), ({"gpu": True}, "[notebook,cuda12]"), ({"tpu": True}, "[notebook,tpu]")],
)
def test_on_colab_the_package_is_installed_for_the_device(machine, extra, installs, monkeypatch):
  for name in [name for name in sys.modules if name == "jax"]:
    monkeypatch.delitem(sys.modules, name)
  command = installs(**machine)
  assert command[:4] == [sys.executable, "-m", "pip", "install"]
  assert f"grpo-jax{extra} @ git+https://github.com/grpo-jax/grpo-jax" in command
  constraints = command[-1].rpartition("/main/")[2]
  assert constraints == f"constraints/py3{sys.version_info[1]}.txt"
  assert (ROOT / constraints).is_file()
  extras = (ROOT / "pyproject.toml").read_text()
  for name in extra.strip("[]").split(","):
    assert re.search(rf"^{name} = ", extras, re.MULTILINE), name


def test_on_colab_an_old_jax_that_is_imported_already_is_an_error(installs, monkeypatch):
  monkeypatch.setitem(sys.modules, "jax", types.ModuleType("jax"))
  with pytest.raises(RuntimeError, match="Restart session"):
    installs()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_is_imported_before_the_cell_that_installs(path):
  source = path.read_text()
  first = source.index('tags=["install"]')
  assert not re.search(r"^(import|from) ", source[:first], re.MULTILINE)
  assert not re.search(r"^\s*(import|from) (jax|grpo_jax|numpy|pandas)", INSTALL, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_with_the_real_model(tmp_path):
  import nbclient
  import nbformat

  notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
  settings = next(cell for cell in notebook.cells if "settings" in cell.metadata.get("tags", ()))
  assert settings.source.count("options = {}\n") == 1
  # For time: 4 larger steps instead of 14, and no evaluation on the way.
  few = {"total_steps": 4, "optim.learning_rate": 3e-5, "evaluation.every_steps": 0}
  settings.source = settings.source.replace("options = {}\n", f"options = {few}\n")
  # Programs are optimised, and kept where a user's are: `make quickstart` has the same.
  suites = ("XLA_FLAGS", "GRPO_JAX_NOTEBOOK_FAST", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
  environment = {name: os.environ[name] for name in os.environ if not name.startswith(suites)}
  client = nbclient.NotebookClient(
    notebook, timeout=1200, resources={"metadata": {"path": str(tmp_path)}}
  )
  client.execute(
    env={**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"}
  )
  rows = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
  values = [json.loads(row) for row in rows]
  accuracy = [row[name] for row in values for name in row if name.endswith("heldout/accuracy")]
  assert accuracy[-1] > 0.4, accuracy
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
  assert not [output for output in outputs if output.get("name") == "stderr"]
  shown = [output["data"] for output in outputs if "data" in output]
  assert sum("<iframe" in str(data.get("text/html")) for data in shown) == 1
  assert sum(output["output_type"] == "display_data" for output in outputs) == 1


@pytest.mark.slow
def test_the_stop_button_saves_a_checkpoint_and_the_next_cell_continues(model, tmp_path):
  """A kernel is interrupted while a cell trains, as Jupyter does it."""
  from jupyter_client.manager import start_new_kernel

  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"}
  kernel, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=environment)
  printed: list[str] = []

  def run(code, *, until=""):
    """Runs a cell; interrupts the kernel once it has printed `until`. Returns how it ended."""
    wanted, ended = client.execute(code, stop_on_error=False), {}
    while True:
      message = client.get_iopub_msg(timeout=240)
      if message["parent_header"].get("msg_id") != wanted:
        continue
      printed.append(str(message["content"].get("text", "")))
      if until and until in "".join(printed):
        until = kernel.interrupt_kernel() or ""
      if message["msg_type"] == "error":
        ended = message["content"]
      if message["content"].get("execution_state") == "idle":
        return ended

  call = (
    "import grpo_jax\n"
    f"options = {{'model.path': {str(model)!r}, 'total_steps': TOTAL, 'sampling.max_tokens': 4,\n"
    "  'rollout.prompts_per_step': 2, 'rollout.group_size': 2, 'evaluation.every_steps': 0,\n"
    "  'evaluation.at_start': False, 'evaluation.at_end': False}\n"
    "reward = lambda prompt, completion, info: sum(map(ord, completion)) % 7\n"
    "said = lambda step, metrics: print('step', step, flush=True)\n"
    "run = grpo_jax.train('quickstart', 'run', reward=reward, on_step=said, **options)\n"
  )
  try:
    ended = run(call.replace("TOTAL", "1000"), until="step 1\n")
    assert ended["ename"] == "KeyboardInterrupt" and "is saved" in ended["evalue"]
    (step,) = [int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert step >= 2 and f"the checkpoint of step {step} is saved" in ended["evalue"]
    assert len(ended["traceback"]) < 10  # frames of the cell and of the API only.
    assert not run(call.replace("TOTAL", str(step + 1)) + "assert run.step == len(run.metrics())\n")
    assert f"continuing at step {step}" in "".join(printed)
  finally:
    client.stop_channels()
    kernel.shutdown_kernel(now=True)
