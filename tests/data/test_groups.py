"""Files of recorded attempts → groups of rollouts: grouping, tokens, masks, logprobs, rewards."""

import json
import math
import pathlib

import numpy as np
import pytest

from grpo_jax import data
from grpo_jax.data.byte_tokenizer import END, ROLE, ByteTokenizer
from grpo_jax.data.formats import RowError
from grpo_jax.data.groups import RECORDED, group_of
from grpo_jax.data.skipped_rows import OverlongError
from grpo_jax.offline import recorded_groups
from grpo_jax.types import FinishReason

TOKENIZER = ByteTokenizer()
GYM = pathlib.Path(__file__).parent / "nemo_gym"


def write(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def opened(path, *, on_error="stop", max_tokens=None, offline_options=None, **fields):
  return recorded_groups.open_groups(
    TOKENIZER,
    options=recorded_groups.RecordedOptions(**(offline_options or {})),
    on_error=on_error,
    max_tokens=max_tokens,
    path=path,
    **fields,
  )


def groups(path, **settings):
  dataset = opened(path, **settings)
  return [group_of(dataset.prompt(row, epoch=0)) for row in range(len(dataset))]


def responses(*triples):
  return [{"input": i, "output": o, "reward": r} for i, o, r in triples]


RANKED = {
  "prompt": "Q",
  "group": [{"response": "ab", "rank": 1}, {"response": "c", "rank": 2}],
}


def test_rows_of_equal_inputs_are_one_group_wherever_they_are(tmp_path):
  rows = responses(("p", "a", 1.0), ("q", "b", 0.5), ("p", "c", 0.0), ("q", "d", 1.0))
  first, second = groups(write(tmp_path / "f.jsonl", rows))
  assert [r.text for r in first.group.rollouts] == ["a", "c"]
  assert first.group.rewards.tolist() == [1.0, 0.0]
  assert [r.text for r in second.group.rollouts] == ["b", "d"]
  assert (first.group.prompt.prompt_id, second.group.prompt.prompt_id) == ("f:0:0", "f:0:1")
  assert second.group.prompt.where == f"{tmp_path / 'f.jsonl'}:2"
  assert first.group.prompt.environment == RECORDED


def test_a_response_ends_as_the_chat_template_ends_it(tmp_path):
  (item,) = groups(write(tmp_path / "f.jsonl", [RANKED]))
  assert item.group.prompt.text == "<role>user\nQ<end><role>assistant\n"
  first = item.group.rollouts[0]
  assert first.completion_ids.tolist() == [ord("a"), ord("b"), END]
  assert first.loss_mask.tolist() == [True] * 3
  assert (first.finish_reason, first.turns) == (FinishReason.STOP, 1)
  assert item.group.rewards.tolist() == [1.0, 0.0]
  assert item.is_known == (False, False)


def test_what_the_environment_wrote_is_not_learned(tmp_path):
  turns = [("assistant", "hit"), ("user", "16"), ("assistant", "no")]
  chat = [{"role": role, "content": text} for role, text in turns]
  rows = [{"input": "Q", "output": chat, "reward": -1}]
  (rollout,) = groups(write(tmp_path / "f.jsonl", rows))[0].group.rollouts
  written = [ROLE, *b"user\n16", END, ROLE, *b"assistant\n"]
  assert rollout.completion_ids.tolist() == [*b"hit", END, *written, *b"no", END]
  assert rollout.loss_mask.tolist() == [True] * 4 + [False] * len(written) + [True] * 3
  assert rollout.turns == 2


def test_a_real_game_is_a_rollout_of_two_turns():
  items = groups(GYM / "blackjack.jsonl")
  two = items[0].group.rollouts[0]
  said = bytes(i for i, m in zip(two.completion_ids, two.loss_mask, strict=True) if m and i < 256)
  assert said == b"<action>hit</action>" * 2
  assert sorted(r for item in items for r in item.group.rewards) == [-1, -1, 1, 1, 1]


def test_a_truncated_response_has_no_end_and_long_ones_are_cut(tmp_path):
  row = {"input": "Q", "output": "abcdef", "reward": 1}
  path = write(tmp_path / "f.jsonl", [{**row, "finish_reason": "length"}, row])
  cut, whole = groups(path)[0].group.rollouts
  assert cut.completion_ids.tolist() == [*b"abcdef"] and cut.is_truncated
  assert whole.completion_ids.tolist() == [*b"abcdef", END] and not whole.is_truncated
  prompt = len(groups(path)[0].group.prompt.token_ids)
  for short in groups(path, max_tokens=prompt + 4)[0].group.rollouts:
    assert short.completion_ids.tolist() == [*b"abcd"] and short.is_truncated


def test_logprobs_of_the_file_are_aligned_with_the_tokens(tmp_path):
  tokens = {"token_ids": [97, END], "logprobs": [-0.5, -0.25]}
  members = [
    {"response": "a", "rank": 1, **tokens},
    {"response": "a", "rank": 2, "logprobs": [-1.0, -2.0]},  # with the end
    {"response": "a", "rank": 3, "logprobs": [-1.0]},  # and without it.
    {"response": "a", "rank": 4, "token_ids": [97, END]},
  ]
  (item,) = groups(write(tmp_path / "f.jsonl", [{"prompt": "Q", "group": members}]))
  assert item.is_known == (True, True, True, False)
  found = [r.behavior_logprobs.tolist() for r in item.group.rollouts]
  assert found == [[-0.5, -0.25], [-1, -2], [-1], [0, 0]]
  assert [len(r.completion_ids) for r in item.group.rollouts] == [2, 2, 1, 2]


def test_several_criteria_are_components_of_the_reward(tmp_path):
  members = [
    {"response": "a", "ranks": {"style": 1, "truth": 2}},
    {"response": "b", "ranks": {"style": 2, "truth": 1}},
    {"response": "c", "ranks": {"style": 3, "truth": 3}},
  ]
  (item,) = groups(write(tmp_path / "f.jsonl", [{"prompt": "Q", "group": members}]))
  parts = [r.reward_components for r in item.group.rollouts]
  assert parts == [
    {"style": 1.0, "truth": 0.5},
    {"style": 0.5, "truth": 1.0},
    {"style": 0.0, "truth": 0.0},
  ]
  assert item.group.rewards.tolist() == [1.5, 1.5, 0.0]


def test_groups_are_datasets_among_loaders(tmp_path):
  """Mixed, split by groups, and resumed like any other data."""
  first = write(tmp_path / "a.jsonl", [{**RANKED, "prompt": f"a{i}"} for i in range(4)])
  second = responses(*((f"b{i // 2}", str(i), i % 2) for i in range(8)))

  def make(state=None):
    return data.make(
      TOKENIZER,
      datasets=[{"path": first}, {"path": write(tmp_path / "b.jsonl", second)}],
      num_prompts_per_dataloader=1,
      state=state,
      opener=lambda tokenizer, **fields: recorded_groups.open_groups(
        tokenizer, options=recorded_groups.RecordedOptions(), on_error="stop", **fields
      ),
    )

  stream = make()
  taken = stream.take(2)
  assert [p.dataset for p in taken] == ["a", "b"]
  assert [len(group_of(p).group.rollouts) for p in taken] == [2, 2]
  state = json.loads(json.dumps(stream.state()))
  assert [p.prompt_id for p in stream.take(4)] == [p.prompt_id for p in make(state).take(4)]


def test_a_split_is_of_groups_not_of_rows(tmp_path):
  path = write(tmp_path / "f.jsonl", responses(*((f"p{i // 3}", str(i), i % 3) for i in range(12))))
  sides = {
    side: {
      group_of(dataset.prompt(row, epoch=0)).number
      for dataset in [opened(path, split_validation_size=1, side=side)]
      for row in range(len(dataset))
    }
    for side in ("train", "validation")
  }
  assert len(sides["train"]) == 3 and len(sides["validation"]) == 1
  assert not sides["train"] & sides["validation"]


def test_json_files_of_groups_are_read(tmp_path):
  """The guides' train.json: one list of groups."""
  path = tmp_path / "train.json"
  path.write_text(json.dumps([RANKED, {**RANKED, "prompt": "R"}]))
  assert len(groups(path)) == 2


@pytest.mark.parametrize(
  "rows, message",
  [
    (responses(("p", "a", 1)) + [{"input": "p", "output": "b"}], r"f\.jsonl:2: no key 'reward'"),
    (
      responses(("p", "a", 1)) + [{"input": "p", "answer": "b", "reward": 1}],
      r"f\.jsonl:2: no key 'output'.*data\.output_key names .*: set it to 'answer'",
    ),
    (responses(("p", "a", 1)) + [RANKED], r"f\.jsonl:2: a whole group in one row"),
    ([RANKED, *responses(("p", "a", 1))], r"f\.jsonl:2: a single response, among rows that are"),
    ([{**RANKED, "group": [{"response": "a", "rank": 1, "token_ids": [999]}]}], "outside the voc"),
    ([{**RANKED, "group": [{"response": "a", "rank": 1, "logprobs": [-1] * 9}]}], "9 logprobs for"),
  ],
)
def test_a_broken_row_is_named_by_its_place(tmp_path, rows, message):
  with pytest.raises(RowError, match=message):
    groups(write(tmp_path / "f.jsonl", rows))


def test_broken_rows_can_be_left_out_of_their_groups(tmp_path, caplog):
  rows = responses(("p", "a", 1), ("p", "b", 0), ("q", "c", 0))
  del rows[1]["output"]
  first, second = groups(write(tmp_path / "f.jsonl", rows), on_error="skip")
  assert [r.text for r in first.group.rollouts] == ["a"] and "f.jsonl:2" in caplog.text
  with pytest.raises(ValueError, match="no row of 'g' can be used: skipped 1 of 1 rows: 1 without"):
    groups(write(tmp_path / "g.jsonl", [{"a": 1}]), on_error="skip")


def test_skipped_rows_are_counted_by_kind_in_one_line(tmp_path, caplog):
  picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
  rows = [
    *responses(("p", "a", 1), ("", "b", 0), (picture, "b", 0), ([], "b", 0), ("p", "b", 0)),
    {"input": "p", "output": "no reward"},
  ]
  path = write(tmp_path / "f.jsonl", rows)
  (item,) = groups(path, on_error="skip")
  assert [rollout.text for rollout in item.group.rollouts] == ["a", "b"]
  counts = "2 with an empty input, 1 with image parts, 1 without a reward"
  (record,) = caplog.records
  expected = f"data: skipped 4 of 6 rows: {counts}; first: {path}:2: 'input' is empty"
  assert record.getMessage() == expected
  with pytest.raises(RowError, match=r"f.jsonl:2: 'input' is empty; data.on_error='skip' leaves"):
    groups(path)


def test_rows_without_rewards_wait_for_an_environment(tmp_path):
  path = write(tmp_path / "f.jsonl", [{"input": "p", "output": "a", "expected_answer": "a"}])
  (item,) = groups(path, offline_options={"rewards": "environment"}, environment="math")
  assert math.isnan(item.group.rewards[0])
  assert item.group.prompt.environment == "math"
  assert item.group.prompt.info["expected_answer"] == "a"


def test_responses_of_one_group_have_the_same_ranks(tmp_path):
  rows = [{"input": "p", "output": o, "rank": 1} for o in "ab"] + responses(("p", "c", 0.5))
  path = write(tmp_path / "f.jsonl", rows)
  with pytest.raises(RowError, match=r"f\.jsonl:1: all responses of a group need the same ranks"):
    groups(path)
  rows = [{"input": "p", "output": "a", "ranks": {name: 1}} for name in ("style", "truth")]
  with pytest.raises(RowError, match="need the same ranks"):
    groups(write(path, rows))


ROLLOUT = {
  "prompt_id": "x:0:1",
  "prompt_ids": [1, 2],
  "completion_ids": [3, 4],
  "loss_mask": [1, 1],
  "behavior_logprobs": [-1.0, -2.0],
  "reward": 1.0,
}


def test_rollouts_that_failed_have_no_reward_and_may_have_no_tokens(tmp_path):
  nothing = {"completion_ids": [], "loss_mask": [], "behavior_logprobs": [], "reward": None}
  rows = [ROLLOUT, {**ROLLOUT, **nothing, "reward_components": {"style": None}}]
  (item,) = groups(write(tmp_path / "f.jsonl", rows))
  failed = item.group.rollouts[1]
  assert len(failed.completion_ids) == 0 and math.isnan(failed.reward)
  assert math.isnan(failed.reward_components["style"])
  with pytest.raises(RowError, match=r"f\.jsonl:1: no key 'rewrd'"):
    groups(tmp_path / "f.jsonl", offline_options={"reward_key": "rewrd"})
  with pytest.raises(RowError, match="'reward_components' must be an object of numbers"):
    groups(write(tmp_path / "g.jsonl", [{**ROLLOUT, "reward_components": ["style"]}]))
  with pytest.raises(RowError, match="token id 1099511627776 is outside the vocabulary"):
    groups(write(tmp_path / "g.jsonl", [{**ROLLOUT, "prompt_ids": [1 << 40]}]))


def test_tasks_by_name_are_refused_where_nothing_is_asked(tmp_path):
  with pytest.raises(ValueError, match="data.tasks is for online training"):
    opened(write(tmp_path / "f.jsonl", [RANKED]), tasks={"sums": {"environment": "own"}})


def test_long_prompts_are_cut_or_dropped(tmp_path):
  path = write(tmp_path / "f.jsonl", [{**RANKED, "prompt": "x" * 50}])
  (item,) = groups(path, max_prompt_tokens=20, overlong="zero_weight")
  prompt = item.group.prompt
  assert (len(prompt.token_ids), prompt.weight, prompt.is_cut) == (20, 0.0, True)
  assert prompt.text == TOKENIZER.decode(prompt.token_ids, skip_special=False)
  with pytest.raises(RowError, match="more than 20"):
    groups(path, max_prompt_tokens=20, overlong="drop")


def test_a_group_and_each_of_its_responses_can_be_weighed(tmp_path):
  members = [{**RANKED["group"][0], "loss_multiplier": 2}, *RANKED["group"][1:]]
  row = {**RANKED, "group": members, "loss_multiplier": 0.5}
  (item,) = groups(write(tmp_path / "f.jsonl", [row]))
  weights = [item.group.weight_of(r) for r in range(len(members))]
  assert weights == [1.0, *[0.5] * (len(members) - 1)]


def test_each_row_of_a_group_has_its_own_weight(tmp_path):
  rows = responses(("p", "a", 1), ("p", "b", 0), ("p", "c", 0))
  rows[0]["loss_multiplier"], rows[2]["loss_multiplier"] = 0, 0.25
  (item,) = groups(write(tmp_path / "f.jsonl", rows))
  assert [item.group.weight_of(r) for r in range(3)] == [0.0, 1.0, 0.25]
  for wrong in (-1, "1", True):
    rows[1]["loss_multiplier"] = wrong
    with pytest.raises(RowError, match=r"f.jsonl:2: 'loss_multiplier' must be a number from 0"):
      groups(write(tmp_path / "f.jsonl", rows))


def test_a_file_of_many_groups_keeps_numbers_only(tmp_path):
  rows = responses(*((f"p{i % 500}", f"a{i}", i % 2) for i in range(2000)))
  dataset = opened(write(tmp_path / "f.jsonl", rows))
  assert len(dataset) == 500
  assert dataset.members.of(7) == [7, 507, 1007, 1507]
  assert np.array_equal(np.sort(dataset.members.rows), np.arange(2000))


LONG = 3_000_000  # characters.


@pytest.mark.parametrize("logprobs", [None, [-1.0] * 4])
def test_what_is_recorded_at_great_length_is_cut_before_it_is_encoded(
  logprobs, tmp_path, monkeypatch
):
  encoded = []
  encode = ByteTokenizer.encode
  monkeypatch.setattr(ByteTokenizer, "encode", lambda t, s: encoded.append(len(s)) or encode(t, s))
  extra = {} if logprobs is None else {"logprobs": logprobs}
  chat = [
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "b" * LONG},
    {"role": "assistant", "content": "c" * LONG},
  ]
  rows = [
    {"input": "p", "output": "a" * LONG, "reward": 1.0, **extra},
    {"input": "p", "output": chat, "reward": 0.0},
  ]
  path = write(tmp_path / "f.jsonl", rows)
  if logprobs is not None:
    with pytest.raises(RowError, match="4 logprobs for a response"):
      groups(path, max_tokens=64)
    assert sum(encoded) < 10_000
    return
  (item,) = groups(path, max_tokens=64)
  room = 64 - len(item.group.prompt.token_ids)
  for rollout in item.group.rollouts:
    assert (len(rollout.completion_ids), rollout.finish_reason) == (room, FinishReason.LENGTH)
  assert sum(encoded) < 10_000


def test_groups_whose_prompts_have_too_many_characters_keep_none_of_them(tmp_path):
  rows = responses(("x" * LONG, "a", 1.0), ("q", "b", 0.5), ("x" * LONG, "c", 0.0))
  path = write(tmp_path / "f.jsonl", rows)
  dataset = opened(path, max_prompt_tokens=20, overlong="zero_weight")
  assert len(dataset) == 2
  prompt = dataset.prompt(0, epoch=0)
  assert (len(prompt.token_ids), prompt.weight, prompt.is_cut) == (20, 0.0, True)
  assert len(group_of(prompt).group.rollouts) == 2
  assert len(prompt.text) <= 120
  dropping = opened(path, max_prompt_tokens=20, overlong="drop")
  with pytest.raises(OverlongError, match=r"f.jsonl:1: \d+ characters, where 20 tokens"):
    dropping.prompt(0, epoch=0)


def test_a_prompt_holds_its_group_in_a_field_of_its_own_and_keeps_what_environments_need(tmp_path):
  row = {"input": "p", "output": "a", "reward": 1.0, "expected_answer": "7"}
  prompt = opened(write(tmp_path / "f.jsonl", [row])).prompt(0, epoch=0)
  assert prompt.info["expected_answer"] == "7"  # an environment that scores responses reads it.
  assert prompt.recorded is group_of(prompt) and prompt.recorded.group.prompt.recorded is None
  with pytest.raises(ValueError, match="has no recorded attempts"):
    group_of(prompt.recorded.group.prompt)
