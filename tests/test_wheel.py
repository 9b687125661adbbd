"""The wheel in an environment of its own, away from the checkout: every command works there."""

import os
import pathlib
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

from grpo_jax.environments.grading import libraries
from grpo_jax.models import tiny
from tests.test_packaging import PACKAGES, PROJECT

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("grpo_jax", "kernels", "packages", "configs", "constraints", "scripts")
REQUIRED = [Requirement(text) for text in PROJECT["dependencies"]]
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")

pytestmark = pytest.mark.slow


def run(*words, **options):
  """Runs a program; returns what it printed."""
  done = subprocess.run(words, capture_output=True, text=True, timeout=250, **options)
  assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
  return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """Builds the wheel from a copy of the sources, without a network."""
  folder = tmp_path_factory.mktemp("build")
  ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
  for name in SOURCES:
    shutil.copytree(ROOT / name, folder / name, ignore=ignore)
  for name in FILES:
    shutil.copy(ROOT / name, folder)
  options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
  run(sys.executable, "-m", "pip", "wheel", *options, folder)
  (made,) = folder.glob("*.whl")
  return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
  """An environment with the wheel and what it requires, nothing of extras or of the checkout.

  Returns:
    A function that runs a program of the environment in a folder away from the checkout.
  """
  folder = tmp_path_factory.mktemp("installed")
  venv.create(folder / "venv", with_pip=False)
  programs = folder / "venv" / "bin"
  pip = (sys.executable, "-m", "pip", "--python", programs / "python")
  run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel)
  packages = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
  _, required = libraries.needed(*(each.name for each in REQUIRED))
  for file in map(pathlib.Path, required):
    (packages / file.name).symlink_to(file)
  elsewhere = folder / "elsewhere"
  elsewhere.mkdir()
  names = ("JAX_COMPILATION", "JAX_PERSISTENT", "XLA_FLAGS", "GRPO_JAX_ANY_VERSIONS")
  kept = {name: os.environ[name] for name in os.environ if name.startswith(names)}
  environment = {
    **kept,
    "PATH": f"{programs}:/usr/bin:/bin",
    "HOME": str(folder),
    "JAX_PLATFORMS": "cpu",
    "HF_HUB_OFFLINE": "1",
  }
  return lambda program, *words: run(
    programs / program, *map(str, words), cwd=elsewhere, env=environment
  )


TINY = (
  *("--config.total_steps=2", "--config.rollout.prompts_per_step=2"),
  *("--config.rollout.group_size=4", "--config.sampling.max_tokens=4"),
  *("--config.evaluation.num_prompts=4", "--config.data.size=64"),
  *("--config.engine.max_rows=8", "--config.learn.report_kl_every_steps=0"),
)


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
  """A run of the quickstart with a tiny model, by name."""
  folder = tmp_path_factory.mktemp("runs")
  model = tiny.write(folder / "model")
  workdir = folder / "first"
  flags = (f"--workdir={workdir}", f"--config.model.path={model}", *TINY)
  printed = installed("grpo-jax", "train", "quickstart", *flags)
  return workdir, printed


def test_the_wheel_holds_what_a_run_needs_and_nothing_of_the_repository_besides(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {*PACKAGES}
  shipped = {name.removeprefix("grpo_jax/shipped/") for name in names if "/shipped/" in name}
  assert shipped == {
    *(f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py")),
    *(f"constraints/sglang_{device}.txt" for device in ("cpu", "cuda")),
    "scripts/install_sglang.sh",
  }
  assert {f"{name}/py.typed" for name in PACKAGES} <= {*names}
  assert "grpo_jax/report/page/page.html" in names


def test_the_package_that_runs_is_the_installed_one(installed):
  code = "import grpo_jax; from grpo_jax.files import package_data; print(package_data.folder())"
  assert installed("python", "-c", code).strip().endswith("site-packages/grpo_jax/shipped")


def test_train_report_and_compare_work_away_from_the_checkout(installed, trained):
  workdir, printed = trained
  assert "devices: 1 x cpu" in printed
  assert (workdir / "export" / "model.safetensors").is_file()
  report = installed("grpo-jax", "report", workdir)
  assert report.strip() == str(workdir / "report.html")
  assert "rollout/reward_mean" in installed("grpo-jax", "compare", workdir, workdir)


def test_the_quickstart_needs_no_extra(installed, trained):
  code = (
    "from grpo_jax.data import generated\ntry: generated.make_task('chain_sum', {})\n"
    "except ImportError as error: print(error)"
  )
  printed = installed("python", "-c", code)
  assert "No module named 'reasoning_gym'" in printed and "'grpo-jax[reasoning-gym]'" in printed


def test_export_writes_a_checkpoint(installed, trained, tmp_path):
  workdir, _ = trained
  installed("grpo-jax", "export", workdir, tmp_path / "exported")
  names = {path.name for path in (tmp_path / "exported").iterdir()}
  assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_evaluate_measures_a_run(installed, trained):
  workdir, _ = trained
  printed = installed("grpo-jax", "evaluate", f"--model={workdir}", "--prompts=4")
  assert "±" in printed


def test_satellites_are_found_by_name(installed):
  assert "grpo-jax plan " in installed("grpo-jax", "plan", "--help")
  code = "from grpo_jax import environments as e; print(*e.make(sliding_puzzle={}))"
  assert installed("python", "-c", code) == "sliding_puzzle\n"


def test_python_finds_the_configs_by_name_and_modules_run_by_name(installed):
  code = (
    "from grpo_jax import configuration as c; print(c.load('math_1b_gpu', {'seed': 7}).seed);"
    " import configs.base"
  )
  assert installed("python", "-c", code) == "7\n"
  printed = installed("python", "-m", "grpo_jax.main", "--config=gsm8k", "--help=seed")
  assert printed.startswith("  --config.seed=")


def test_doctor_names_a_script_that_is_there(installed):
  printed = installed("grpo-jax", "doctor")
  assert "Training can run here" in printed
  (line,) = [line for line in printed.splitlines() if "install_sglang.sh" in line]
  script = pathlib.Path(line.split()[-2])
  assert script.is_file() and "site-packages" in script.parts
  wrong = subprocess.run(["bash", script, "tpu"], capture_output=True, text=True)
  assert "usage" in wrong.stderr and wrong.returncode
  lists = script.parents[1] / "constraints"
  assert {path.name for path in lists.iterdir()} == {"sglang_cpu.txt", "sglang_cuda.txt"}
