"""The order of the package, as a test: who may import whom, and what is pure."""

import ast
import os
import pathlib
import subprocess
import sys

from grpo_jax import registry
from grpo_jax.commands import cli
from grpo_jax.environments import tool_use

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_jax"

# Lowest first. A room is a module or a folder directly under grpo_jax, or one of the packages in
# kernels/ and packages/; it may import rooms of lower floors only. Within a room, imports are free.
FLOORS = [
  {"grpo_kernels", "grpo_sandbox"},
  {"types", "errors", "values", "interrupts", "http"},
  {"rl", "files", "compilation", "processes", "registry"},
  {"models", "batching", "metrics"},
  {"data", "environments", "engines", "learn", "groups"},
  {"serving"},
  {"rollouts", "run_folder"},
  {"offline", "config", "report"},
  {"building", "configuration", "notebook"},
  {"train", "evaluation"},
  {"main", "api"},
  {"commands"},
  {"__main__"},
  {"grpo_environments", "grpo_plan", "grpo_trackers"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

# Pure: the same values in, the same values out. No file, clock, socket, process or logger.
PURE_ROOMS = {
  "types",
  "values",
  "rl",
  "batching",
  "groups",
  "learn",
  "models",
}
PURE_FILES = {
  "compilation/precision.py",
  "data/group_options.py",
  "offline/ranking.py",
  "processes/arrays.py",
}
NOT_PURE = {
  "learn/group_scoring.py",
  "learn/monitoring.py",
  "models/__init__.py",
  "models/adapter_files.py",
  "models/export.py",
  "models/files.py",
  "models/gguf.py",
  "models/gguf_header.py",
  "models/loading.py",
  "models/fused_experts.py",
  "models/merged_tensors.py",
  "models/parameter_reading.py",
  "models/safetensors.py",
  "models/sources.py",
  "models/tiny.py",
  *(f"models/chat/{name}.py" for name in ("__init__", "rendering", "text_bounds", "token_bytes")),
  "models/chat/tokenizer_files.py",
}
PURE_MAY_IMPORT = {
  "contextlib",
  *("jax", "jaxtyping", "numpy", "flax", "optax", "ml_dtypes", "grpo_kernels", "grpo_jax"),
  *(
    "base64",
    "bisect",
    "collections",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "functools",
    "heapq",
    "inspect",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "re",
  ),
  *("types", "typing"),
}
PURE_MAY_USE = PURE_ROOMS | {"errors", "metrics", "compilation", "data"}
EFFECTS = {"open", "print", "input", "exec", "eval", "__import__"}
SEES_CONFIGS = {
  *("config", "configuration", "building", "train", "main", "api", "commands"),
  "evaluation",
}
SAYS_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc", "tools"}

FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = [
  path for name in ("kernels", "packages") for path in sorted((ROOT / name).rglob("*.py"))
]


def is_standalone(path):
  """Returns whether other interpreters run a file by its path."""
  return path.parent == PACKAGE / "engines" / "server_side" or path.name == "guard.py"


def name_of(path):
  return path.relative_to(PACKAGE).as_posix()


def room_of(path):
  home = PACKAGE if path.is_relative_to(PACKAGE) else ROOT
  return path.relative_to(home).parts[home == ROOT].removesuffix(".py")


def imports_of(path):
  """Yields the dotted name of everything that a file imports, wherever in it."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots_of(path):
  return {name.split(".")[0] for name in imports_of(path)}


def our_imports_of(path):
  """Yields the parts of imported names below grpo_jax, such as ("rl", "losses")."""
  for name in imports_of(path):
    if name.startswith("grpo_jax."):
      yield tuple(name.split(".")[1:])


def rooms_imported_by(path):
  """Yields the rooms that a file imports something of, packages among them."""
  yield from (target for target, *_ in our_imports_of(path))
  yield from roots_of(path) & (FLOORS[0] | FLOORS[-1])


def is_pure(path):
  name = name_of(path)
  return name in PURE_FILES or (room_of(path) in PURE_ROOMS and name not in NOT_PURE)


PURE = [path for path in FILES if is_pure(path)]
SATELLITES = [path for path in PACKAGES if room_of(path) in FLOORS[-1]]


def test_modules_import_only_lower_floors():
  paths = [path for path in [*FILES, *PACKAGES] if path != PACKAGE / "__init__.py"]
  assert {room_of(path) for path in paths} - set(FLOOR) == set(), "no place in FLOORS"
  wrong = [
    f"{path.relative_to(ROOT)}: {room_of(path)} may not import {target}"
    for path in paths  # for __init__.py see the test of `import grpo_jax`.
    for target in rooms_imported_by(path)
    if target != room_of(path) and FLOOR[target] >= FLOOR[room_of(path)]
  ]
  assert wrong == []


def test_pure_modules_import_nothing_effectful():
  wrong = []
  for path in PURE:
    effectful = roots_of(path) - PURE_MAY_IMPORT
    wrong += [f"{name_of(path)}: {name} has effects" for name in sorted(effectful)]
    for target in our_imports_of(path):
      name = f"{'/'.join(target[:2])}.py"
      if not (target[0] in PURE_MAY_USE or name in PURE_FILES) or name in NOT_PURE:
        wrong.append(f"{name_of(path)}: {name} is not pure")
  assert wrong == []


def test_pure_modules_call_nothing_effectful():
  wrong = []
  for path in PURE:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    wrong += [f"{name_of(path)}: {name}" for name in sorted(names & EFFECTS)]
  assert wrong == []


def test_exceptions_exist():
  assert {name for name in NOT_PURE | PURE_FILES if not (PACKAGE / name).exists()} == set()


def test_config_objects_stop_at_train():
  wrong = [
    f"{name_of(path)}: {name}"
    for path in FILES
    if room_of(path) not in SEES_CONFIGS
    for name in imports_of(path)
    if name.startswith("ml_collections") or f"{name}.".startswith("grpo_jax.config.")
  ]
  assert wrong == []


def test_package_never_imports_torch():
  ours = [path for path in [*FILES, *PACKAGES] if not is_standalone(path)]
  assert [str(path.relative_to(ROOT)) for path in ours if "torch" in roots_of(path)] == []


def test_scripts_of_servers_import_nothing_of_the_package():
  """Other interpreters run them by path: the package and they import nothing of each other."""
  for path in FILES:
    assert not [name for name in imports_of(path) if "server_side" in name.split(".")]
    if is_standalone(path):
      assert not list(our_imports_of(path))


def test_the_lowest_packages_import_nothing_of_the_trainer_by_any_name():
  lowest = [path for path in PACKAGES if room_of(path) in FLOORS[0]]
  assert {room_of(path) for path in lowest} == FLOORS[0]
  assert [str(path.relative_to(ROOT)) for path in lowest if "grpo_jax" in roots_of(path)] == []


def test_the_trainer_imports_no_satellite_and_no_satellite_another():
  satellites = FLOORS[-1]
  wrong = [
    f"{path.relative_to(ROOT)}: {name}"
    for path in [*FILES, *PACKAGES, *sorted((ROOT / "configs").rglob("*.py"))]
    for name in sorted(roots_of(path) & satellites - {room_of(path)})
  ]
  assert wrong == []


def test_every_satellite_is_found_by_name():
  of_commands = {module.partition(":")[0] for module, _ in cli.COMMANDS.values()}
  of_tools = tool_use._OPEN_SERVERS.rpartition(".")[0]
  found = {*registry.SATELLITES.values(), *of_commands, of_tools}
  satellites = {path for path in found if not path.startswith("grpo_jax.")}
  assert {path.partition(".")[0] for path in satellites} == FLOORS[-1]
  assert {*registry.OURS} == {"grpo_jax"} | FLOORS[0] | FLOORS[-1]
  file_of = lambda home, path: home / f"{path.replace('.', '/')}.py"
  assert [path for path in satellites if not file_of(ROOT / "packages", path).exists()] == []
  shadowed = [path for path in registry.SATELLITES if file_of(ROOT, path).exists()]
  assert shadowed == []


def test_folders_of_packages_are_not_packages():
  """`import kernels` must stay Hugging Face's; transformers would run ours."""
  assert not [name for name in ("kernels", "packages") if (ROOT / name / "__init__.py").exists()]


def test_every_name_says_something():
  folders = [
    ROOT / name for name in ("grpo_jax", "kernels", "packages", "configs", "scripts", "tests")
  ]
  paths = [
    path for folder in folders for path in folder.rglob("*") if "__pycache__" not in str(path)
  ]
  assert [str(path) for path in paths if path.stem in SAYS_NOTHING] == []


def test_importing_the_package_imports_nothing_else():
  code = "import sys; before = set(sys.modules); import grpo_jax; print(set(sys.modules) - before)"
  environment = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True
  )
  extra = {name for name in ast.literal_eval(done.stdout) if name.partition(".")[0] == "grpo_jax"}
  assert extra == {"grpo_jax"} and "jax" not in done.stdout.replace("grpo_jax", "")


def test_mathematics_imports_without_models_and_files():
  modules = [f"grpo_jax.rl.{path.stem}" for path in sorted((PACKAGE / "rl").glob("[a-z]*.py"))]
  code = (
    f"import sys, grpo_jax.rl, {', '.join(modules)}\n"
    "unwanted = {'flax', 'optax', 'orbax', 'transformers', 'huggingface_hub', 'ml_collections',"
    " 'absl', 'grain', 'tensorboardX'}\n"
    "print(sorted(unwanted & set(sys.modules)))"
  )
  environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'packages'}"}
  done = subprocess.run(
    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
  )
  assert done.stdout == "[]\n"
