"""Training from recorded groups: what takes the place of prompts, engine and environments.

`RecordedGroups` is a source of prompts and, at the same time, what answers them: `OnlineStream`
asks it for prompts, and then for their groups, as it asks an engine. So dynamic sampling, filters,
shaping and resuming are those of online training.
"""

import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from grpo_jax import behavior, ranking, rollout, scoring
from grpo_jax.data import ranks
from grpo_jax.data.formats import PromptStyle, RowError
from grpo_jax.data.groups import (
  GROUP_FORMATS,
  RECORDED,
  GroupDataset,
  OfflineGroup,
  index_groups,
)
from grpo_jax.data.prompts import OnError, Overlong, OverlongError
from grpo_jax.data.recorded import Style
from grpo_jax.data.sources import RowSource
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import Generation, GenerationRequest, OnProgress, SamplingParams
from grpo_jax.environments.base import EnvironmentFactory
from grpo_jax.registry import choose, function
from grpo_jax.types import Prompt, RolloutGroup

_SHOWN_ERRORS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
  """How recorded attempts are read, rewarded and compared; the section `offline` of a config."""

  rewards: Literal["file", "environment"] = "file"
  reward_key: str = "reward"
  rank_reward: str = "linear"
  rank_ties: str = "mean"
  rank_best: str = "lowest"
  rank_temperature: float = 1.0
  group_size: int | None = None
  type_key: str = "group_type"
  behavior: Literal["auto", "file", "initial"] = "auto"
  score: str = "mean"
  reasoning: str = "think"
  tools: str = "refuse"

  def __post_init__(self):
    choices = {
      "rewards": (self.rewards, ("file", "environment")),
      "behavior": (self.behavior, behavior.SOURCES),
      "score": (self.score, ranking.SCORES),
    }
    for name, (value, known) in choices.items():
      if value not in known:
        raise ValueError(f"offline.{name} must be one of {known}, got {value!r}")
    if self.group_size is not None and self.group_size < 2:
      raise ValueError(f"offline.group_size must be at least 2, got {self.group_size}")
    ranks.check(**self.ranking())
    Style(reasoning=self.reasoning, tools=self.tools)

  def ranking(self) -> dict[str, Any]:
    """Returns the arguments of `ranks.rewards`."""
    return {
      "mapping": self.rank_reward,
      "ties": self.rank_ties,
      "best": self.rank_best,
      "temperature": self.rank_temperature,
    }


def open_groups(
  source: RowSource,
  tokenizer: Tokenizer,
  options: Options,
  *,
  style: PromptStyle,
  format: str = "auto",
  input_key: str | None = None,
  output_key: str | None = None,
  environment: str = RECORDED,
  max_prompt_tokens: int = 1024,
  max_tokens: int | None = None,
  overlong: Overlong = "drop",
  on_error: OnError = "stop",
) -> GroupDataset:
  """Opens a file of recorded attempts.

  Args:
    source: of its rows.
    tokenizer: of the model.
    options: of offline training.
    style: system prompt and template of the prompts.
    format: key of GROUP_FORMATS, or the dotted path of a function like those in it.
    input_key: field of the prompt; None: that of the format.
    output_key: field of the response, likewise.
    environment: that scores the responses, if `options.rewards` is "environment".
    max_prompt_tokens: longest prompt, chat template included.
    max_tokens: of prompt and response; longer responses are cut.
    overlong: what becomes of longer prompts: see `data.prompts.open_dataset`.
    on_error: "stop" or "skip", for broken rows.

  Raises:
    RowError: a row is broken and `on_error` is "stop"; rows that are whole groups are read later.
    ValueError: an unknown format, or no row can be read.
  """
  row_style = Style(
    prompt=style,
    input_key=input_key,
    output_key=output_key,
    reward_key=options.reward_key,
    type_key=options.type_key,
    reasoning=options.reasoning,
    tools=options.tools,
  )
  read = function(format) if "." in format else choose("format", format, GROUP_FORMATS)
  members, broken = index_groups(source, read, row_style, on_error=on_error)
  return GroupDataset(
    source=source,
    tokenizer=tokenizer,
    read_row=read,
    style=row_style,
    members=members,
    rank_rewards=functools.partial(ranks.rewards, **options.ranking()),
    environment=environment if options.rewards == "environment" else RECORDED,
    max_prompt_tokens=max_prompt_tokens,
    overlong=overlong,
    max_tokens=max_tokens,
    broken=broken,
  )


class RecordedGroups:
  """Groups of a file in training order. Their place is one integer: the positions passed."""

  def __init__(
    self,
    dataset: GroupDataset,
    *,
    shuffle: bool = True,
    seed: int = 0,
    epochs: int | None = None,
    on_error: OnError = "stop",
    group_size: int | None = None,
  ):
    """Places the source at its beginning.

    Args:
      dataset: what is read.
      shuffle: whether every epoch has an order of its own, drawn from seed and epoch.
      seed: of the order, and of the choice among too many responses.
      epochs: passes over the groups; None: without end.
      on_error: "stop": a broken row raises; "skip": its group is counted and passed over.
      group_size: responses of a group; of larger ones others are drawn in every epoch. None: all.
    """
    self._dataset = dataset
    numbers = grain.MapDataset.range(len(dataset))
    # grain adds the epoch to the seed: hashed first, so that seeds 0 and 1 share no order.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    self._numbers = (numbers.shuffle(seed=hashed) if shuffle else numbers).repeat(epochs)
    self._seed = seed
    self._on_error: OnError = on_error
    self._group_size = group_size
    self._cursor = 0
    self._needs_file = False
    self._behavior: behavior.BehaviorLogprobs | None = None
    self._rescore: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None = None
    self._taken: dict[str, OfflineGroup] = {}
    self._counts = {"broken_rows": 0, "overlong_prompts": 0}

  def fill_behavior(
    self,
    folder: Path,
    score: behavior.Score,
    *,
    wanted: int | None,
    source: str = "auto",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
  ) -> None:
    """Scores, under the initial policy, the responses whose logprobs are not known.

    Args:
      folder: that keeps them.
      score: under the initial policy.
      wanted: groups that the run takes at most; None: all.
      source: "auto": the file's where it has them; "initial": all are scored; "file": none
        is, and `take` raises RowError for a group without.
      on_progress: see `behavior.score_all`.
    """

    def read(position: int) -> OfflineGroup | None:
      try:
        return self._read(position)
      except OverlongError:
        return None
      except RowError:
        if self._on_error == "stop":
          raise
        return None

    self._needs_file = source == "file"
    if self._needs_file:
      return
    positions = min(len(self._dataset), len(self._numbers))
    self._behavior = behavior.score_all(
      read,
      positions,
      wanted=positions if wanted is None else wanted,
      folder=folder,
      score=score,
      from_file=source == "auto",
      on_progress=on_progress,
    )

  def rescore_with(
    self, rescore: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]]
  ) -> None:
    """Has environments score the responses; see `rescored`."""
    self._rescore = rescore

  def take(self, n: int) -> list[Prompt]:
    """Takes the prompts of the next n groups; fewer, at last none, when the epochs are over.

    Raises:
      RowError: a row is broken and `on_error` is "stop".
      ValueError: a whole epoch in a row had no group that can be used.
    """
    self._counts = dict.fromkeys(self._counts, 0)
    self._taken = {}
    reasons: list[str] = []
    fruitless = 0
    while len(self._taken) < n and self._cursor < len(self._numbers):
      position = self._cursor
      self._cursor += 1
      try:
        item = self._read(position)
      except RowError as error:
        kind = "overlong_prompts" if isinstance(error, OverlongError) else "broken_rows"
        if kind == "broken_rows" and self._on_error == "stop":
          raise
        self._counts[kind] += 1
        fruitless += 1
        reasons += [str(error)] if len(reasons) < _SHOWN_ERRORS else []
        if fruitless >= len(self._dataset):
          first = "\n  ".join(reasons)
          raise ValueError(
            f"no group of {self._dataset.source.name!r} can be used; first:\n  {first}"
          ) from error
        continue
      fruitless = 0
      self._counts["overlong_prompts"] += item.group.prompt.weight == 0.0
      self._taken[item.group.prompt.prompt_id] = item
    if reasons:
      logging.warning("data: %s; first:\n  %s", self._counts, "\n  ".join(reasons))
    return [item.group.prompt for item in self._taken.values()]

  def __call__(self, prompts: Sequence[Prompt], step: int) -> list[RolloutGroup]:
    """Returns the recorded groups of prompts that `take` has just given, in their order."""
    del step  # what was recorded does not depend on it.
    groups = [self._complete(self._taken[prompt.prompt_id]) for prompt in prompts]
    return self._rescore(groups) if self._rescore else groups

  def seek(self, cursor: int) -> None:
    """Goes to a place, from `cursor()` of an earlier source of the same settings."""
    if not 0 <= cursor <= len(self._numbers):
      raise ValueError(f"cursor {cursor} is outside of the data: {len(self._numbers)} positions")
    self._cursor = cursor

  def cursor(self) -> int:
    """Returns the number of positions passed, skipped groups included."""
    return self._cursor

  def metrics(self) -> dict[str, float]:
    """Counts of the last `take`, and the epochs done."""
    counts = {f"data/{name}": float(count) for name, count in self._counts.items()}
    return {"data/epoch": self._cursor / len(self._dataset), **counts}

  def _read(self, position: int) -> OfflineGroup:
    number = self._numbers[position]
    assert number is not None  # grain's word for a filtered element; there is no filter.
    item = self._dataset.group(int(number), epoch=position // len(self._dataset))
    if self._needs_file and not all(item.is_known):
      raise RowError(
        self._dataset.where(item.number),
        f"response {item.is_known.index(False) + 1} has no logprobs, and offline.behavior='file'",
      )
    return item

  def _complete(self, item: OfflineGroup) -> RolloutGroup:
    """The group with behavior logprobs, and of no more than the responses asked for."""
    group = self._behavior.complete(item) if self._behavior else item.group
    size = len(group.rollouts)
    if self._group_size is None or size <= self._group_size:
      return group
    key = rollout.request_seed(self._seed, 0, group.prompt.prompt_id, 0)
    chosen = np.sort(np.random.default_rng(key).choice(size, self._group_size, replace=False))
    return dataclasses.replace(group, rollouts=tuple(group.rollouts[i] for i in chosen))


def held_out(
  dataset: GroupDataset, *, limit: int | None = None, on_error: OnError = "stop"
) -> list[OfflineGroup]:
  """Lists the first groups of a file, in its own order: a fixed evaluation set.

  Args:
    dataset: what is read.
    limit: number of groups read; None: all.
    on_error: as for RecordedGroups.

  Raises:
    RowError: a row is broken and `on_error` is "stop".
    ValueError: no group can be used.
  """
  items: list[OfflineGroup] = []
  reasons: list[str] = []
  for number in range(len(dataset) if limit is None else min(limit, len(dataset))):
    try:
      items.append(dataset.group(number, epoch=0))
    except RowError as error:
      if on_error == "stop" and not isinstance(error, OverlongError):
        raise
      reasons.append(str(error))
  if not items:
    first = "\n  ".join(reasons[:_SHOWN_ERRORS])
    raise ValueError(f"no group of {dataset.source.name!r} can be used; first:\n  {first}")
  return items


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How well a policy ranks the responses of held-out groups."""

  items: Sequence[OfflineGroup]
  scorer: scoring.GroupScorer
  name: str  # middle part of the metrics' names.
  score: str  # of a response: see `ranking.response_scores`.

  def __len__(self) -> int:
    return len(self.items)

  def run(self, params: Any, advance: Callable[[int], None]) -> dict[str, float]:
    """Scores the groups and returns eval/NAME/*; see `ranking.of_groups`."""
    found: list[ranking.Ranked] = []
    for first in range(0, len(self.items), self.scorer.groups_at_once):
      items = self.items[first : first + self.scorer.groups_at_once]
      logprobs = self.scorer(params, [item.group for item in items])
      for item, values in zip(items, logprobs, strict=True):
        scores = ranking.response_scores(item.group, values, score=self.score)
        found.append(ranking.Ranked(scores, item.group.rewards, item.group_type))
      advance(len(items))
    return ranking.of_groups(found, name=self.name)

  def of_step(
    self, groups: Sequence[RolloutGroup], logprobs: Sequence[Sequence[np.ndarray]]
  ) -> dict[str, float]:
    """Returns train/rank_accuracy of a step, from the logprobs that its update has found."""
    scores = [
      ranking.response_scores(group, values, score=self.score)
      for group, values in zip(groups, logprobs, strict=True)
    ]
    found = zip(groups, scores, strict=True)
    return ranking.of_step([ranking.Ranked(each, group.rewards) for group, each in found])


def rescored(
  groups: Sequence[RolloutGroup],
  environments: Mapping[str, EnvironmentFactory],
  tokenizer: Tokenizer,
  *,
  limits: rollout.Limits,
) -> list[RolloutGroup]:
  """Has the environments score recorded responses, as if an engine had just sampled them.

  Raises:
    ValueError: a response has several turns: what its environment said is recorded, and cannot
      be asked for anew.
    rollout.TooManyFailures: see `rollout.collect`.
  """
  several = [g.prompt.prompt_id for g in groups if any(r.turns > 1 for r in g.rollouts)]
  if several:
    raise ValueError(
      f"offline.rewards='environment' is for responses of one turn; {several[0]} has several"
    )
  done: dict[str, RolloutGroup] = {}
  for size in sorted({len(group.rollouts) for group in groups}):
    members = [group for group in groups if len(group.rollouts) == size]
    found = rollout.collect_sync(
      _Replay(members),
      environments,
      [group.prompt for group in members],
      tokenizer,
      group_size=size,
      sampling=SamplingParams(max_tokens=1),  # nothing is sampled.
      seed=0,
      step=0,
      limits=dataclasses.replace(limits, max_turns=1, max_tokens=None),
    )
    done |= {group.prompt.prompt_id: group for group in found}
  return [done[group.prompt.prompt_id] for group in groups]


class _Replay:
  """Answers requests with what was recorded."""

  def __init__(self, groups: Sequence[RolloutGroup]):
    self._groups = {group.prompt.prompt_id: group for group in groups}

  async def generate(
    self, requests: Sequence[GenerationRequest], *, on_progress: OnProgress | None = None
  ) -> AsyncIterator[Generation]:
    for request in requests:
      prompt_id, _, attempt = request.request_id.rpartition("#")  # see `Attempt.request_id`.
      recorded = self._groups[prompt_id].rollouts[int(attempt.split(".")[0])]
      yield Generation(
        request_id=request.request_id,
        token_ids=recorded.completion_ids,
        logprobs=recorded.behavior_logprobs,
        weight_versions=recorded.weight_versions,
        finish_reason=recorded.finish_reason,
      )
