"""Groups as bytes: what one process sends is what the others read, bit for bit."""

import dataclasses
import json
import math
import struct

import numpy as np
import pytest

from grpo_jax.groups import group_bytes, group_json
from grpo_jax.run_folder import attached_bytes
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn

ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_DEAD_BEEF))[0]
FLOATS = (0.1, -0.0, math.inf, -math.inf, math.nan, ODD_NAN, 5e-324)
TEXTS = ("", "é\n\x00", "\ud83d\ude00", "\U0001f600", "lone \udc80 half \ud800")


def prompt(number: int, **fields) -> Prompt:
  ids = np.asarray([number, 7, 7], np.int32)
  info = {"expected_answer": object()}  # anything: it is not sent.
  return Prompt(f"set:{number}", ids, "env", info, text="asked", weight=0.5, **fields)


def rollout(rng, length: int, number: int = 0) -> Rollout:
  mask = rng.random(length) < 0.7
  logprobs = np.where(mask, -rng.random(length), -0.0).astype(np.float32)
  if length:
    hidden = np.flatnonzero(~mask)
    logprobs.view(np.uint32)[hidden] = 0x7FC0_BEEF  # not a number, with a payload.
  text = TEXTS[number % len(TEXTS)]
  return Rollout(
    completion_ids=rng.integers(0, 2**31 - 1, length).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=logprobs,
    weight_versions=np.where(mask, rng.integers(0, 3, length), -1).astype(np.int32),
    finish_reason=list(FinishReason)[number % 4],
    reward=FLOATS[number % len(FLOATS)],
    text=text,
    reward_components={f"{text}{i}": FLOATS[i] for i in range(number % 8)},
    metrics={"z": ODD_NAN, "a": -0.0},
    turns=number + 1,
    turn_log=tuple(Turn(i, 2 * i, FLOATS[i]) for i in range(number % 4)),
    error=f"timeout: {text}" if number % 3 == 0 else "",
    failure="timeout" if number % 3 == 0 else "",
    close_failure="died" if number % 3 == 1 else "",
    hit_turn_limit=number % 2 == 1,
  )


def with_experts(group: RolloutGroup, rng, dtype: str) -> RolloutGroup:
  """Returns the group with experts of its prompt and of every second attempt, as they are known."""
  record = lambda tokens: rng.integers(-1, 127, (tokens, 3, 2)).astype(dtype)
  rollouts = [
    dataclasses.replace(each, experts=record(len(each.completion_ids)) if i % 2 else None)
    for i, each in enumerate(group.rollouts)
  ]
  of_prompt = record(len(group.prompt.token_ids))
  return dataclasses.replace(group, rollouts=tuple(rollouts), prompt_experts=of_prompt)


def made(count: int = 9, experts: str = ""):
  """Returns groups and the prompts that were asked; with a dtype of experts some have them."""
  rng = np.random.default_rng(0)
  prompts = [prompt(i) for i in range(count)]
  groups = []
  for i, asked in enumerate(prompts):
    own = asked
    if i % 4 == 1:  # an agent's attempts begin with other tokens.
      ids = rng.integers(0, 9, i).astype(np.int32)
      own = dataclasses.replace(asked, token_ids=ids, text=TEXTS[i % 5], is_cut=i % 2 == 0)
    attempts = tuple(rollout(rng, int(n), i + j) for j, n in enumerate(rng.integers(0, 6, i % 5)))
    group = RolloutGroup(own, attempts, rollout(rng, 3, i) if i % 3 == 2 else None)
    groups.append(with_experts(group, rng, experts) if experts and i % 3 else group)
  return groups, prompts


def bits(value):
  """Returns a value so that == compares its bits."""
  if isinstance(value, np.ndarray):
    return value.dtype.str, value.shape, value.tobytes()
  if isinstance(value, float):
    return struct.pack("<d", value)
  if dataclasses.is_dataclass(value):
    return {each.name: bits(getattr(value, each.name)) for each in dataclasses.fields(value)}
  if isinstance(value, dict):
    return [(name, bits(each)) for name, each in value.items()]
  if isinstance(value, tuple | list):
    return [bits(each) for each in value]
  return value


@pytest.mark.parametrize("experts", ["", "int8", "int16"])
def test_groups_come_back_bit_for_bit(experts):
  groups, prompts = made(experts=experts)
  back = group_bytes.decode(group_bytes.encode(groups, prompts), prompts)
  assert bits(back) == bits(groups)
  assert group_bytes.decode(group_bytes.encode([], []), []) == []
  back[2].greedy.completion_ids[0] = 1  # its own memory, which can be written.


def test_the_prompt_of_a_group_is_the_one_that_was_sampled():
  groups, prompts = made()
  back = group_bytes.decode(group_bytes.encode(groups, prompts), prompts)
  assert back[0].prompt is prompts[0]
  assert back[5].prompt.info is prompts[5].info
  assert back[5].prompt.token_ids.tolist() == groups[5].prompt.token_ids.tolist() != [5, 7, 7]


@pytest.mark.parametrize("change", [{"weight": 1.0}, {"prompt_id": "other"}, {"info": {}}])
def test_the_group_of_another_prompt_is_refused(change):
  groups, prompts = made(1)
  other = dataclasses.replace(prompts[0], **change)
  with pytest.raises(ValueError, match=f"{next(iter(change))} of another prompt"):
    group_bytes.encode([dataclasses.replace(groups[0], prompt=other)], prompts)


@pytest.mark.parametrize("experts", ["", "int8"])
def test_damaged_bytes_are_refused(experts):
  groups, prompts = made(6 if not experts else 3, experts=experts)
  data = group_bytes.encode(groups, prompts)
  for length in range(len(data)):
    with pytest.raises(ValueError):
      group_bytes.decode(data[:length], prompts)
  for wrong in (data + b"\0", prompts[:-1], [*prompts, prompts[0]]):
    with pytest.raises(ValueError):
      group_bytes.decode(*((wrong, prompts) if isinstance(wrong, bytes) else (data, wrong)))


def test_a_token_takes_eight_bytes():
  rng = np.random.default_rng(0)
  plain = dataclasses.replace(
    rollout(rng, 0),
    completion_ids=np.arange(1000, dtype=np.int32),
    loss_mask=np.ones(1000, bool),
    behavior_logprobs=-np.ones(1000, np.float32),
    weight_versions=np.ones(1000, np.int32),
  )
  asked = prompt(0)
  data = group_bytes.encode([RolloutGroup(asked, (plain,) * 8)], [asked])
  assert len(data) < 8 * 8000 + 8 * 500


def stored(group: RolloutGroup):
  """Returns a group's record as a checkpoint holds it: JSON, and bytes beside it."""
  record, data = attached_bytes.taken_out(group_json.encode(group))
  return attached_bytes.put_back(json.loads(json.dumps(record)), data)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_a_checkpoint_holds_the_experts_bit_for_bit(dtype):
  groups, _ = made(experts=dtype)
  for group in (groups[2], groups[5], groups[0]):
    back = group_json.decode(stored(group))
    assert bits(back.prompt_experts) == bits(group.prompt_experts)
    assert [bits(r.experts) for r in back.rollouts] == [bits(r.experts) for r in group.rollouts]
  sent = stored(groups[2])
  sent["prompt_experts"]["shape"] = [3, 1]
  with pytest.raises(ValueError, match="6 prompt_experts for 3 tokens"):
    group_json.decode(sent)


def test_experts_of_two_models_are_refused():
  groups, prompts = made(6, experts="int8")
  groups[2] = with_experts(groups[2], np.random.default_rng(0), "int16")
  with pytest.raises(ValueError, match="experts of several models"):
    group_bytes.encode(groups, prompts)
