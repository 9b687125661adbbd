"""Training from recorded groups: replaces data, engine and evaluation.

Recorded groups are datasets of prompts, each with its group, and `Recorded` answers those prompts
in place of an engine. So loaders, mixing, dynamic sampling, filters, shaping and resuming are the
same as in online training.
"""

import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.data import named, ranks
from grpo_jax.data.formats import LeftOut, RowError
from grpo_jax.data.group_options import RecordedOptions
from grpo_jax.data.groups import (
  GROUP_FORMATS,
  RECORDED,
  GroupDataset,
  checker,
  group_of,
  index_groups,
)
from grpo_jax.data.options import DataOptions
from grpo_jax.data.prompts import Dataset, open_dataset
from grpo_jax.data.recorded import Style
from grpo_jax.data.row_selection import RowSelection
from grpo_jax.data.skipped_rows import OnError
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import Generation, GenerationRequest, OnProgress, SamplingParams
from grpo_jax.environments.base import AnyFactory
from grpo_jax.learn import group_scoring
from grpo_jax.offline import behavior, ranking
from grpo_jax.registry import choose, function
from grpo_jax.rollouts import rollout, work_sharing
from grpo_jax.rollouts.group_source import PromptSource
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.turn_sampling import request_seed
from grpo_jax.types import Prompt, RecordedGroup, RolloutGroup

Batch = list[RecordedGroup]  # groups that are scored together.


def open_groups(
  tokenizer: Tokenizer,
  *,
  options: RecordedOptions,
  on_error: OnError,
  max_tokens: int | None = None,
  format: str = DataOptions.format,
  input_key: str | None = None,
  output_key: str | None = None,
  split_validation_size: float | int = 0,
  **fields: Any,
) -> GroupDataset:
  """Opens a dataset of recorded attempts.

  Args:
    tokenizer: Tokenizer of the model.
    options: Options of offline training.
    on_error: "stop" or "skip", for rows that are broken when the file is indexed.
    max_tokens: Largest number of tokens of prompt and response; longer responses are cut.
    format: Key of GROUP_FORMATS, or the dotted path of a similar function. "auto" reads the ranked
      responses of a named dataset that has them.
    input_key: Field of the prompt; None: the format's usual field.
    output_key: Field of the response; None: the format's usual field.
    split_validation_size: Number or share of groups (not rows) that are split off.
    **fields: Arguments of `data.prompts.open_dataset`.

  Raises:
    RowError: A row is broken and `on_error` is "stop"; rows that are whole groups are read later.
    ValueError: The format is unknown, or no row can be read.
  """
  if fields.get("tasks"):
    raise ValueError("data.tasks is for online training only: give each task a dataset of its own")
  rows = open_dataset(tokenizer, **{**fields, "side": "all", "repeat": 1})
  style = Style(
    prompt=rows.task.style,
    input_key=input_key or None,
    output_key=output_key or None,
    reward_key=options.reward_key,
    type_key=options.type_key,
    tools_key=rows.tools_key,
    reasoning=options.reasoning,
    tools=options.tools,
  )
  read = function(format) if "." in format else choose("format", format, GROUP_FORMATS)
  entry = named.find(str(fields["dataset"])) if fields.get("dataset") else None
  if entry is not None and format == "auto":
    read = named.group_reader(entry) or read
  check = checker(tokenizer, style, needs_rewards=options.rewards == "file")
  members = index_groups(rows.source, read, style, on_error=on_error, check=check)
  part = RowSelection(
    len(members),
    side=fields.get("side", "all"),
    split_validation_size=split_validation_size,
    split_seed=fields.get("split_seed", 0),
    repeat=fields.get("repeat", 1),
  )
  return GroupDataset(
    source=rows.source,
    part=part,
    tokenizer=tokenizer,
    read_row=read,
    style=style,
    members=members,
    rank_rewards=functools.partial(ranks.rewards, **options.ranking()),
    environment=rows.task.environment if options.rewards == "environment" else RECORDED,
    max_prompt_tokens=rows.max_prompt_tokens,
    overlong=rows.overlong,
    max_tokens=max_tokens,
    allow_control_tokens=rows.allow_control_tokens,
  )


@dataclasses.dataclass(frozen=True)
class Recorded:
  """A function (prompts, step) → their recorded groups; nothing is sampled."""

  behavior: behavior.BehaviorLogprobs
  group_size: int | None  # responses of a group; larger groups are subsampled. None: all responses.
  seed: int
  rescore: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None = None

  def __call__(self, prompts: Sequence[Prompt], step: int) -> list[RolloutGroup]:
    """Returns the recorded groups of the prompts, in their order."""
    del step  # recorded groups do not depend on it.
    groups = [self._chosen(self.behavior.complete(group_of(prompt))) for prompt in prompts]
    return self.rescore(groups) if self.rescore else groups

  def _chosen(self, group: RolloutGroup) -> RolloutGroup:
    """Returns the group with at most `group_size` responses, a new draw in every epoch."""
    size = len(group.rollouts)
    if self.group_size is None or size <= self.group_size:
      return group
    key = request_seed(self.seed, 0, group.prompt.prompt_id, 0)
    chosen = np.sort(np.random.default_rng(key).choice(size, self.group_size, replace=False))
    return dataclasses.replace(group, rollouts=tuple(group.rollouts[i] for i in chosen))


def batches(prompts: PromptSource, *, steps: int, prompts_per_step: int) -> Iterator[Batch]:
  """Yields, for each step of a run, the groups that no earlier step has taken."""
  seen: set[tuple[str, int]] = set()
  for _ in range(steps):
    taken = prompts.take(prompts_per_step)
    if not taken:
      return
    items = {(item.dataset, item.number): item for item in map(group_of, taken)}
    yield [item for key, item in items.items() if key not in seen]
    seen |= items.keys()


def all_batches(datasets: Sequence[Dataset], *, size: int, on_error: OnError) -> Iterator[Batch]:
  """Yields all usable groups, in the order of the files."""
  for dataset in datasets:
    for first in range(0, len(dataset), size):
      items: list[RecordedGroup] = []
      for row in range(first, min(first + size, len(dataset))):
        try:
          items.append(group_of(dataset.prompt(row, epoch=0)))
        except RowError as error:
          if on_error == "stop" and not isinstance(error, LeftOut):
            raise
      yield items


@dataclasses.dataclass(frozen=True)
class Scored:
  """A recorded group under a policy."""

  group: RolloutGroup  # with its rewards.
  logprobs: Sequence[np.ndarray]  # of the tokens of each response; see `GroupScorer`.
  ranked: ranking.Ranked


@dataclasses.dataclass(frozen=True)
class Ranking:
  """How well a policy ranks the responses of recorded groups."""

  scorer: group_scoring.GroupScorer
  score: str  # kind of score of a response; see `ranking.response_scores`.
  rescore: Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None = None

  def evaluate(
    self, params: Any, prompts: Sequence[Prompt], *, name: str, advance: Callable[[int], None]
  ) -> dict[str, float]:
    """Scores the groups of the prompts; returns eval/NAME/*, see `ranking.group_metrics`."""
    found = []
    for scored in self.scored(params, prompts):
      found += [each.ranked for each in scored]
      advance(len(scored))
    return ranking.group_metrics(found, name=name)

  def scored(self, params: Any, prompts: Sequence[Prompt]) -> Iterator[list[Scored]]:
    """Yields the groups of the prompts, scored by the weights `params`, some at a time."""
    for first in range(0, len(prompts), self.scorer.groups_at_once):
      items = [group_of(p) for p in prompts[first : first + self.scorer.groups_at_once]]
      groups = [item.group for item in items]
      rewarded = self.rescore(groups) if self.rescore else groups
      found = []
      for item, group, logprobs in zip(items, rewarded, self.scorer(params, groups), strict=True):
        scores = ranking.response_scores(group, logprobs, score=self.score)
        found.append(
          Scored(group, logprobs, ranking.Ranked(scores, group.rewards, item.group_type))
        )
      yield found

  def step_metrics(
    self, groups: Sequence[RolloutGroup], logprobs: Sequence[Sequence[np.ndarray]]
  ) -> dict[str, float]:
    """Returns train/rank_accuracy of a step, from the logprobs that its update has computed."""
    scores = [
      ranking.response_scores(group, values, score=self.score)
      for group, values in zip(groups, logprobs, strict=True)
    ]
    found = zip(groups, scores, strict=True)
    return ranking.step_metrics([ranking.Ranked(each, group.rewards) for group, each in found])


def rescored(
  groups: Sequence[RolloutGroup],
  environments: Mapping[str, AnyFactory],
  tokenizer: Tokenizer,
  *,
  limits: rollout.AttemptLimits,
  stop: Any = False,
  loop: LoopThread | None = None,
) -> list[RolloutGroup]:
  """Has the environments score recorded responses, as if an engine had just sampled them.

  The processes of a run share the work.

  Raises:
    ValueError: A response has several turns, whose recorded observations cannot be repeated.
    TooManyFailures: See `rollout.collect`.
  """
  several = [g.prompt.prompt_id for g in groups if any(r.turns > 1 for r in g.rollouts)]
  if several:
    raise ValueError(
      f"offline.rewards='environment' is for responses of one turn; {several[0]} has several"
    )
  by_prompt = {group.prompt.prompt_id: group for group in groups}

  def scored(
    prompts: Sequence[Prompt], limits: rollout.AttemptLimits, stop: Any
  ) -> list[RolloutGroup]:
    own = [by_prompt[prompt.prompt_id] for prompt in prompts]
    done: dict[str, RolloutGroup] = {}
    for size in sorted({len(group.rollouts) for group in own}):
      members = [group for group in own if len(group.rollouts) == size]
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
        stop=stop,
        loop=loop,
      )
      done |= {group.prompt.prompt_id: group for group in found}
    return [done[prompt.prompt_id] for prompt in prompts]

  return work_sharing.among_processes(
    [group.prompt for group in groups],
    scored,
    limits=limits,
    what="the rewards of recorded responses",
    stop=stop,
  )


class _Replay:
  """Answers requests with recorded responses."""

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
