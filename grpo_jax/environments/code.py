"""Code: the completion's program is right if it passes the tests of its row.

It runs in a sandbox (packages/grpo_sandbox). The tests and expected answers are kept in another
process, so the program cannot influence the verdict by changing its own. docs/code_environment.md
lists the forms of tests, the limits, and what each sandbox does not protect from.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence

from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.grading import code_tests, programs
from grpo_jax.environments.grading.code_tests import FunctionTests, ProgramTests
from grpo_jax.registry import choose
from grpo_jax.types import Prompt
from grpo_sandbox.launch import Launcher, ProcessLimits, SandboxError
from grpo_sandbox.supervise import Ending, Supervisor, Verdict


class CodeEnvironments(EnvironmentFactory):
  """Makes the environments, which share the threads that supervise programs."""

  observation_roles = ()

  def __init__(
    self,
    supervisor: Supervisor,
    *,
    code: str,
    partial: bool,
    reward_correct: float,
    reward_wrong: float,
    format_reward: float,
    timeout_s: float,
    total_timeout_s: float,
    tests_key: str | None,
  ):
    self._supervisor = supervisor
    self._extract = choose("code form", code, programs.EXTRACTORS)
    self._partial = partial
    self._reward_correct = reward_correct
    self._reward_wrong = reward_wrong
    self._format_reward = format_reward
    self._timeout_s = timeout_s
    self._total_timeout_s = total_timeout_s
    self._tests_key = tests_key

  def __call__(self, prompt: Prompt) -> Environment:
    try:
      tests = code_tests.read(prompt.info, self._tests_key)
    except code_tests.TestError as error:
      raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error
    return SingleTurn(lambda _, text: self._judge(tests, text), prompt)

  def metrics(self) -> dict[str, float]:
    """Returns how many judges were started, and how programs ended."""
    return self._supervisor.counts()

  def close(self) -> None:
    """Ends all processes."""
    self._supervisor.close()

  async def _judge(self, tests: FunctionTests | ProgramTests, text: str) -> StepResult:
    code = self._extract(text, tests.entry)
    if code is None:
      return self._result(None)
    check = self._check_functions if isinstance(tests, FunctionTests) else self._check_program
    return self._result(await asyncio.wrap_future(self._supervisor.submit(check, tests, code)))

  def _check_functions(self, tests: FunctionTests, code: str) -> Verdict:
    suite = {
      "sources": programs.assemble(code, prompt_code=tests.prompt_code, entry=tests.entry),
      "given": tests.prompt_code,
      "setup": tests.setup,
      "tests": tests.tests,
      "entry": tests.entry,
      "cases": tests.cases,
    }
    return self._supervisor.check(suite, self._timeout_s)

  def _check_program(self, tests: ProgramTests, code: str) -> Verdict:
    """Runs the program on each input in turn; without `partial`, up to the first failure."""
    passed, endings = 0, []
    deadline = time.monotonic() + self._total_timeout_s
    for stdin, expected in tests.cases:
      left = deadline - time.monotonic()
      if left <= 0:
        endings.append(Ending.TIMEOUT)
        break
      output = self._supervisor.run(code, stdin, min(left, self._timeout_s))
      endings.append(output.ending)
      is_right = output.ending is Ending.OK and code_tests.same_output(output.text, expected)
      passed += is_right
      if output.ending is Ending.COMPILE_ERROR or not (is_right or self._partial):
        break
    ending = next((e for e in endings if e is not Ending.OK), Ending.OK)
    return Verdict(ending, passed, len(tests.cases) - passed)

  def _result(self, verdict: Verdict | None) -> StepResult:
    """Returns the reward of a verdict; None: the completion has no program."""
    share = 0.0
    if verdict is not None:
      share = verdict.passed_share if self._partial else float(verdict.is_correct)
    outcome = self._reward_wrong + share * (self._reward_correct - self._reward_wrong)
    components = {"correct": outcome, "format": self._format_reward * (verdict is not None)}
    return StepResult(
      reward=components if self._format_reward else outcome, done=True, metrics=_metrics(verdict)
    )


_FAULTS = {
  "compile_error": (Ending.COMPILE_ERROR,),
  "timeout": (Ending.TIMEOUT,),
  "over_limit": (Ending.MEMORY, Ending.OUTPUT),
  "crash": (Ending.RAISED, Ending.DIED),
}


def _metrics(verdict: Verdict | None) -> dict[str, float]:
  """Returns the outcome as metrics: `accuracy`, or exactly one fault, is 1."""
  ending = None if verdict is None else verdict.ending
  is_correct = verdict is not None and verdict.is_correct
  return {
    "accuracy": float(is_correct),
    "has_code": float(verdict is not None),
    "passed_share": 0.0 if verdict is None else verdict.passed_share,
    "wrong": float(ending is Ending.OK and not is_correct),
    **{name: float(ending in endings) for name, endings in _FAULTS.items()},
  }


def make(
  *,
  code: str = "fence",
  partial: bool = False,
  reward_correct: float = 1.0,
  reward_wrong: float = 0.0,
  format_reward: float = 0.0,
  sandbox: str = "bubblewrap",
  workers: int = 2,
  timeout_s: float = 5.0,
  total_timeout_s: float = 20.0,
  memory_mib: int = 512,
  output_kib: int = 1024,
  scratch_mib: int = 16,
  tests_key: str | None = None,
  interpreter: str | None = None,
  packages: Sequence[str] = (),
) -> CodeEnvironments:
  """Makes the code environment.

  Args:
    code: Place of the program: "fence" (last ``` block of Python), "tag"
      (<code>…</code>), "raw" (the whole completion), "any" (the first of these that is present).
    partial: Whether the reward grows with the share of tests that pass; otherwise all must pass.
    reward_correct: Reward if all tests pass.
    reward_wrong: Reward if none passes, or not all do, or there is no program.
    format_reward: Added if there is a program in the required place; the reward then has the
      components "correct" and "format".
    sandbox: "bubblewrap"; or "landlock" or "limits", which leave more open (see the docs).
    workers: Number of programs that run at the same time.
    timeout_s: Longest time of one run of a program, its tests included, in seconds.
    total_timeout_s: Longest time of all runs of a program on the inputs of a row, in seconds.
    memory_mib: Limit of a program's address space.
    output_kib: Limit of what a run prints, or of one result of a function.
    scratch_mib: Limit of the files that a program writes.
    tests_key: Field of the row that holds the tests; None: see docs/code_environment.md.
    interpreter: Python that runs programs; None: the running one, without its packages.
    packages: Folders with further packages that programs may import.

  Returns:
    A factory of environments. Metrics of an attempt: accuracy, has_code, passed_share, and
    whichever of compile_error, timeout, over_limit, crash and wrong applies.

  Raises:
    ValueError: The sandbox does not work on this machine, or an option is out of range.
  """
  if not total_timeout_s > 0:
    raise ValueError(f"total_timeout_s must be above 0, got {total_timeout_s}")
  limits = ProcessLimits(
    timeout_s=timeout_s, memory_mib=memory_mib, output_kib=output_kib, scratch_mib=scratch_mib
  )
  try:
    launcher = Launcher(sandbox, limits, interpreter=interpreter, packages=packages)
    supervisor = Supervisor(launcher, workers=workers)
    with contextlib.ExitStack() as stack:
      stack.callback(supervisor.close)
      supervisor.try_out()
      stack.pop_all()
  except SandboxError as error:
    raise ValueError(f"the code environment: {error}") from error
  return CodeEnvironments(
    supervisor,
    code=code,
    partial=partial,
    reward_correct=reward_correct,
    reward_wrong=reward_wrong,
    format_reward=format_reward,
    timeout_s=timeout_s,
    total_timeout_s=total_timeout_s,
    tests_key=tests_key,
  )
