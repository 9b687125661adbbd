"""From a config to the parts of a run: everything that is made once, before the loop."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from absl import logging
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh

from grpo_jax import (
  checkpointing,
  configuration,
  data,
  data_options,
  engines,
  environments,
  filters,
  loggers,
  offline,
  offline_building,
  rollout,
  shaping,
  stream,
  timing,
)
from grpo_jax.engines.base import Engine, SamplingParams
from grpo_jax.engines.none import NoEngine
from grpo_jax.engines.server_process import ServerError
from grpo_jax.engines.transfer import TransferError
from grpo_jax.learn import optim, sharding, train_step
from grpo_jax.models import config as model_config
from grpo_jax.models import leaves, loading, sources, transformer
from grpo_jax.rl import estimators, objectives
from grpo_jax.types import Prompt, TrainState

# An ml_collections.ConfigDict, whose fields a type checker cannot know.
Config = Any

# Fields whose change does not alter what a continued run learns.
HARMLESS = (
  "total_steps",
  "logging.*",
  "checkpoint.*",
  "export.*",
  "evaluation.*",
  "model.path",
  "model.fallback",
  "model.cache_dir",
  "rollout.max_error_share",
  "learn.max_skipped_steps",
)


@dataclasses.dataclass(frozen=True)
class Run:
  """The parts of a run."""

  config: Config
  workdir: pathlib.Path
  mesh: Mesh
  model: loading.Loaded  # without its parameters, which training consumes.
  reference: Any  # parameters of the frozen reference policy; None: the loss needs none.
  tokenizer: data.Tokenizer
  engine: Engine
  environments: environments.Environments
  stream: stream.GroupStream
  filters: dict[str, Any]  # arguments of `filters.apply`.
  shaping: shaping.Shaping
  held_out: dict[str, list[Prompt]]  # by the name of the evaluation set.
  has_several_datasets: bool  # to train on, whose metrics are told apart.
  ranking: offline.Ranking | None  # evaluates recorded groups; None: completions are sampled.
  evaluation_sampling: SamplingParams
  limits: rollout.Limits
  estimator: estimators.Estimator
  objective: objectives.Objective
  update: train_step.Update
  score: train_step.Scorer
  checkpoints: checkpointing.Checkpoints
  logger: loggers.Logger
  timer: timing.Timer


@dataclasses.dataclass(frozen=True)
class Start:
  """Where a run begins or goes on."""

  state: TrainState
  stream: dict[str, Any]  # what `GroupStream.state` returned; empty at the beginning.
  skipped: int  # updates in a row that changed nothing.
  evaluated: dict[str, float]  # the last evaluation, of the weights of this step; or empty.


def validate(config: Config) -> Iterator[str]:
  """Yields everything that cannot work, before a model is loaded."""
  yield from _refused(lambda: objectives.make(**config.loss))
  yield from _refused(lambda: estimators.make(**config.advantages))
  yield from _refused(lambda: _dynamic_sampling(config))
  yield from _refused(lambda: _shaping(config))
  yield from _refused(lambda: filters.apply((), **config.filters))
  yield from _unlearnable(config)
  yield from _refused(lambda: SamplingParams(**config.sampling))
  yield from _refused(lambda: SamplingParams(**_evaluation_sampling(config)))
  yield from _refused(lambda: optim.make(_optimizer_steps(config), **config.optim.to_dict()))
  if config.sampling.temperature <= 0:
    yield "sampling.temperature must be above 0: greedy completions do not explore"
  if config.mode not in offline_building.MODES:
    yield f"mode must be one of {offline_building.MODES}, got {config.mode!r}"
  is_offline = offline_building.is_offline(config)
  if is_offline:
    yield from offline_building.problems(config)
  if config.total_steps < 1:
    yield f"total_steps must be at least 1, got {config.total_steps}"
  for name in ("prompts_per_step", "group_size", "max_turns"):
    if config.rollout[name] < 1:
      yield f"rollout.{name} must be at least 1, got {config.rollout[name]}"
  has_environments = offline_building.needs_environments(config)
  yield from data_options.complaints(config, has_environments=has_environments)
  for name, settings in config.environments.items():
    if settings.to_dict().get("total_timeout_s", 0.0) >= config.rollout.environment_timeout_s:
      yield (
        f"environments.{name}.total_timeout_s={settings.total_timeout_s:g} must be less than"
        f" rollout.environment_timeout_s, which is {config.rollout.environment_timeout_s:g}"
      )
  too_large = [k for k in config.evaluation.pass_k if k > config.evaluation.group_size]
  if too_large:
    size = config.evaluation.group_size
    yield f"evaluation.pass_k={too_large} needs evaluation.group_size >= k, which is {size}"
  updates = config.learn.epochs * config.learn.minibatches
  if updates < 1:
    yield "learn.epochs and learn.minibatches must be at least 1"
  if config.loss.force_on_policy_ratio and updates > 1:
    yield "loss.force_on_policy_ratio needs learn.epochs=1 and learn.minibatches=1"
  whitens = config.advantages.estimator.startswith("reinforce_pp")
  if config.loss.kl_in_reward and not whitens:
    yield "loss.kl_in_reward goes with advantages.estimator='reinforce_pp' (or its baseline form)"
  if config.model.compute_dtype not in ("float32", "bfloat16"):
    yield f"model.compute_dtype is float32 or bfloat16, got {config.model.compute_dtype!r}"


def _unlearnable(config: Config) -> Iterator[str]:
  """Yields why no group would be learned from, or why an option could never act."""
  group_size, filtered, dynamic = config.rollout.group_size, config.filters, config.dynamic_sampling
  if offline_building.is_offline(config):
    return  # groups and completions are as long as they are.
  if group_size == 1 and config.advantages.estimator not in ("reinforce_pp",):
    yield "rollout.group_size=1 gives every completion advantage 0: nothing would be learned"
  elif group_size == 1 and (filtered.drop_no_signal or dynamic.enabled):
    yield "rollout.group_size=1 has no signal within a group: every group would be dropped"
  if filtered.min_scored > group_size:
    yield f"filters.min_scored={filtered.min_scored} is above rollout.group_size={group_size}"
  drawn = dynamic.max_rounds * (dynamic.prompts_per_round or config.rollout.prompts_per_step)
  if dynamic.enabled and drawn < config.rollout.prompts_per_step:
    yield (
      f"dynamic_sampling draws at most {drawn} prompts a step, too few for "
      f"rollout.prompts_per_step={config.rollout.prompts_per_step}"
    )
  buffer, limit = config.shaping.overlong_buffer_tokens, _completion_limit(config)
  if buffer is None:
    return
  if config.shaping.max_completion_tokens is None and config.rollout.max_turns > 1:
    yield (
      "shaping.overlong_buffer_tokens needs shaping.max_completion_tokens where "
      f"rollout.max_turns={config.rollout.max_turns}: sampling.max_tokens is of one turn"
    )
  longest = min(
    config.sampling.max_tokens * config.rollout.max_turns,
    config.rollout.max_tokens - 1,
    config.batching.row_tokens - 1,
  )
  if longest <= limit - buffer:
    yield (
      f"shaping.overlong_buffer_tokens={buffer} penalises completions of more than "
      f"{limit - buffer} tokens, and none can have more than {longest}"
    )


def build(config: Config, workdir: pathlib.Path, stack: contextlib.ExitStack) -> tuple[Run, Start]:
  """Makes the parts of a run and restores its newest checkpoint; `stack` closes them."""
  workdir.mkdir(parents=True, exist_ok=True)
  _keep_compiled()
  mesh = sharding.make_mesh(**config.mesh)
  _check_head(config, mesh)
  folder = sources.resolve(
    config.model.path, fallback=config.model.fallback, cache_dir=config.model.cache_dir
  )
  tokenizer = data.load_tokenizer(
    folder,
    chat_template=config.model.chat_template,
    template_args=config.model.chat_template_args.to_dict(),
  )
  is_offline = offline_building.is_offline(config)
  opener = offline_building.opener(config) if is_offline else data.open_dataset
  held_out = data_options.open_all(config, tokenizer, opener)  # a wrong file is found at once.
  factories = stack.enter_context(_environments(config))

  checkpoints = stack.enter_context(
    checkpointing.open(
      workdir / "checkpoints",
      keep_last=config.checkpoint.keep_last,
      keep_best=config.checkpoint.keep_best,
      best_metric=data_options.best_metric(config),
      mode=config.checkpoint.best_mode,
      tell=print,
    )
  )
  _remember(config, workdir)
  engine = _engine(config, folder, tokenizer, workdir, stack)
  objective = objectives.make(**config.loss)
  tx, schedule = optim.make(_optimizer_steps(config), **config.optim.to_dict())
  model, shardings = _load(folder, mesh)
  data.check_vocabulary(tokenizer, model.config.vocab_size)
  of_policy = {
    "temperature": config.sampling.temperature,
    "compute_dtype": config.model.compute_dtype,
    "remat": config.model.remat,
    "partition": sharding.head_partition(mesh),
  }
  logprobs = train_step.make_logprobs(
    model.config, implementation=config.model.logprobs, **of_policy
  )
  score = train_step.make_scorer(logprobs)
  scorer = offline_building.make_scorer(config, score, mesh)
  behavior_logprobs = None
  if is_offline:
    prompts = _prompts(config, tokenizer, opener, {})
    behavior_logprobs = offline_building.score_behavior(
      config, prompts, scorer, model.params, workdir
    )
  reference = jax.tree.map(lambda x: x.copy(), model.params) if objective.needs_ref else None
  start = _restore(checkpoints, model.params, tx, shardings, mesh)
  model = dataclasses.replace(model, params={})

  first = int(start.state.step)
  logger = loggers.make(
    workdir,
    start_step=first,
    total_steps=config.total_steps,
    decode=lambda ids: tokenizer.decode(ids, skip_special=False),
    **config.logging,
  )
  stack.callback(logger.close)
  token_loss = None
  if takes_one_sweep(config, objective):
    token_loss = train_step.make_token_loss(model.config, objective, **of_policy)
  limits = _limits(config)
  ranking = None
  if behavior_logprobs is not None:
    rescore = offline_building.make_rescore(config, factories, tokenizer, limits)
    ranking = offline.Ranking(scorer, config.offline.score, rescore)
    sample = offline.Recorded(behavior_logprobs, config.offline.group_size, config.seed, rescore)
  else:
    sample = stream.Sampler(
      engine,
      factories,
      tokenizer,
      group_size=config.rollout.group_size,
      sampling=_sampling(config.sampling.to_dict(), tokenizer, model),
      seed=config.seed,
      limits=limits,
      progress=logger.progress,
    )
  prompts = _prompts(config, tokenizer, opener, start.stream)
  return Run(
    config=config,
    workdir=workdir,
    mesh=mesh,
    model=model,
    reference=reference,
    tokenizer=tokenizer,
    engine=engine,
    environments=factories,
    stream=_stream(config, prompts, sample, start.stream),
    filters=_filters(config),
    shaping=_shaping(config),
    held_out=held_out,
    has_several_datasets=data_options.has_several(config),
    ranking=ranking,
    evaluation_sampling=_sampling(_evaluation_sampling(config), tokenizer, model),
    limits=limits,
    estimator=estimators.make(**config.advantages),
    objective=objective,
    update=train_step.make_update(
      logprobs,
      tx,
      objective,
      epochs=config.learn.epochs,
      report_entropy=config.learn.report_entropy,
      schedule=schedule,
      shardings=shardings,
      token_loss=token_loss,
    ),
    score=score,
    checkpoints=checkpoints,
    logger=logger,
    timer=timing.Timer(),
  ), start


def _check_head(config: Config, mesh: Mesh) -> None:
  """Raises ConfigError, before anything is loaded, for a `model.logprobs` that cannot run here."""
  if config.model.logprobs is None:
    return
  chip = choice.chip_of(mesh.devices.flat[0])
  try:
    choice.pick(config.model.logprobs, chip, dtype=config.model.compute_dtype, width=0)
  except (ValueError, NotImplementedError) as error:
    raise configuration.ConfigError(f"model.logprobs: {error}") from error


def takes_one_sweep(config: Config, objective: objectives.Objective) -> bool:
  """Returns whether the update finds the head's gradients in the sweep that computes the loss.

  A named implementation of the two passes is what runs.
  """
  is_one_step = config.learn.epochs * config.learn.minibatches == 1
  is_free = config.model.logprobs is None
  return config.learn.gradient_in_forward and is_one_step and is_free and objective.is_token_local


def _keep_compiled() -> None:
  """Keeps compiled programs in the user's cache, so that a run that goes on starts at once.

  JAX_COMPILATION_CACHE_DIR names another folder.
  """
  if jax.config.values["jax_compilation_cache_dir"] is None:
    jax.config.update("jax_compilation_cache_dir", str(sources.default_cache() / "xla"))


def _load(folder: pathlib.Path, mesh: Mesh) -> tuple[loading.Loaded, Any]:
  """Reads the model straight into its sharding; returns the shardings, too."""
  described = model_config.from_hf(loading.read_json(folder / "config.json"))
  axes, shapes = transformer.logical_axes(described), leaves.tree(described)
  shardings = sharding.param_shardings(axes, mesh, shapes=shapes)
  return loading.load(folder, sharding=lambda _: shardings), shardings


def _restore(
  checkpoints: checkpointing.Checkpoints, params: Any, tx: Any, shardings: Any, mesh: Mesh
) -> Start:
  """Returns the newest checkpoint's state, or the state of the model as it was read."""
  if checkpoints.steps():
    like = _described(params, tx, shardings, mesh)
    jax.tree.map(lambda x: x.delete(), params)  # never two sets of weights in memory.
    restored = checkpoints.restore_latest(like)
    if restored is not None:
      state, extra = TrainState(**restored[0]), restored[1]
      print(f"continuing at step {int(state.step)}", flush=True)
      return Start(state, extra["stream"], extra["skipped"], extra["evaluated"])
  return Start(train_step.init(params, tx, shardings=shardings), {}, 0, {})


def _described(params: Any, tx: Any, shardings: Any, mesh: Mesh) -> dict[str, Any]:
  """Returns shapes, dtypes and shardings of a state's fields, without their arrays."""
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  shapes = jax.eval_shape(lambda x: x, params)
  of_optimizer = sharding.opt_state_shardings(tx, shapes, shardings, mesh)
  placed = lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
  return {
    "step": jax.ShapeDtypeStruct((), jax.numpy.int32, sharding=whole),
    "params": jax.tree.map(placed, shapes, shardings),
    "opt_state": jax.tree.map(placed, jax.eval_shape(tx.init, shapes), of_optimizer),
  }


def _engine(
  config: Config,
  folder: pathlib.Path,
  tokenizer: data.Tokenizer,
  workdir: pathlib.Path,
  stack: contextlib.ExitStack,
) -> Engine:
  """Makes the engine, which `stack` closes; offline there is none.

  Servers start while the trainer loads and compiles.
  """
  if offline_building.is_offline(config):
    return NoEngine()
  settings = config.engine.to_dict()
  name = settings.pop("name")
  own = settings[name] if name in settings else settings["options"]
  try:
    engine = engines.make(
      name,
      config=model_config.from_hf(loading.read_json(folder / "config.json")),
      source_directory=folder,
      workdir=workdir,
      decode=lambda ids: tokenizer.decode(ids, skip_special=False),
      compute_dtype=config.model.compute_dtype,
      num_valid_tokens=tokenizer.vocab_size,
      max_rows=settings["max_rows"],
      **own,
    )
  except (ValueError, ServerError, TransferError) as error:
    raise configuration.ConfigError(f"engine: {error}") from error
  stack.callback(engine.close)
  return engine


def _sampling(
  settings: Mapping[str, Any], tokenizer: data.Tokenizer, model: loading.Loaded
) -> SamplingParams:
  """Adds the ids that end a completion: all that the tokenizer and the model's files name."""
  named = model.generation.get("eos_token_id", [])
  ids = {*tokenizer.stop_ids, *(named if isinstance(named, list) else [named])}
  return SamplingParams(**settings, stop_ids=tuple(sorted(i for i in ids if i is not None)))


def _prompts(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener, state: Mapping[str, Any]
) -> data.PromptStream:
  """Opens the prompts where `state` of the stream says; {} is the beginning."""
  of_data = data_options.of_stream(config)
  return data.make(tokenizer, state=state.get("prompts"), opener=opener, **of_data)


def _stream(
  config: Config, prompts: stream.PromptSource, sample: stream.Sample, state: Mapping[str, Any]
) -> stream.OnlineStream:
  """Makes the stream of groups, where `state` says; {} is the beginning."""
  return stream.OnlineStream(
    prompts,
    sample,
    prompts_per_step=config.rollout.prompts_per_step,
    dynamic=_dynamic_sampling(config),
    keep=functools.partial(filters.apply, **_filters(config)),
    surplus=state.get("surplus", ()),
  )


def _environments(config: Config) -> environments.Environments:
  """Makes the environments, if anything is scored by them."""
  is_needed = offline_building.needs_environments(config)
  return environments.make(**(config.environments.to_dict() if is_needed else {}))


def _dynamic_sampling(config: Config) -> stream.DynamicSampling | None:
  settings = config.dynamic_sampling.to_dict()
  is_enabled = settings.pop("enabled")
  made = stream.DynamicSampling(**settings)
  return made if is_enabled else None


def _completion_limit(config: Config) -> int:
  limit = config.shaping.max_completion_tokens
  return config.sampling.max_tokens if limit is None else limit


def _shaping(config: Config) -> shaping.Shaping:
  settings = config.shaping.to_dict()
  if settings["overlong_buffer_tokens"] is not None:
    settings["max_completion_tokens"] = _completion_limit(config)
  return shaping.make(**settings)


def _filters(config: Config) -> dict[str, Any]:
  """Returns the filters of groups; dynamic sampling is about those that have signal."""
  settings = config.filters.to_dict()
  settings["drop_no_signal"] |= config.dynamic_sampling.enabled
  by_component = estimators.make(**config.advantages).by_component
  return {**settings, "by_component": by_component}


def _limits(config: Config) -> rollout.Limits:
  return rollout.Limits(
    max_turns=config.rollout.max_turns,
    max_tokens=min(config.rollout.max_tokens, config.batching.row_tokens),
    environment_timeout_s=config.rollout.environment_timeout_s,
    environment_concurrency=config.rollout.environment_concurrency,
    max_error_share=config.rollout.max_error_share,
  )


def _evaluation_sampling(config: Config) -> dict[str, Any]:
  return {**config.sampling.to_dict(), **_given(config.evaluation.sampling)}


def _given(section: Config) -> dict[str, Any]:
  """Returns the fields that are not None."""
  return {name: value for name, value in section.to_dict().items() if value is not None}


def _optimizer_steps(config: Config) -> int:
  return config.total_steps * config.learn.epochs * config.learn.minibatches


def _remember(config: Config, workdir: pathlib.Path) -> None:
  """Writes config.json; tells in what the config differs from the one the run began with."""
  file = workdir / "config.json"
  if file.exists():
    found = configuration.differences(configuration.read(file), config, harmless=HARMLESS)
    for line in found.serious:
      logging.warning("the configuration differs from the one that this run began with: %s", line)
  configuration.write(config, file)


def _refused(make: Callable[[], Any]) -> Iterator[str]:
  """Yields the message with which something refuses to be made."""
  try:
    make()
  except (TypeError, ValueError) as error:
    yield str(error)
