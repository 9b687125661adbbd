"""The options of datasets, of their order and of recorded groups. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from grpo_jax.data import ranks
from grpo_jax.values import checked
from grpo_jax.values.options import option

# Sources of the logprobs under the policy that sampled a response; see `offline.behavior`.
SOURCES = ("auto", "file", "initial")
# Ways to turn the tokens' logprobs into the score of a response; see `offline.ranking`.
SCORES = ("mean", "sum")
# What becomes of the reasoning, and of tools that a chat template cannot write; see `recorded`.
REASONING = ("think", "drop")
TOOLS = ("refuse", "ignore")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
  """Training data: the section `data` of a config."""

  kind: str = option(
    "auto",
    'kind of source: "auto", jsonl, json, parquet, hub, reasoning_gym, function, dotted path',
  )
  path: str | None = option(
    None, "file, folder of files, or URL; also a local copy of `dataset`", checked.path(none=True)
  )
  dataset: str | None = option(
    None, "dataset by name: GSM8K, MATH-500, ..., or owner/name on the hub"
  )
  subset: str | None = option(None, "subset of a hub dataset")
  split: str | None = option(None, "split of a hub dataset, folder or JSON file")
  name: str | None = option(None, "first part of prompt ids; None: name of the file or task")
  format: str = option(
    "auto", 'format of a row: "auto", "problem", "messages", "nemo_gym", or a dotted path'
  )
  input_key: str | None = option(None, 'field of the problem; None: "problem"')
  output_key: str | None = option(
    None,
    'field of the answer; None: "expected_answer"; "": rows have no answer',
    checked.text(empty=True, none=True),
  )
  system_prompt: str | None = option(
    None, "text of the system message", checked.text(empty=True, none=True)
  )
  system_prompt_file: str | None = option(
    None, "file with the system message", checked.path(none=True)
  )
  prompt_template: str | None = option(None, "user message, with {} in place of the problem")
  prompt_file: str | None = option(None, "file with the user message", checked.path(none=True))
  environment: str | None = option(
    None, 'environment that scores completions; None: the dataset\'s, or "math"'
  )
  tools_key: str = option(
    "tools", 'field of the tools that a row declares; "": none is read', checked.text(empty=True)
  )
  allow_control_tokens: bool = option(
    False, "text such as <|im_end|> in rows becomes control tokens"
  )
  rows_choose_environment: bool = option(
    True, "a row's `environment` or `task_name` takes precedence"
  )
  tasks: Mapping[str, Any] = option(
    {}, "task_name of a row -> its environment, format, keys and prompts"
  )
  max_prompt_tokens: int = option(
    512, "longest prompt in tokens, chat template included", checked.whole(low=1)
  )
  overlong: Literal["drop", "zero_weight"] = option(
    "zero_weight", 'longer prompts: "drop", or "zero_weight" (kept, but not learned from)'
  )
  on_error: Literal["stop", "skip"] = option(
    "stop", 'when a row is broken: "stop", or "skip" and count it'
  )
  shuffle: bool = option(True, "a new order in every epoch, drawn from `seed`")
  epochs: int | None = option(
    None, "passes over the data; None: no limit", checked.whole(low=1, none=True)
  )
  repeat: int = option(1, "number of times that each row appears in an epoch", checked.whole(low=1))
  split_validation_size: float = option(
    0.0, "rows split off for evaluation: a share below 1, or a number", checked.number(low=0)
  )
  split_seed: int | None = option(
    None, "random seed of that split; None: `seed`", checked.whole(low=0, none=True)
  )
  task: str | None = option(None, "name of a reasoning_gym task, or dotted path of a function")
  task_args: Mapping[str, Any] = option({}, "further arguments of the task")
  task_seed: int = option(0, "random seed of the task's problems", checked.whole())
  size: int = option(10000, "number of problems of the task", checked.whole(low=1))
  datasets: tuple[Mapping[str, Any], ...] = option(
    (),
    "several datasets: dicts of the fields that differ, and `weight`",
    checked.several(checked.mapping()),
  )
  num_prompts_per_dataloader: int | None = option(
    None, "prompts taken from each dataset in turn", checked.whole(low=1, none=True)
  )
  dataloader: str | None = option(
    None, 'function that chooses prompts: "by_success", or dotted path'
  )
  dataloader_args: Mapping[str, Any] = option({}, "further arguments of that function")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineOptions:
  """Recorded groups: the section `offline` of a config."""

  rewards: Literal["file", "environment"] = option(
    "file", '"file", or "environment": scored by data.environment'
  )
  reward_key: str = option("reward", "field of the reward in a response")
  rank_reward: str = option(
    "linear", "reward of a rank: linear, reciprocal, softmax, top, negative, dotted path"
  )
  rank_ties: str = option(
    "mean",
    'rank of ties: "mean", "best", "worst" or "dense"',
    checked.choice(ranks.TIES),
  )
  rank_best: str = option(
    "lowest",
    'which rank is best: "lowest" (1 beats 2) or "highest"',
    checked.choice(ranks.BEST),
  )
  rank_temperature: float = option(
    1.0, 'temperature of rank_reward "softmax", in ranks', checked.number(above=0)
  )
  group_size: int | None = option(
    None,
    "largest number of responses in a group; None: all of them",
    checked.whole(low=2, none=True),
  )
  type_key: str = option("group_type", "field by which the evaluation distinguishes groups")
  behavior: Literal["auto", "file", "initial"] = option(
    "auto",
    'behavior logprobs: "file", "initial" (scored before step 0), "auto" (either)',
    checked.choice(SOURCES),
  )
  score: str = option(
    "mean",
    'the policy ranks responses by the "mean" or "sum" of their logprobs',
    checked.choice(SCORES),
  )
  reasoning: str = option(
    "think",
    'NeMo Gym: "think": reasoning in <think> tags before the answer; "drop" it',
    checked.choice(REASONING),
  )
  tools: str = option(
    "refuse",
    '"refuse": declared tools and calls go to the chat template, and rows whose tools it does'
    ' not write are refused; "ignore": declared tools are left out, and calls are text',
    checked.choice(TOOLS),
  )
