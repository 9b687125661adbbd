"""Evaluates one model or two on several sets: samples, scores, writes, compares."""

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax import data, environments, metrics
from grpo_jax.building import (
  checks,
  evaluation_sets,
  groups,
  named_code,
  online,
  preparing,
  stored,
  stored_engine,
)
from grpo_jax.config import configuration, data_options, modes, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.engines.base import SamplingParams
from grpo_jax.evaluation import choosing, results
from grpo_jax.evaluation.results import Evaluation, ModelResult, SetResult
from grpo_jax.files import local_paths
from grpo_jax.files.disk import writing
from grpo_jax.rollouts import rollout
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.run_folder import console, evaluation_log
from grpo_jax.run_folder.sinks.jsonl import MetricLines
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)


def run(
  model: str | Sequence[str],
  *,
  workdir: str | pathlib.Path | None = None,
  config: Config | None = None,
  sets: Sequence[str] = (),
  samples: int | None = None,
  num_prompts: int | None = None,
  base: str | None = None,
  stop: Any = False,
) -> Evaluation:
  """Samples completions of held-out prompts, scores them and says how good the model is.

  Recorded groups (`mode="offline"`, or `sets` with responses) are not sampled: the model ranks
  their responses by its logprobs; see `ranked.describe`.

  Args:
    model: RUN[:STEP|:best|:latest], a folder, or a name of a model; or two of them, which are
      compared on the same prompts.
    workdir: Folder for the results; it must not hold an evaluation yet. None: RUN/evaluated/STEP,
      or evaluated/MODEL in the working directory, numbered if it is there.
    config: Config with the sampling, the engine and the sets; None: that of the run.
    sets: Sets in place of the config's, by name or file; see `choosing.with_sets`.
    samples: Number of completions of each prompt; None: `evaluation.group_size`.
    num_prompts: Number of prompts of each set; None: `evaluation.num_prompts` of the config's own
      sets, and all prompts of `sets`.
    base: Model that a run began with; see `stored.find`.
    stop: Flag that becomes true when the evaluation is to end; see `interrupts.Flag`.

  Returns:
    The results; `summary()` is their text, `metrics` the numbers.

  Raises:
    ConfigError: An option or a set cannot be used.
    Stopped: The evaluation was asked to end. What was sampled is in the folder.
    ExpectedFailure: What else a user can repair: a model, a checkpoint, servers, environments.
  """
  names = [model] if isinstance(model, str) else list(model)
  if not 1 <= len(names) <= 2:
    raise ConfigError(f"one model is evaluated, or two are compared; got {len(names)}")
  found = [stored.find(name, base=base) for name in names]
  chosen = _config_of_run(names[0]) if config is None else configuration.typed(config)
  chosen = _prepared(chosen, sets, samples, num_prompts, found[0])
  folder = _folder(workdir, found[0], names[0])
  _log.info("results: %s", folder)
  ks = _ks(chosen)
  evaluation = Evaluation(folder, (), {})
  for number, weights in enumerate(found, start=1):
    own = folder if len(found) == 1 else folder / f"model_{number}"
    one = configuration.replaced(chosen, stored.fields(weights))
    facts = {"samples": one.evaluation.group_size, "seed": one.seed}
    run_folder = None if weights.step is None else _run_of(names[number - 1])
    done = _Model(weights, own, one, ks, stop, run=run_folder, has_own_sets=bool(sets))
    for partial in done.sets():
      models = (*evaluation.models[: number - 1], partial)
      evaluation = Evaluation(folder, models, _compared(models, one.seed))
      results.write(evaluation, facts)  # what is done is not lost if the rest fails.
  return evaluation


def _compared(models: Sequence[ModelResult], seed: int) -> Mapping[str, Any]:
  return results.compare(*models, seed=seed) if len(models) == 2 else {}


@dataclasses.dataclass(frozen=True)
class _Model:
  """One model and where its results go."""

  weights: stored.StoredWeights
  folder: pathlib.Path
  config: Config
  ks: Sequence[int]
  stop: Any
  run: pathlib.Path | None  # folder of the run that trained it; None: it is not known.
  has_own_sets: bool  # sets that were asked for, in place of the config's.

  def sets(self) -> Any:
    """Evaluates set after set; yields the results so far after each."""
    with contextlib.ExitStack() as stack:
      with writing(self.folder):
        self.folder.mkdir(parents=True, exist_ok=True)
      configuration.write(self.config, self.folder / "config.json")
      evaluate = self._ranking(stack) if modes.is_offline(self.config) else self._engine(stack)
      lines = MetricLines(self.folder / "metrics.jsonl", 0)
      found: dict[str, SetResult] = {}
      for name, prompts in evaluate.held_out.items():
        found[name] = evaluate(name, prompts)
        model = ModelResult(self.weights.label, self.folder, dict(found))
        values = {f"eval/{key}": value for key, value in results.flat(model).items()}
        logged = {key: value for key, value in values.items() if metrics.definition(key)}
        lines.write(self.weights.step or 0, logged)
        yield model

  def _ranking(self, stack: contextlib.ExitStack) -> Any:
    """Reads tokenizer, recorded groups and weights; nothing is sampled."""
    from grpo_jax.evaluation import ranked  # imported here: most evaluations sample.

    return ranked.start(
      self.config, self.weights, stack, read=self._held_out, folder=self.folder, stop=self.stop
    )

  def _engine(self, stack: contextlib.ExitStack) -> "_Sampling":
    """Reads tokenizer, prompts and weights, and starts the engine."""
    config, weights = self.config, self.weights
    opened = stored_engine.open_weights(config, weights, stack)
    tokenizer = opened.tokenizer
    factories = stack.enter_context(groups.make_environments(config))
    config = groups.with_conversations(config, factories)
    held_out = self._held_out(config, tokenizer, groups.with_tools(data.open_dataset, factories))
    _check_scorable(held_out, factories)
    checks.check_prompts(config, tokenizer, factories, list(held_out.values()))
    engine = stored_engine.start(config, opened, stack, folder=self.folder, stop=self.stop)
    sampling = run_options.evaluation_sampling(config)
    log = evaluation_log.EvaluationLog(
      self.folder, lambda ids: tokenizer.decode(ids, skip_special=False)
    )
    return _Sampling(
      held_out=held_out,
      environments=factories,
      collect=functools.partial(
        rollout.groups,
        engine,
        factories,
        tokenizer=tokenizer,
        group_size=config.evaluation.group_size,
        sampling=online.sampling_params(sampling, tokenizer=tokenizer, model=weights.model),
        seed=config.seed,
        limits=run_options.limits(config),
        schedule=config.rollout.schedule,
      ),
      loop=stack.enter_context(LoopThread()),
      ks=self.ks,
      seed=config.seed,
      screen=opened.screen,
      log=log,
      step=weights.step or 0,
      stop=self.stop,
    )

  def _held_out(
    self, config: Config, tokenizer: data.Tokenizer, opener: data.Opener
  ) -> dict[str, list[Prompt]]:
    """Reads the prompts of all sets.

    Raises:
      ConfigError: A set cannot be read or has no prompts, or all sets are training rows.
    """
    limit, on_error = config.evaluation.num_prompts, config.data.on_error
    try:
      sets = data_options.open_sets(config, tokenizer, opener)
      sets = self._without_trained(sets, tokenizer, limit)
      found = {
        name: data.held_out(each, limit=limit, on_error=on_error) for name, each in sets.items()
      }
    except (OSError, ValueError, ImportError) as error:
      raise ConfigError(f"an evaluation set cannot be read: {error}{_OFFLINE}") from error
    if not found:
      raise ConfigError(_NOTHING_HELD_OUT)
    return found

  def _without_trained(
    self, sets: Mapping[str, data.Dataset], tokenizer: data.Tokenizer, limit: int
  ) -> dict[str, data.Dataset]:
    """Returns the sets of a run that it has not trained on, and logs what others share with its
    training data. Sets that were asked for are evaluated in any case."""
    if self.run is None:
      return dict(sets)
    of_run = named_code.config_to_run(self.run)
    try:
      opener = preparing.mode_of(of_run).opener
      stream = data.make(tokenizer, opener=opener, **data_options.stream_options(of_run))
    except (OSError, ValueError, ImportError) as error:
      _log.info("the sets are not compared with the training data, which cannot be read: %s", error)
      return dict(sets)
    counted = evaluation_sets.count(of_run, stream, sets, limit=limit)
    for name, each in counted.items():
      if each.shared:
        evaluation_sets.log_shared(name, each)
    return {
      name: each for name, each in sets.items() if self.has_own_sets or not counted[name].is_trained
    }


@dataclasses.dataclass(frozen=True)
class _Sampling:
  """Samples and scores a set: sampling(name, prompts) → what was found."""

  held_out: Mapping[str, Sequence[Prompt]]
  environments: environments.Environments
  collect: Any
  loop: LoopThread
  ks: Sequence[int]
  seed: int
  screen: console.TrainingScreen
  log: evaluation_log.EvaluationLog
  step: int
  stop: Any

  def __call__(self, name: str, prompts: Sequence[Prompt]) -> SetResult:
    """Every group is on the disk when it is scored; at the end the file is put in order."""
    found: list[rollout.Finished] = []
    with (
      self.screen.progress(f"evaluating {name}", len(prompts)) as shown,
      self.log.appending(self.step, name) as append,
    ):
      groups_of = self.collect(rollout.for_step(prompts, 0))
      iterator: Any = self.loop.iterate(groups_of, stop=self.stop)
      with contextlib.closing(iterator) as finished:
        for each in finished:
          found.append(each)
          append(*each)
          shown(1)
    ordered = rollout.in_order(found)
    self.log.write(self.step, name, ordered)
    return results.describe(name, ordered, self.environments, pass_k=self.ks, seed=self.seed)


def _prepared(
  config: Config,
  sets: Sequence[str],
  samples: int | None,
  num_prompts: int | None,
  weights: stored.StoredWeights,
) -> Config:
  """Returns the config of the evaluation, checked.

  Raises:
    ConfigError: The config cannot work.
  """
  if sets:
    config = choosing.with_sets(config, sets)
  own = config.evaluation
  attempts = own.group_size if samples is None else samples
  if num_prompts is None:
    num_prompts = _ALL if sets else own.num_prompts
  is_offline = modes.is_offline(config)
  if is_offline and samples is not None:
    raise ConfigError("--samples: the responses are recorded (mode='offline'), and none is sampled")
  values = {
    **stored.fields(weights),
    "model.fallback": None,
    "model.fallback_taken": None,
    "evaluation.at_start": True,
    "evaluation.group_size": attempts,
    "evaluation.num_prompts": num_prompts,
    "evaluation.pass_k": tuple(k for k in own.pass_k if k <= attempts) or (1,),
  }
  config = configuration.replaced(config, values)
  configuration.check(config, [run_options.validate])
  if not data_options.evaluation(config):
    raise ConfigError(_NOTHING_HELD_OUT)
  if is_offline:
    return config
  settings = SamplingParams.of(run_options.evaluation_sampling(config))
  if config.evaluation.group_size > 1 and settings.temperature == 0:
    raise ConfigError(
      f"{config.evaluation.group_size} samples of each prompt at temperature 0 are all the same:"
      " set --config.evaluation.sampling.temperature, for example to 1"
    )
  # What the engine is planned for: an evaluation is all that it samples.
  planned = {
    "rollout.prompts_per_step": 1,
    "rollout.group_size": config.evaluation.group_size,
    "sampling.max_tokens": settings.max_tokens,
  }
  return configuration.replaced(config, planned)


def _check_scorable(
  held_out: Mapping[str, Sequence[Prompt]], factories: environments.Environments
) -> None:
  try:
    for prompts in held_out.values():
      environments.check(factories, prompts[: checks.TRIED])
  except ValueError as error:
    raise ConfigError(str(error)) from error


def _ks(config: Config) -> list[int]:
  """Returns the k of pass@k and maj@k: the config's, and the powers of two up to all samples."""
  most = config.evaluation.group_size
  return sorted({*config.evaluation.pass_k, most} | {2**i for i in range(12) if 2**i <= most})


def _config_of_run(name: str) -> Config:
  reference = stored.parse(name)
  if reference.step is None:
    raise ConfigError(f"{name} is a model and not a run: say how to evaluate it, with --config=…")
  return named_code.config_to_run(pathlib.Path(reference.place))


def _run_of(name: str) -> pathlib.Path:
  return pathlib.Path(stored.parse(name).place)


def _folder(
  workdir: str | pathlib.Path | None, weights: stored.StoredWeights, name: str
) -> pathlib.Path:
  """Returns the folder of the results; it has no results yet."""
  if workdir is not None:
    folder = local_paths.checked("--workdir", workdir)
    if (folder / results.FILE).exists():
      raise ConfigError(f"--workdir={folder} holds an evaluation already: choose another folder")
    if stored.is_run(folder):
      raise ConfigError(f"--workdir={folder} is the folder of a run: choose another one")
    return folder
  if weights.step is None:
    place = pathlib.Path("evaluated") / pathlib.Path(name).name.replace(":", "_")
  else:
    place = _run_of(name) / "evaluated" / f"step_{weights.step:06d}"
  number = 1
  while (folder := place if number == 1 else place.with_name(f"{place.name}-{number}")).exists():
    number += 1
  return folder


_ALL = 10**9
_NOTHING_HELD_OUT = (
  "nothing can be evaluated: the config names no rows but those of the training. Name sets, by name"
  " or file, with --sets=gsm8k,FILE (in Python: sets=), or set evaluation.data.path"
)
_OFFLINE = (
  ". Sets of the hub need the library datasets and a network; a local copy of the rows is named"
  " as --sets=NAME=FILE"
)
