"""Every block of code in README and docs runs here, or says why it cannot.

Python: settings (`config.…`) are set and validated, everything else is executed and checked by the
function that CHECKS names. Shell: commands that need no accelerator, server, network or training
run; the others are listed with the reason in NOT_RUN.
"""

import ast
import asyncio
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import types

import numpy as np
import pytest

import configs.base
from grpo_jax import report
from grpo_jax.commands import cli
from grpo_jax.config import configuration, run_options
from grpo_jax.data import formats
from grpo_jax.environments.isolation import IsolatedEnvironment
from grpo_jax.environments.toolbox import functions
from grpo_jax.models.chat import tool_calls
from grpo_jax.types import FinishReason, Prompt
from tests.test_documentation import PAGES, ROOT

# --- Python ---


def blocks(page):
  """Yields (language, text) of the fenced blocks of a page."""
  for block in ("\n" + page.read_text()).split("\n```")[1::2]:
    language, _, text = block.partition("\n")
    yield language, text


def is_settings(text):
  return text.startswith("config.")


PYTHON = [
  pytest.param(page.name, text, id=f"{page.stem}-{number}")
  for page in PAGES
  for number, (language, text) in enumerate(blocks(page))
  if language == "python" or (not language and is_settings(text))
]
NAMED_ELSEWHERE = {  # environments that a block of settings takes for granted.
  "judge": {"module": "function", "path": "my_rewards.brevity"},
  "gym": {"module": "reasoning_gym"},
}


def prompt(answer):
  return Prompt("data:0:0", np.asarray([1, 2]), "mine", {"expected_answer": answer})


def check_rows(scope):
  row = {"question": "Which?", "options": ["one", "two"], "correct": "B"}
  record = scope["choices"](row, "rows.jsonl:1", formats.PromptStyle())
  assert "B. two" in record.messages[-1]["content"] and record.info["expected_answer"] == "B"


def check_loader(scope):
  taken = {}
  made = lambda name: types.SimpleNamespace(take=lambda n: taken.setdefault(name, n) and [name] * n)
  loaders = {name: made(name) for name in ("easy", "hard")}
  records = [{"data/easy/reward_mean": 0.9, "data/hard/reward_mean": 0.1}]
  prompts = scope["worse_first"](loaders, num_prompts=8, records=records, memory={})
  assert len(prompts) == 8 and taken == {"hard": 6, "easy": 2}


def check_reward(scope):
  assert scope["brevity"]("1 + 1?", "2", {"expected_answer": "2"}) == {
    "right": 1.0,
    "short": -0.001,
  }


def check_environment(scope):
  async def play():
    guess = scope["Guess"](prompt("7"), low=1)
    await guess.start()
    first = await guess.step("3", [5], FinishReason.STOP)
    last = await guess.step("7", [5], FinishReason.STOP)
    await guess.close()
    return first, last

  first, last = asyncio.run(play())
  assert (first.done, first.observation) == (False, "higher") and (last.done, last.reward) == (
    True,
    1.0,
  )


def check_function_tool(scope):
  tool = functions.tool_of(scope["search"])
  properties = tool.declaration["function"]["parameters"]["properties"]
  assert properties["limit"] == {
    "type": "integer",
    "description": "Largest number of results.",
    "default": 5,
  }
  assert asyncio.run(tool.run({"query": "Uly"})) == ["Ulysses"]


def check_form(scope):
  parsed = tool_calls.parse("CALL add 1 + 1<|im_end|>", scope["my_form"])
  assert parsed.calls[0]["function"] == {"name": "add", "arguments": {"expression": "1 + 1"}}
  assert tool_calls.parse("CALL add", scope["my_form"]).malformed[0].name == "add"
  assert tool_calls.parse("4", scope["my_form"]).content == "4"


def check_tool_environment(scope):
  factory = scope["Library"]()
  call = '<tool_call>{"name": "find", "arguments": {"title": "Ulysses"}}</tool_call>'

  async def play():
    visit = IsolatedEnvironment(factory, prompt("1922"), timeout_s=10.0)
    await visit.start()
    read = lambda text: lambda: tool_calls.parse(text, "hermes", tools=factory.tools)
    ids = np.zeros(1, np.int32)
    results = [
      await visit.step(text, ids, FinishReason.STOP, read=read(text)) for text in (call, "In 1922.")
    ]
    await visit.close()
    return results

  first, last = asyncio.run(play())
  assert not first.done and first.messages[0]["content"] == "1922" and first.tool_calls
  assert last.done and last.reward == 1.0


# The name that a block defines, and what is checked of it.
CHECKS = {
  "choices": check_rows,
  "worse_first": check_loader,
  "brevity": check_reward,
  "Guess": check_environment,
  "search": check_function_tool,
  "my_form": check_form,
  "Library": check_tool_environment,
}
# What only some blocks have, and the test that runs these.
RUN_ELSEWHERE = {
  "evaluation.run(": "tests/evaluation/test_runner.py",
  "grpo_jax.train(": "tests/api/test_documented_calls.py",
  "grpo_jax.open(": "tests/api/test_documented_calls.py",
  "run.sample(": "tests/api/test_documented_calls.py",
  "def schedule(": "tests/runs/test_own_methods.py",
  "my_sinks.Csv": "tests/run_folder/test_sinks.py",
  "class Csv(": "tests/run_folder/test_sinks.py",
  "def squares(": "tests/data/test_in_memory_rows.py",
  "my_agents.Adds": "tests/serving/test_serving_page.py",
  "class Adds:": "tests/serving/test_serving_page.py",
  "from grpo_jax.rl import": "tests/test_library_examples.py",
  "from grpo_kernels.linear_logprobs import": "tests/kernels/test_head_documentation.py",
}


class Awaited:
  """Stands in for the factory of the block that shows an environment's life."""

  def __init__(self, prompt):
    self.calls = []

  async def start(self):
    self.calls.append("start")

  async def step(self, text, completion_ids, finish_reason):
    self.calls.append("step")
    return "result"

  async def close(self):
    self.calls.append("close")


@pytest.mark.parametrize("page, text", PYTHON)
def test_a_python_block_runs(page, text, monkeypatch):
  monkeypatch.chdir(ROOT)
  scope: dict = {"__name__": "documented"}
  if page.startswith("coming_from_"):
    assert "exec(compile(text" in (ROOT / "tests/config/test_other_programs.py").read_text()
    return
  if elsewhere := [test for name, test in RUN_ELSEWHERE.items() if name in text]:
    assert page in (ROOT / elsewhere[0]).read_text()
    return
  if is_settings(text):
    scope["config"] = config = configs.base.get_config()
    exec(text, scope)
    for name in re.findall(r'environment="(\w+)"', text):
      config.environments[name] = NAMED_ELSEWHERE.get(name, {"module": "math"})
    configuration.check(config, [run_options.validate])
    return
  if "await " in text:
    scope |= dict.fromkeys(("text", "completion_ids", "finish_reason")) | {"prompt": prompt("1")}
    scope["factory"] = Awaited
    code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    running = eval(code, scope)
    assert inspect.iscoroutine(running)
    asyncio.run(running)
    assert scope["environment"].calls == ["start", "step", "close"]
    return
  exec(compile(text, page, "exec"), scope)
  checks = {check for name, check in CHECKS.items() if name in scope}
  assert checks, f"{page}: add to CHECKS what this block defines: {[*scope]}"
  for check in checks:
    check(scope)


def test_every_block_of_json_is_json():
  found = 0
  for page in PAGES:
    for language, text in blocks(page):
      if language == "json":
        decoder, rest = json.JSONDecoder(), text.strip()
        while rest:
          _, end = decoder.raw_decode(rest)
          rest, found = rest[end:].strip(), found + 1
  assert found >= 4


# --- shell ---

NOT_RUN = {
  "pip install": "needs the network; the gate installs in the same way",
  "python -m venv": "the gate makes environments",
  "git clone": "needs the network",
  "source": "changes the shell that calls it",
  "tensorboard": "serves until it is stopped",
  "export": "sets a key for servers on other hosts",
  "cd": "changes the shell that calls it",
  "[": "belongs to the loop around a training command",
  "done": "belongs to the loop around a training command",
  "pip wheel": "tests/test_wheel.py builds the wheel",
  "docker": "needs Docker; the image's files are checked by tests/test_packaging.py",
  "gcloud": "needs Google Cloud",
  "exit": "leaves the machine that a command before it has entered",
  "sbatch": "needs Slurm; tests/scripts/test_slurm.py runs it under one",
  "mpirun.sh": "needs Open MPI; tests/scripts/test_slurm.py runs it",
  "tpu_pod.sh": "needs Google Cloud; tests/scripts/test_launch_scripts.py runs it with stand-ins",
  "kubectl": "needs a Kubernetes cluster; tests/scripts/test_launch_scripts.py reads the file",
  "xpk": "needs a GKE cluster",
  "grpo-jax launch": "trains; tests/processes run it",
  "start_tpu_vm.sh": "installs; tests/scripts/test_start_tpu_vm.py runs it with stand-ins",
  "grpo-jax train": "trains; test_documentation parses its arguments",
  "grpo-jax doctor": "tests/commands/test_doctor.py runs it",
  "grpo-jax evaluate": "samples a model; tests/evaluation/test_runner.py runs it",
  "grpo-jax export": "needs a run; tests/commands/test_export.py runs it",
  "grpo-jax serve": "serves until it is stopped; tests/commands/test_serve.py runs it",
  "lm_eval": "needs a server and a package of its own",
  "python -m grpo_jax": "the console script; tests/config/test_users_files.py runs it",
  "python scripts/spellings.py": "needs rows of your own; tests/scripts/test_spellings.py runs it",
  "python -m grpo_jax.main": "trains; test_documentation parses and validates its arguments",
  "python scripts/gpu_day.py": "needs a GPU; its arguments are checked below",
  "sh bundle/run.sh": "needs a bundle; tests/scripts/test_gpu_day_bundle.py runs one",
  "python scripts/serve_sglang.py": "needs SGLang; its arguments are checked below",
  "python scripts/benchmark/compare.py": "needs TRL and Tunix; its arguments are checked below",
  "python scripts/benchmark/linear_logprobs.py": "takes minutes; its arguments are checked below",
  "python scripts/packing_table.py": "takes 10 s; tests/scripts/test_packing_table.py runs it",
  "python -m scripts.staleness": "trains 27 times; tests/scripts/test_staleness.py has stand-ins",
  "python scripts/benchmark/profile_update.py": "takes minutes; its arguments are checked below",
}
PROGRAMS = {name.split()[0] for name in NOT_RUN} | {"make", "until", "grpo-jax"}


def plain(word):
  """Returns the name of a program without its folder and version: .venv/bin/python3.11 → python."""
  return re.sub(r"^(python|pip)[\d.]*$", r"\1", word.rpartition("/")[2])


def shell_commands(page):
  """Yields the words of the commands in a page: in shell blocks, and as `python …` in the text."""
  for language, text in blocks(page):
    if language not in ("", "bash", "sh"):
      continue
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("#")]
    words = [
      [*shlex.split(re.sub(r"\s#.*", "", line))] for line in lines if line.count("'") % 2 == 0
    ]
    words = [[word for word in line if not re.match(r"[A-Z_]+=", word)] for line in words]
    if words and words[0] and plain(words[0][0]) in PROGRAMS:
      for line in words:
        assert plain(line[0]) in PROGRAMS, f"{page.name}: what is {line[0]!r}? see NOT_RUN"
        yield from split(line)
  for code in re.findall(r"(?<!`)`(python (?:-m|scripts)[^`]*)`(?!`)", page.read_text()):
    yield shlex.split(code.replace("\n", " "))


def split(words):
  """Yields the commands of a line: those between && and what `until` repeats."""
  line = " ".join(map(shlex.quote, words)).replace("'&&'", "&&")
  for part in line.split(" && "):
    found = shlex.split(part)
    found = found[1:] if found[0] == "until" else found
    yield [word.rstrip(";") for word in found]


COMMANDS = [
  (page.name, [plain(words[0]), *words[1:]]) for page in PAGES for words in shell_commands(page)
]


def fill(words, folder):
  """Puts files of a folder in the place of the names in a documented command."""
  inputs = {"RUN": folder / "run", "rollouts.jsonl": folder / "rollouts.jsonl"}
  outputs = {"groups.jsonl": folder / "groups.jsonl", "prompts.jsonl": folder / "prompts.jsonl"}
  known = {name: str(path) for name, path in (inputs | outputs).items()}
  return [known.get(word, word) for word in words if word != "…"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with a run and with rollouts of NeMo Gym."""
  from tests import fake_run

  path = tmp_path_factory.mktemp("documented")
  fake_run.make_run(path / "run", steps=3)
  shutil.copy(ROOT / "tests/data/nemo_gym/reasoning_gym.jsonl", path / "rollouts.jsonl")
  return path


def script(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def runnable():
  for page, words in COMMANDS:
    is_skipped = any(" ".join(words).startswith(name) for name in NOT_RUN)
    if words[0] in ("python", "grpo-jax") and not is_skipped:
      yield pytest.param(words, id=f"{page}-{words[2] if words[1] == '-m' else words[1]}")


@pytest.mark.parametrize("words", list(runnable()))
def test_a_shell_command_runs(words, folder):
  if words[0] == "grpo-jax":
    given = [str(folder / "run") if "runs/" in word else word for word in fill(words[1:], folder)]
    assert cli.run(given) == 0
    return
  if words[1:3] == ["-m", "grpo_jax.report"]:
    assert report.main(fill(words[3:], folder)) == 0
    assert (folder / "run" / "report.html").exists()
    return
  assert words[1].startswith("scripts/"), f"say in NOT_RUN why it cannot run: {words}"
  code = script(ROOT / words[1]).main(fill(words[2:], folder))
  assert code in (0, None)
  for name in {"groups.jsonl", "prompts.jsonl"} & {*words}:
    assert (folder / name).read_text().count("\n") > 0


def test_commands_that_do_not_run_here_name_scripts_options_and_targets_that_exist():
  targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
  assert len(COMMANDS) > 40
  for page, words in COMMANDS:
    if words[0] == "make":
      wrong = {word for word in words[1:] if "=" not in word} - targets
      assert not wrong, f"{page}: make has no {wrong}"
    elif words[0] == "python" and "scripts" in " ".join(words[1:3]):
      path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
      source = (ROOT / path).read_text()
      own = (
        words[: words.index("--")] if "--" in words else words
      )  # the rest is for another program.
      for option in (word.partition("=")[0] for word in own if word.startswith("--")):
        known = f'"{option}"' in source or (option == "--config" and "command_line" in source)
        assert known, f"{page}: {path} does not have {option}"


def test_reasons_are_of_commands_that_are_documented():
  documented = [" ".join(words) for _, words in COMMANDS]
  for name in NOT_RUN:
    assert any(line.startswith(name) for line in documented), name
