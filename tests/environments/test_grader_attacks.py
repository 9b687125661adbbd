"""What a completion tries against its grader: nothing of it runs, reaches files or lasts."""

import asyncio
import json

import numpy as np
import pytest
from reasoning_gym.factory import DATASETS

from grpo_jax import environments
from grpo_jax.config import data_options
from grpo_jax.config.configuration import typed
from grpo_jax.environments import reasoning_gym as gym_module
from grpo_jax.environments.grading import confinement, gym_score
from grpo_jax.environments.grading.pool import GraderError, GraderTimeout, WorkerPool
from grpo_jax.types import FinishReason, Prompt
from grpo_sandbox import expressions
from grpo_sandbox.launch import KINDS
from tests import sandboxes

# Whose scorers hand the answer itself to eval or to SymPy's parser, found by attacking them.
ATTACKED = (
  *("binary_matrix", "n_queens", "string_insertion", "spiral_matrix", "countdown", "puzzle24"),
  *("polynomial_multiplication", "simple_integration", "intermediate_integration"),
)
ALL = sorted(DATASETS)
ARGUMENTS = {"composite": None}  # needs other tasks as its arguments.


# A data file of one task is left open by its library.
leaves_files_open = pytest.mark.filterwarnings(
  "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def row(task):
  dataset = gym_score.dataset(task, json.dumps({"size": 1, "seed": 3}))
  return dataset, dataset[0]


def prompt_of(task, entry):
  info = {"task": task, "task_args": {"size": 1, "seed": 3}, "entry": entry}
  return Prompt("x:0:0", np.zeros(1, np.int32), "gym", info)


def judge(factory, prompt, text):
  async def attempt():
    environment = factory(prompt)
    await environment.start()
    return await environment.step(text, np.zeros(0, np.int32), FinishReason.STOP)

  return asyncio.run(attempt())


@pytest.fixture(scope="module")
def gym():
  settings = dict(module="reasoning_gym", workers=1, timeout_s=20.0, sandbox=sandboxes.any_kind())
  with environments.make(gym=settings) as made:
    yield made["gym"]


PAYLOADS = [
  "__import__('os').system('touch {file}')",
  "[__import__('os').system('touch {file}')]",
  "open('{file}', 'w')",
  'exec(\'open("{file}", "w")\')',
  "(lambda: open('{file}', 'w'))()",
  "[open('{file}', 'w') for _ in [0]]",
  "x.__class__.__base__.__subclasses__()",
  'sympify(\'open("{file}", "w")\')',
  'Symbol(\'open("{file}", "w")\')',
  'S(\'open("{file}", "w")\')',
  "lambdify(Symbol('x'), 'open(\"{file}\", \"w\")')(1)",
  'f\'{{open("{file}", "w")}}\'',
  "\uff4fpen('{file}', 'w')",
  "print('x')",
  'eval(\'open("{file}", "w")\')',
]
FORGED = (
  "[__import__('os').write(fd, __import__('struct').pack('<I', 14) + b'{\"value\": 1.0}')"
  " for fd in range(64)] + [__import__('os')._exit(0)]"
)
PATCH = (
  "[setattr(o, 'score_answer', lambda *a: 1.0)"
  " for o in __import__('gc').get_objects() if hasattr(o, 'score_answer')]"
)


@pytest.mark.long
@pytest.mark.parametrize("task", ATTACKED)
def test_nothing_that_a_completion_says_is_run(gym, task, tmp_path):
  _, entry = row(task)
  file = tmp_path / "made"
  for payload in (*PAYLOADS, FORGED, PATCH):
    result = judge(gym, prompt_of(task, entry), payload.replace("{file}", str(file)))
    assert result.total <= 0.01 and result.metrics["accuracy"] == 0.0, payload
    assert not file.exists(), payload
  right = judge(gym, prompt_of(task, entry), str(entry["answer"]))
  assert right.metrics["accuracy"] == 1.0


@pytest.mark.parametrize("payload", [p.replace("{file}", "/nowhere") for p in PAYLOADS])
def test_no_payload_is_an_expression(payload):
  import sympy
  from sympy.parsing import sympy_parser

  names = dict(vars(sympy), open=open, eval=eval, exec=exec, print=print)
  with pytest.raises((expressions.ExpressionError, SyntaxError)):
    expressions.value(payload)
  code = sympy_parser.stringify_expr(payload, {}, names, sympy_parser.standard_transformations)
  with pytest.raises((expressions.ExpressionError, SyntaxError)):
    expressions.sympy_value(code, {}, names)


@pytest.mark.parametrize(
  "text",
  ["x**2 - 3*x + 1/2", "2*(x + 1)*(y - 3)", "5!", "0.2[1]", "exp(x)*sin(2*x) + C", "sqrt(2)/pi"]
  + [
    "Abs(x) + log(x, 2)",
    "f(x) + E**I",
    "-(3 + 4)*5/7",
    "(1, 2)",
    "1.10 + 3.14159265358979323846",
  ],
)
def test_expressions_have_the_value_that_sympy_gives_them(text):
  from sympy.parsing import sympy_parser

  names: dict = {}
  exec("from sympy import *", names)
  code = sympy_parser.stringify_expr(text, {}, names, sympy_parser.standard_transformations)
  assert expressions.sympy_value(code, {}, names) == sympy_parser.eval_expr(code, {}, names)


@leaves_files_open
@pytest.mark.long
def test_the_honest_answers_of_all_tasks_score_as_they_do_without_a_sandbox(gym):
  differing = {}
  for task in ALL:
    if task in ARGUMENTS or gym_score.has_plain_scorer(task):
      continue
    dataset, entry = row(task)
    for answer in (str(entry["answer"]), "no idea", "[1, 2]"):
      try:
        plain = float(dataset.score_answer(answer, entry))
      except Exception:  # a scorer that cannot read an answer: no reward.
        plain = 0.0
      score = judge(gym, prompt_of(task, entry), answer).metrics["score"]
      if score != plain:
        differing[task, answer] = (score, plain)
  assert not differing


@pytest.mark.long
@leaves_files_open
def test_the_tasks_that_compute_are_found_in_the_package(monkeypatch):
  """By the code of the scorers; compared with what they call when they score."""
  import builtins

  from sympy.parsing import sympy_parser

  called = set()
  evaluate, parse = builtins.eval, sympy_parser.eval_expr
  for task in ALL:
    if task in ARGUMENTS or gym_score.has_plain_scorer(task):
      continue
    dataset, entry = row(task)

    def noted(*arguments, task=task, of=evaluate):
      called.add(task)
      return of(*arguments)

    with monkeypatch.context() as patched:
      patched.setattr(builtins, "eval", noted)
      patched.setattr(sympy_parser, "eval_expr", lambda *a, f=noted: f(*a, of=parse))
      for answer in (str(entry["answer"]), "[[1, 2], [0, 1]]", "1 + 1"):
        try:
          dataset.score_answer(answer, entry)
        except Exception:  # a scorer that raises has scored.
          continue
  found = {task for task in ALL if gym_score.computes(task)}
  assert {*ATTACKED} <= called <= found
  assert found - called == {"composite"}  # which is scored by the tasks that it is made of.


HOSTILE = """
import os, resource, socket, sys

left = []

def environment(): return dict(os.environ)
def read(path): return open(path).read()
def write(path): return open(path, "w").write("x")
def connect(): return socket.create_connection(("127.0.0.1", 9), timeout=1) and 1
def start(): return os.fork()
def kill(pid): return os.kill(pid, 9)
def leave(text):
  left.append(text)
  open("note", "w").write(text)
  return 1
def found(): return left + os.listdir(".")
def parent(): return open(f"/proc/{os.getppid()}/environ").read()
def memory(): return len(bytearray(8 << 30))
def forge(): os.write(1, b"xxxx" + b'{"value": 1.0}'); os._exit(0)
def flood():
  while True: os.write(1, b"x" * 65536)
def spin():
  while True: pass
def stop_the_clock():
  import signal
  signal.setitimer(signal.ITIMER_REAL, 0)
  while True: pass
"""


@pytest.fixture(scope="module", params=KINDS)
def hostile(request, tmp_path_factory):
  """A grader that runs what it likes: as if a text had been run after all."""
  path = tmp_path_factory.mktemp("grader") / "grader.py"
  path.write_text(HOSTILE)
  sandboxes.need(request.param)
  pool = WorkerPool(path, workers=1, timeout_s=0.5, memory_gib=1.0, sandbox=request.param)
  yield pool
  pool.close()


def test_a_grader_has_no_network_no_processes_and_no_secrets(hostile, monkeypatch, tmp_path):
  monkeypatch.setenv("MY_SECRET_KEY", "hunter2")
  assert "hunter2" not in json.dumps(hostile.submit("environment").result())
  for call in (("connect",), ("start",), ("kill", 1), ("memory",)):
    with pytest.raises(GraderError):
      hostile.submit(*call).result()
  if hostile.confinement.kind == "limits":  # as docs/code_environment.md says.
    return
  secret = tmp_path / "secret"
  secret.write_text("hunter2")
  for call in (("read", str(secret)), ("write", str(tmp_path / "new")), ("parent",)):
    with pytest.raises(GraderError):
      hostile.submit(*call).result()


def test_nothing_is_left_for_the_next_call(hostile):
  assert hostile.submit("leave", "note").result() == 1
  assert hostile.submit("found").result() == []


@pytest.mark.long
def test_what_is_not_a_reply_in_time_costs_one_call(hostile):
  for call in ("spin", "stop_the_clock"):
    with pytest.raises(GraderTimeout):
      hostile.submit(call).result()
  with pytest.raises((GraderError, GraderTimeout)):
    hostile.submit("flood").result()
  with pytest.raises(GraderError):
    hostile.submit("forge").result()
  assert hostile.submit("found").result() == []


@pytest.mark.long
def test_a_grader_sees_the_packages_that_it_needs_and_no_others(gym):
  submit = gym._pool.submit
  modules = submit("loaded_modules").result()
  assert "reasoning_gym" in modules and "sympy" in modules
  assert not {name.partition(".")[0] for name in modules} & {"jax", "transformers", "grain"}


@pytest.mark.long
def test_under_landlock_the_graders_libraries_load_and_other_packages_are_missing(tmp_path):
  path = tmp_path / "grader.py"
  path.write_text(
    "import latex2sympy2_extended, sys\n"  # asks for the version of an installed distribution.
    "from grpo_sandbox import expressions\n"
    "try:\n  import jax\nexcept ImportError:\n  jax = None\n"
    "def has_jax():\n  return jax is not None\n"
  )
  kind = sandboxes.need("landlock")
  pool = WorkerPool(path, packages=["latex2sympy2_extended"], sandbox=kind, workers=1)
  assert pool.submit("has_jax").result() is False
  pool.close()


@pytest.fixture
def unsandboxed(monkeypatch):
  why = "there is no program bwrap on the path"
  found = confinement.Confinement("limits", is_sandbox=False, why_not=why)
  monkeypatch.setattr(confinement, "_best", lambda: found)


@pytest.mark.long
def test_without_a_sandbox_tasks_that_compute_are_refused(unsandboxed):
  _, entry = row("countdown")
  refused = r"'countdown' evaluates the text .* no program bwrap .* allow_unsandboxed=True"
  with environments.make(gym=dict(module="reasoning_gym")) as made:
    with pytest.raises(ValueError, match=refused):
      made["gym"](prompt_of("countdown", entry))
    made["gym"](prompt_of("chain_sum", row("chain_sum")[1]))  # computes nothing.
  with environments.make(gym=dict(module="reasoning_gym", allow_unsandboxed=True)) as made:
    result = judge(made["gym"], prompt_of("countdown", entry), str(entry["answer"]))
    assert result.metrics["accuracy"] == 1.0
  assert gym_module.objection("countdown", allow_unsandboxed=True) == ""


def test_they_are_refused_before_the_run_begins(unsandboxed):
  from configs import quickstart

  config = quickstart.get_config()
  config.data.kind = config.environments.arithmetic.module = "reasoning_gym"
  config.data.task = "chain_sum"
  assert not list(data_options.complaints(typed(config)))
  config.data.task = "countdown"
  (complaint, *_) = data_options.complaints(typed(config))
  assert "environments.arithmetic" in complaint and "allow_unsandboxed=True" in complaint


def test_a_sandbox_that_does_not_work_here_is_refused_by_name(monkeypatch):
  monkeypatch.setattr(confinement, "_why_not", lambda kind: f"{kind} does not work here")
  with pytest.raises(ValueError, match="landlock does not work here"):
    environments.make(math=dict(sandbox="landlock"))
  with pytest.raises(ValueError, match="unknown sandbox 'bublewrap'.*did you mean 'bubblewrap'"):
    environments.make(math=dict(sandbox="bublewrap"))
  confinement._best.cache_clear()
  assert confinement.find("best").kind == "none"
  confinement._best.cache_clear()


def test_graders_work_in_mere_processes_where_there_is_no_sandbox(tmp_path, monkeypatch):
  monkeypatch.setattr(confinement, "_best", lambda: confinement.Confinement("none", False))
  monkeypatch.setenv("MY_SECRET_KEY", "hunter2")
  path = tmp_path / "grader.py"
  path.write_text(HOSTILE)
  pool = WorkerPool(path, workers=1, timeout_s=1.0)
  assert "hunter2" not in json.dumps(pool.submit("environment").result())
  assert pool.submit("leave", "note").result() == 1
  assert pool.submit("found").result() == []
  pool.close()
