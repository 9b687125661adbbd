"""The code environment: rows of the known shapes, where the program stands, rewards, metrics."""

import asyncio
import json
import time

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.code import make
from grpo_jax.environments.grading import code_tests, programs
from grpo_jax.types import FinishReason, Prompt
from grpo_sandbox import syscalls
from grpo_sandbox.supervise import BadTests
from tests import sandboxes

# Of the shape of HumanEval: the prompt ends in a docstring, the test is check(candidate).
HUMANEVAL = {
  "problem": "from typing import List\n\n\n"
  'def scale(xs: List[int], k: int) -> List[int]:\n  """k times each."""\n',
  "task_id": "Own/0",
  "entry_point": "scale",
  "canonical_solution": "  return [k * x for x in xs]\n",
  "test": "METADATA = {}\n\ndef check(candidate):\n  assert candidate([1, 2], 3) == [3, 6]\n"
  "  assert candidate([], 3) == []\n  assert candidate([-1], 0) == [0]\n",
}
MBPP = {
  "problem": "Write a function to find the larger of two numbers.",
  "test_setup_code": "import math",
  "test_list": ["assert larger(1, 2) == 2", "assert larger(math.pi, 1) == math.pi"],
}
PROGRAM = {
  "problem": "Print the sum of each line.",
  "tests": [{"input": "1 2\n3 4\n", "output": "3\n7\n"}, {"input": "5 5", "output": "10"}],
}
SUMS = "import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))"


@pytest.fixture(scope="module")
def factories():
  made = {}

  def factory(**options):
    key = json.dumps(options, sort_keys=True)
    if key not in made:
      made[key] = make(sandbox=sandboxes.any_kind(), **{"timeout_s": 10.0, **options})
    return made[key]

  yield factory
  for one in made.values():
    one.close()


def judge(factory, row, text):
  async def attempt():
    environment = factory(Prompt("x:0:0", np.zeros(1, np.int32), "code", row))
    await environment.start()
    result = await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)
    await environment.close()
    return result

  return asyncio.run(attempt())


def fenced(code, label="python"):
  return f"Thinking.\n```{label}\n{code}\n```\nDone."


FAULTS = ("wrong", "compile_error", "timeout", "over_limit", "crash")


@pytest.mark.parametrize(
  ("row", "code", "reward", "fault"),
  [
    (HUMANEVAL, "def scale(xs, k):\n  return [k * x for x in xs]", 1.0, None),
    (HUMANEVAL, "def scale(xs: List[int], k):\n  return [x + x + x for x in xs]", 0.0, "wrong"),
    (HUMANEVAL, "def other(xs, k): pass", 0.0, "wrong"),
    (HUMANEVAL, "def scale(xs, k)\n  return xs", 0.0, "compile_error"),
    (HUMANEVAL, "def scale(xs, k): raise SystemExit(0)", 0.0, "wrong"),
    (HUMANEVAL, "import os\nos._exit(0)", 0.0, "crash"),
    (HUMANEVAL, "def scale(xs, k): return bytearray(10**10)", 0.0, "over_limit"),
    (MBPP, "def larger(a, b): return max(a, b)", 1.0, None),
    (MBPP, "def larger(a, b): return b", 0.0, "wrong"),
    (PROGRAM, SUMS, 1.0, None),
    (PROGRAM, "print(3)\nprint(7)", 0.0, "wrong"),
    (PROGRAM, "print(3", 0.0, "compile_error"),
    (PROGRAM, "while True: print(3)", 0.0, "over_limit"),
    (PROGRAM, SUMS + "\n1 / 0", 0.0, "crash"),
    (PROGRAM, SUMS + "\nimport sys\nsys.exit(3)", 0.0, "crash"),
    (PROGRAM, SUMS + "\nraise SystemExit", 1.0, None),
  ],
)
def test_reward_and_the_one_fault(factories, row, code, reward, fault):
  result = judge(factories(), row, fenced(code))
  assert result.total == reward == result.metrics["accuracy"] and result.done
  assert {name: result.metrics[name] for name in FAULTS} == {n: float(n == fault) for n in FAULTS}
  assert result.metrics["has_code"] == 1.0


@pytest.mark.long
@pytest.mark.parametrize("row", [HUMANEVAL, PROGRAM])
def test_time_out(factories, row):
  start = time.monotonic()
  code = "def scale(xs, k):\n  while True: pass\nif __name__ == '__main__': scale(1, 2)"
  result = judge(factories(timeout_s=0.7), row, fenced(code))
  assert result.metrics["timeout"] == 1.0 and result.total == 0.0
  assert time.monotonic() - start < 6


@pytest.mark.long
def test_total_time_of_many_inputs_is_bounded(factories):
  row = {"problem": "x", "tests": [{"input": "", "output": "1"}] * 50}
  code = "import time\ntime.sleep(0.8)\nprint(1)"
  start = time.monotonic()
  result = judge(factories(total_timeout_s=2.5, partial=True), row, fenced(code))
  assert result.metrics["timeout"] == 1.0 and 0.0 < result.total < 0.1
  assert time.monotonic() - start < 15  # of 40.


def test_partial_reward_is_the_share_of_passed_tests(factories):
  partial = factories(partial=True, reward_correct=2.0, reward_wrong=-1.0, format_reward=0.5)
  third = judge(partial, HUMANEVAL, fenced("def scale(xs, k): return [0] * len(xs)"))
  assert third.components == {"correct": pytest.approx(-1 + 3 * 2 / 3), "format": 0.5}
  assert third.metrics["passed_share"] == pytest.approx(2 / 3) and third.metrics["accuracy"] == 0.0
  half = judge(partial, PROGRAM, fenced("print(10)"))
  assert half.components["correct"] == pytest.approx(0.5)
  assert judge(partial, PROGRAM, fenced(SUMS)).components["correct"] == 2.0
  assert judge(partial, PROGRAM, "no code").components == {"correct": -1.0, "format": 0.0}


def test_completion_of_the_prompt_and_whole_function_both_count(factories):
  bare = factories(code="any")
  assert judge(bare, HUMANEVAL, HUMANEVAL["canonical_solution"]).total == 1.0
  assert judge(bare, HUMANEVAL, "  return xs\n").total == 0.0
  whole = HUMANEVAL["problem"] + HUMANEVAL["canonical_solution"]
  assert judge(bare, HUMANEVAL, whole).total == 1.0
  assert judge(bare, HUMANEVAL, fenced(whole)).total == 1.0


def test_expected_output_is_not_in_reach_of_the_program(factories):
  row = {"problem": "x", "tests": [{"input": "", "output": "SECRET-4711"}]}
  code = """
import gc, os, re, sys
found = re.findall("SECRET-[0-9]+", repr(gc.get_objects()) + repr(sys.modules) + sys.stdin.read())
print((found or ["nothing"])[0])
"""
  assert judge(factories(), row, fenced(code)).metrics["wrong"] == 1.0


def test_row_without_usable_tests_is_an_error_of_its_own(factories):
  with pytest.raises(ValueError, match=r"x:0:0: the code environment needs tests in one of test,"):
    judge(factories(), {"problem": "x"}, "")
  with pytest.raises(BadTests, match="not Python"):
    judge(factories(), {**HUMANEVAL, "test": "def check("}, fenced("def scale(xs, k): pass"))


def test_environment_is_made_by_name_and_counts():
  settings = dict(module="code", sandbox=sandboxes.any_kind(), workers=1)
  with environments.make(programs=settings) as made:
    assert judge(made["programs"], PROGRAM, fenced(SUMS)).total == 1.0
    counts = made.metrics()
  # Two inputs, and the program with which the sandbox is tried out.
  assert counts == {"env/programs/sandboxes": 1.0, "env/programs/programs_ok": 3.0}


def test_sandbox_that_is_not_there_is_never_replaced_silently(monkeypatch):
  monkeypatch.setenv("PATH", "/nonexistent")
  with pytest.raises(ValueError, match=r"code environment: .*bwrap.*docs/code_environment.md"):
    environments.make(code=dict(module="code"))


@pytest.mark.parametrize(
  ("option", "value", "reason"),
  [
    ("timeout_s", 0.0, "timeout_s must be at least"),
    ("timeout_s", float("nan"), "timeout_s must be at least"),
    ("total_timeout_s", 0.0, "total_timeout_s must be above 0"),
    ("packages", ["/nonexistent"], "there is no /nonexistent"),
    ("interpreter", "/nonexistent/python", "there is no /nonexistent/python"),
  ],
)
def test_option_that_makes_no_sense_is_refused(option, value, reason):
  with pytest.raises(ValueError, match=reason):
    make(**{option: value})


def test_sandbox_in_which_no_program_runs_is_found_before_a_model_is_blamed(monkeypatch):
  right = syscalls.program
  broken = lambda machine, *, processes, files: (
    right(machine, processes=processes, files=files) if processes else bytes(8)
  )
  kind = sandboxes.any_kind()
  monkeypatch.setattr(syscalls, "program", broken)  # a kernel that refuses the filter.
  with pytest.raises(ValueError, match=rf"did not run in the sandbox '{kind}': raised"):
    make(sandbox=kind)


@pytest.mark.parametrize(
  ("text", "form", "code"),
  [
    ("```python\na\n```\n```python\nb\n```", "fence", "b\n"),
    ("```python\na\n```\n```\noutput\n```", "fence", "a\n"),
    ("```bash\nls\n```", "fence", None),
    ("```python\r\na\r\n```\r\nDone.\r\n", "fence", "a\r\n"),
    ("```\na\n```", "fence", "a\n"),
    ("```Python3 title=x\na\n```", "fence", "a\n"),
    ("1. first\n   ```py\n   a\n     b\n   ```", "fence", "a\n  b\n"),
    ("```python\ndef f(): pass\n```\n```python\nprint(f())\n```", "fence", "def f(): pass\n"),
    ("```python\na\n```<|im_end|>", "fence", "a\n"),
    ("```python\na", "fence", None),
    ("a", "fence", None),
    ("<code>a</code> <code>\nb</code>", "tag", "\nb"),
    ("<code>\n```python\na\n```\n</code>", "tag", "a\n"),
    ("  return 1", "any", "  return 1"),
    (" \n", "any", None),
    ("```x```", "raw", "```x```"),
  ],
)
def test_program_is_found_where_it_must_be(text, form, code):
  assert programs.EXTRACTORS[form](text, "f") == code


def test_prompt_goes_before_the_program_or_is_completed_by_it():
  prompt = "import math\ndef f(x):\n"
  assert programs.assemble("  return 1", prompt_code=prompt, entry="f") == [prompt + "  return 1"]
  for whole in ("def f(x): pass", "async  def f(x): pass", "f = len", "class Solution: pass"):
    assert programs.assemble(whole, prompt_code=prompt, entry="f") == [prompt, whole]
  assert programs.assemble("def ff(x): pass", prompt_code=prompt, entry="f")[0].startswith(prompt)
  assert programs.assemble("x", prompt_code="", entry="f") == ["x"]


ADD = (([1, 2], 3),)


@pytest.mark.parametrize(
  ("row", "cases"),
  [
    ({"tests": [{"args": [1, 2], "expected": 3}], "entry_point": "add"}, ADD),
    ({"input_output": '{"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}'}, ADD),
    ({"input_output": {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}}, ADD),
    ({"verifier_metadata": {"unit_tests": {"inputs": ["1 2"], "outputs": ["3"]}}}, (("1 2", "3"),)),
    ({"unit_tests": '{"inputs": ["1 2"], "outputs": ["3"]}'}, (("1 2", "3"),)),
    ({"expected_answer": '[{"stdin": "1 2", "stdout": "3"}]'}, (("1 2", "3"),)),
    ({"tests": [{"input": ["1", "2"], "output": ["3"]}]}, (("1\n2", "3"),)),
  ],
)
def test_cases_of_known_shapes(row, cases):
  read = code_tests.read({"problem": "Add two numbers.", **row})
  assert read.cases == cases and read.entry in ("add", "")


def test_test_code_of_known_shapes():
  assert code_tests.read({"expected_answer": "assert f(1) == 2"}).tests == ("assert f(1) == 2",)
  assert code_tests.read({"mine": "assert f()", "test": "x"}, "mine").tests == ("assert f()",)
  mbpp = code_tests.read({**MBPP, "test_imports": ["import re", "import os"]})
  assert mbpp.tests == tuple(MBPP["test_list"]) and "import math" in mbpp.setup
  human = code_tests.read(HUMANEVAL)
  assert human.prompt_code == HUMANEVAL["problem"] and human.entry == "scale"
  assert code_tests.read({**HUMANEVAL, "problem": "Scale."}).prompt_code == ""


@pytest.mark.parametrize(
  ("value", "reason"),
  [
    (3, "tests are code"),
    ([1], "tests are code"),
    ({"inputs": ["a"]}, "needs lists 'inputs' and 'outputs', has inputs"),
    ({"inputs": ["a"], "outputs": []}, "1 inputs and 0 outputs"),
    ([{"question": 1}], "a test needs one of input, args, stdin, has question"),
    ({"inputs": ["a b"], "outputs": ["1"], "fn_name": "f"}, "an argument is not JSON: a b"),
    ({"inputs": [5], "outputs": [1], "fn_name": "f"}, "list of its arguments"),
  ],
)
def test_tests_of_an_unknown_shape_are_refused_with_the_reason(value, reason):
  with pytest.raises(code_tests.TestError, match=reason):
    code_tests.read({"problem": "x", "tests": value})


def test_output_is_compared_up_to_blanks_at_ends():
  assert code_tests.same_output("1 2 \n3\n\n", "1 2\n3")
  for other in ("12\n3", "1 2 3", "1 2\n\n3", " 1 2\n3", ""):
    assert not code_tests.same_output(other, "1 2\n3")
