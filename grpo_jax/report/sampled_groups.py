"""The sampled groups that a report shows: some of each step, cut to a size that a page can have."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_jax.report.run_data import RunData
from grpo_jax.run_folder import console
from grpo_jax.values import json_text

MAX_BYTES = 3_000_000  # size of all sampled groups together.
MAX_EVALUATION_BYTES = 1_000_000  # size of the groups of evaluations, where there are others.
MAX_STEPS = 24  # number of steps whose groups are shown.
MAX_GROUPS = 6  # per step.
MAX_ROLLOUTS = 8  # per group.
MAX_TOKENS = 500  # per completion.
MAX_PROMPT = 4000  # characters.
MAX_LABEL = 200  # characters of an identifier, of the name of a reward, ...
MAX_COMPONENTS = 30  # of a reward.
MAX_SCAN = 8_000_000  # characters of a file that are read to find groups to show.


def samples(run: RunData) -> tuple[list[dict[str, Any]], str]:
  """Returns the groups that the page shows, by step, and a note on what was left out.

  Steps are spread over the run, and a file is read only as far as it is shown. If the size
  limit is exceeded, steps in between are left out first. Evaluations follow the steps; they have
  the name of their set and a size limit of their own.
  """
  steps = [({"step": step}, path) for step, path in run.rollouts.items()]
  evaluated = [({"step": step, "set": name}, path) for name, step, path in run.evaluations]
  if steps and evaluated:
    limits = (MAX_BYTES - MAX_EVALUATION_BYTES, MAX_EVALUATION_BYTES)
  else:
    limits = (MAX_BYTES, MAX_BYTES)
  found, unreadable = _shown_groups(steps, limits[0])
  of_evaluations, more_unreadable = _shown_groups(evaluated, limits[1])
  unreadable += more_unreadable
  if not found and not of_evaluations:
    return [], "No sampled groups were recorded." if not unreadable else "No group was readable."
  parts = [f"{len(found)} of {len(steps)} recorded steps"] if steps else []
  parts += [f"{len(of_evaluations)} of {len(evaluated)} evaluations"] if evaluated else []
  names = ["rollouts/"] * bool(steps) + ["evaluations/"] * bool(evaluated)
  folders = f"the folder{'s' * (len(names) > 1)} {' and '.join(names)}"
  note = (
    f"{', '.join(parts)}, at most {MAX_GROUPS} groups per step,"
    f" {MAX_ROLLOUTS} completions per group, {MAX_TOKENS} tokens per completion;"
    f" all of them are in {folders} of the run."
  )
  return [*found, *of_evaluations], note + (
    f" {unreadable} lines could not be read." if unreadable else ""
  )


def _shown_groups(
  files: Sequence[tuple[dict[str, Any], Path]], max_bytes: int
) -> tuple[list[dict[str, Any]], int]:
  """Returns what is shown of some files, in their order, and how many lines are broken."""
  found: dict[int, dict[str, Any]] = {}
  size = unreadable = 0
  for place in _spread(list(range(len(files))), MAX_STEPS):
    facts, path = files[place]
    groups, broken = _read_groups(path)
    unreadable += broken
    sizes = size + np.cumsum([len(json.dumps(group)) for group in groups])
    fitting = [group for group, total in zip(groups, sizes, strict=True) if total <= max_bytes]
    if fitting:
      found[place] = {**facts, "groups": fitting}
      size = int(sizes[len(fitting) - 1])
    if len(fitting) < len(groups):
      break
  return [found[place] for place in sorted(found)], unreadable


def _spread(steps: Sequence[int], count: int) -> list[int]:
  """Returns at most `count` of the steps: last, first, then ever finer in between."""
  places = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
  order, parts = [], 1
  while len(order) < len(places):
    for i in range(parts, -1, -1):
      place = int(places[round(i * (len(places) - 1) / parts)])
      if place not in order:
        order.append(place)
    parts *= 2
  return [steps[place] for place in order]


def _read_groups(path: Path) -> tuple[list[dict[str, Any]], int]:
  """Returns some groups of a rollout file as the page shows them, and the number of broken lines.

  Groups with logprobs of the trainer come first, since those were learned from.
  """
  groups: dict[int, dict[str, Any]] = {}
  broken = size = 0
  with open(path, encoding="utf-8", errors="replace") as file:
    for line in file:
      size += len(line)
      try:
        record = json_text.parsed_object(line, is_strict=True)
        number = record["group"]
        if number not in groups and _are_enough(groups.values(), size):
          break
        group = groups.setdefault(number, _group(record))
        group["size"] += 1
        if len(group["rollouts"]) < MAX_ROLLOUTS:
          group["rollouts"].append(_rollout(record))
      except json_text.UNEXPECTED:
        broken += 1
  shown = [group for group in groups.values() if group["rollouts"]]
  return sorted(shown, key=lambda group: not _is_compared(group))[:MAX_GROUPS], broken


def _are_enough(groups: Collection[dict[str, Any]], size: int) -> bool:
  """Returns whether reading stops after these groups and `size` characters of a file."""
  compared = sum(map(_is_compared, groups))
  return compared >= MAX_GROUPS or (len(groups) >= MAX_GROUPS and size > MAX_SCAN)


def _is_compared(group: Mapping[str, Any]) -> bool:
  """Returns whether a token of the group has a logprob of the trainer as well as the engine's."""
  return any(rollout["delta"] is not None for rollout in group["rollouts"])


def _group(record: Mapping[str, Any]) -> dict[str, Any]:
  expected = record.get("expected_answer")  # missing in older files.
  return {
    "id": console.shorten(record["prompt_id"], MAX_LABEL),
    "environment": console.shorten(record["environment"], MAX_LABEL),
    "prompt": console.shorten(record["prompt"], MAX_PROMPT) + console.cut_mark(record),
    "expected": None if expected is None else console.shorten(str(expected), MAX_PROMPT),
    "size": 0,
    "rollouts": [],
  }


def _rollout(record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns one completion, cut to MAX_TOKENS; in one piece if token texts are missing."""
  texts = record["token_texts"]
  length = len(record["completion_ids"])
  versions = [
    v for v, kept in zip(record["weight_versions"], record["loss_mask"], strict=True) if kept
  ]
  shown: dict[str, Any] = {
    "index": record["rollout"],
    "reward": record["reward"],
    "advantage": record["advantage"],
    "finish": record["finish_reason"],
    "turns": record["turns"],
    "error": console.shorten(record.get("error") or "", 5 * MAX_LABEL),
    "components": _components(record["reward_components"]),
    "length": length,
    "omitted": 0,
    "sampled": console.sampled_from(versions),
    "texts": [console.shorten(record["completion"], 5 * MAX_TOKENS)],
    "engine": None,
    "delta": None,
    "mask": None,
  }
  if texts is None:
    return shown
  engine, policy = record["behavior_logprobs"][:MAX_TOKENS], record["policy_logprobs"]
  mask = record["loss_mask"][:MAX_TOKENS]
  shown |= {
    "texts": [console.shorten(text, MAX_LABEL) for text in texts[:MAX_TOKENS]],
    "omitted": max(0, length - MAX_TOKENS),
    "engine": [None if v is None else round(v, 4) for v in engine],
    "mask": None if all(mask) else mask,
  }
  if policy is not None:
    delta = [
      None if p is None or e is None or not kept else float(f"{p - e:.3g}")
      for p, e, kept in zip(policy, engine, mask, strict=False)
    ]
    shown["delta"] = None if all(d is None for d in delta) else delta
  return shown


def _components(rewards: Mapping[str, Any]) -> dict[str, Any]:
  first = list(rewards.items())[:MAX_COMPONENTS]
  return {console.shorten(name, MAX_LABEL): value for name, value in first}
