"""Rows of recorded attempts → recordings: ranked groups, rewarded responses, rollouts of a run."""

import math

import pytest

from grpo_jax.data import recorded
from grpo_jax.data.formats import PromptStyle, RowError
from grpo_jax.data.groups import from_any
from grpo_jax.data.recorded import RecordedTurn, Style

RANKED = {
  "prompt": "Name a colour.",
  "group": [
    {"response": "blue", "rank": 1},
    {"response": "sky", "rank": 2},
    {"response": "seven", "rank": 3},
  ],
}
ROLLOUT = {
  "step": 3,
  "prompt_id": "t:0:4",
  "prompt": "Q",
  "prompt_ids": [5, 6],
  "completion_ids": [7, 8, 9, 10],
  "loss_mask": [1, 1, 0, 1],
  "behavior_logprobs": [-0.5, -0.25, 0.0, -1.0],
  "reward": None,
  "reward_components": {"format": 1.0, "answer": None},
  "finish_reason": "length",
  "environment": "math",
}


def test_a_ranked_group_keeps_prompt_responses_ranks_and_type():
  row = {**RANKED, "group_type": "colours", "source": "humans"}
  found = recorded.from_ranked(row, "f:1", Style())
  assert found.messages == ({"role": "user", "content": "Name a colour."},)
  assert [r.turns for r in found.responses] == [
    (RecordedTurn("assistant", text),) for text in ("blue", "sky", "seven")
  ]
  assert [r.rank for r in found.responses] == [1, 2, 3]
  assert (found.key, found.group_type) == (None, "colours")
  assert found.info["source"] == "humans" and found.info["problem"] == "Name a colour."


def test_system_prompt_and_template_are_put_around_the_prompt():
  style = Style(PromptStyle(system_prompt="Be brief.", prompt_template="Q: {}"))
  found = recorded.from_ranked(RANKED, "f:1", style)
  assert found.messages == (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q: Name a colour."},
  )


def test_other_names_and_rewards_instead_of_ranks():
  row = {"q": "Hi", "group": [{"a": "x", "score": 0.5}, {"a": "y", "score": 2}]}
  style = Style(input_key="q", output_key="a", reward_key="score")
  found = recorded.from_ranked(row, "f:1", style)
  assert [(r.turns[0].text, r.reward, r.rank) for r in found.responses] == [
    ("x", 0.5, None),
    ("y", 2.0, None),
  ]


def test_a_recorded_response_is_grouped_by_its_input():
  row = {"input": "What is 47 × 23?", "output": "1,081", "reward": 1.0}
  same, other = {**row, "output": "no", "reward": 0}, {**row, "input": "What is 2?"}
  apart = {**row, "group_id": 7}
  keys = [recorded.from_recorded(r, "f:1", Style()).key for r in (row, same, other, apart)]
  assert keys[0] == keys[1] and len({keys[0], keys[2], keys[3]}) == 3
  response = recorded.from_recorded(row, "f:1", Style()).responses[0]
  assert (response.turns, response.reward) == ((RecordedTurn("assistant", "1,081"),), 1.0)


def test_prompts_and_responses_may_be_chats():
  said = [{"role": "assistant", "content": "hit"}, {"role": "user", "content": "16"}]
  row = {
    "input": [{"role": "system", "content": "S"}, {"role": "user", "content": [{"text": "U"}]}],
    "output": [*said, {"role": "assistant", "content": "stand"}],
    "reward": -1,
  }
  found = recorded.from_recorded(row, "f:1", Style())
  assert [m["content"] for m in found.messages] == ["S", "U"]
  assert [t.role for t in found.responses[0].turns] == ["assistant", "user", "assistant"]


def test_a_rollout_of_a_run_keeps_tokens_mask_and_logprobs():
  found = recorded.from_rollouts(ROLLOUT, "f:1", Style())
  (response,) = found.responses
  assert response.turns == (
    RecordedTurn("assistant", "", (7, 8), (-0.5, -0.25)),
    RecordedTurn("environment", "", (9,), None),
    RecordedTurn("assistant", "", (10,), (-1.0,)),
  )
  assert math.isnan(response.reward) and response.is_truncated
  assert response.components["format"] == 1.0 and math.isnan(response.components["answer"])
  assert (found.prompt_ids, found.prompt_text) == ((5, 6), "Q")


def test_formats_are_distinguished_by_their_fields():
  recorded_row = {"input": "a", "output": "b", "reward": 1}
  gym = {
    "responses_create_params": {"input": "a"},
    "output": [{"type": "message", "role": "assistant", "content": [{"text": "b"}]}],
    "reward": 1,
  }
  kinds = [from_any(row, "f:1", Style()) for row in (RANKED, ROLLOUT, recorded_row, gym)]
  assert [len(found.responses) for found in kinds] == [3, 1, 1, 1]
  assert kinds[2].messages == kinds[3].messages
  assert kinds[2].responses == kinds[3].responses


def changed(row, **fields):
  return {k: v for k, v in {**row, **fields}.items() if v != "gone"}


def of_first(**fields):
  return changed(RANKED, group=[changed(RANKED["group"][0], **fields), *RANKED["group"][1:]])


@pytest.mark.parametrize(
  "row, message",
  [
    (changed(RANKED, prompt="gone", promt="x"), r"no key 'prompt' \(did you mean 'promt'\?\)"),
    (changed(RANKED, prompt=""), "empty"),
    (changed(RANKED, prompt=7), "'prompt' must be a string or a list of messages, got a number"),
    (changed(RANKED, group=[]), "'group' must be a list of responses, got an empty list"),
    (changed(RANKED, group="x"), "got a string"),
    (changed(RANKED, group=["x"]), "response 1: must be an object with response and rank"),
    (of_first(rank="gone"), "response 1: no key 'rank' and no 'reward'"),
    (of_first(rank="1"), "response 1: 'rank' must be a number, got a string"),
    (of_first(rank=True), "'rank' must be a number, got a boolean"),
    (of_first(rank=float("inf")), "'rank' must be finite, got inf"),
    (of_first(response="gone"), "response 1: no key 'response'"),
    (of_first(response=None), "'response' must be a string or a list of messages, got null"),
    (of_first(rank="gone", reward=1.0), "need the same: a rank, or a reward"),
    (of_first(logprobs=[0.5]), "logprob above 0: 0.5"),
    (of_first(token_ids=[1, 2], logprobs=[-1.0]), "got 2 token_ids and 1 logprobs"),
    (of_first(token_ids=[1.5]), "'token_ids' must be a list of integers"),
    (changed(RANKED, group_type=3), "'group_type' must be a string, got a number"),
  ],
)
def test_a_broken_group_says_where_and_what(row, message):
  with pytest.raises(RowError, match=message) as error:
    recorded.from_ranked(row, "data.jsonl:12", Style())
  assert str(error.value).startswith("data.jsonl:12: ")


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
  "row, message",
  [
    ({"input": "a", "reward": 1}, "no key 'output'"),
    ({"input": "a", "output": "b", "reward": "1"}, "'reward' must be a number, got a string"),
    ({"input": "a", "output": "b", "reward": math.nan}, "'reward' must be finite, got nan"),
    ({"input": CHAT, "output": "b"}, "'input' ends with the assistant"),
    ({"input": "a", "output": CHAT}, "must begin and end with the assistant"),
    ({"input": "a", "output": CHAT[1:], "logprobs": [-1]}, "as a string, not as messages"),
    ({"input": [{"role": "bot", "content": "a"}], "output": "b"}, "has role 'bot'; there are: "),
    ({"input": [{"role": "user"}], "output": "b"}, "no key 'content'"),
    ({"input": "a", "output": "\ud83d"}, "half a surrogate pair"),
  ],
)
def test_a_broken_response_says_where_and_what(row, message):
  with pytest.raises(RowError, match=message) as error:
    recorded.from_recorded(row, "data.jsonl:3", Style())
  assert str(error.value).startswith("data.jsonl:3: ")


def test_a_rollout_whose_arrays_differ_in_length_is_refused():
  with pytest.raises(RowError, match="differ in length"):
    recorded.from_rollouts({**ROLLOUT, "loss_mask": [1]}, "f:1", Style())


def test_unknown_choices_are_refused():
  with pytest.raises(ValueError, match="reasoning must be one of"):
    Style(reasoning="keep")
