"""Tools from functions: their schemas, the check of arguments, and every way a call can fail."""

import asyncio
import collections
import contextlib
import dataclasses
import datetime
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import pytest
import sandboxes

from grpo_jax.environments import hanging
from grpo_jax.environments.toolbox import builtin, calling, functions, schemas
from grpo_jax.environments.toolbox.calling import CallLimits, Toolbox
from grpo_jax.models.chat.tool_calls import Malformed, Parsed, call
from tests.environments import my_tools

TOOLS = {tool.name: tool for tool in functions.tools_in(my_tools)}


def fits(value, schema):
  return schemas._checked(value, schema) is None


def answer(name, limits=None, **arguments):
  """Runs one call of a tool of my_tools; returns its text and what was counted."""
  counts = Counter()
  text = asyncio.run(Toolbox(TOOLS.values(), limits).answer(name, arguments, counts))
  return text, dict(counts)


def properties(name):
  return TOOLS[name].parameters["properties"]


def test_the_tools_of_a_module_are_its_public_functions():
  assert [*TOOLS] == ["weather", "search", "sleeps", "waits", "fails", "returns"]
  declared = TOOLS["weather"].declaration
  assert declared["type"] == "function" and declared["function"]["name"] == "weather"
  assert (
    declared["function"]["description"] == "Tells the weather of a place.\n\nIt is always fine."
  )


def test_type_hints_and_docstrings_become_a_schema():
  assert TOOLS["weather"].parameters == {
    "type": "object",
    "properties": {
      "place": {
        "$ref": "#/$defs/Place",
        "description": "Where: a name, and its height in metres.",
      },
      "days": {"type": "integer", "description": "Number of days.", "default": 1},
      "unit": {"$ref": "#/$defs/Unit", "description": "Unit of the temperature."},
      "how": {
        "type": "string",
        "enum": ["short", "long"],
        "description": "Length of the text.",
        "default": "short",
      },
    },
    "required": ["place"],
    "$defs": {
      "Place": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "height": {"type": "number", "default": 0.0}},
        "required": ["name"],
        "additionalProperties": False,
      },
      "Unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    },
  }
  found = properties("search")
  assert found["words"] == {
    "type": "array",
    "items": {"type": "string"},
    "description": "Words to search for.",
  }
  assert TOOLS["search"].parameters["$defs"]["Filter"]["required"] == ["word"]
  assert found["weights"]["anyOf"][0]["additionalProperties"] == {"type": "number"}
  assert found["limit"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
  assert found["key"] == {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": "a"}
  assert found["pair"]["prefixItems"] == [{"type": "integer"}, {"type": "string"}]
  assert found["anything"] == {} and found["noted"]["description"] == "Whether it is noted."


def test_arguments_arrive_as_the_types_of_the_hints():
  place = {"name": "Oslo", "height": 3}
  text, counts = answer("weather", place=place, days=2.0, unit="kelvin")
  assert (text, counts) == ("Place Oslo 3.0 2 Unit.KELVIN short", {"calls": 1})
  text, _ = answer("search", words=["a"], filters={"word": "b"}, pair=[2, "c"], key=3, limit=None)
  assert '"words": ["a"]' in text and '"pair": [2, "c"]' in text and '"key": 3' in text


@pytest.mark.parametrize(
  ("name", "arguments", "reason"),
  [
    ("weather", {}, "the argument place is missing"),
    (
      "weather",
      {"place": {"name": "x"}, "day": 1},
      "unknown argument 'day' (did you mean 'days'?)",
    ),
    ("weather", {"place": "Oslo"}, "place must be an object, got 'Oslo'"),
    ("weather", {"place": {}}, "place.name is missing"),
    ("weather", {"place": {"name": "x", "z": 1}}, "place.z is unknown; there are: name, height"),
    ("weather", {"place": {"name": "x"}, "days": "2"}, "days must be a whole number, got '2'"),
    ("weather", {"place": {"name": "x"}, "days": True}, "days must be a whole number, got true"),
    ("weather", {"place": {"name": "x"}, "days": 1.5}, "days must be a whole number, got 1.5"),
    ("weather", {"place": {"name": "x"}, "unit": "C"}, "must be one of 'celsius', 'kelvin', got"),
    ("search", {"words": "a"}, "words must be a list, got 'a'"),
    ("search", {"words": ["a", None]}, "words[1] must be a string, got null"),
    ("search", {"words": [], "pair": [1]}, "pair must have at least 2 items"),
    ("search", {"words": [], "weights": {"a": "x"}}, "weights.a must be a number"),
    ("search", {"words": [], "limit": "x" * 999}, "x…'"),
  ],
)
def test_arguments_that_do_not_fit_are_an_answer_that_says_so(name, arguments, reason):
  text, counts = answer(name, **arguments)
  assert text.startswith(f"error: {name}: ") and reason in text and len(text) < 400
  assert counts == {"calls": 1, "failed_calls": 1, "wrong_arguments": 1}


@pytest.mark.parametrize(
  ("schema", "fitting", "others"),
  [
    ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.5, "x"], [0, 3]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd", 22]),
    ({"const": 1}, [1, 1.0], [True, "1", None]),
    ({"enum": [1, None, "a"]}, [1, None, "a"], [True, False, 0, "b"]),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["1", 1.5]),
    ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1, 2], [0, 3]),
    ({"type": "string", "nullable": True}, ["a", None], [1]),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["1"]),
    ({"$ref": "#"}, [1], []),
    ({"$ref": "#/nowhere", "pattern": "(a+)+$", "format": "date"}, ["a" * 50 + "!"], []),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [[], [1]], [["1"], [1, 1]]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"a": 1}], [{"a": "1"}]),
    ({"type": ["integer", "null"]}, [1, 1.0, None], ["1", True]),
    ({"type": "unheard_of"}, [1, "a"], []),
    (True, [1], []),
    (False, [], [1]),
  ],
)
def test_values_are_checked_by_json_schema(schema, fitting, others):
  assert [value for value in fitting if not fits(value, schema)] == []
  assert [value for value in others if fits(value, schema)] == []


def test_a_schema_with_nulls_in_it_is_checked_as_if_they_were_absent():
  schema = {"type": "object", "properties": None, "required": None, "anyOf": None}
  assert schemas.problem({}, schema) is None
  assert "unknown argument 'a'; the tool takes: no arguments" in str(
    schemas.problem({"a": 1}, schema)
  )


FILTER = {
  "type": "object",
  "properties": {"filter": {"$ref": "#/$defs/any"}},
  "$defs": {
    "any": {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("and", "or", "leaf")]},
    **{
      name: {
        "type": "object",
        "properties": {
          "of": {"type": "array", "items": {"$ref": "#/$defs/any"}},
          "op": {"const": name},
        },
        "required": ["op", "of"],
      }
      for name in ("and", "or")
    },
    "leaf": {"type": "object", "properties": {"op": {"const": "leaf"}}, "required": ["op"]},
  },
}


def filter_of(depth, leaf="leaf"):
  """A filter in which `op` comes after what is nested, as a model may write it."""
  found = {"op": leaf}
  for _ in range(depth):
    found = {"of": [found, found], "op": "or"}
  return {"filter": found}


def steps_of(arguments, schema):
  """Returns the result of a check, and how many pairs of a value and a schema it looked at."""
  made, check = [], schemas._Check

  class Kept(check):
    def __init__(self, root):
      super().__init__(root)
      made.append(self)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(schemas, "_Check", Kept)
    found = schemas.problem(arguments, schema)
  return found, made[0]._steps


def test_alternatives_within_each_other_take_steps_in_proportion_to_their_depth():
  steps = [steps_of(filter_of(depth), FILTER) for depth in (5, 10, 20)]
  assert [found for found, _ in steps] == [None] * 3
  assert steps[2][1] - steps[1][1] == 2 * (steps[1][1] - steps[0][1]) > 0
  found, _ = steps_of(filter_of(20, leaf="leave"), FILTER)
  assert found and found.startswith("filter.op must be 'and', got 'or' or filter.of[0].op must be")
  assert len(found) < 1000


def chain(length, end):
  """A schema whose parts each have two alternatives, which are the next part."""
  parts = {
    f"t{i}": {"anyOf": [{"$ref": f"#/$defs/t{i + 1}"} for _ in range(2)]} for i in range(length)
  }
  return {"properties": {"a": {"$ref": "#/$defs/t0"}}, "$defs": {**parts, f"t{length}": end}}


def test_schemas_that_refer_to_themselves_or_branch_end_within_few_steps():
  itself = {"anyOf": [{"$ref": "#/$defs/t"}, {"$ref": "#/$defs/t"}]}
  schema = {"properties": {"a": {"$ref": "#/$defs/t"}}, "$defs": {"t": itself}}
  assert steps_of({"a": 1}, schema)[1] < 10
  found, steps = steps_of({"a": "b"}, chain(60, {"type": "string"}))
  assert found is None and steps < 4 * 60
  found, steps = steps_of({"a": 1}, chain(60, {"type": "string"}))
  assert found == "a must be a string, got 1" and steps < 4 * 60


def test_what_takes_too_many_steps_is_refused(monkeypatch):
  refused = "the arguments are too large or too deeply nested to be checked"
  assert schemas.problem({"a": 1}, chain(1000, {})) == refused
  monkeypatch.setattr(schemas, "_MOST_STEPS", 500)
  numbers = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
  assert schemas.problem({"a": [*range(490)]}, numbers) is None
  assert schemas.problem({"a": [*range(510)]}, numbers) == refused
  words = {"properties": {"a": {"items": {"enum": [str(i) for i in range(2000)]}}}}
  assert schemas.problem({"a": ["1999"]}, words) is None
  assert schemas.problem({"a": [str(i) for i in range(100)]}, words) == refused
  texts, pairs = [*map(str, range(50))], {str(i): i for i in range(3000)}
  for value, part in (
    (texts, {"items": {"type": ["string"] * 3000}}),
    (texts, {"items": {"$ref": "#/" + "%41" * 1000}}),
    (pairs, {"allOf": [{"type": "object"} for _ in range(50)]}),
    ([*pairs], {"allOf": [{"type": "array"} for _ in range(50)]}),
  ):
    assert schemas.problem({"a": value}, {"properties": {"a": part}}) == refused


def test_required_names_that_are_not_strings_are_not_checked():
  schema = {"properties": {"a": {"required": [["x"], {}]}}, "required": [["x"], None, "a"]}
  assert schemas.problem({"a": {}}, schema) is None
  assert schemas.problem({}, schema) == "the argument a is missing"


def test_names_that_another_keyword_may_allow_are_not_refused():
  for others in (
    {"patternProperties": {"^x_": {}}, "additionalProperties": False},
    {"anyOf": [{"properties": {"x_1": {"type": "integer"}}}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x_1": {}}}}},
  ):
    assert schemas.problem({"x_1": 1}, {"properties": {"a": {}}, **others}) is None


def test_numbers_are_compared_exactly():
  assert fits(19.99, {"multipleOf": 0.01}) and not fits(19.995, {"multipleOf": 0.01})
  huge = 10**5000
  assert fits(huge, {"multipleOf": 10**4000, "minimum": 1e300})
  assert schemas.problem({"a": huge}, {"properties": {"a": {"maximum": 10**4999}}}) == (
    "a must be at most a number of many digits, got a number of many digits"
  )


def random_value(draw, depth=3):
  kind = draw.random()
  if depth and kind > 0.8:
    return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
  if depth and kind > 0.6:
    return {draw.choice("abc"): random_value(draw, depth - 1) for _ in range(draw.randrange(4))}
  return draw.choice([None, True, False, 0, 1, 2, -1, 1.0, 2.5, "", "a", "ab", "ü", 30])


def random_schema(draw, depth, keywords):
  def below():
    return random_schema(draw, depth - 1, keywords)

  found, small = {}, draw.choice([0, 1, 2])
  for keyword in draw.sample(keywords, 3):
    if keyword in ("items", "not", "contains"):
      value = below() if depth else True
    elif keyword == "additionalProperties":
      value = draw.choice([False, below() if depth else True])
    elif keyword in ("properties", "patternProperties"):
      value = {draw.choice("abc"): below() if depth else True for _ in range(2)}
    elif keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
      value = [below() if depth else True for _ in range(draw.randrange(1, 4))]
    else:
      value = {
        "type": draw.choice(
          ["string", "number", "integer", "object", "array", ["null", "boolean"]]
        ),
        "enum": [random_value(draw, 1) for _ in range(3)],
        "const": random_value(draw, 1),
        "required": [draw.choice("abc")],
        "$ref": "#/$defs/tree",
        "pattern": "^a",
        "uniqueItems": True,
        "multipleOf": small + 0.5,
      }.get(keyword, small)
    found[keyword] = value
  return found


CHECKED = (
  *("type", "enum", "const", "required", "properties", "additionalProperties", "items", "anyOf"),
  *("prefixItems", "allOf", "$ref", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
  *("multipleOf", "minLength", "maxLength", "minItems", "maxItems"),
)
OTHERS = ("oneOf", "not", "contains", "pattern", "patternProperties", "uniqueItems")


@pytest.mark.parametrize(("keywords", "is_same"), [(CHECKED, True), (CHECKED + OTHERS, False)])
def test_random_values_fit_random_schemas_as_in_another_implementation(keywords, is_same):
  jsonschema = pytest.importorskip("jsonschema")
  draw = random.Random(5)
  tree = {
    "type": ["object", "integer"],
    "additionalProperties": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": "a"}]},
  }
  seen = collections.Counter()
  for _ in range(1500):
    schema = {**random_schema(draw, 2, keywords), "$defs": {"tree": tree}}
    other = jsonschema.Draft202012Validator(schema)
    for value in (random_value(draw), random_value(draw)):
      expected, found = other.is_valid(value), fits(value, schema)
      # What is not checked may let a value pass, but nothing that fits is refused.
      assert found == expected if is_same else found >= expected, (schema, value)
      seen[expected] += 1
  assert min(seen.values()) > 500


def test_arguments_are_checked_outside_of_the_event_loop_within_the_time_of_the_call(monkeypatch):
  release = threading.Event()
  monkeypatch.setattr(schemas, "problem", lambda *_: release.wait(5.0))
  seen = []

  async def body():
    call = asyncio.create_task(
      Toolbox(TOOLS.values(), CallLimits(timeout_s=0.2)).answer(
        "returns", {"what": "none"}, Counter()
      )
    )
    while not call.done():
      await asyncio.sleep(0.01)
      seen.append(1)
    release.set()
    return await call

  assert asyncio.run(body()) == "error: returns: no result within 0.2 s" and len(seen) > 3


def test_a_tool_that_hangs_is_refused_until_its_calls_return(monkeypatch, caplog):
  monkeypatch.setattr(hanging, "MOST", 4)
  release = threading.Event()

  def stuck() -> str:
    release.wait()
    return "done"

  box = Toolbox([functions.tool_of(stuck), TOOLS["returns"]], CallLimits(timeout_s=0.02))
  before, counts, text = {*threading.enumerate()}, Counter(), ""
  for _ in range(50):  # a busy machine may need more than 0.02 s to begin a call.
    counts = Counter()
    text = asyncio.run(box.answer("stuck", {}, counts))
  assert text == "error: the tool 'stuck' is not called: 4 earlier calls of it still hang"
  assert counts == {"calls": 1, "failed_calls": 1, "tool_errors": 1}
  hung = {*threading.enumerate()} - before
  assert [thread.name for thread in hung] == ["tool"] * 4
  assert box.metrics() == {"hanging_calls": 4.0}
  assert len(caplog.records) == 1
  assert asyncio.run(box.answer("returns", {"what": "none"}, Counter())) == "null"
  release.set()
  while box.metrics():
    time.sleep(0.01)
  assert asyncio.run(box.answer("stuck", {}, Counter())) == "done"


def test_a_schema_may_allow_further_arguments():
  schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}}
  assert schemas.problem({"b": 1}, schema) is None
  assert schemas.problem({"b": "1"}, schema) == "b must be a whole number, got '1'"


@pytest.mark.parametrize(
  ("name", "arguments", "text", "counted"),
  [
    (
      "serch",
      {},
      "error: there is no tool 'serch' (did you mean 'search'?); there are",
      "unknown_t",
    ),
    ("fails", {"how": "x"}, "error: fails: KeyError: 'x'", "tool_errors"),
    ("fails", {"how": "exit"}, "error: fails: SystemExit: 3", "tool_errors"),
    ("sleeps", {"seconds": 0.3}, "error: sleeps: no result within 0.05 s", "tool_timeouts"),
    ("waits", {"seconds": 9}, "error: waits: no result within 0.05 s", "tool_timeouts"),
    ("returns", {"what": "text"}, "ü\nx", ""),
    ("returns", {"what": "surrogate"}, "?", ""),
    ("returns", {"what": "set"}, "[1]", ""),
    ("returns", {"what": "object"}, '{"name": "x", "height": 0.0}', ""),
    ("returns", {"what": "none"}, "null", ""),
    ("returns", {"what": "nan"}, "NaN", ""),
    (
      "returns",
      {"what": "long"},
      "x" * 999 + "\n[cut: the first 999 of 100000 characters]",
      "cut_res",
    ),
  ],
)
def test_every_outcome_of_a_call_is_text_and_is_counted(name, arguments, text, counted, noticed):
  calling._report.cache_clear()
  started = time.monotonic()
  found, counts = answer(name, CallLimits(timeout_s=0.05, max_result_chars=999), **arguments)
  assert found.startswith(text) if counted == "unknown_t" else found == text
  assert [key for key in counts if key not in ("calls", "failed_calls")] == [
    key for key in (*calling.FAILURES, "cut_results") if counted and key.startswith(counted)
  ]
  assert counts["calls"] == 1 and counts.get("failed_calls", 0) == text.startswith("error")
  assert time.monotonic() - started < 5
  # The model does not read where a tool has failed; people do.
  assert "my_tools.py" not in found and len(noticed) == (counted == "tool_errors")
  assert all("the tool fails failed" in line and "my_tools.py:" in line for line in noticed)


def test_the_answers_of_a_turn_are_in_order_then_those_of_malformed_calls():
  calls = tuple(
    {**call("returns", {"what": what}), "id": f"id{i}"} for i, what in enumerate(("none", "text"))
  )
  turn = Parsed("", calls, (Malformed("bad JSON", "returns"), Malformed("worse")))
  counts = Counter()
  messages, given = asyncio.run(calling.answers(Toolbox(TOOLS.values()), turn, counts))
  assert given == calls
  assert [(m["name"], m["content"]) for m in messages] == [
    ("returns", "null"),
    ("returns", "ü\nx"),
    ("returns", "error: malformed call: bad JSON"),
    ("unknown", "error: malformed call: worse"),
  ]
  assert [m["tool_call_id"] for m in messages] == ["id0", "id1", "id1", "id1"]
  assert counts == {"calls": 2, "malformed_calls": 2}
  # Templates that write no answer without a call get one.
  _, given = asyncio.run(calling.answers(Toolbox([]), Parsed("", malformed=turn.malformed), counts))
  assert [each["function"] for each in given] == [{"name": "returns", "arguments": {}}]


@dataclasses.dataclass
class Tree:
  trees: "list[Tree]"


def test_functions_without_a_schema_are_refused_by_name():
  def no_hint(x):
    return x

  def positional(x: int, /):
    return x

  def any_number(*x: int):
    return x

  def strange(x: threading.Thread):
    return x

  def called(x: Callable[[int], int]):
    return x

  def unknown(x: "Nothing"):  # pyright: ignore[reportUndefinedVariable]
    return x

  for function, reason in {
    no_hint: "the parameter 'x' needs a type hint",
    positional: "cannot be given by name",
    any_number: "cannot be given by name",
    strange: "parameter 'x': no JSON schema: .*threading.Thread",
    called: "parameter 'x': no JSON schema: .*Callable",
    unknown: "its signature cannot be read: name 'Nothing'",
  }.items():
    with pytest.raises(ValueError, match=reason):
      functions.tool_of(function)
  with pytest.raises(ValueError, match="two tools have the name 'waits'"):
    Toolbox([TOOLS["waits"], TOOLS["waits"]])
  with pytest.raises(ValueError, match="the name of a tool is letters"):
    dataclasses.replace(TOOLS["waits"], name="a b")


def test_arguments_have_the_types_of_containers_objects_and_dates():
  for hint, value, made in (
    (set[int], [1, 1], {1}),
    (tuple[float, ...], [1, 2], (1.0, 2.0)),
    (list, [1], [1]),
    (dict, {"a": 1}, {"a": 1}),
    (dict[int, str], {"1": "a"}, {1: "a"}),
    (list[my_tools.Unit], ["kelvin"], [my_tools.Unit.KELVIN]),
    (my_tools.Place | None, {"name": "x"}, my_tools.Place("x")),
    (float | int, 3, 3),
    (Tree, {"trees": [{"trees": []}]}, Tree([Tree([])])),
    (datetime.date, "2026-11-27", datetime.date(2026, 11, 27)),
    (Annotated[int, "A number."], 3.0, 3),
  ):

    def tool(x):
      return x

    tool.__annotations__["x"] = hint
    found = functions.tool_of(tool)
    assert schemas.problem({"x": value}, found.parameters) is None
    converted = asyncio.run(found.run({"x": value}))
    assert converted == made and type(converted) is type(made)


def test_what_only_the_type_refuses_is_an_answer_that_says_so():
  def tool(day: datetime.date):
    return day

  counts = Counter()
  text = asyncio.run(Toolbox([functions.tool_of(tool)]).answer("tool", {"day": "soon"}, counts))
  assert text.startswith("error: tool: day: Input should be a valid date")
  assert counts == {"calls": 1, "failed_calls": 1, "wrong_arguments": 1}


@pytest.mark.parametrize(
  ("docstring", "description", "arguments"),
  [
    ("", "", {}),
    ("One line.", "One line.", {}),
    ("A.\n\nArgs:\n  x: Of\n    two lines.\n  y (int): B: c.\n\nReturns:\n  z: no.", "A.",
     {"x": "Of two lines.", "y": "B: c."}),
    ("A.\n\nArgs:\n  x: X.\n\nMore text.", "A.\n\nMore text.", {"x": "X."}),
    ("A.\n\n:param int x: X\n  y.\n:returns: z", "A.", {"x": "X y."}),
  ],
)  # fmt: skip
def test_docstrings_in_two_styles(docstring, description, arguments):
  assert functions.described(docstring) == (description, arguments)


def named(*names, **options):
  with contextlib.ExitStack() as stack:
    return [tool.name for tool in builtin.open_tools(names, stack, **options)]


def test_a_setting_names_tools_modules_and_functions():
  assert named("calculator", "tests.environments.my_tools.waits") == ["calculator", "waits"]
  assert named("tests.environments.my_tools") == [*TOOLS]
  for name, reason in {
    "calculater": "there is no tool 'calculater' \\(did you mean 'calculator'\\?\\)",
    "tests.environments.my_tools.wait": "my_tools has no function 'wait' \\(did you mean 'waits'",
    "tests.environments.my_tools.py": "named without .py",
    "hints": "there is no tool 'hints'",
    "nothing.at.all": "cannot import",
    "contextvars": "has no public function",
    "tests.environments.my_tools.Place": "my_tools.Place is a class; tools are functions",
  }.items():
    with pytest.raises(ValueError, match=reason):
      named(name)


def test_the_calculator_never_runs_what_it_reads():
  async def body():
    box, counts = Toolbox(builtin.open_tools(["calculator"], contextlib.ExitStack())), Counter()
    texts = [
      await box.answer("calculator", {"expression": e}, counts) for e in ("6 * 7", "open(1)")
    ]
    return texts, counts

  texts, counts = asyncio.run(body())
  assert texts[0] == "42" and texts[1].startswith("error: 'open' is not known")
  assert counts["failed_calls"] == counts["tool_errors"] == 1


@pytest.mark.slow
def test_python_runs_in_the_sandbox():
  sandboxes.need("bubblewrap") if sandboxes.why_not("landlock") else None
  with contextlib.ExitStack() as stack:
    opened = builtin.open_tools(["python"], stack, python={"timeout_s": 2, "workers": 1})
    box, counts = Toolbox(opened), Counter()
    programs = {
      "print(6 * 7)": "42\n",
      "1 / 0": "ZeroDivisionError: division by zero\n",
      "import os; print(os.path.exists('/root'), 1)": "1\n",
      "while True: pass": "error: the program took too long",
      "x = (": "SyntaxError",
    }
    for code, text in programs.items():
      assert text in asyncio.run(box.answer("python", {"code": code}, counts))
  with pytest.raises(ValueError, match="unknown sandbox"):
    named("python", python={"sandbox": "box"})


def test_settings_of_python_are_checked():
  for settings, reason in {
    ("memory", 1): "takes no 'memory' .did you mean 'memory_mib'",
    ("workers", 0): "python.workers must be an integer >= 1, got 0",
  }.items():
    with pytest.raises(ValueError, match=reason):
      named("python", python=dict([settings]))
