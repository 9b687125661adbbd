"""The files rollouts/step_NNNNNN.jsonl: one line per rollout, with everything sampled."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.metrics import attempt_events
from grpo_jax.types import Rollout, RolloutGroup
from grpo_jax.values.json_numbers import finite

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"  # what a decoder writes for part of a character.


class TokenTexts:
  """Splits a completion into the texts of its tokens.

  A character may span several tokens; then the first of them has its text, and the rest
  are empty. The texts of all tokens together are the text of the completion.
  """

  def __init__(self, decode: Decode):
    self._decode = decode
    self._known: dict[int, str] = {}

  def __call__(self, token_ids: Iterable[int]) -> list[str]:
    """Returns one string per token."""
    texts: list[str] = []
    parts: list[int] = []  # tokens of an incomplete character.
    for token in token_ids:
      if not parts and REPLACEMENT not in self._text(token):
        texts.append(self._text(token))
        continue
      parts.append(token)
      joint = self._decode(parts)
      if REPLACEMENT not in joint:
        texts += [joint] + [""] * (len(parts) - 1)
        parts = []
      elif len(parts) == 4:  # the longest character has 4 bytes: these are not one.
        texts += map(self._text, parts)
        parts = []
    return texts + [self._text(token) for token in parts]

  def _text(self, token: int) -> str:
    if token not in self._known:
      self._known[token] = self._decode([token])
    return self._known[token]


def rollout_records(
  step: int,
  groups: Sequence[RolloutGroup],
  advantages: Sequence[np.ndarray],
  policy_logprobs: Sequence[Sequence[np.ndarray]] | None,
  texts: TokenTexts | None,
  shaped_rewards: Sequence[np.ndarray] | None = None,
) -> list[dict[str, Any]]:
  """Returns one record per rollout, in order; takes the arguments of `RunLogger.write_rollouts`.

  Raises:
    ValueError: Lengths differ.
  """
  if len(advantages) != len(groups) or len(policy_logprobs or groups) != len(groups):
    raise ValueError(f"expected advantages and logprobs for {len(groups)} groups")
  shaped = shaped_rewards or [group.rewards for group in groups]
  records = []
  for g, group in enumerate(groups):
    if len(advantages[g]) != len(group.rollouts):
      raise ValueError(
        f"group {g}: {len(group.rollouts)} rollouts, {len(advantages[g])} advantages"
      )
    for i, rollout in enumerate(group.rollouts):
      logprobs = policy_logprobs[g][i] if policy_logprobs else None
      place = {"step": step, "group": g, "rollout": i}
      numbers = float(shaped[g][i]), float(advantages[g][i]), group.weight_of(i)
      records.append(place | _record(group, rollout, *numbers, logprobs, texts))
  return records


def drop_rollouts(folder: Path, start_step: int) -> None:
  """Removes the rollout files of steps >= start_step, and partial files."""
  for path in sorted(folder.glob("step_*.jsonl*")):
    found = re.fullmatch(r"step_(\d+)\.jsonl(\.tmp)?", path.name)
    if found and (found[2] or int(found[1]) >= start_step):
      path.unlink()


def json_line(record: Mapping[str, Any]) -> str:
  """Returns the record as one line of strict JSON; NaN is an error."""
  return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _record(
  group: RolloutGroup,
  rollout: Rollout,
  shaped_reward: float,
  advantage: float,
  weight: float,
  policy_logprobs: np.ndarray | None,
  texts: TokenTexts | None,
) -> dict[str, Any]:
  """Returns the record of one rollout, without its place in the step."""
  if policy_logprobs is not None and len(policy_logprobs) != len(rollout.completion_ids):
    raise ValueError(
      f"a completion of {len(rollout.completion_ids)} tokens has {len(policy_logprobs)} logprobs"
    )
  ids = rollout.completion_ids.tolist()
  return {
    "prompt_id": group.prompt.prompt_id,
    "environment": group.prompt.environment,
    "prompt": group.prompt.text,
    "prompt_is_cut": group.prompt.is_cut,
    "expected_answer": group.prompt.expected_answer,
    "completion": rollout.text,
    "reward": finite(rollout.reward),
    "shaped_reward": finite(shaped_reward),
    "reward_components": {k: finite(v) for k, v in rollout.reward_components.items()},
    "metrics": {k: finite(v) for k, v in attempt_events.with_events(rollout).items()},
    "advantage": finite(advantage),
    **({} if weight == 1 else {"loss_multiplier": weight}),
    "finish_reason": rollout.finish_reason.value,
    "turns": rollout.turns,
    "turn_log": [
      {**dataclasses.asdict(turn), "reward": finite(turn.reward)} for turn in rollout.turn_log
    ],
    "error": rollout.error,
    **({"row": group.prompt.where} if rollout.error and group.prompt.where else {}),
    "prompt_ids": group.prompt.token_ids.tolist(),
    "completion_ids": ids,
    "token_texts": texts(ids) if texts else None,
    "loss_mask": rollout.loss_mask.astype(int).tolist(),
    "behavior_logprobs": _short(rollout.behavior_logprobs),
    "policy_logprobs": None if policy_logprobs is None else _short(policy_logprobs),
    "weight_versions": rollout.weight_versions.tolist(),
  }


def _short(values: np.ndarray) -> list[float | None]:
  """Returns float32 values in the fewest digits that round-trip; NaN as None."""
  return [finite(float(str(v))) for v in values.astype(np.float32)]
