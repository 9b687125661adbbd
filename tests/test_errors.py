"""What ends a run with a message and without a traceback is one base class."""

import ast

from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn.train_step import NonFiniteGradients
from grpo_jax.run_folder.checkpoint_errors import CheckpointError
from tests.test_architecture import FILES, PACKAGE, ROOT, SATELLITES, is_standalone

# Exceptions that do not leave the package: other code of the package catches them, or turns them
# into an expected failure.
CAUGHT = {
  "interrupts.py": {"Stopped"},
  "config/command_line.py": {"HelpWanted"},
  "engines/server.py": {"ServerLost"},
  "files/hub.py": {"Unavailable"},
  "http/bodies.py": {"UnreadableBody"},
  "http/failures.py": {"HttpFailure"},
  "api/callbacks.py": {"StopTraining"},  # users raise it.
  "processes/rendezvous.py": {"_NotArrived"},
  "run_folder/stored_leaves.py": {"UnusableCheckpoint", "OtherState"},
  "environments/isolation.py": {"EnvironmentFailure"},
  "grpo_environments/openenv.py": {"BadAction"},
  "environments/toolbox/calling.py": {"ToolError"},
  "environments/toolbox/schemas.py": {"_TooLarge"},
  "models/chat/tool_calls.py": {"_CallError"},
  "models/chat/untrusted_json.py": {"JsonError"},
  "serving/request_errors.py": {"RequestError"},
  "serving/session.py": {"EngineFailed"},
  "environments/reward_model.py": {"TooLong"},
  "environments/scoring/failures.py": {"EndpointError"},
  "environments/grading/pool.py": {
    "GraderTimeout",
    "GraderCrash",
    "GraderError",
    "GraderStartError",
    "_SandboxDied",
  },
  "environments/grading/code_tests.py": {"TestError"},
  "environments/grading/evaluated.py": {"_TooDeepError"},
  "environments/toolbox/functions.py": {"WrongArguments"},
  "errors.py": {"ExpectedFailure"},
}
ENDS = ("Error", "Exception", "Failure")


def exceptions():
  """Yields (file, name, names of the bases) of exceptions of the trainer and the satellites."""
  for path in [*FILES, *SATELLITES]:
    home = ROOT / "packages" if path in SATELLITES else PACKAGE
    name = path.relative_to(home).as_posix()
    if is_standalone(path):
      continue  # other processes run them.
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        yield name, node.name, bases


def test_every_exception_is_an_expected_failure_or_is_caught_within_the_package():
  found = list(exceptions())
  expected, caught = {"ExpectedFailure"}, set().union(*CAUGHT.values()) - {"ExpectedFailure"}
  for _ in range(4):  # bases of bases.
    expected |= {name for _, name, bases in found if bases & expected}
    caught |= {name for _, name, bases in found if bases & caught and not bases & expected}
  raised = [
    f"{file}: {name}"
    for file, name, bases in found
    if any(base.endswith(ENDS) for base in bases) and name not in expected | caught
  ]
  assert raised == []
  listed = {(file, name) for file, names in CAUGHT.items() for name in names}
  assert listed <= {(file, name) for file, name, _ in found}, "gone: take it off the list"


def test_a_full_disk_and_gradients_that_are_not_finite_are_expected_failures():
  assert issubclass(CheckpointError, ExpectedFailure)
  assert issubclass(NonFiniteGradients, ExpectedFailure)
