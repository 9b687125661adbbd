"""From a config to the parts of a run: everything that is made once, before the loop."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh

from grpo_jax import (
  batching_options,
  checkpointing,
  compiling,
  configuration,
  console,
  data,
  data_options,
  engines,
  environments,
  filters,
  group_json,
  learning_signal,
  loggers,
  monitoring,
  offline,
  offline_building,
  packing,
  precision,
  rollout,
  run_folder,
  run_options,
  shaping,
  shared_places,
  stored_leaves,
  stream,
  timing,
)
from grpo_jax.disk import writing
from grpo_jax.engines.base import Engine, SamplingParams
from grpo_jax.engines.none import NoEngine
from grpo_jax.engines.server_process import ServerError
from grpo_jax.engines.transfer import TransferError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import optim, sharding, train_step
from grpo_jax.models import export, leaves, loading, operations, sources, transformer
from grpo_jax.models.fields import Fields
from grpo_jax.models.products import Products
from grpo_jax.rl import estimators, objectives
from grpo_jax.types import Prompt, TrainState

# An ml_collections.ConfigDict, whose fields a type checker cannot know.
Config = Any

# Prompts of each dataset that are shown to their environments before anything is sampled.
TRIED = 8

# Fields whose change does not alter what a continued run learns.
HARMLESS = (
  "total_steps",
  "logging.*",
  "checkpoint.*",
  "export.*",
  "evaluation.*",
  "model.path",
  "model.fallback",
  "model.fallback_taken.reason",
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
  shapes: tuple[packing.Shape, ...]  # those that microbatches may have.
  cost: packing.Cost  # by which the shapes of a step are chosen.
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
  monitor: monitoring.Monitor
  signal_watch: learning_signal.Watch
  checkpoints: checkpointing.Checkpoints
  logger: loggers.Logger
  timer: timing.Timer
  stop: Any = False  # becomes true when the run is asked to end; see `interrupts.Flag`.


@dataclasses.dataclass(frozen=True)
class Start:
  """Where a run begins or goes on."""

  state: TrainState
  stream: dict[str, Any]  # what `GroupStream.state` returned; empty at the beginning.
  skipped: int  # updates in a row that changed nothing.
  evaluated: dict[str, float]  # the last evaluation, of the weights of this step; or empty.


def build(
  config: Config, workdir: pathlib.Path, stack: contextlib.ExitStack, stop: Any = False
) -> tuple[Run, Start]:
  """Makes the parts of a run and restores its newest checkpoint; `stack` closes them."""
  config = run_options.resolved(config)
  with writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
  _keep_compiled()
  watch = compiling.Watch()
  screen = console.Screen(note=watch.note)
  stack.enter_context(watch.listening(screen.print))
  mesh = sharding.make_mesh(**config.mesh)
  matmul_precision = _matmul_precision(config)
  _check_head(config, mesh)
  print(precision.describe(matmul_precision, _chip(mesh).platform), flush=True)
  found = _find_model(config)
  folder = found.folder
  config = _with_fallback(config, found)
  _check_context(config, folder)
  _check_split(mesh, folder)
  tokenizer = data.load_tokenizer(
    folder,
    chat_template=config.model.chat_template,
    template_args=config.model.chat_template_args.to_dict(),
  )
  is_offline = offline_building.is_offline(config)
  opener = offline_building.opener(config) if is_offline else data.open_dataset
  held_out = data_options.open_all(config, tokenizer, opener)  # a wrong file is found at once.
  factories = stack.enter_context(_environments(config))
  if offline_building.needs_environments(config):
    _check_scorable(config, _prompts(config, tokenizer, opener, {}), held_out, factories)

  checkpoints = stack.enter_context(
    checkpointing.open(
      workdir / "checkpoints",
      keep_last=config.checkpoint.keep_last,
      keep_best=config.checkpoint.keep_best,
      best_metric=data_options.best_metrics(config),
      mode=config.checkpoint.best_mode,
      tell=print,
    )
  )
  _tell_differences(config, workdir)
  engine = _engine(config, folder, tokenizer, workdir, stack)
  objective = objectives.make(**config.loss)
  logging.info("loss: %s", config.loss.to_dict())
  tx, schedule = optim.make(run_options.optimizer_steps(config), **config.optim.to_dict())
  model, shardings = _load(folder, mesh)
  data.check_vocabulary(tokenizer, model.config.vocab_size)
  of_policy = {
    "temperature": config.sampling.temperature,
    "products": Products(
      config.model.compute_dtype, config.model.product_dtype, sharding.placement(mesh)
    ),
    "remat": config.model.remat,
    "partition": sharding.head_partition(mesh),
  }
  logprobs = train_step.make_logprobs(
    model.config, implementation=config.model.logprobs, **of_policy
  )
  score = train_step.make_scorer(logprobs, matmul_precision=matmul_precision)
  cost = operations.of_update(model.config, remat=config.model.remat)
  shapes = batching_options.plan(config, cost=cost, replicas=sharding.replicas(mesh))
  scorer = offline_building.make_scorer(config, score, mesh, shapes, cost)
  behavior_logprobs = None
  if is_offline:
    prompts = _prompts(config, tokenizer, opener, {})
    for line in offline_building.groups_lines(config, prompts.datasets):
      print(line, flush=True)
    behavior_logprobs = offline_building.score_behavior(
      config, prompts, scorer, model.params, workdir
    )
  reference = jax.tree.map(lambda x: x.copy(), model.params) if objective.needs_ref else None
  initial, frees_initial = monitoring.make_initial(lambda: _load(folder, mesh)[0].params, reference)
  refuse = functools.partial(_unusable, config, tokenizer, opener)
  start = _restore(checkpoints, model.params, tx, shardings, mesh, refuse)
  if int(start.state.step) == 0:
    run_folder.set_aside(workdir, tell=print)
  configuration.write(config, workdir / "config.json")
  export.clear_leftovers(workdir / "export")
  model = dataclasses.replace(model, params={})

  first = int(start.state.step)
  logger = loggers.make(
    workdir,
    start_step=first,
    total_steps=config.total_steps,
    decode=lambda ids: tokenizer.decode(ids, skip_special=False),
    screen=screen,
    **config.logging,
  )
  stack.callback(logger.close)
  monitor = monitoring.Monitor(
    train_step.make_watcher(
      logprobs, with_entropy=config.learn.report_entropy, matmul_precision=matmul_precision
    ),
    scorer,
    initial,
    frees_initial,
    all_every_steps=config.learn.report_all_every_steps,
    kl_every_steps=config.learn.report_kl_every_steps,
    total_steps=config.total_steps,
    warn=logger.print,
  )
  token_loss = None
  if takes_one_sweep(config, objective):
    token_loss = train_step.make_token_loss(model.config, objective, **of_policy)
  limits = run_options.limits(config)
  ranking = None
  if behavior_logprobs is not None:
    rescore = offline_building.make_rescore(config, factories, tokenizer, limits, stop)
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
      stop=stop,
    )
  prompts = _prompts(config, tokenizer, opener, start.stream)
  return Run(
    config=config,
    workdir=workdir,
    mesh=mesh,
    shapes=shapes,
    cost=cost,
    model=model,
    reference=reference,
    tokenizer=tokenizer,
    engine=engine,
    environments=factories,
    stream=_stream(config, prompts, sample, start.stream),
    filters=run_options.filters_of(config),
    shaping=run_options.shaping_of(config),
    held_out=held_out,
    has_several_datasets=data_options.has_several(config),
    ranking=ranking,
    evaluation_sampling=_sampling(run_options.evaluation_sampling(config), tokenizer, model),
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
      matmul_precision=matmul_precision,
    ),
    score=score,
    monitor=monitor,
    signal_watch=learning_signal.Watch(has_learned=first > 0),
    checkpoints=checkpoints,
    logger=logger,
    timer=timing.Timer(),
    stop=stop,
  ), start


def _find_model(config: Config) -> sources.Found:
  """Finds the folder of the model; raises ConfigError if there is none."""
  model = config.model
  try:
    return sources.find(model.path, fallback=model.fallback, cache_dir=model.cache_dir, tell=_say)
  except ExpectedFailure:
    raise
  except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
    raise configuration.ConfigError(f"model.path: {error}") from error


def _check_head(config: Config, mesh: Mesh) -> None:
  """Raises ConfigError, before anything is loaded, for a `model.logprobs` that cannot run here."""
  if config.model.logprobs is None:
    return
  try:
    with precision.scope(_matmul_precision(config)):
      choice.pick(config.model.logprobs, _chip(mesh), dtype=config.model.compute_dtype, width=0)
  except (ValueError, NotImplementedError) as error:
    raise configuration.ConfigError(f"model.logprobs: {error}") from error


def _matmul_precision(config: Config) -> str | None:
  """Returns the precision of all float32 products of the run."""
  return precision.resolve(config.model.matmul_precision, config.model.compute_dtype)


def _chip(mesh: Mesh) -> choice.Chip:
  """Returns what the run computes on."""
  return choice.chip_of(mesh.devices.flat[0])


def _check_context(config: Config, folder: pathlib.Path) -> None:
  """Raises ConfigError if completions may outgrow the model: a run would end there, half done."""
  allowed = run_options.limits(config).max_tokens or 0
  known = loading.read_config(folder).max_position_embeddings
  if not offline_building.is_offline(config) and allowed > known:
    bounds, remedy = "rollout.max_tokens lets", "it"
    if batching_options.longest_row(config) is not None:
      rows = "row_buckets" if config.batching.row_tokens is None else "row_tokens"
      bounds, remedy = f"rollout.max_tokens and batching.{rows} let", "one of them"
    raise configuration.ConfigError(
      f"{bounds} a prompt with its completion have {allowed} tokens, the model in {folder} reads"
      f" {known} (max_position_embeddings): lower {remedy}"
    )


def _check_split(mesh: Mesh, folder: pathlib.Path) -> None:
  """Says what of a model a mesh does not split, though an axis of it is there to split it.

  Raises:
    ConfigError: `mesh.tensor` does not divide the attention heads or the feed-forward width.
  """
  model = loading.read_config(folder)
  tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
  for what, length in (("attention heads", model.num_heads), ("mlp", model.intermediate_size)):
    if length % tensor:
      raise configuration.ConfigError(
        f"mesh.tensor={tensor} does not divide the model's {length} {what} ({folder}): set it to a"
        " divisor, or mesh.tensor=1 and mesh.fsdp=-1"
      )
  axes, shapes = transformer.logical_axes(model), leaves.tree(model)
  whole = sharding.unsplit(axes, mesh, shapes=shapes)
  if "fsdp" in whole:
    logging.warning(
      "mesh.fsdp=%d does not divide the model's width of %d: weights and optimizer state are whole"
      " on every device",
      *(fsdp, model.hidden_size),
    )
  if "vocab" in whole.get("tensor", {}):
    logging.warning(
      "mesh.tensor=%d does not divide the vocabulary of %d: embedding and head are whole on every"
      " device",
      *(tensor, model.vocab_size),
    )


def takes_one_sweep(config: Config, objective: objectives.Objective) -> bool:
  """Returns whether the update finds the head's gradients in the sweep that computes the loss.

  A named implementation of the two passes is what runs.
  """
  is_one_step = config.learn.epochs * config.learn.minibatches == 1
  is_free = config.model.logprobs is None
  return config.learn.gradient_in_forward and is_one_step and is_free and objective.is_token_local


def _keep_compiled() -> None:
  """Keeps compiled programs in the user's cache, so that a run that goes on starts at once.

  JAX_COMPILATION_CACHE_DIR names another folder. They are code that runs as this user, so a folder
  that others may write is not used.
  """
  if jax.config.values["jax_compilation_cache_dir"] is None:
    try:
      folder = shared_places.private_folder(sources.default_cache() / "xla")
    except OSError as error:
      logging.warning("compiled programs are not kept: %s", error)
    else:
      jax.config.update("jax_compilation_cache_dir", str(folder))


def _load(folder: pathlib.Path, mesh: Mesh) -> tuple[loading.Loaded, Any]:
  """Reads the model straight into its sharding; returns the shardings, too."""
  described = loading.read_config(folder)
  axes, shapes = transformer.logical_axes(described), leaves.tree(described)
  shardings = sharding.param_shardings(axes, mesh, shapes=shapes)
  return loading.load(folder, sharding=lambda _: shardings), shardings


def _restore(
  checkpoints: checkpointing.Checkpoints,
  params: Any,
  tx: Any,
  shardings: Any,
  mesh: Mesh,
  refuse: checkpointing.Refusal,
) -> Start:
  """Returns the newest usable checkpoint's state, or the state of the model as it was read."""
  if checkpoints.steps():
    like = _described(params, tx, shardings, mesh)
    jax.tree.map(lambda x: x.delete(), params)  # never two sets of weights in memory.
    restored = checkpoints.restore_latest(like, refuse=refuse)
    if restored is not None:
      state, extra = TrainState(**restored[0]), restored[1]
      print(f"continuing at step {int(state.step)}", flush=True)
      return Start(state, extra["stream"], extra["skipped"], extra["evaluated"])
  return Start(train_step.init(params, tx, shardings=shardings), {}, 0, {})


def _unusable(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener, state: Any, extra: Any
) -> str | None:
  """Returns why a run cannot continue from what a checkpoint holds; None if it can."""
  if name := stored_leaves.first_not_finite(state["params"]):
    return f"its weights are not finite: {name}"
  for name, kind in {"stream": dict, "skipped": int, "evaluated": dict}.items():
    if not isinstance(extra.get(name), kind) or isinstance(extra[name], bool):
      return f"{name!r} is {extra.get(name)!r:.60}"
  if extra["skipped"] < 0:
    return f"'skipped' is {extra['skipped']}"
  values = extra["evaluated"].values()
  if not all(isinstance(value, float | int) for value in values):
    return "'evaluated' holds what is not a number"
  try:
    _prompts(config, tokenizer, opener, extra["stream"])
    for record in extra["stream"].get("surplus", ()):
      group_json.decode(record)
  except checkpointing.READING_FAILS as error:
    return f"its place in the data cannot be used: {type(error).__name__}: {error}"
  return None


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
      config=loading.read_config(folder),
      source_directory=folder,
      workdir=workdir,
      decode=lambda ids: tokenizer.decode(ids, skip_special=False),
      compute_dtype=config.model.compute_dtype,
      product_dtype=config.model.product_dtype,
      matmul_precision=config.model.matmul_precision,
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
  named = Fields(model.generation, "generation_config.json").ids("eos_token_id")
  return SamplingParams(**settings, stop_ids=tuple(sorted({*tokenizer.stop_ids, *named})))


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
    dynamic=run_options.dynamic_sampling(config),
    keep=functools.partial(filters.apply, **run_options.filters_of(config)),
    surplus=state.get("surplus", ()),
  )


def _environments(config: Config) -> environments.Environments:
  """Makes the environments, if anything is scored by them."""
  is_needed = offline_building.needs_environments(config)
  try:
    return environments.make(**(config.environments.to_dict() if is_needed else {}))
  except ValueError as error:
    raise configuration.ConfigError(f"environments: {error}") from error


def _check_scorable(
  config: Config,
  prompts: data.PromptStream,
  held_out: Mapping[str, Sequence[Prompt]],
  factories: environments.Environments,
) -> None:
  """Raises ConfigError, before anything is sampled, if an environment can score no row."""
  try:
    for dataset in prompts.datasets:
      environments.check(factories, data.first_prompts(dataset, TRIED))
    for of_set in held_out.values():
      environments.check(factories, of_set[:TRIED])
  except ValueError as error:
    remedy = "data.environment names another one (docs/environments.md)"
    if "nemo_gym" in {one["format"] for one in data_options.training(config).values()}:
      remedy += (
        ". NeMo Gym's own verifiers do not run here: write an environment that scores these rows,"
        " or learn from the rewards that the file has, without sampling: mode='offline'"
      )
    raise configuration.ConfigError(f"{error}. What to do: {remedy}") from error


def _with_fallback(config: Config, found: sources.Found) -> Config:
  """Returns the config as it is written; a model's fallback is named in it if it was taken.

  Then `model.fallback_taken` is added: the model that was asked for, the one that was taken, and
  why.
  """
  if not found.reason:
    return config
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.model.fallback_taken = {
      "asked": found.asked,
      "taken": found.taken,
      "reason": found.reason,
    }
  return config


def _say(line: str) -> None:
  print(line, flush=True)


def _tell_differences(config: Config, workdir: pathlib.Path) -> None:
  """Logs in what the configuration differs from the one that the run began with."""
  file = workdir / "config.json"
  if not file.exists():
    return
  try:
    before = configuration.read(file)
  except configuration.ConfigError as error:
    raise configuration.ConfigError(
      f"{error}. Move it away to continue the run: it is compared with the present configuration,"
      " which is then written in its place"
    ) from error
  for line in configuration.differences(before, config, harmless=HARMLESS).serious:
    logging.warning("the configuration differs from the one that this run began with: %s", line)
