"""The notebooks: each .ipynb is what its script makes, holds the lesson alone, and runs.

`make test-long` executes them with a tiny model (fast_form.py); a slow test here executes the
quickstart with the real model.
"""

import json
import os
import re
import tomllib

import pytest
from packaging.requirements import Requirement

from scripts import make_notebooks
from tests.notebooks import executing
from tests.notebooks.executing import PYTHONPATH, ROOT

SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
NAMES = [
  "colab_t4",
  "colab_tpu",
  "quickstart",
  "reading_a_run",
  "your_own_loss",
  "your_own_reward",
]


def cells(path):
  return json.loads(path.with_suffix(".ipynb").read_text())["cells"]


def sources(path):
  return ["".join(cell["source"]) for cell in cells(path)]


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
  assert badge in (ROOT / "docs" / "python_api.md").read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_cell_of_four_lines_installs_the_package_with_extras_that_exist(path):
  code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
  assert [i for i, cell in enumerate(code) if "install" in cell["metadata"].get("tags", ())] == [0]
  *lines, last = "".join(code[0]["source"]).splitlines()
  assert lines == ["try:", "  import grpo_jax", "except ImportError:"]
  wanted = re.fullmatch(r'  %pip install --quiet "(.+)"', last)
  assert wanted, last
  needed = Requirement(wanted[1])
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert needed.name == project["name"] and needed.url == f"git+{project['urls']['Homepage']}"
  assert "notebook" in needed.extras and needed.extras <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
  "name, runtime, extra",
  [("colab_t4", ("GPU", "T4"), "cuda12"), ("colab_tpu", ("TPU", "V5E1"), "tpu")],
)
def test_colab_opens_a_notebook_on_the_device_that_its_extra_is_for(name, runtime, extra):
  made = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())["metadata"]
  assert (made["accelerator"], made["colab"]["gpuType"]) == runtime
  assert f"grpo-jax[notebook,{extra}] @" in "".join(sources(ROOT / "notebooks" / name))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_notebook_has_nothing_that_only_tests_need(path):
  """What tests change, they change in a cell before those of the notebook."""
  found = re.findall(
    r"os\.environ|GRPO_JAX_|tempfile|chdir|models\.tiny|\btiny\b", path.read_text()
  )
  assert not found


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_with_a_tiny_model_and_its_cells_unchanged(name, tmp_path):
  notebook = executing.execute(name, tmp_path, executing.FAST_FORM.read_text(), timeout=240)
  assert [cell.source for cell in notebook.cells] == sources(ROOT / "notebooks" / f"{name}.py")
  assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
  runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")]
  assert runs and all(run["model"]["path"].endswith("tiny") for run in runs)


# A first cell, for time: 4 larger steps instead of 14, and no evaluation on the way.
FEWER_STEPS = """
import grpo_jax
few = {"total_steps": 4, "optim.learning_rate": 3e-5, "evaluation.every_steps": 0}
api = grpo_jax.api
grpo_jax.train = lambda *arguments, **options: api.train(*arguments, **options | few)
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_learns_with_the_real_model(tmp_path):
  # Programs are optimised, and kept where a user's are: `make quickstart` has the same.
  notebook = executing.execute("quickstart", tmp_path, FEWER_STEPS, timeout=1200, as_users=True)
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

  environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
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
