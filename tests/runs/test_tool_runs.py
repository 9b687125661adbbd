"""A run whose policy calls declared tools, from the config to the rollouts on the disk."""

import json
import pathlib

import pytest

import grpo_jax.train  # noqa: F401  (main imports it later: its seconds are not this test's.)
from grpo_jax import main, metrics
from tests.data.small_templates import SMALL

pytestmark = pytest.mark.usefixtures("one_device")

ROOT = pathlib.Path(__file__).parents[2]


def run(workdir, model, capsys, **overrides):
  """Runs the config on a tiny model whose completions the scripted engine writes."""
  template = workdir / "template.jinja"
  template.write_text(SMALL["keeps"])
  settings = {
    "model.path": model,
    "model.compute_dtype": "float32",
    "model.chat_template": template,
    "engine.name": "tests.calling_engine",
    "mesh.data": 1,
    "mesh.fsdp": 1,
    "total_steps": 1,
    "data.max_prompt_tokens": 800,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "batching.row_tokens": 1024,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
    "logging.sinks": ("jsonl", "console"),
    "learn.report_all_every_steps": 0,
    "learn.report_kl_every_steps": 0,
    **overrides,
  }
  arguments = [f"--config.{key}={value}" for key, value in settings.items()]
  config = f"--config={ROOT / 'configs' / 'tool_use.py'}:functions"
  code = main.main([config, f"--workdir={workdir / 'run'}", *arguments])
  return code, "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_run_with_declared_tools_learns_from_the_calls_it_sampled(tmp_path, model, capsys):
  code, _ = run(tmp_path, model, capsys)
  assert code == 0
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  first = json.loads(lines[0])
  assert first["env/tool_use/calls"] == first["env/tool_use/used_tool"] == 1.0
  assert first["env/tool_use/failed_calls"] == first["env/tool_use/malformed_calls"] == 0.0
  assert first["env/tool_use/accuracy"] == 0.5 and first["rollout/turns_mean"] == 2.0
  assert first["batch/loss_tokens"] > 0
  assert not metrics.unknown({name for name in first if name != "step"})
  (file,) = (tmp_path / "run" / "rollouts").iterdir()
  for record in map(json.loads, file.read_text().splitlines()):
    assert '"name": "calculator"' in record["prompt"] and record["turns"] == 2
    parts = zip(record["token_texts"], record["loss_mask"], strict=True)
    written = "".join(text for text, is_learned in parts if not is_learned)
    result = record["completion"].partition("<tool_response>\n")[2].partition("\n")[0]
    assert written == (
      f"\n<|im_start|>user<tool_response>\n{result}\n</tool_response><|im_end|>\n"
      "<|im_start|>assistant\n"
    )


@pytest.mark.long
@pytest.mark.parametrize(
  ("overrides", "reason"),
  [
    ({"environments.tool_use.tools": "('calculater',)"}, "there is no tool 'calculater'"),
    ({"model.tool_calls": "herms"}, "model.tool_calls: unknown form of tool calls 'herms'"),
    ({"model.tool_calls": "tests.rewards.vowels"}, "the parser tests.rewards.vowels"),
    (
      {"model.chat_template": "{{ messages[0].content }}"},
      "template does not write",
    ),
    (
      {"model.chat_template": "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"},
      "the form in which this model calls them is not known",
    ),
  ],
)
def test_what_cannot_work_is_said_before_anything_is_sampled(
  tmp_path, model, capsys, overrides, reason
):
  code, printed = run(tmp_path, model, capsys, **overrides)
  assert code == 2 and reason in " ".join(printed.split())
