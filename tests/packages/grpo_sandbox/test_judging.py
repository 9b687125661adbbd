"""Tests and programs in two processes: what counts as right, and what cheating is worth."""

import json
import textwrap

import pytest

from grpo_sandbox.launch import Launcher
from grpo_sandbox.supervise import BadTests, Ending, Supervisor
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


BOX = "class Box:\n  def __init__(self, items): self.items = items\n"
AS_ONE = {
  "by keyword": ("def f(nums): nums.sort()", "x = [2, 1]\nf(nums=x)\nassert x == [1, 2]"),
  "many arguments": ("def f(*a, **k):\n  for v in (*a, *k.values()): v.append(len(a))",
    "x, y, z = [], [], []\nf(x, y, k=z)\nassert x == y == z == [2] and x is not y"),
  "inner list": ("def f(grid):\n  for row in grid: row.reverse()",
    "row = [1, 2]\ngrid = [row, [3, 4]]\nf(grid)\nassert row == [2, 1] and grid[0] is row"),
  "inner of all kinds": ("""
    def f(d):
      d["s"].add(2); d["q"].appendleft(0); d["b"][0] = 65; d["t"][1].clear(); d["d"]["x"]["y"] = 1
      del d["gone"]
  """, """
    from collections import deque
    s, q, b, t, i = {1}, deque([1]), bytearray(b"ab"), (1, [2]), {}
    d = {"s": s, "q": q, "b": b, "t": t, "d": {"x": i}, "gone": 1}
    f(d)
    assert (s, list(q), bytes(b), t, i) == ({1, 2}, [0, 1], b"Ab", (1, []), {"y": 1})
    assert "gone" not in d and d["s"] is s
  """),
  "one object twice": ("def f(a, b):\n  a.append(1)\n  return a is b, b",
    "x = []\nassert f(x, x)[0] and x == [1]\nsame, y = f(x, x)\nassert y is x and x == [1, 1]"),
  "argument in an argument": ("def f(a, b): b[0].append(a is b[0])",
    "x = []\nf(x, [x])\nassert x == [True]\ny = {'k': x}\nf(x, [y['k']])\nassert x == [True] * 2"),
  "the same back": ("def f(x): return x",
    "for x in ([1], {1: 2}, {3}, (4, [5]), bytearray(b'6')):\n  assert f(x) is x\n"
    "  assert f([x])[0] is x"),
  "new within old": ("def f(x):\n  y = [1]\n  x.append(y)\n  return y",
    "x = []\ny = f(x)\nassert x[0] is y\ny.append(2)\nassert x == [[1, 2]]"),
  "shared in a result": ("def f(n): return [[0] * n] * n",
    "x = f(2)\nx[0][0] = 1\nassert x == [[1, 0], [1, 0]]"),
  "leads back to itself": ("def f(x):\n  x.append(x)\n  return x",
    "x = [1]\ny = f(x)\nassert y is x and x[1] is x and len(x) == 2"),
  "default argument": ("def f(x, acc=[]):\n  acc.append(x)\n  return acc",
    "a = f(1)\nassert a == [1]\nb = f(2)\nassert a == b == [1, 2] and a is b"),
  "kept by the program": ("""
    class f:
      def __init__(self, items): self.items = items
      def push(self, x): self.items.append(x)
      def last(self): return self.items[-1]
  """, """
    x = [1]
    s = f(x)
    s.push(2)
    assert x == [1, 2] and s.items is x
    x.append(3)
    assert s.last() == 3
    inner = s.items
    inner[-1] = {4: [5]}
    s.push(6)
    assert x == [1, 2, {4: [5]}, 6] == inner
    inner[2][4].append(7)
    assert s.items[2] == {4: [5, 7]}
  """),
  "kept by the program alone": ("KEPT = {}\ndef f(n): return KEPT.setdefault(n, [n])",
    "f(1).append(2)\nassert f(1) == [1, 2] and f(1) is f(1)\nf(1)[0] = {3: [4]}\n"
    "f(1)[0][3].append(5)\nassert f(1) == [{3: [4, 5]}, 2]"),
  "kept by a generator": ("def f(xs):\n  for i in range(len(xs)):\n    xs[i] *= 2\n    yield xs[i]",
    "x = [1, 2]\ng = f(x)\nassert next(g) == 2 and x == [2, 2]\n"
    "assert list(g) == [4] and x == [2, 4]"),
  "before it raises": ("def f(x):\n  x.append(1)\n  raise ValueError",
    "x = []\ntry: f(x)\nexcept ValueError: pass\nassert x == [1]"),
  "iterators": ("def f(xs, n): return [v for v, _ in zip(xs, range(n))]",
    "g = (i * i for i in range(9))\nassert f(g, 2) == [0, 1]\nassert next(g) == 9\n"
    "import itertools\nassert f(itertools.count(3), 2) == [3, 4]\n"
    "assert f(map(str, [1]), 5) == ['1'] and f({1: 2}.items(), 1) == [(1, 2)]"),
  "views": ("def f(d): return d.keys(), d.values(), d.items()",
    "k, v, i = f({1: 2})\nassert k == {1} and list(v) == [2] and (1, 2) in i"),
  "callback that looks": ("def f(xs, look):\n  xs.append(1)\n  look(xs)\n  xs.append(3)",
    "x = []\nseen = []\ndef look(y):\n  seen.append((list(y), y is x))\n  y.append(2)\n"
    "f(x, look)\nassert seen == [([1], True)] and x == [1, 2, 3]"),
  "counter": ("def f(c): c['a'] = 5",
    "import collections\nc = collections.Counter('ab')\nf(c)\nassert c == {'a': 5, 'b': 1}"),
  "one object of the program": ("class f:\n  one = None\n  def __new__(cls):\n"
    "    cls.one = cls.one or object.__new__(cls)\n    return cls.one", "assert f() is f()"),
  "raising callback": ("def f(g):\n  try: g()\n  except StopIteration: return 1",
    "def g(): raise StopIteration\nassert f(g) == 1"),
}  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), AS_ONE.values(), ids=AS_ONE.keys())
def test_objects_that_test_and_program_hold_are_one_as_in_plain_python(boxes, program, tests):
  """Each is tried in plain Python, too."""
  space = {}
  exec(textwrap.dedent(program) + "\n" + textwrap.dedent(tests), space)
  verdict = check(boxes, program, tests, entry="")
  assert verdict.is_correct and verdict.passed >= 1, verdict


def test_instances_of_the_setups_classes_are_changed_in_place(boxes):
  program = "def f(box):\n  box.items.append(1)\n  box.size = 1\n  del box.old\n  return box"
  test = """
    items = []
    box = Box(items)
    box.old = 1
    assert f(box) is box
    assert items == [1] and box.items is items and box.size == 1 and not hasattr(box, 'old')
  """
  assert check(boxes, program, test, setup=BOX).is_correct  # the program has no such class
  mine = BOX + program
  assert check(boxes, mine, test, setup=BOX).is_correct  # or one of its own
  assert check(boxes, program, test, setup=BOX, prompt=[BOX]).is_correct  # or this one.


APPROX = {
  "class": """
    class Approx:
      def __init__(self, value, tol=1e-6): self.value, self.tol = value, tol
      EQ
  """,
  "slots": """
    class Approx:
      __slots__ = ("value", "tol")
      def __init__(self, value, tol=1e-6): self.value, self.tol = value, tol
      EQ
  """,
  "dataclass": """
    import dataclasses
    @dataclasses.dataclass(eq=False)
    class Approx:
      value: float
      tol: float = 1e-6
      EQ
  """,
  "named tuple": """
    import collections
    class Approx(collections.namedtuple("Approx", "value tol", defaults=[1e-6])):
      EQ
  """,
  "enum": """
    import enum
    class Approx(enum.Enum):
      value_, tol = 0, 1e99
      @classmethod
      def _missing_(cls, value): return cls.value_
      EQ
  """,
  "exception": """
    class Approx(Exception):
      def __init__(self, value, tol=1e-6): self.value, self.tol = value, tol
      EQ
  """,
}
EQ = """
      def __eq__(self, other):
        tol = getattr(self, "tol", 0)
        other = getattr(other, "value", other)
        return abs(self.value - other) <= tol
      __hash__ = None
"""
RAW = """
  import json, os
  def f(x):
    message = {"value": VALUE, "changes": [], "held": []}
    body = json.dumps(message).encode()
    for fd in range(3, 64):
      try: os.write(fd, len(body).to_bytes(4, "little") + body)
      except OSError: pass
"""
FORGED = (
  {"instance": ["Approx", ["value", 0, "tol", 1e99]]},
  {"instance": ["Approx", {"value": 0, "tol": 1e99}]},
  {"record": ["Approx", [0, 1e99]]},
  {"member": ["Approx", "tol"]},
  {"same": 0},
)


@pytest.mark.parametrize("kind", APPROX)
def test_program_makes_no_instance_of_a_class_of_the_tests(boxes, kind):
  """It would choose its tolerance. Neither by a class of that name nor without one."""
  approx = textwrap.dedent(APPROX[kind]).replace(
    "  EQ\n", textwrap.dedent(EQ).replace("\n", "\n  ")
  )
  test = "assert f(2) == Approx(4)\nassert f(3) == Approx(6)"
  right = "def f(x): return 2 * x"
  if kind != "enum":
    wrapped = "assert Approx(f(2)) == Approx(4)\nassert Approx(f(3)) == Approx(6)"
    assert check(boxes, right, wrapped, setup=approx).is_correct
  made = "Approx.tol" if kind == "enum" else "Approx(0, 1e99)"
  verdict = check(boxes, f"{approx}\ndef f(x): return {made}", test, setup=approx)
  assert not verdict.is_correct and verdict.passed == 0
  raised = f"{approx}\ndef f(x):\n  v = {made}\n  return [v, (v,), {{1: v}}][x - 2]"
  assert not check(boxes, raised, test, setup=approx).is_correct
  for value in FORGED:
    forged = RAW.replace("VALUE", json.dumps(value).replace("null", "None"))
    verdict = check(boxes, forged, test, setup=approx)
    assert not verdict.is_correct and verdict.passed == 0, value


def test_program_cannot_change_what_it_was_not_given(boxes):
  """Changes of objects are taken for those alone that the test has passed."""
  test = "expected = [4]\nassert f([2]) == expected\nassert f([2]) == expected"
  for changes in ([[0, [9]]], [[1, [4]]], [[-1, [4]]], [[0, {"x": 1}]], [["a", []]], [[0, 5]], 7):
    message = {"value": {"same": 0}, "changes": changes, "held": [0, 1, 2]}
    body = json.dumps(message).encode()
    program = f"""
      import os
      def f(x):
        for fd in range(3, 64):
          try: os.write(fd, {len(body).to_bytes(4, "little") + body!r})
          except OSError: pass
    """
    assert not check(boxes, program, test).is_correct


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


@pytest.mark.long
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
def test_endings_are_distinguished(boxes, program, ending):
  verdict = check(boxes, program, "def check(candidate):\n  assert candidate(1) == 1")
  assert verdict.ending is ending and not verdict.is_correct


@pytest.mark.parametrize(
  ("tests", "more", "reason"),
  [
    (["def check(candidate: assert"], {}, "not Python"),
    (["import nothing_of_that_name\nassert f(1)"], {}, "ModuleNotFoundError"),
    (["assert f(1)"], {"setup": "1 / 0"}, "setup raises ZeroDivisionError"),
    (["def check(candidate): assert True"], {"entry": ""}, "no entry_point"),
    (["x = 1"], {}, "assert nothing"),
    (["def test_f(): assert f(1) == 1"], {}, "functions that are never called"),
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
