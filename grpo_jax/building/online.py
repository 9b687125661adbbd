"""The parts of a run that samples completions from an engine and scores them."""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from grpo_kernels.attention import Attention

from grpo_jax import data, engines, processes
from grpo_jax.building import router_replay
from grpo_jax.building.training_mode import KeepGroups, ModeDependencies, ModeFunctions
from grpo_jax.compilation.programs import CompileJob
from grpo_jax.config import (
  ahead_options,
  configuration,
  device_options,
  lora_options,
  run_options,
)
from grpo_jax.config.options import Config
from grpo_jax.engines.base import Engine, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.options import USUAL_ROWS, SamplingOptions
from grpo_jax.engines.server_process import ServerError
from grpo_jax.engines.transfer import TransferError
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models import loading
from grpo_jax.models.fields import Fields
from grpo_jax.processes import bulk
from grpo_jax.rollouts import evaluation, rollout, stream, work_sharing
from grpo_jax.types import Prompt
from grpo_jax.values import options


class Online:
  """Makes the parts of an online run; see `training_mode.TrainingMode`."""

  def __init__(self, config: Config):
    self._config = config
    self.opener: data.Opener = data.open_dataset

  def make_engine(
    self,
    tokenizer: data.Tokenizer,
    model: loading.ModelFacts,
    workdir: pathlib.Path,
    stack: contextlib.ExitStack,
  ) -> Engine:
    """Makes the engine. Servers start while the trainer loads and compiles."""
    engine = _engine(self._config, model, tokenizer, workdir)
    stack.callback(engine.close)
    return engine

  def engine_jobs(self, engine: Engine, full: Any) -> list[CompileJob]:
    """Returns the compilations of the embedded sampler; servers compile their own programs."""
    own = engine.programs(full) if isinstance(engine, JaxSampler) else []
    exchange = [CompileJob("exchanging groups", bulk.prepare)] if processes.count() > 1 else []
    return [*own, *exchange]

  def meet_initial_policy(
    self,
    prompts: Callable[[], data.PromptStream],
    scorer: GroupScorer,
    params: Any,
    workdir: pathlib.Path,
  ) -> None:
    """Does nothing."""

  def make_functions(self, dependencies: ModeDependencies) -> ModeFunctions:
    """Makes the parts from an engine and environments."""
    config = self._config
    sampling = functools.partial(
      sampling_params, tokenizer=dependencies.tokenizer, model=dependencies.model
    )
    limits = run_options.limits(config)
    sample = stream.RolloutSampler(
      dependencies.engine,
      dependencies.environments,
      dependencies.tokenizer,
      group_size=config.rollout.group_size,
      sampling=sampling(config.sampling),
      seed=config.seed,
      limits=limits,
      progress=dependencies.logger.progress,
      loop=dependencies.loop,
      stop=dependencies.stop,
      with_greedy=run_options.needs_greedy(config),
      schedule=config.rollout.schedule,
    )
    evaluate_set = functools.partial(
      _evaluate_set,
      dependencies=dependencies,
      group_size=config.evaluation.group_size,
      pass_k=config.evaluation.pass_k,
      sampling=sampling(run_options.evaluation_sampling(config)),
      seed=config.seed,
      limits=limits,
      schedule=config.rollout.schedule,
    )
    return ModeFunctions(sample, sample.in_background, evaluate_set, rank=None)


def _evaluate_set(
  weights: Any,
  prompts: Sequence[Prompt],
  name: str,
  keep: KeepGroups,
  *,
  dependencies: ModeDependencies,
  **options: Any,
) -> dict[str, float]:
  """Evaluates the weights that the engine holds on one set of prompts."""
  del weights  # the engine has them.
  own = work_sharing.share(prompts)
  with dependencies.logger.progress(f"evaluating {name}{work_sharing.shown()}", len(own)) as shown:
    return evaluation.run(
      dependencies.engine,
      dependencies.environments,
      prompts,
      dependencies.tokenizer,
      name=name,
      loop=dependencies.loop,
      on_progress=rollout.counting(shown),
      on_groups=keep,
      stop=dependencies.stop,
      **options,
    )


def _engine(
  config: Config, model: loading.ModelFacts, tokenizer: data.Tokenizer, workdir: pathlib.Path
) -> Engine:
  """Makes the engine that the config names."""
  name = config.engine.name
  own = options.values(config.engine.sglang) if name == "sglang" else config.engine.options
  is_embedded = name == "jax_sampler"
  sizes: dict[str, Any] = {"max_rows": config.engine.max_rows or USUAL_ROWS}
  if is_embedded:  # `stream.RolloutSampler` warns for every engine.
    sizes = {**run_options.sampler_sizes(config), "warn_of_truncation": False}
    sizes["unmerged"] = lora_options.is_unmerged(config)
    sizes["copy_weights"] = ahead_options.is_ahead(config)  # updates donate the trainer's.
    sizes["in_flight_updates"] = ahead_options.updates_in_flight(config)
    sizes["devices"] = device_options.of_sampler(config)
  if name == "sglang" and lora_options.is_unmerged(config):
    sizes["adapter"] = lora_options.load(config)
  sizes |= router_replay.engine_options(config, model.config)
  try:
    return engines.make(
      name,
      config=model.config,
      source_directory=model.directory,
      workdir=workdir,
      decode=lambda ids: tokenizer.decode(ids, skip_special=False),
      compute_dtype=config.model.compute_dtype,
      product_dtype=config.model.product_dtype,
      matmul_precision=config.model.matmul_precision,
      attention=Attention(config.model.attention),
      num_valid_tokens=tokenizer.vocab_size,
      **{**sizes, **own},
    )
  except (ValueError, ServerError, TransferError) as error:
    raise configuration.ConfigError(f"engine: {error}") from error


def sampling_params(
  settings: SamplingOptions, *, tokenizer: data.Tokenizer, model: loading.ModelFacts
) -> SamplingParams:
  """Adds the ids that end a completion: all those named by the tokenizer and the model's files."""
  named = Fields(model.generation, "generation_config.json").ids("eos_token_id")
  return SamplingParams.of(settings, tuple(sorted({*tokenizer.stop_ids, *named})))
