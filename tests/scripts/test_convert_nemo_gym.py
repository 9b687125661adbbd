"""scripts/convert_nemo_gym.py: what it writes is what is read directly, and the guide's rows."""

import json
import pathlib
import sys

import pytest

from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.groups import group_of
from grpo_jax.offline import recorded_groups

ROOT = pathlib.Path(__file__).parents[2]
GYM = ROOT / "tests" / "data" / "nemo_gym"

sys.path.insert(0, str(ROOT / "scripts"))
import convert_nemo_gym  # noqa: E402


def convert(out, *arguments):
  code = convert_nemo_gym.main([*map(str, arguments), f"--out={out}"])
  return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def groups(path):
  dataset = recorded_groups.open_groups(
    ByteTokenizer(),
    options=recorded_groups.RecordedOptions(),
    on_error="stop",
    path=path,
    max_prompt_tokens=9999,
  )
  return [group_of(dataset.prompt(row, epoch=0)) for row in range(len(dataset))]


def described(items):
  return [
    [
      (
        item.group.prompt.text,
        r.text,
        r.completion_ids.tolist(),
        r.loss_mask.tolist(),
        r.behavior_logprobs.tolist(),
        r.reward,
        r.is_truncated,
      )
      for r in item.group.rollouts
    ]
    for item in items
  ]


def message(text, **fields):
  return {"type": "message", "role": "assistant", "content": [{"text": text}], **fields}


def simple(question, answer, **fields):
  params = {"input": [{"role": "user", "content": question}]}
  return {"responses_create_params": params, "output": [message(answer)], **fields}


@pytest.mark.parametrize("name", ["blackjack", "reasoning_gym"])
def test_converted_groups_are_those_that_are_read_directly(name, tmp_path):
  code, rows = convert(tmp_path / "out.jsonl", GYM / f"{name}.jsonl")
  assert code == 0 and all(row.keys() >= {"input", "output", "reward"} for row in rows)
  direct = groups(GYM / f"{name}.jsonl")
  assert described(groups(tmp_path / "out.jsonl")) == described(direct)
  assert [i.group_type for i in groups(tmp_path / "out.jsonl")] == [i.group_type for i in direct]


def test_tokens_survive(tmp_path):
  tokens = {"prompt_token_ids": [5, 6], "generation_token_ids": [7], "generation_log_probs": [-0.5]}
  after = {
    "prompt_token_ids": [5, 6, 7, 8],
    "generation_token_ids": [9],
    "generation_log_probs": [-1.0],
  }
  row = simple("Q", "a", reward=1.0)
  row["output"] = [message("a", **tokens), message("b", **after)]
  path = write(tmp_path / "in.jsonl", [row])
  assert convert(tmp_path / "out.jsonl", path)[0] == 0
  (rollout,) = groups(tmp_path / "out.jsonl")[0].group.rollouts
  assert rollout.completion_ids.tolist() == [7, 8, 9]
  assert rollout.loss_mask.tolist() == [True, False, True]
  assert rollout.behavior_logprobs.tolist() == [-0.5, 0.0, -1.0]


def test_the_guides_rows(tmp_path):
  """The example of the guide: three fields, as texts; a missing reward stays missing."""
  rollouts = [
    simple("What is 47 × 23?", "Let me calculate: 47 * 23 = 1,081", reward=1.0),
    simple("What is 2?", "2"),
  ]
  path = write(tmp_path / "in.jsonl", rollouts)
  for form in ([], ["--text"]):
    _, rows = convert(tmp_path / "out.jsonl", path, *form)
    assert rows == [
      {
        "input": "What is 47 × 23?",
        "output": "Let me calculate: 47 * 23 = 1,081",
        "reward": 1.0,
      },
      {"input": "What is 2?", "output": "2"},
    ]


def as_the_guides_script_does(rollout):
  """The row of NeMo Gym's GRPO guide: the last user message, the first parts of all messages."""
  asked = [m["content"] for m in rollout["responses_create_params"]["input"] if m["role"] == "user"]
  items = rollout.get("response", rollout)["output"]
  said = [item["content"][0]["text"] for item in items if item["type"] == "message"]
  return {"input": asked[-1], "output": " ".join(said), "reward": rollout.get("reward", 0.0)}


def test_texts_are_those_of_the_guides_script(tmp_path):
  rollouts = [
    json.loads(line)
    for line in (GYM / "reasoning_gym.jsonl").read_text().splitlines()  # with thoughts.
  ]
  mixed = simple("Q", "first", reward=1.0)
  mixed["output"] = [
    {"type": "reasoning", "summary": [{"text": "hm"}]},
    message("first", prompt_token_ids=[5], generation_token_ids=[7], generation_log_probs=[-0.5]),
    message("second"),
    {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "2"},
    message("third"),
  ]
  rollouts.append(mixed)
  path = write(tmp_path / "in.jsonl", rollouts)
  _, rows = convert(tmp_path / "out.jsonl", path, "--text")
  fields = ("input", "output", "reward")
  assert [{name: row[name] for name in fields} for row in rows] == [
    as_the_guides_script_does(rollout) for rollout in rollouts
  ]
  assert rows[-1]["output"] == "first second third"
  with pytest.raises(SystemExit):
    convert(tmp_path / "out.jsonl", path, "--text", "--reasoning=think")


def test_texts_of_a_game_are_the_models_words_only(tmp_path):
  _, rows = convert(tmp_path / "out.jsonl", GYM / "blackjack.jsonl", "--text")
  assert rows[0]["output"] == "<action>hit</action> <action>hit</action>"
  assert rows[0]["input"].startswith("Your hand: [8, 5] = 13")


def test_prompts_are_written_once_with_what_the_environment_needs(tmp_path):
  rollouts = [
    simple("Q", "a", reward=1.0, expected_answer="a"),
    simple("Q", "b", reward=0.0, expected_answer="a"),
    simple("R", "b", reward=0.0, expected_answer="c"),
  ]
  path = write(tmp_path / "in.jsonl", rollouts)
  _, rows = convert(tmp_path / "out.jsonl", path, "--to=prompts")
  assert rows == [
    {"messages": [{"role": "user", "content": "Q"}], "expected_answer": "a"},
    {"messages": [{"role": "user", "content": "R"}], "expected_answer": "c"},
  ]


def test_a_broken_row_is_named_and_nothing_is_written(tmp_path, capsys):
  path = write(tmp_path / "in.jsonl", [simple("Q", "a"), {"x": 1}])
  code, rows = convert(tmp_path / "out.jsonl", path)
  assert (code, rows) == (1, [])
  assert "in.jsonl:2: no key 'output'" in capsys.readouterr().err
  assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
  code, rows = convert(tmp_path / "out.jsonl", path, "--on-error=skip")
  assert (code, len(rows)) == (0, 1)
  reported = capsys.readouterr().out
  assert "1 rows to" in reported and "1 groups, 1 of them with one response" in reported
  assert "'reinforce_pp' learns" in reported


def test_tools_and_calls_survive(tmp_path):
  row = simple("Q", "a", reward=1.0)
  call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
  answer = {"type": "function_call_output", "call_id": "c", "output": "2"}
  row["responses_create_params"]["tools"] = [{"type": "function", "name": "f", "strict": True}]
  row["output"] = [call, answer, message("It is 2.")]
  path = write(tmp_path / "in.jsonl", [row])
  _, (converted,) = convert(tmp_path / "out.jsonl", path)
  assert [tool["function"]["name"] for tool in converted["tools"]] == ["f"]
  assert converted["output"][0]["tool_calls"][0]["function"]["name"] == "f"
  assert converted["output"][1]["tool_call_id"] == "c"
  assert described(groups(tmp_path / "out.jsonl")) == described(groups(path))
  _, (prompt,) = convert(tmp_path / "out.jsonl", path, "--to=prompts")
  assert prompt["tools"] == converted["tools"] and len(prompt["messages"]) == 1


def test_a_check_of_a_whole_file_counts_by_kind(tmp_path, capsys):
  tools = simple("Q", "a", reward=1.0)
  tools["responses_create_params"]["tools"] = [{"type": "function", "name": "f"}]
  picture = simple("Q", "a", reward=1.0)
  picture["responses_create_params"]["input"][0]["content"] = [{"type": "input_image"}]
  empty = {**simple("Q", "a"), "responses_create_params": {"input": []}}
  path = write(tmp_path / "in.jsonl", [simple("Q", "a"), tools, empty, picture, empty])
  assert convert_nemo_gym.main([str(path), "--check"]) == 1
  assert capsys.readouterr().out.splitlines() == [
    "2 of 5 rows can be used; 1 of them declare tools",
    "1 without a reward: offline.rewards='environment' computes it",
    f"skipped 3 of 5 rows: 2 with an empty input, 1 with image parts; first: {path}:3: 'input' is"
    " empty",
  ]
  assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]
  code, rows = convert(tmp_path / "out.jsonl", path)
  assert (code, rows) == (1, [])
  assert "in.jsonl:3: 'input' is empty; --on-error=skip leaves" in capsys.readouterr().err
  code, rows = convert(tmp_path / "out.jsonl", path, "--on-error=skip")
  assert (code, len(rows)) == (0, 2)
  assert "skipped 3 of 5 rows: 2 with an empty input" in capsys.readouterr().err


def test_the_file_to_convert_is_not_overwritten(tmp_path):
  path = write(tmp_path / "in.jsonl", [simple("Q", "a")])
  with pytest.raises(SystemExit):
    convert(path, path)
  assert "responses_create_params" in path.read_text()
