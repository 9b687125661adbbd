"""From a config to the parts of a run: everything that is made once, before the loop."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from grpo_kernels.attention import Attention
from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh

from grpo_jax import data, engines, environments, processes
from grpo_jax.building import computation
from grpo_jax.building import offline as offline_building
from grpo_jax.compilation import compiling, precision
from grpo_jax.compilation.programs import Job
from grpo_jax.config import batching_options, configuration, data_options, modes, run_options
from grpo_jax.engines.base import Engine, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.none import NoEngine
from grpo_jax.engines.server_process import ServerError
from grpo_jax.engines.transfer import TransferError
from grpo_jax.errors import ExpectedFailure
from grpo_jax.files import atomic, shared_places
from grpo_jax.files.disk import writing
from grpo_jax.groups import filters, group_json, learning_signal, shaping
from grpo_jax.learn import monitoring, sharding, train_step
from grpo_jax.metrics import timing
from grpo_jax.models import leaves, loading, sources, transformer
from grpo_jax.models.fields import Fields
from grpo_jax.offline import recorded as offline
from grpo_jax.rl import objectives
from grpo_jax.rollouts import collecting as rollout
from grpo_jax.rollouts import stream
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.run_folder import checkpointing, console, loggers, notices, stored_leaves
from grpo_jax.run_folder import earlier as run_folder
from grpo_jax.types import Prompt, TrainState

_log = logging.getLogger(__name__)

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
  loop: LoopThread  # collects the rollouts.
  computation: computation.Computation
  compilations: compiling.Watch
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
  stack.enter_context(notices.on_screen(screen))
  stack.enter_context(watch.listening())
  mesh = sharding.make_mesh(**config.mesh)
  matmul_precision = _matmul_precision(config)
  _check_head(config, mesh)
  _check_attention(config, mesh)
  _log.info(precision.describe(matmul_precision, _chip(mesh).platform))
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
  is_offline = modes.is_offline(config)
  opener = offline_building.opener(config) if is_offline else data.open_dataset
  held_out = data_options.open_all(config, tokenizer, opener)  # a wrong file is found at once.
  factories = stack.enter_context(_environments(config))
  if modes.needs_environments(config):
    _check_scorable(config, _prompts(config, tokenizer, opener, {}), held_out, factories)

  checkpoints = stack.enter_context(
    checkpointing.open(
      workdir / "checkpoints",
      keep_last=config.checkpoint.keep_last,
      keep_best=config.checkpoint.keep_best,
      best_metric=data_options.best_metrics(config),
      mode=config.checkpoint.best_mode,
    )
  )
  _tell_differences(config, workdir)
  engine = _engine(config, folder, tokenizer, workdir, stack)
  objective = objectives.make(**config.loss)
  _log.debug("loss: %s", config.loss.to_dict())
  made = computation.make(config, loading.read_config(folder), mesh, objective)
  with compiling.Ahead([*_engine_jobs(engine, made), *made.jobs()], watch) as ahead:
    model = _load(folder, made.shardings)
    data.check_vocabulary(tokenizer, model.config.vocab_size)
    ahead.wait(screen.progress, stop=stop)
  scorer = offline_building.make_scorer(config, made.score, mesh, made.shapes, made.cost)
  behavior_logprobs = None
  if is_offline:
    prompts = _prompts(config, tokenizer, opener, {})
    for line in offline_building.groups_lines(config, prompts.datasets):
      _log.info(line)
    behavior_logprobs = offline_building.score_behavior(
      config, prompts, scorer, model.params, workdir
    )
  reference = made.copy(model.params) if objective.needs_ref else None
  initial, frees_initial = monitoring.make_initial(
    lambda: _load(folder, made.shardings).params, reference
  )
  refuse = functools.partial(_unusable, config, tokenizer, opener)
  start = _restore(checkpoints, model.params, made, refuse)
  if int(start.state.step) == 0:
    run_folder.set_aside(workdir)
  configuration.write(config, workdir / "config.json")
  if processes.is_main():
    atomic.clear_leftovers(workdir / "export")
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
    made.watch,
    scorer,
    initial,
    frees_initial,
    all_every_steps=config.learn.report_all_every_steps,
    kl_every_steps=config.learn.report_kl_every_steps,
    total_steps=config.total_steps,
    warn=_log.warning,
  )
  limits = run_options.limits(config)
  loop = stack.enter_context(LoopThread())
  ranking = None
  if behavior_logprobs is not None:
    rescore = offline_building.make_rescore(config, factories, tokenizer, limits, stop, loop)
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
      loop=loop,
      stop=stop,
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
    filters=run_options.filters_of(config),
    shaping=run_options.shaping_of(config),
    held_out=held_out,
    has_several_datasets=data_options.has_several(config),
    ranking=ranking,
    evaluation_sampling=_sampling(run_options.evaluation_sampling(config), tokenizer, model),
    limits=limits,
    loop=loop,
    computation=made,
    compilations=watch,
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
    return sources.find(model.path, fallback=model.fallback, cache_dir=model.cache_dir)
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


def _check_attention(config: Config, mesh: Mesh) -> None:
  """Raises ConfigError, before anything is loaded, for a `model.attention` that cannot run here."""
  try:
    attention_choice.pick(config.model.attention, _chip(mesh), dtype=config.model.compute_dtype)
  except (ValueError, NotImplementedError) as error:
    raise configuration.ConfigError(f"model.attention: {error}") from error


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
  if not modes.is_offline(config) and allowed > known:
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
    _log.warning(
      "mesh.fsdp=%d does not divide the model's width of %d: weights and optimizer state are whole"
      " on every device",
      *(fsdp, model.hidden_size),
    )
  if "vocab" in whole.get("tensor", {}):
    _log.warning(
      "mesh.tensor=%d does not divide the vocabulary of %d: embedding and head are whole on every"
      " device",
      *(tensor, model.vocab_size),
    )


def _keep_compiled() -> None:
  """Keeps compiled programs in the user's cache, so that a run that continues starts at once.

  JAX_COMPILATION_CACHE_DIR names another folder. They are code that runs as this user, so a folder
  that others may write is not used. All are kept, unless a variable of JAX says otherwise; by
  default JAX keeps those that take a second, and a run that continues would compile the others.
  """
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  named = jax.config.values["jax_compilation_cache_dir"]
  if named is not None and "://" in named:
    return  # a bucket; JAX reports its errors.
  try:
    if named is None:
      named = str(shared_places.private_folder(sources.default_cache() / "xla"))
      jax.config.update("jax_compilation_cache_dir", named)
    os.makedirs(named, exist_ok=True)
    tempfile.TemporaryFile(dir=named).close()
  except OSError as error:
    _log.warning("compiled programs are not kept: %s", error)
    # What is there can still be read. JAX would warn of every program that it cannot write.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    if named is not None and not os.path.isdir(named):
      jax.config.update("jax_compilation_cache_dir", None)


def _load(folder: pathlib.Path, shardings: Any) -> loading.Loaded:
  """Reads the model straight into its sharding."""
  return loading.load(folder, sharding=lambda _: shardings)


def _restore(
  checkpoints: checkpointing.Checkpoints,
  params: Any,
  made: computation.Computation,
  refuse: checkpointing.Refusal,
) -> Start:
  """Returns the newest usable checkpoint's state, or the state of the model as it was read."""
  if checkpoints.steps():
    jax.tree.map(lambda x: x.delete(), params)  # never two sets of weights in memory.
    restored = checkpoints.restore_latest(dict(vars(made.state)), refuse=refuse)
    if restored is not None:
      state, extra = TrainState(**restored[0]), restored[1]
      _log.info("continuing at step %d", int(state.step))
      return Start(state, extra["stream"], extra["skipped"], extra["evaluated"])
  state = train_step.init(params, made.tx, shardings=made.shardings, initializer=made.initialize)
  return Start(state, {}, 0, {})


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


def _engine_jobs(engine: Engine, made: computation.Computation) -> list[Job]:
  """Returns what the engine has compiled; servers compile by themselves."""
  return engine.programs(made.state.params) if isinstance(engine, JaxSampler) else []


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
  if modes.is_offline(config):
    return NoEngine()
  settings = config.engine.to_dict()
  name = settings.pop("name")
  own = settings[name] if name in settings else settings["options"]
  is_embedded = name == "jax_sampler"
  sizes = run_options.sampler_sizes(config) if is_embedded else {"max_rows": settings["max_rows"]}
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
      attention=Attention(config.model.attention),
      num_valid_tokens=tokenizer.vocab_size,
      **{**sizes, **own},
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
  is_needed = modes.needs_environments(config)
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
    _log.warning("the configuration differs from the one that this run began with: %s", line)
