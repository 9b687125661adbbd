"""The typed config: every option of a run, as `config.SECTION.OPTION`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.data.options import DataOptions, OfflineOptions
from grpo_jax.engines.options import EngineOptions, SamplingOptions, TeacherOptions
from grpo_jax.groups.options import FilterOptions, ShapingOptions
from grpo_jax.learn.options import (
  BatchingOptions,
  LearnOptions,
  MeshOptions,
  OptimOptions,
  ReferenceOptions,
)
from grpo_jax.models.options import ExportOptions, ModelOptions
from grpo_jax.processes.options import DistributedOptions
from grpo_jax.rl.options import AdvantageOptions, LossOptions
from grpo_jax.rollouts.options import DynamicOptions, RolloutOptions
from grpo_jax.run_folder.options import CheckpointOptions, LoggingOptions
from grpo_jax.values import checked
from grpo_jax.values.options import (
  Option,
  Section,
  below,
  declared,
  differences,
  named,
  option,
  section,
  type_of,
)

MODES = ("online", "offline")
# Options of `data` and `sampling` that an evaluation may have of its own. Those called ALSO are not
# in the base config: config.json of every run would have them.
_OF_A_SET = (
  *("kind", "path", "dataset", "subset", "split", "name", "format", "input_key", "output_key"),
  *("system_prompt", "system_prompt_file", "prompt_template", "prompt_file", "environment"),
  *("repeat", "task", "task_seed", "size"),
)
_ALSO_OF_A_SET = (
  *("tools_key", "allow_control_tokens", "rows_choose_environment", "max_prompt_tokens"),
  *("overlong", "split_validation_size", "split_seed"),
)
_OF_AN_EVALUATION = ("max_tokens", "temperature", "top_k", "top_p", "min_p")
_ALSO_OF_AN_EVALUATION = ("stop_strings",)
_SIZE = checked.whole(low=1)
_EVERY = checked.whole(low=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MathSettings:
  """The environment that a config has by default."""

  module: str = option("math", "file of environments/, or the dotted path of a module of your own")
  verifier: str = option(
    "math_verify", 'or "minerva" (DAPO\'s, compares strings), "multiple_choice"'
  )
  answer: str | None = option(
    None,
    'where the answer must be: boxed, hash (after ####), tag, line (after "Answer:"),'
    " last_number, any, raw; None: boxed, for minerva line, for multiple_choice anywhere",
  )
  workers: int = option(2, "number of grading processes", checked.whole(low=1))
  timeout_s: float = option(
    5.0, "a grading that takes longer is stopped and counts as wrong", checked.number(above=0)
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """Evaluation on held-out data; the rooms that evaluate are above this one."""

  every_steps: int = option(10, "0: only at the start and at the end", _EVERY)
  at_start: bool = option(True, "evaluate before the first step")
  at_end: bool = option(True, "evaluate after the last step")
  num_prompts: int = option(256, "first prompts of each evaluation set that are used", _SIZE)
  group_size: int = option(1, "completions of each prompt", _SIZE)
  pass_k: tuple[int, ...] = option(
    (1,), "values of k for pass@k, each at most group_size", checked.several(_SIZE)
  )
  name: str = option("heldout", "name of a single evaluation set: eval/NAME/accuracy")
  data: Mapping[str, Any] = differences(
    DataOptions, "fields of config.data that differ; None: the same", _OF_A_SET, _ALSO_OF_A_SET
  )
  datasets: tuple[Mapping[str, Any], ...] = option(
    (),
    "several sets: dicts of the fields that differ; each has a name",
    checked.several(checked.mapping()),
  )
  sampling: Mapping[str, Any] = differences(
    SamplingOptions,
    "fields of config.sampling that differ; None: the same",
    _OF_AN_EVALUATION,
    _ALSO_OF_AN_EVALUATION,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """Every option of a run."""

  seed: int = option(
    42,
    "random seed of the data order, sampling and initialisation",
    checked.whole(low=0, high=2**32 - 1),
  )
  total_steps: int = option(
    1000, "number of training steps; each samples a batch and learns from it", _SIZE
  )
  mode: str = option(
    "online",
    '"online": sample completions; "offline": learn from recorded ones',
    checked.choice(MODES),
  )
  model: ModelOptions = section(ModelOptions, "")
  mesh: MeshOptions = section(
    MeshOptions,
    "sizes of the axes; their product is the number of devices; -1: the rest. docs/sharding.md",
  )
  distributed: DistributedOptions = section(
    DistributedOptions, "several processes, on one host or many; docs/hosts.md"
  )
  data: DataOptions = section(
    DataOptions, "training data: one dataset, or what several share; docs/data.md"
  )
  offline: OfflineOptions = section(OfflineOptions, 'for mode "offline": docs/offline.md')
  environments: Mapping[str, Mapping[str, Any]] = named(
    "math", MathSettings, "by name; each has a `module` and its settings; docs/environments.md"
  )
  engine: EngineOptions = section(EngineOptions, "what samples completions")
  sampling: SamplingOptions = section(SamplingOptions, "how training completions are sampled")
  rollout: RolloutOptions = section(RolloutOptions, "what a training step samples")
  dynamic_sampling: DynamicOptions = section(
    DynamicOptions, "draw prompts until P groups pass `filters`; docs/rewards.md"
  )
  shaping: ShapingOptions = section(
    ShapingOptions, "changes to rewards, after the filters; docs/rewards.md"
  )
  filters: FilterOptions = section(
    FilterOptions, "which groups a step leaves out, counted by reason; docs/rewards.md"
  )
  advantages: AdvantageOptions = section(
    AdvantageOptions, "how advantages are computed; formulas: docs/algorithms.md"
  )
  loss: LossOptions = section(LossOptions, "formulas: docs/algorithms.md")
  reference: ReferenceOptions = section(
    ReferenceOptions, "the reference policy of loss.kl_coef; docs/distillation.md"
  )
  teacher: TeacherOptions = section(
    TeacherOptions,
    "a model whose logprobs of the sampled tokens become advantages; docs/distillation.md",
  )
  batching: BatchingOptions = section(
    BatchingOptions, "how completions are packed into rows; docs/batching.md"
  )
  optim: OptimOptions = section(OptimOptions, "the optimizer; gradients are clipped before it")
  learn: LearnOptions = section(LearnOptions, "what an update does with a batch")
  evaluation: EvaluationOptions = section(EvaluationOptions, "evaluation on held-out data")
  checkpoint: CheckpointOptions = section(CheckpointOptions, "checkpoints of the run")
  logging: LoggingOptions = section(LoggingOptions, "what a run writes and prints")
  export: ExportOptions = section(ExportOptions, "the final weights, as a Hugging Face folder")
  # Options that were None, and that the run chose by the memory of its devices; a run records it.
  chosen_by_memory: tuple[str, ...] | None = None


# Every option by its dotted name.
OPTIONS: Mapping[str, Option] = dict(below(Config))
# Options that hold arguments of other code by name; that code knows the names, and refuses others.
OPEN = tuple(name for name, each in OPTIONS.items() if isinstance(each.default, Mapping))
# Types of the options that an override may add to a section.
ALSO: Mapping[str, type] = {
  f"evaluation.{part}.{name}": type_of(each.cls, name)[0]
  for part, each in declared(EvaluationOptions).items()
  if isinstance(each, Section)
  for name in each.also
}
