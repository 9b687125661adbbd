"""Tests and programs in two processes: what counts as right, and what cheating is worth."""

import json
import textwrap

import pytest

from grpo_jax.sandbox.launch import Launcher
from grpo_jax.sandbox.supervise import BadTests, Ending, Supervisor
from tests import sandboxes
from tests.sandboxes import suite


@pytest.fixture(scope="module")
def boxes():
  supervisor = Supervisor(Launcher(sandboxes.any_kind(), sandboxes.LIMITS), workers=1)
  yield supervisor
  supervisor.close()


def check(boxes, program, *tests, timeout_s=None, **more):
  texts = [textwrap.dedent(test) for test in tests]
  return boxes.check(suite(textwrap.dedent(program), *texts, **more), timeout_s)


DOUBLE = """
  def check(candidate):
    assert candidate(2) == 4
    assert candidate(0) == 0
    assert candidate(-3) == -6
    assert candidate("ab") == "abab"
"""


def test_right_program_passes_and_a_wrong_one_gets_its_share(boxes):
  right = check(boxes, "def f(x): return x * 2", DOUBLE)
  assert right.is_correct and (right.passed, right.failed, right.passed_share) == (4, 0, 1.0)
  wrong = check(boxes, "def f(x): return x ** 2 if x != 'ab' else 'abab'", DOUBLE)
  assert not wrong.is_correct and (wrong.passed, wrong.failed) == (3, 1)  # 2² = 4, 0² = 0, "abab".
  assert wrong.passed_share == 0.75 and wrong.first_failure == "candidate(-3) == -6"


CHEATS = {
  "equal to all": """
    class Any(int):
      __eq__ = lambda *_: True
      __ne__ = lambda *_: False
      __hash__ = lambda _: 0
    f = lambda x: Any(9)
  """,
  "equal object": """
    class Any:
      def __eq__(self, other): return True
      def __sub__(self, other): return 0
      __rsub__ = __lt__ = __gt__ = __contains__ = __eq__
    f = lambda x: Any()
  """,
  "exit at once": "import sys; sys.exit(0)",
  "hard exit at once": "import os; os._exit(0)",
  "exit in the function": "import sys\ndef f(x): sys.exit(0)",
  "hard exit in the function": "import os\ndef f(x): os._exit(0)",
  "hard exit after one right answer": """
    import os
    def f(x):
      global left
      left = globals().get("left", 1) - 1
      return 2 * x if left == 0 else os._exit(0)
  """,
  "stop iteration": "def f(x): raise StopIteration",
  "keyboard interrupt": "def f(x): raise KeyboardInterrupt",
  "assertion error": "def f(x): raise AssertionError",
  "success marker": """
    import json, os
    verdict = '{"passed": 4, "failed": 0, "first": "", "compile": false, "gone": "", "over": ""}'
    for text in (verdict, "OK", "PASS"):
      print(text, flush=True)
      for fd in range(256):
        try: os.write(fd, len(text).to_bytes(4, "little") + text.encode())
        except OSError: pass
    def f(x): return None
  """,
  "forged answers": """
    import os
    def f(x):
      for fd in range(256):
        for text in ('{"value": true}', '{"end": true}', '{"value": null}'):
          try: os.write(fd, len(text).to_bytes(4, "little") + text.encode())
          except OSError: pass
      return None
  """,
  "patched builtins": """
    import builtins, json, sys
    builtins.AssertionError = type("Never", (Exception,), {})
    builtins.all = builtins.any = builtins.isinstance = lambda *_: True
    json.dumps = json.loads = lambda *a, **k: {"value": True}
    all = abs = len = isinstance = check = candidate = lambda *_: True
    def f(x): return None
  """,
  "patched link": """
    import sys
    for module in list(sys.modules.values()):
      for name in ("verdict", "evaluate", "check", "main"):
        if hasattr(module, name):
          try: setattr(module, name, lambda *a, **k: {"passed": 9, "failed": 0})
          except Exception: pass
    def f(x): return True
  """,
  "own check": "def check(candidate): pass\ndef f(x): return None",
  "not a number": "def f(x): return float('nan')",
  "endless generator": "def f(x):\n  while True: yield x",
  "huge value": "def f(x): return 'x' * 10**7",
  "deep value": "def f(x):\n  v = []\n  for _ in range(10**5): v = [v]\n  return v",
  "value that holds itself": "v = []\nv.append(v)\ndef f(x): return v",
  "nothing": "",
  "class of that name": "class f:\n  def __init__(self, x): pass\n  __eq__ = lambda *_: True",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS.keys())
def test_cheating_is_worth_nothing(boxes, program):
  verdict = check(boxes, program, DOUBLE, timeout_s=3.0)
  assert not verdict.is_correct and verdict.passed <= 1 and verdict.failed >= 1


@pytest.mark.parametrize(
  ("name", "assertion"),
  [
    ("stop iteration", "all(map(candidate, [1, 2]))"),
    ("stop iteration", "sorted(map(candidate, [1, 2])) == []"),
    ("equal object", "candidate(3) in [6]"),
    ("equal object", "6 in candidate(3)"),
    ("equal object", "not candidate(3) != 6"),
    ("patched builtins", "all([candidate(3)])"),
    ("patched builtins", "isinstance(candidate(3), int)"),
    ("patched builtins", "abs(candidate(3)) == 6"),
  ],
)
def test_cheating_is_worth_nothing_in_other_forms_of_assertions(boxes, name, assertion):
  verdict = check(boxes, CHEATS[name], f"def check(candidate):\n  assert {assertion}")
  assert not verdict.is_correct and verdict.passed == 0


def test_arithmetic_with_an_expected_value_is_not_the_programs(boxes):
  test = "def check(candidate):\n  assert abs(candidate(2) - 4.0) < 1e-6"
  assert check(boxes, "def f(x): return x * 2", test).is_correct
  assert not check(boxes, CHEATS["equal object"], test).is_correct


SEARCH = """
  import gc, os, re, sys
  PATTERN = re.compile(r"SECRET-[0-9]+")
  def everything():
    frame = sys._getframe()
    while frame:
      yield repr(frame.f_locals) + repr(frame.f_code.co_consts)
      frame = frame.f_back
    for module in list(sys.modules.values()):
      yield repr(vars(module))
    for value in gc.get_objects():
      try: yield repr(value)[:10000]
      except Exception: pass
    for fd in range(3, 64):
      try:
        os.set_blocking(fd, False)
        yield repr(os.read(fd, 100000))
      except OSError: pass
    yield repr(sys.argv) + repr(sys.orig_argv) + repr(dict(os.environ))
    for folder in ("/proc", "/tmp", os.getcwd(), os.path.expanduser("~")):
      for path, _, names in os.walk(folder):
        for name in names:
          try: yield open(os.path.join(path, name), errors="replace").read(100000)
          except (OSError, ValueError): pass
  def f(x):
    for text in everything():
      if found := PATTERN.search(text.replace("SECRET-[", "")):
        return found[0]
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "landlock"])
def test_expected_answer_cannot_be_found_anywhere(kind, tmp_path):
  (tmp_path / "data.jsonl").write_text("SECRET-4711")
  boxes = Supervisor(Launcher(sandboxes.need(kind), sandboxes.LIMITS), workers=2)
  test = "def check(candidate):\n  assert candidate(1) == 'SECRET-4711'"
  assert check(boxes, "def f(x): return 'SECRET-' + str(4710 + x)", test).is_correct
  verdict = check(boxes, SEARCH, test, test)
  assert verdict.ending is Ending.OK and not verdict.is_correct and verdict.passed == 0
  boxes.close()


FORMS = {
  "default arguments": ("def f(a, *b, c=1, **d): return a + sum(b) + c + d.get('e', 0)",
    "assert f(1) == 2\nassert f(1, 2, 3, c=4, e=5) == 15"),
  "values": ("def f(x): return x", """
    import math, collections, decimal, fractions, datetime
    for x in (None, True, 0, -1, 10**400, 1.5, -0.0, 1e300, math.inf, 1j, "ä\\ud800", b"\\xff",
              bytearray(b"a"), [1, [2]], (1, (2,)), {1: 2, (3,): {4}}, {1, 2}, frozenset([3]),
              range(3, 9, 2), collections.deque([1]), fractions.Fraction(1, 3),
              decimal.Decimal("1.10"), datetime.date(2020, 1, 2),
              datetime.datetime(2020, 1, 2, 3), datetime.timedelta(3)):
      assert f(x) == x and type(f(x)) is type(x), x
    assert math.isnan(f(math.nan)) and math.copysign(1, f(-0.0)) == -1
  """),
  "subclasses": ("""
    import collections, enum
    class Color(enum.IntEnum): RED = 3
    def f(): return [collections.Counter("aab"), collections.OrderedDict(a=1), Color.RED]
  """, "assert f() == [{'a': 2, 'b': 1}, {'a': 1}, 3]"),
  "in place": ("def f(a, b):\n  a.sort(); b.clear(); b[1] = [2]",
    "x, y = [3, 1, 2], {5: 6}\nf(x, y)\nassert x == [1, 2, 3] and y == {1: [2]}"),
  "errors": ("""
    class Own(LookupError): pass
    def f(x):
      if x == 1: raise Own("one")
      raise ValueError("two")
  """, """
    try: f(1); assert False
    except LookupError as error: assert "one" in str(error)
    try:
      f(2)
      assert False, "must raise"
    except ValueError:
      pass
  """),
  "generator": ("def f(n):\n  for i in range(n): yield i, [i]",
    "assert list(f(3)) == [(0, [0]), (1, [1]), (2, [2])]\nassert next(iter(f(1))) == (0, [0])"),
  "closure": ("def f(n):\n  return lambda x: x + n", "assert f(3)(4) == 7"),
  "callback": ("def f(function, xs): return [function(x) for x in xs]",
    "assert f(lambda x: x * 10, [1, 2]) == [10, 20]\nassert f(str, [1]) == ['1']"),
  "class": ("""
    class Stack:
      limit = 5
      def __init__(self): self.items = []
      def push(self, x): self.items.append(x); return self
      def __len__(self): return len(self.items)
      def __getitem__(self, i): return self.items[i]
      def __eq__(self, other): return self.items == other.items
      def __add__(self, other):
        both = Stack()
        both.items = self.items + other.items
        return both
  """, """
    s = Stack()
    assert s.push(1).push(2) is not None and len(s) == 2 and s[1] == 2 and s.items == [1, 2]
    assert Stack.limit == 5 and Stack() == Stack() and s != Stack() and not Stack()
    assert (s + s).items == [1, 2, 1, 2] and list(s) == [1, 2] and 2 in s
  """),
  "several functions and a value": ("A = 3\ndef f(): return A\ndef g(): return f() + 1",
    "assert f() == A == 3\nassert g() == 4"),
  "unittest": ("def f(x): return x", """
    import unittest
    class TestF(unittest.TestCase):
      def test_same(self): self.assertEqual(f(1), 1)
      def test_more(self):
        with self.assertRaises(TypeError): f()
  """),
  "printing": ("print('hello')\ndef f(x):\n  print(x)\n  return input() if x else 5",
    "assert f(0) == 5"),
}  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), FORMS.values(), ids=FORMS.keys())
def test_tests_see_a_program_as_if_it_were_theirs(boxes, program, tests):
  verdict = check(boxes, program, tests, entry="")
  assert verdict.is_correct and verdict.passed >= 1, verdict


def test_helpers_of_the_data_are_not_the_programs(boxes):
  """HumanEval/32: the check uses `poly`, which the prompt defines and the model may redefine."""
  setup = (
    'def poly(xs, x): return sum(c * x**i for i, c in enumerate(xs))\ndef f(xs):\n  """Root."""'
  )
  test = "def check(candidate):\n  assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4"
  right = "def f(xs): return -xs[0] / xs[1]"
  cheat = "def poly(*_): return 0\ndef f(xs): return 99"
  assert check(boxes, right, test, setup=setup, prompt=[setup]).is_correct
  assert not check(boxes, cheat, test, setup=setup, prompt=[setup]).is_correct


def test_classes_of_the_data_are_passed_by_their_attributes(boxes):
  setup = """class Node:
  def __init__(self, value, left=None): self.value, self.left = value, left
  def total(self): return self.value + (self.left.total() if self.left else 0)
"""
  test = "def check(candidate):\n  n = candidate(Node(1, Node(2)))\n  assert n.total() == 6"
  grow = "def f(n): return Node(3, n)"
  assert check(boxes, grow, test, setup=setup, prompt=[setup]).is_correct
  patched = "def f(n):\n  n.total = lambda: 6\n  Node.total = n.total\n  return n"
  assert not check(boxes, patched, test, setup=setup, prompt=[setup]).is_correct


SHARED = {
  "slots": ("@dataclass(slots=True)\nclass P: x: int; y: int", "P(1, 2)", "P(2, 1)"),
  "frozen": ("@dataclass(frozen=True)\nclass P: x: int; y: int = 0", "P(1, 2)", "P(2, 1)"),
  "named tuple": ("P = namedtuple('P', 'x y')", "P(1, 2)", "P(2, 1)"),
  "enum": ("class P(Enum):\n  A, B = 1, 2\n  x, y = 1, 2", "P.A", "P.A"),
}


@pytest.mark.parametrize(("definition", "given", "expected"), SHARED.values(), ids=SHARED.keys())
def test_classes_of_the_data_of_every_kind_cross(boxes, definition, given, expected):
  imports = "from collections import namedtuple\nfrom dataclasses import dataclass\n"
  setup = f"{imports}from enum import Enum\n{definition}\n"
  program = "def f(p): return p if isinstance(p, Enum) else P(p.y, p.x)"
  test = f"r = f({given})\nassert r == {expected} and type(r) is P and r.x == {expected}.x"
  assert check(boxes, program, test, setup=setup, prompt=[setup]).is_correct


def test_errors_of_the_data_are_raised_whatever_they_take(boxes):
  setup = "class Bad(Exception):\n  def __init__(self, code, why): super().__init__(why)\n"
  test = "try: f(1)\nexcept Bad as error: assert 'no' in str(error)\nelse: assert False"
  raising = "def f(x): raise Bad(3, 'no')"
  assert check(boxes, raising, test, setup=setup, prompt=[setup]).is_correct
  assert not check(boxes, "def f(x): pass", test, setup=setup, prompt=[setup]).is_correct


def test_cached_property_of_the_data_is_not_filled_in_by_the_program(boxes):
  setup = """from functools import cached_property
class Node:
  def __init__(self, value): self.value = value
  @cached_property
  def double(self): return 2 * self.value
"""
  test = "assert f(Node(1)).double == 4"
  right = "def f(n): return Node(n.value + 1)"
  assert check(boxes, right, test, setup=setup, prompt=[setup]).is_correct
  cheat = "def f(n):\n  vars(n)['double'] = 4\n  return n"
  assert not check(boxes, cheat, test, setup=setup, prompt=[setup]).is_correct


def test_cases_of_data_count_one_by_one(boxes):
  cases = [[[1, 2], 3], [[2, 2], 5], [[[1], [2]], [1, 2]]]
  verdict = check(boxes, "def f(a, b): return a + b", cases=cases)
  assert (verdict.passed, verdict.failed) == (2, 1)
  assert check(boxes, "def f(a): return a, (a,)", cases=[[[1], [1, [1]]]]).is_correct
  in_class = "class Solution:\n  def f(self, a, b): return a + b"
  assert check(boxes, in_class, cases=cases[:1]).is_correct


def test_time_out_counts_what_was_passed_before(boxes):
  test = "def check(candidate):\n" + "".join(f"  assert candidate({i}) == {i}\n" for i in (1, 0, 2))
  verdict = check(boxes, "def f(x):\n  while not x: pass\n  return x", test, timeout_s=1.0)
  assert verdict.ending is Ending.TIMEOUT and (verdict.passed, verdict.failed) == (1, 2)
  swallowing = "def check(candidate):\n  try: candidate(0)\n  except Exception: pass"
  assert not check(boxes, "def f(x):\n  while not x: pass", swallowing, timeout_s=0.5).is_correct


def test_assertions_that_were_not_reached_have_failed(boxes):
  """An exception outside of an assertion must not make the share larger."""
  test = (
    "def check(candidate):\n  assert candidate(1) == 1\n  x = candidate(2)\n" + 8 * "  assert x\n"
  )
  verdict = check(boxes, "def f(x): return 1 // (2 - x)", test)
  assert (verdict.passed, verdict.failed, verdict.passed_share) == (1, 8, 1 / 9)


@pytest.mark.parametrize(
  ("program", "ending"),
  [
    ("def f(x) return x", Ending.COMPILE_ERROR),
    ("def f(x):\nreturn x", Ending.COMPILE_ERROR),
    ("(" * 5000, Ending.COMPILE_ERROR),
    ("x = '\\0'\0", Ending.COMPILE_ERROR),
    ("def f(x): return bytes(10**9)", Ending.MEMORY),
    ("def f(x): return 'x' * 10**6", Ending.OUTPUT),
    ("import os\ndef f(x): os.abort()", Ending.DIED),
    ("raise ValueError('at import')", Ending.OK),
  ],
)
def test_endings_are_told_apart(boxes, program, ending):
  verdict = check(boxes, program, "def check(candidate):\n  assert candidate(1) == 1")
  assert verdict.ending is ending and not verdict.is_correct


@pytest.mark.parametrize(
  ("tests", "more", "reason"),
  [
    (["def check(candidate: assert"], {}, "no Python"),
    (["import nothing_of_that_name\nassert f(1)"], {}, "ModuleNotFoundError"),
    (["assert f(1)"], {"setup": "1 / 0"}, "setup raises ZeroDivisionError"),
    (["def check(candidate): assert True"], {"entry": ""}, "no entry_point"),
    (["x = 1"], {}, "assert nothing"),
    (["def test_f(): assert f(1) == 1"], {}, "functions there that nobody calls"),
    (["import sys\nsys.exit()\nassert f(1) == 1"], {}, "without asking the program"),
  ],
)
def test_tests_that_cannot_be_run_are_the_datas_fault(boxes, tests, more, reason):
  with pytest.raises(BadTests, match=reason):
    check(boxes, "def f(x): return x", *tests, **more)
  assert check(boxes, "def f(x): return x", "assert f(1) == 1").is_correct


def test_program_cannot_have_its_failure_taken_for_the_datas(boxes):
  """Then it would cost nothing: attempts that could not be scored are left out."""
  nothing = "for value in VALUES:\n  assert f(value) == 1"
  assert not check(boxes, "VALUES = []\ndef f(x): return 2", nothing, entry="").is_correct
  raising = "class A:\n  __class__ = property(lambda _: exec('raise ImportError'))\nVALUES = A()"
  assert not check(boxes, raising + "\ndef f(x): pass", nothing, entry="").is_correct
  plain = "f = 1"
  assert not check(boxes, plain, "if callable(f): assert f(1) == 1").is_correct
  at_call = "def f(x): raise ImportError('no')"
  assert not check(boxes, at_call, "f(1)\nassert f(2) == 2").is_correct


UNITTEST = "import unittest\nclass T(unittest.TestCase):\n  "


@pytest.mark.parametrize(
  "test",
  [
    UNITTEST + "def test(self):\n    with self.subTest(1): self.assertEqual(f(1), 1)",
    UNITTEST + "def test(self): self.assertEqual(f(1), 1)\nunittest.main()",
    UNITTEST + "@unittest.expectedFailure\n  def test(self): self.assertEqual(f(1), 2)",
    "assert f(1) == 1\nimport sys\nsys.exit(f(1) != 1)",
    "import sys\nif f(1) == 1: sys.exit()\nassert False",
  ],
  ids=["sub-test", "main", "expected failure", "exit at the end", "exit at once"],
)
def test_ways_in_which_tests_fail_and_end_do_not_pass_a_wrong_program(boxes, test):
  assert check(boxes, "def f(x): return x", test, "assert f(3) == 3", entry="").is_correct
  wrong = "def f(x): return 3 if x == 3 else 2"
  assert not check(boxes, wrong, test, "assert f(3) == 3", entry="").is_correct
  late = "def f(x): return 1"
  assert not check(boxes, late, test, "assert f(3) == 3", entry="").is_correct


BROKEN = (
  *(b"{", b"[1]", b"[" * 10**5, b'{"error": 5}', b'{"value": 1e999}', b'{"value": {"tuple": 5}}'),
  *(b'{"value": {"int": "zz"}}', b'{"value": {"instance": ["X", 1]}}', b'{"value": {"kept": "a"}}'),
  b'{"callback": 7, "args": {"tuple": []}}',
)


def test_judge_survives_what_a_program_sends(boxes):
  """Messages that are no messages: each ends the check, and the next one is fair."""
  for body in BROKEN:
    frame = len(body).to_bytes(4, "little") + body
    program = f"""
      import os
      def f(x):
        for fd in range(3, 64):
          try: os.write(fd, {frame!r})
          except OSError: pass
    """
    assert not check(boxes, program, "assert f(1) == 1\nassert f(2) == 2").is_correct
  assert check(boxes, "def f(x): return x", "assert f(1) == 1").is_correct


def test_same_seed_gives_the_same_verdict(boxes):
  test = "def check(candidate):\n  assert candidate() == candidate()"
  program = "import random\nvalue = random.random()\ndef f(): return value, list({'a', 'b', 'c'})"
  verdicts = {json.dumps(check(boxes, program, test).passed) for _ in range(3)}
  assert verdicts == {"1"}


def test_packages_are_there_only_where_they_were_named(boxes, tmp_path):
  (tmp_path / "mine.py").write_text("def triple(x): return 3 * x")
  program = "import mine\nf = mine.triple"
  assert not check(boxes, program, "assert f(2) == 6").is_correct
  launcher = Launcher(sandboxes.any_kind(), sandboxes.LIMITS, packages=[str(tmp_path)])
  supervisor = Supervisor(launcher, workers=1)
  assert check(supervisor, program, "assert f(2) == 6").is_correct
  supervisor.close()
