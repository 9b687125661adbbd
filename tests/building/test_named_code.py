"""Commands that run the code of a stored config name it first."""

import json
import logging
import sys

from grpo_jax.building import endpoint, named_code
from grpo_jax.config import configuration
from tests import stored_runs

SERVERS = {"files": {"command": ["npx", "-y", "server", "a b"]}}
CONFIG = {
  "environments": {
    "math": {"timeout_s": 5.0},
    "mine": {"module": "my_env"},
    "other": {},
    "reward": {"module": "function", "path": "tests.rewards.vowels"},
    "tool_use": {"tools": ["calculator", "my_tools", "os.path.join"], "mcp_servers": SERVERS},
  },
  "data": {"path": "rows.jsonl", "format": "json.loads", "datasets": [{"format": "shutil.copy"}]},
  "engine": {"name": "jax_sampler", "sglang": {"command": ["python", "x.py"]}},
  "loss": {"loss": "clipped"},
  "model": {"path": "org.name/model.v1", "tool_calls": "grpo_jax.models.chat.tool_calls"},
}


def test_functions_modules_and_programs_of_others_are_named():
  assert [*named_code.named(CONFIG)] == [
    "environments.mine.module=my_env",
    "environments.other.module=other",
    "environments.tool_use.tools=my_tools",
    "environments.reward.path=tests.rewards.vowels",
    "environments.tool_use.tools=os.path.join",
    "environments.tool_use.mcp_servers.files.command=npx -y server 'a b'",
    "data.format=json.loads",
    "data.datasets.format=shutil.copy",
    "engine.sglang.command=python x.py",
  ]


def test_modules_without_a_dot_are_named():
  tasks = {"data": {"kind": "grpo_environments.verifiers.rows", "task": "reverse-text"}}
  assert [*named_code.named({"engine": {"name": "my_engine"}})] == ["engine.name=my_engine"]
  assert "data.task=reverse-text" in named_code.named(tasks)
  tasks["data"]["kind"] = "grpo_jax.environments.verifiers.rows"  # of a run before the packages.
  assert "data.task=reverse-text" in named_code.named(tasks)
  assert [*named_code.named({"data": {"task": "chain_sum"}, "engine": {"name": "sglang"}})] == []


def test_values_of_any_type_are_read(monkeypatch):
  monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as that of an entry point.
  values = (None, True, 3, "x", "\ud800.a", "a..b", "__main__.f", ".a", [1], [None, {}], {"a": 1})
  for value in values:
    places = {"module": value, "tools": value, "mcp_servers": {"a": {"command": value}}}
    list(named_code.named({"environments": {"a": value, "b": places}, "data": {"format": value}}))
  assert [*named_code.named({"data": {"format": "__main__.f"}})] == ["data.format=__main__.f"]


def test_configs_of_the_package_name_nothing_of_others():
  for name in ("quickstart", "curriculum", "code_humaneval", "math_1b_gpu", "tool_use:functions"):
    assert [*named_code.named(configuration.load(name).to_dict())] == []


def test_the_config_of_a_run_is_taken_after_its_code_was_named(tmp_path, caplog):
  caplog.set_level(logging.INFO, "grpo_jax")
  run = stored_runs.write(tmp_path / "run", {1: None})
  config = endpoint.config_of(str(run))
  assert not caplog.records
  stored = json.loads((run / "config.json").read_text())
  stored["environments"] = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  (run / "config.json").write_text(json.dumps(stored))
  changed = endpoint.config_of(str(run), changes=["--config.sampling.max_tokens=3"])
  assert changed.sampling.max_tokens == 3 != config.sampling.max_tokens
  (record,) = caplog.records
  assert record.getMessage().endswith("as your user: environments.own.path=tests.rewards.vowels")
