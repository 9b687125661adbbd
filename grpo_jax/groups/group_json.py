"""Groups of rollouts ↔ JSON, bit for bit: how a checkpoint holds groups not yet learned from. Pure.

Arrays are written as base64 of their little-endian bytes: about 18 characters a token. The experts
of a mixture, hundreds of bytes a token, stay bytes, which a checkpoint keeps beside the JSON. Parts
of a prompt that only sampling and scoring need are left out: its messages, its tools, its stop
strings, and its `info`, which may hold anything, except for the expected answer.
"""

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.groups import expert_bytes
from grpo_jax.metrics import attempt_events
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn
from grpo_jax.values.json_numbers import decoded, encoded

# The arrays of a rollout, one number a token, with the form in which they are written.
ARRAYS = {
  "completion_ids": "<i4",
  "loss_mask": "|b1",
  "behavior_logprobs": "<f4",
  "weight_versions": "<i4",
}
# Fields of a rollout that say what happened to it.
EVENTS = ("failure", "close_failure", "hit_turn_limit")


def without_info(group: RolloutGroup) -> RolloutGroup:
  """Returns the group as `decode(encode(group))` returns it."""
  info = _info(group.prompt.expected_answer)
  prompt = dataclasses.replace(group.prompt, info=info, messages=(), tools=(), stop_strings=())
  return dataclasses.replace(group, prompt=prompt)


def encode(group: RolloutGroup) -> dict[str, Any]:
  """Returns the group as strict JSON, but for the bytes of experts.

  NaN and infinity become strings.
  """
  prompt = group.prompt
  return {
    "prompt_id": prompt.prompt_id,
    "token_ids": _packed(prompt.token_ids, "<i4"),
    "environment": prompt.environment,
    "text": prompt.text,
    "where": prompt.where,
    "weight": prompt.weight,
    "dataset": prompt.dataset,
    "is_cut": prompt.is_cut,
    "expected_answer": prompt.expected_answer,
    "rollouts": [_encoded(rollout) for rollout in group.rollouts],
    **({} if group.greedy is None else {"greedy": _encoded(group.greedy)}),
    **_experts("prompt_experts", group.prompt_experts),
  }


def decode(record: Mapping[str, Any]) -> RolloutGroup:
  """Returns the group that `encode` was given, without what `without_info` removes.

  Raises:
    KeyError: A field is missing.
    ValueError: An array is damaged, or the arrays of a rollout differ in length.
  """
  prompt = Prompt(
    prompt_id=record["prompt_id"],
    token_ids=_unpacked(record["token_ids"], "<i4"),
    environment=record["environment"],
    text=record["text"],
    where=record.get("where", ""),  # older checkpoints have none.
    weight=record["weight"],
    dataset=record["dataset"],
    is_cut=record["is_cut"],
    info=_info(record.get("expected_answer")),  # nor this.
  )
  rollouts = tuple(_decoded(rollout) for rollout in record["rollouts"])
  greedy = record.get("greedy")
  experts = _read_experts(record.get("prompt_experts"))
  if experts is not None and len(experts) != len(prompt.token_ids):
    raise ValueError(f"{len(experts)} prompt_experts for {len(prompt.token_ids)} tokens")
  return RolloutGroup(prompt, rollouts, None if greedy is None else _decoded(greedy), experts)


def _info(expected_answer: str | None) -> dict[str, Any]:
  return {} if expected_answer is None else {"expected_answer": expected_answer}


def _encoded(rollout: Rollout) -> dict[str, Any]:
  return {
    **{name: _packed(getattr(rollout, name), dtype) for name, dtype in ARRAYS.items()},
    "finish_reason": rollout.finish_reason.value,
    "reward": encoded(rollout.reward),
    "text": rollout.text,
    "reward_components": {k: encoded(v) for k, v in rollout.reward_components.items()},
    "metrics": {k: encoded(v) for k, v in rollout.metrics.items()},
    "turns": rollout.turns,
    "weight": rollout.weight,
    "turn_log": [
      [turn.sampled_tokens, turn.environment_tokens, encoded(turn.reward)]
      for turn in rollout.turn_log
    ],
    "error": rollout.error,
    **{name: getattr(rollout, name) for name in EVENTS},
    **_experts("experts", rollout.experts),
  }


def _decoded(record: Mapping[str, Any]) -> Rollout:
  values = {k: decoded(v) for k, v in record["metrics"].items()}
  if "failure" in record:
    events = {name: record[name] for name in EVENTS}
  else:  # older checkpoints have them among the metrics.
    values, events = attempt_events.split_events(values)
  return Rollout(
    **{name: _unpacked(record[name], dtype) for name, dtype in ARRAYS.items()},
    finish_reason=FinishReason(record["finish_reason"]),
    reward=decoded(record["reward"]),
    text=record["text"],
    reward_components={k: decoded(v) for k, v in record["reward_components"].items()},
    metrics=values,
    turns=record["turns"],
    weight=record.get("weight", 1.0),  # older checkpoints have none.
    turn_log=tuple(
      Turn(sampled, written, decoded(reward)) for sampled, written, reward in record["turn_log"]
    ),
    error=record["error"],
    experts=_read_experts(record.get("experts")),
    **events,
  )


def _experts(name: str, experts: np.ndarray | None) -> dict[str, Any]:
  """Returns the field of a record of experts; none if there is no record."""
  if experts is None:
    return {}
  dtype = expert_bytes.FORMS[experts.dtype.itemsize]
  values = np.ascontiguousarray(experts, dtype).tobytes()
  return {name: {"shape": list(experts.shape[1:]), "dtype": dtype, "values": values}}


def _read_experts(record: Mapping[str, Any] | None) -> np.ndarray | None:
  """Reads what `_experts` has written."""
  if record is None:
    return None
  layers, chosen = record["shape"]
  return np.frombuffer(record["values"], record["dtype"]).reshape(-1, layers, chosen).copy()


def _packed(values: np.ndarray, dtype: str) -> str:
  return base64.b64encode(np.ascontiguousarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> np.ndarray:
  return np.frombuffer(base64.b64decode(text, validate=True), dtype).copy()
