"""Makes datasets from the sections `data` and `evaluation` of a config, and checks them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo_jax import data, environments
from grpo_jax.config.options import Config
from grpo_jax.values import options

# Fields of datasets, by their names.
Sets = Mapping[str, Mapping[str, Any]]

# Fields of a dataset that say where its rows are.
_OF_SOURCE = ("path", "dataset", "subset", "split", "task")
# Fields of config.data that say how datasets are combined, not what each dataset is.
_DATALOADER = ("num_prompts_per_dataloader", "dataloader", "dataloader_args")
_OF_STREAM = ("shuffle", "epochs", "on_error", "datasets", *_DATALOADER)


def stream_options(config: Config) -> dict[str, Any]:
  """Returns the arguments of `data.make`, except the tokenizer and the state."""
  split_seed = config.seed if config.data.split_seed is None else config.data.split_seed
  settled: dict[str, Any] = {"seed": config.seed, "split_seed": split_seed}
  settled["known_environments"] = tuple(config.environments)
  return {**options.values(config.data), **settled}


def training(config: Config) -> dict[str, dict[str, Any]]:
  """Returns the fields of every training dataset, by name.

  Raises:
    ValueError: A field is unknown, or two datasets have the same name.
  """
  return data.training_sets(_shared(config), config.data.datasets)


def evaluation(config: Config) -> dict[str, dict[str, Any]]:
  """Returns the fields of every evaluation set, by the name used in its metrics.

  Raises:
    ValueError: A field is unknown, or two sets have the same name.
  """
  return _of_sets(config, data.evaluation_sets)


def trained_on(config: Config) -> list[str]:
  """Returns the names of the sets that are not evaluated, because they are training rows."""
  return _of_sets(config, data.trained_on)


def names_held_out(config: Config) -> bool:
  """Returns whether the config names rows for the evaluation."""
  section = config.evaluation
  return bool(section.datasets) or data.names_a_source(section.data)


def _of_sets(config: Config, function: Callable[..., Any]) -> Any:
  section = config.evaluation
  own, sets = section.data, section.datasets
  return function(_shared(config), config.data.datasets, own, sets, name=section.name)


def has_several(config: Config) -> bool:
  """Returns whether the metrics distinguish training datasets."""
  return len(training(config)) > 1 or config.data.dataloader is not None


def evaluates(config: Config) -> bool:
  """Returns whether the config asks for any evaluation."""
  section = config.evaluation
  return bool(section.at_start or section.at_end or section.every_steps)


def open_sets(
  config: Config, tokenizer: data.Tokenizer, opener: data.Opener = data.open_dataset
) -> dict[str, data.Dataset]:
  """Opens every evaluation set; {} if the run never evaluates."""
  found = evaluation(config) if evaluates(config) else {}
  for one in found.values():
    one.pop("weight", None)
  return {name: opener(tokenizer, **one) for name, one in found.items()}


def best_metrics(config: Config) -> tuple[str, ...]:
  """Returns the metrics that rank checkpoints; the first of them that was measured counts.

  The default is the accuracy of the first evaluation set, or its mean reward if its environment
  does not measure accuracy. A set that turns out to be training rows is not measured.
  """
  if config.checkpoint.best_metric:
    return (config.checkpoint.best_metric,)
  sets = (*evaluation(config), *trained_on(config))
  return tuple(f"eval/{name}/{metric}" for name in sets for metric in ("accuracy", "reward_mean"))


def complaints(config: Config, *, has_environments: bool = True) -> Iterator[str]:
  """Yields what cannot work, without opening anything.

  Args:
    config: Config of the run.
    has_environments: Whether the environments that datasets name score anything.
  """
  try:
    found = {"data": training(config), "evaluation": evaluation(config)}
    weights = {name: one.get("weight") for name, one in found["data"].items()}
    data.make_dataloader(weights, **{name: getattr(config.data, name) for name in _DATALOADER})
  except ValueError as error:
    yield str(error)
    return
  # A set of training rows is missing in `found`, and may have the fields that the others do not.
  yield from _unused(config, found["data"], {} if trained_on(config) else found["evaluation"])
  for section, sets in found.items() if has_environments else ():
    for name, one in sets.items():
      place = section if len(sets) == 1 else f"{section}: dataset {name!r}"
      try:
        yield from _unknown_environments(place, one, config)
        yield from _refused_tasks(place, one, config)
      except ValueError as error:  # there is no dataset of that name.
        yield f"{place}: {error}"
  per_loader, per_step = config.data.num_prompts_per_dataloader, config.rollout.prompts_per_step
  if per_loader and per_step % per_loader:
    yield (
      f"rollout.prompts_per_step={per_step} must be a multiple of "
      f"data.num_prompts_per_dataloader={per_loader}"
    )
  best = config.checkpoint.best_metric
  if config.checkpoint.keep_best and best and best.startswith("eval/") and found["evaluation"]:
    if not any(best.startswith(f"eval/{name}/") for name in found["evaluation"]):
      known = ", ".join(found["evaluation"])
      yield f"checkpoint.best_metric is {best!r}, but the evaluation sets are: {known}"


def _unused(config: Config, trained: Sets, evaluated: Sets) -> Iterator[str]:
  """Yields fields that name data although every dataset of a list has data of its own."""
  sections = {
    "data": (options.values(config.data), config.data.datasets, trained),
    "evaluation.data": (config.evaluation.data, config.evaluation.datasets, evaluated),
  }
  for section, (shared, listed, sets) in sections.items():
    place = section.removesuffix(".data")
    for field in _OF_SOURCE if listed and sets else ():
      value = shared.get(field)
      if value is not None and all(one.get(field) != value for one in sets.values()):
        yield (
          f"{section}.{field}={value!r} has no effect: every entry of {place}.datasets has data of"
          " its own"
        )


def _refused_tasks(place: str, one: dict[str, Any], config: Config) -> Iterator[str]:
  """Yields reasons why environments cannot score the task of a dataset."""
  task = one.get("task")
  if one.get("kind") != "reasoning_gym" or not task:
    return
  for name in sorted(data.environments(one) & {*config.environments}):
    settings = config.environments[name]
    try:
      why_not = environments.objection(name, settings, task)
    except LookupError:
      continue  # the task does not exist; opening it reports that.
    except ValueError as error:
      why_not = str(error)
    if why_not:
      yield f"{place}.task: environments.{name}: {why_not}"


def _unknown_environments(place: str, one: dict[str, Any], config: Config) -> Iterator[str]:
  for name in sorted(data.environments(one) - {*config.environments}):
    known = ", ".join(config.environments)
    yield f"{place}.environment is {name!r}, but environments has: {known}"


def _shared(config: Config) -> dict[str, Any]:
  """Returns the fields that training datasets share."""
  names = {"seed", *_OF_STREAM}
  return {name: value for name, value in stream_options(config).items() if name not in names}
