"""Groups of rollouts ↔ bytes, bit for bit: how the processes of a run exchange what they sampled.

All processes have the prompts, so only the attempts are written: arrays of all attempts one after
another, and JSON for what is neither a number of a token nor a float. Masks and weight versions
are written as runs, because they are equal over many tokens. About 8 bytes a token and the text,
and of a mixture of experts a byte for each choice. Pure.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grpo_jax.groups import expert_bytes
from grpo_jax.groups.group_json import ARRAYS, EVENTS
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn

_RUNS = ("loss_mask", "weight_versions")
_PLAIN = tuple(name for name in ARRAYS if name not in _RUNS)
# Fields of a prompt that sampling may change: an agent's attempts may begin otherwise.
_CHANGING = ("token_ids", "text", "is_cut")
_NAMED = ("text", "turns", "error", "weight", *EVENTS)
_MAGIC = b"groups1\n"


def encode(groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> bytes:
  """Returns the attempts of groups as bytes, for processes that have the prompts.

  Args:
    groups: Groups, one for each prompt.
    prompts: Prompts as they were attempted.

  Raises:
    ValueError: There is not one group for each prompt, or a group has another prompt.
  """
  described = [_prompt(group, asked) for group, asked in zip(groups, prompts, strict=True)]
  rollouts = [rollout for group in groups for rollout in _members(group)]
  found = {name: _joined(rollouts, name) for name in ARRAYS}
  changed = [group.prompt.token_ids for group, own in zip(groups, described, strict=True) if own]
  blocks = {name: found[name] for name in _PLAIN}
  for name in _RUNS:
    blocks[f"{name} values"], blocks[f"{name} counts"] = _runs(found[name])
  of_prompts = [group.prompt_experts for group in groups]
  blocks["experts"], experts = expert_bytes.joined(
    [*of_prompts, *(each.experts for each in rollouts)]
  )
  blocks["lengths"] = np.asarray([len(each.completion_ids) for each in rollouts], "<i8")
  blocks["floats"] = np.asarray([number for each in rollouts for number in _floats(each)], "<f8")
  blocks["prompt ids"] = np.concatenate([np.zeros(0, "<i4"), *changed]).astype("<i4")
  rest = {
    "blocks": [[name, array.dtype.str, len(array)] for name, array in blocks.items()],
    "groups": [
      [len(group.rollouts), group.greedy is not None, own]
      for group, own in zip(groups, described, strict=True)
    ],
    "rollouts": [_rest(each) for each in rollouts],
    "experts": experts,
  }
  # A text may hold lone surrogates, also two that ASCII would join.
  header = json.dumps(rest, ensure_ascii=False).encode("utf-8", "surrogatepass")
  arrays = [np.ascontiguousarray(array).tobytes() for array in blocks.values()]
  return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *arrays])


def decode(data: bytes | bytearray, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
  """Returns the groups that `encode` was given.

  Args:
    data: Result of `encode`.
    prompts: The prompts that `encode` was given.

  Raises:
    ValueError: The bytes are damaged, or are of another number of prompts.
  """
  try:
    return _decoded(memoryview(data), prompts)
  except (KeyError, TypeError, IndexError, StopIteration, RuntimeError) as error:
    raise ValueError(f"damaged bytes of groups: {type(error).__name__}: {error}") from error


def _decoded(data: memoryview, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
  rest, blocks = _read(data)
  if len(rest["groups"]) != len(prompts):
    raise ValueError(f"{len(rest['groups'])} groups for {len(prompts)} prompts")
  lengths = blocks["lengths"]
  if len(lengths) != len(rest["rollouts"]) or (lengths < 0).any():
    raise ValueError(f"{len(lengths)} lengths for {len(rest['rollouts'])} rollouts")
  arrays = {name: blocks[name] for name in _PLAIN}
  for name in _RUNS:
    arrays[name] = np.repeat(blocks[f"{name} values"], blocks[f"{name} counts"])
  for name, array in arrays.items():
    if len(array) != lengths.sum():
      raise ValueError(f"{len(array)} {name} for {lengths.sum()} tokens")
  ends = np.cumsum(lengths)
  experts = iter(expert_bytes.split(blocks["experts"], rest["experts"]))
  of_prompts = [next(experts) for _ in prompts]
  floats = iter(blocks["floats"].tolist())
  made = iter(
    [
      _rollout(
        own,
        {name: array[end - n : end].copy() for name, array in arrays.items()},
        floats,
        next(experts),
      )
      for own, n, end in zip(rest["rollouts"], lengths.tolist(), ends.tolist(), strict=True)
    ]
  )
  ids, groups = iter(blocks["prompt ids"]), []
  described = zip(rest["groups"], prompts, of_prompts, strict=True)
  for (count, has_greedy, changed), asked, of_prompt in described:
    prompt = asked if changed is None else _changed(asked, changed, ids)
    if of_prompt is not None and len(of_prompt) != len(prompt.token_ids):
      raise ValueError(
        f"experts of {len(of_prompt)} tokens for {len(prompt.token_ids)} of a prompt"
      )
    attempts = tuple(next(made) for _ in range(count))
    groups.append(RolloutGroup(prompt, attempts, next(made) if has_greedy else None, of_prompt))
  left_over = {"rollouts": made, "floats": floats, "prompt ids": ids, "experts": experts}
  for name, left in left_over.items():
    if next(left, left) is not left:
      raise ValueError(f"there are {name} that no group has")
  return groups


def _read(data: memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Returns the JSON and the arrays."""
  start = len(_MAGIC) + 8
  if bytes(data[: len(_MAGIC)]) != _MAGIC or len(data) < start:
    raise ValueError(f"these {len(data)} bytes are not groups")
  at = start + int.from_bytes(data[len(_MAGIC) : start], "little")
  rest = json.loads(bytes(data[start:at]).decode("utf-8", "surrogatepass"))
  blocks: dict[str, np.ndarray] = {}
  for name, dtype, count in rest["blocks"]:
    end = at + count * np.dtype(dtype).itemsize
    if count < 0 or end > len(data):
      raise ValueError(f"array {name} must end by byte {len(data)}, but ends at byte {end}")
    blocks[name] = np.frombuffer(data[at:end], dtype)
    at = end
  if at != len(data):
    raise ValueError(f"{len(data) - at} bytes follow the last array")
  return rest, blocks


def _prompt(group: RolloutGroup, asked: Prompt) -> dict[str, Any] | None:
  """Returns what sampling has changed of a group's prompt; None if nothing.

  Raises:
    ValueError: The group is of another prompt.
  """
  own = group.prompt
  if own is asked:
    return None
  fields = [field.name for field in dataclasses.fields(Prompt) if field.name not in _CHANGING]
  pairs = [(name, getattr(own, name), getattr(asked, name)) for name in fields]
  others = [name for name, one, other in pairs if one is not other and one != other]
  if others:
    raise ValueError(f"the group of prompt {asked.prompt_id} has {others[0]} of another prompt")
  return {"tokens": len(own.token_ids), "text": own.text, "is_cut": own.is_cut}


def _changed(asked: Prompt, changed: dict[str, Any], ids: Iterator[Any]) -> Prompt:
  """Returns a prompt with the fields that sampling may change."""
  token_ids = np.asarray([next(ids) for _ in range(changed["tokens"])], np.int32)
  text, is_cut = changed["text"], changed["is_cut"]
  return dataclasses.replace(asked, token_ids=token_ids, text=text, is_cut=is_cut)


def _members(group: RolloutGroup) -> tuple[Rollout, ...]:
  return group.rollouts if group.greedy is None else (*group.rollouts, group.greedy)


def _joined(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
  """Returns the arrays of all rollouts, one after another."""
  arrays = [getattr(each, name) for each in rollouts]
  return np.concatenate([np.zeros(0, ARRAYS[name]), *arrays]).astype(ARRAYS[name], copy=False)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values of runs of equal values, and their lengths."""
  begins = np.ones(len(values), bool)
  begins[1:] = values[1:] != values[:-1]
  first = np.flatnonzero(begins)
  return values[first], np.diff(np.append(first, len(values))).astype("<i8")


def _floats(rollout: Rollout) -> Iterator[float]:
  """Yields the floats of a rollout in the order in which `_rollout` reads them."""
  yield rollout.reward
  yield from rollout.reward_components.values()
  yield from rollout.metrics.values()
  yield from (turn.reward for turn in rollout.turn_log)


def _rest(rollout: Rollout) -> dict[str, Any]:
  """Returns all of a rollout but its floats and its arrays."""
  return {
    **{name: getattr(rollout, name) for name in _NAMED},
    "finish_reason": rollout.finish_reason.value,
    "reward_components": list(rollout.reward_components),
    "metrics": list(rollout.metrics),
    "turn_log": [[turn.sampled_tokens, turn.environment_tokens] for turn in rollout.turn_log],
  }


def _rollout(
  rest: dict[str, Any],
  arrays: dict[str, np.ndarray],
  floats: Iterator[float],
  experts: expert_bytes.Record,
) -> Rollout:
  return Rollout(
    **arrays,
    experts=experts,
    **{name: rest[name] for name in _NAMED},
    finish_reason=FinishReason(rest["finish_reason"]),
    reward=next(floats),
    reward_components={name: next(floats) for name in rest["reward_components"]},
    metrics={name: next(floats) for name in rest["metrics"]},
    turn_log=tuple(Turn(sampled, written, next(floats)) for sampled, written in rest["turn_log"]),
  )
