"""Makes the checked options of a run's parts from the sections of a config, and validates it."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

from grpo_jax import data, engines, environments
from grpo_jax.compilation import accelerators, precision
from grpo_jax.config import (
  ahead_options,
  batching_options,
  chosen_options,
  configuration,
  data_options,
  device_options,
  field_checks,
  lora_options,
  modes,
  sampler_options,
  teacher_options,
)
from grpo_jax.config.options import OPTIONS, Config
from grpo_jax.config.own_functions import name_or_function
from grpo_jax.data import group_options
from grpo_jax.engines import launching
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.options import USUAL_ROWS, SamplingOptions
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.files import local_paths, remote
from grpo_jax.groups import filters, shaping
from grpo_jax.learn import optim
from grpo_jax.models import loading, sources
from grpo_jax.models.chat import exported
from grpo_jax.models.products import Products
from grpo_jax.rl import custom_functions, estimators, objective_options, objectives
from grpo_jax.rollouts import rollout, stream
from grpo_jax.run_folder import sinks
from grpo_jax.values import options

# Fields that hold a path, in any section: path, prompt_file, weights_folder, ...
_PROOF_TOKENS = 4096  # of a step, with servers.
_PATH_FIELD = re.compile(
  r"(^|[._])(path|paths|file|files|folder|directory|dir|python|fallback|chat_template|dataset)"
  r"(\[\d+\])?$"
)


# Those of them that may be URLs, of which a local copy is made.
_MAY_BE_REMOTE = re.compile(
  r"model\.(path|fallback)|(data|evaluation\.data)\.path|(data|evaluation)\.datasets\[\d+\]\.path"
)


def validate(
  config: configuration.AnyConfig, *, devices: Sequence[Any] | None = None
) -> Iterator[str]:
  """Yields a message for everything that cannot work, before a model is loaded.

  A field with an invalid value does not hide problems of other fields: the rules are tried with
  two stand-ins for each invalid field, and complaints that depend on a stand-in are left out.

  Args:
    config: Config of the run.
    devices: Devices that the run will use; None: those that JAX finds.
  """
  if lacking := missing(config):
    yield lacking
    return
  yield from paths_elsewhere(configuration.as_dict(config))
  fields = configuration.plain_fields(config)
  wrong = field_checks.wrong(fields)
  yield from field_checks.problems(fields, lambda name: configuration.place_of(config, name))
  if not wrong:
    yield from _broken_rules(configuration.typed(config), devices)
    return
  values = {name: field_checks.stand_ins(name) for name in wrong}
  stand_ins = ({name: x[i] for name, x in values.items()} for i in (0, 1))
  found, again = (
    list(_broken_rules(configuration.typed(configuration.replaced(config, each)), devices))
    for each in stand_ins
  )
  for complaint in found:
    if complaint in again and not any(_is_about(complaint, name) for name in wrong):
      yield complaint


def missing(config: configuration.AnyConfig) -> str:
  """Returns a message that names the sections that a config lacks; "" if it has all."""
  sections = {name.partition(".")[0] for name in OPTIONS}
  lacking = sorted(sections - {*configuration.as_dict(config)})
  if not lacking:
    return ""
  return (
    f"the config is not one of a run, because it lacks {', '.join(lacking)}: begin with"
    " grpo_jax.config.base.get_config()"
  )


def _is_about(complaint: str, name: str) -> bool:
  """Returns whether a complaint names a field, with or without its section."""
  last = name.rpartition(".")[2]
  is_named = name in complaint or re.search(rf"(?<![\w.]){re.escape(last)}\b", complaint)
  return bool(is_named) or field_checks.STAND_IN in complaint


def _broken_rules(config: Config, devices: Sequence[Any] | None) -> Iterator[str]:
  """Yields a message for each combination of valid fields that cannot work."""
  yield from _unusable_model(config)
  yield from _refused(lambda: objective(config))
  yield from _refused(lambda: estimator(config))
  yield from _refused(lambda: dynamic_sampling(config))
  yield from ahead_options.problems(config)
  yield from _refused(lambda: shaping_of(config))
  yield from sinks.problems(config.logging.sinks, config.logging.wandb)
  yield from _refused(lambda: filters.apply((), **options.values(config.filters)))
  yield from _unlearnable(config)
  yield from _refused(lambda: SamplingParams.of(config.sampling))
  yield from _refused(lambda: SamplingParams.of(evaluation_sampling(config)))
  yield from _sampling_problems(config)
  yield from _refused(lambda: optimizer(config))
  if config.sampling.temperature <= 0:
    yield "sampling.temperature must be above 0: greedy completions do not explore"
  yield from _refused(lambda: group_options.RecordedOptions(**options.values(config.offline)))
  is_offline = modes.is_offline(config)
  if is_offline:
    yield from modes.problems(config)
    if needs_greedy(config):
      yield (
        "mode='offline' has no greedy completion of a prompt, whose reward is the baseline of"
        f" advantages.estimator={config.advantages.estimator!r}"
      )
  has_environments = modes.needs_environments(config)
  yield from data_options.complaints(config, has_environments=has_environments)
  if has_environments:
    yield from _environment_problems(config)
  too_large = [k for k in config.evaluation.pass_k if k > config.evaluation.group_size]
  if too_large:
    size = config.evaluation.group_size
    yield f"evaluation.pass_k={too_large} needs evaluation.group_size >= k, which is {size}"
  if not is_offline:
    refused = _refused(lambda: engines.module(config.engine.name))
    yield from (f"engine.name: {reason}" for reason in refused)
  if config.engine.name == "sglang" and not is_offline:
    yield from _refused_servers(config.engine.sglang)
  updates = config.learn.epochs * config.learn.minibatches
  if config.loss.force_on_policy_ratio and updates > 1:
    yield "loss.force_on_policy_ratio needs learn.epochs=1 and learn.minibatches=1"
  whitens = config.advantages.estimator in ("reinforce_pp", "reinforce_pp_baseline")
  if config.loss.kl_in_reward and not whitens:
    yield "loss.kl_in_reward needs advantages.estimator='reinforce_pp' (or its baseline form)"
  model = config.model
  if (form := model.tool_calls) is not None:
    refused = _refused(lambda: data.find_tool_form(form))
    yield from (f"model.tool_calls: {reason}" for reason in refused)
  taken = [name for name in exported.RESERVED if name in model.chat_template_args]
  if taken:
    yield f"model.chat_template_args: the run itself sets {', '.join(taken)}"
  yield from _refused(lambda: precision.resolve(model.matmul_precision, model.compute_dtype))
  yield from _refused(lambda: Products(model.compute_dtype, model.product_dtype))
  yield from teacher_options.problems(config)
  yield from lora_options.problems(config)
  yield from batching_options.problems(config)
  yield from _mesh_problems(config, devices)


def _sampling_problems(config: Config) -> Iterator[str]:
  """Yields reasons why the engine, or training, cannot do what the sampling asks for."""
  if modes.is_offline(config):
    if config.sampling.logprobs == "truncated":
      yield "sampling.logprobs='truncated' needs completions that are sampled: mode='online'"
    return
  try:
    sampling = SamplingParams.of(config.sampling)
    SamplingParams.of(evaluation_sampling(config))
  except (TypeError, ValueError):
    return  # already reported.
  yield from sampler_options.problems(config)
  if not sampling.reports_truncated:
    return
  if config.model.logprobs is not None:
    yield (
      "sampling.logprobs='truncated' has one implementation of the head:"
      f" model.logprobs={config.model.logprobs!r} must be None"
    )
  if config.engine.name == "sglang" and not sampling.top_k:
    yield (
      "sampling.logprobs='truncated' with engine.name='sglang' needs sampling.top_k: without it"
      " SGLang does not return logprobs of the distribution that it samples from"
    )
  if config.loss.use_on_policy_kl_approximation or config.loss.kl_weight == "old":
    yield (
      "sampling.logprobs='truncated' takes the KL between whole distributions: it works with"
      " loss.kl_weight='score' or 'none', and without loss.use_on_policy_kl_approximation"
    )


def _mesh_problems(config: Config, devices: Sequence[Any] | None) -> Iterator[str]:
  """Yields reasons why the mesh does not fit the devices; None: those that JAX finds."""
  try:
    found = jax.devices() if devices is None else devices
  # A missing driver, or JAX_PLATFORMS names a platform without one; without plug-in JAX asserts.
  except (RuntimeError, AssertionError) as error:
    yield f"JAX finds no device: {accelerators.why_none(error)}"
    return
  yield from device_options.problems(config, found)


def _refused_servers(settings: SGLangOptions) -> Iterator[str]:
  """Yields a message for each option of SGLang servers that would override another one."""
  yield from launching.refusals(
    addresses=settings.addresses,
    arguments=settings.arguments,
    command=settings.command,
    environment=settings.environment,
  )


def paths_elsewhere(section: Any, name: str = "") -> Iterator[str]:
  """Yields reasons why paths in a section, or in lists and sections below it, cannot be used."""
  if isinstance(section, Mapping):
    for key, value in section.items():
      yield from paths_elsewhere(value, f"{name}.{key}" if name else str(key))
  elif isinstance(section, list | tuple):
    for index, value in enumerate(section):
      yield from paths_elsewhere(value, f"{name}[{index}]")
  elif name and _PATH_FIELD.search(name):
    may_be_remote = _MAY_BE_REMOTE.fullmatch(name) and local_paths.is_url(section)
    check = remote.problem if may_be_remote else local_paths.complaint
    if reason := check(name, section):
      yield reason


def _unusable_model(config: Config) -> Iterator[str]:
  """Yields reasons why the model or its fallback cannot be used, without asking the network."""
  for name in ("path", "fallback"):
    path = getattr(config.model, name)
    if name == "fallback" and not path:
      continue
    refused = sources.refusal(path)
    if refused:
      yield f"model.{name}: {refused}"
    elif pathlib.Path(path).expanduser().is_dir():
      yield from (f"model.{name}: {reason}" for reason in _refused(lambda p=path: loading.look(p)))


def _environment_problems(config: Config) -> Iterator[str]:
  """Yields a message for environments that do not exist or may exceed the time limit of a call."""
  limit_s = config.rollout.environment_timeout_s
  for name, settings in config.environments.items():
    if environments.problems(name, settings):
      continue  # already reported.
    try:
      total_s = environments.total_timeout_s(name, settings)
    except ValueError as error:
      yield str(error)
      continue
    if total_s >= limit_s:
      yield (
        f"environments.{name}.total_timeout_s={total_s:g} must be less than"
        f" rollout.environment_timeout_s, which is {limit_s:g}"
      )


def _unlearnable(config: Config) -> Iterator[str]:
  """Yields reasons why nothing would be learned, or why an option could never have an effect."""
  group_size, filtered, dynamic = config.rollout.group_size, config.filters, config.dynamic_sampling
  if modes.is_offline(config):
    return  # the sizes of recorded groups and completions are given.
  compares = _estimates(config, "compares") and not teacher_options.has_teacher(config)
  if group_size == 1 and compares:
    yield "rollout.group_size=1 gives every completion advantage 0: nothing would be learned"
  elif group_size == 1 and (filtered.drop_no_signal or dynamic.enabled):
    yield "rollout.group_size=1 has no signal within a group: every group would be dropped"
  pass_k = config.advantages.pass_k
  if pass_k is not None and pass_k > group_size:
    yield (
      f"advantages.pass_k={pass_k} is above rollout.group_size={group_size}: there is no set of"
      " that many attempts, and nothing would be learned"
    )
  if filtered.min_scored > group_size:
    yield f"filters.min_scored={filtered.min_scored} is above rollout.group_size={group_size}"
  drawn = dynamic.max_rounds * (dynamic.prompts_per_round or config.rollout.prompts_per_step)
  if dynamic.enabled and drawn < config.rollout.prompts_per_step:
    yield (
      f"dynamic_sampling draws at most {drawn} prompts per step, too few for "
      f"rollout.prompts_per_step={config.rollout.prompts_per_step}"
    )
  buffer, limit = config.shaping.overlong_buffer_tokens, _completion_limit(config)
  if buffer is None:
    return
  if config.shaping.max_completion_tokens is None and config.rollout.max_turns > 1:
    yield (
      "shaping.overlong_buffer_tokens needs shaping.max_completion_tokens where "
      f"rollout.max_turns={config.rollout.max_turns}: sampling.max_tokens limits one turn only"
    )
  longest = min(
    config.sampling.max_tokens * config.rollout.max_turns,
    batching_options.longest_sequence(config) - 1,
  )
  if longest <= limit - buffer:
    yield (
      f"shaping.overlong_buffer_tokens={buffer} penalises completions of more than "
      f"{limit - buffer} tokens, but none can have more than {longest}"
    )


def dynamic_sampling(config: Config) -> stream.DynamicSampling | None:
  made = stream.DynamicSampling(**options.values(config.dynamic_sampling))
  return made if made.enabled else None


def shaping_of(config: Config) -> shaping.Shaping:
  settings = options.values(config.shaping)
  if settings["overlong_buffer_tokens"] is not None:
    settings["max_completion_tokens"] = _completion_limit(config)
  return shaping.make(**settings)


def _completion_limit(config: Config) -> int:
  limit = config.shaping.max_completion_tokens
  return config.sampling.max_tokens if limit is None else limit


def filters_of(config: Config) -> dict[str, Any]:
  """Returns the options of the group filters; dynamic sampling needs groups with signal."""
  settings = options.values(config.filters)
  settings["drop_no_signal"] |= config.dynamic_sampling.enabled
  by_component = estimator(config).by_component
  return {**settings, "by_component": by_component}


def limits(config: Config) -> rollout.AttemptLimits:
  return rollout.AttemptLimits(
    max_turns=config.rollout.max_turns,
    max_tokens=batching_options.longest_sequence(config),
    environment_timeout_s=config.rollout.environment_timeout_s,
    environment_concurrency=config.rollout.environment_concurrency,
    agent_timeout_s=config.rollout.agent_timeout_s,
    agent_concurrency=config.rollout.agent_concurrency,
    max_error_share=config.rollout.max_error_share,
  )


def proof_tokens(config: Config) -> int:
  """Returns the tokens of a proof that the engine has the new weights; 0: nothing is proven."""
  if modes.is_offline(config):
    return 0
  tokens = config.engine.proof_tokens
  if tokens is None:
    return _PROOF_TOKENS if config.engine.name == "sglang" else 0
  return tokens


def sampler_sizes(config: Config) -> dict[str, Any]:
  """Returns the sizes that the embedded sampler is planned for; the run never exceeds them."""
  evaluation, lengths = config.evaluation, lengths_of_sampler(config)
  most = max(completions_of_step(config), evaluation.num_prompts * evaluation.group_size)
  rows = min(config.engine.max_rows or USUAL_ROWS, most)
  own_prompts = lengths.pop("own_prompts")
  return {
    "max_rows": rows,
    "cache_dtype": config.engine.cache_dtype,
    "sampled_bytes": sampler_options.sampled_bytes(config),
    **lengths,
    "long_prompts": rows if own_prompts else None,
    "whole_caches": chosen_options.has_chosen_rows(config) and rows > USUAL_ROWS,
    "has_filters": _has_filters(config.sampling) or _has_filters(evaluation_sampling(config)),
  }


def completions_of_step(config: Config, hosts: int = 1) -> int:
  """Returns the completions that a training step samples at the same time.

  Args:
    config: Config of the run.
    hosts: Number of processes that share the prompts.
  """
  of_step = max(config.rollout.prompts_per_step, config.dynamic_sampling.prompts_per_round or 0)
  if ahead_options.updates_in_flight(config):
    of_step = ahead_options.rule(config).capacity
  return -(-of_step // hosts) * (config.rollout.group_size + needs_greedy(config))


def lengths_of_sampler(config: Config) -> dict[str, Any]:
  """Returns the longest prompt and completion, the size of a group, and whether all completions
  have prompts of their own: in a conversation they do after the first turn."""
  longest = (limits(config).max_tokens or 0) - 1  # a completion has at least one token.
  has_conversations = batching_options.has_conversations(config)
  is_simple = not has_conversations and not config.data.datasets
  longest_prompt = min(longest, config.data.max_prompt_tokens) if is_simple else longest
  of_evaluation = evaluation_sampling(config).max_tokens
  return {
    "prompt_tokens": max(longest_prompt, 1),
    "completion_tokens": max(min(max(config.sampling.max_tokens, of_evaluation), longest), 1),
    "group_size": config.rollout.group_size + needs_greedy(config),
    "own_prompts": has_conversations,
  }


def _has_filters(sampling: SamplingOptions) -> bool:
  """Returns whether some token can not be sampled."""
  return bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


def evaluation_sampling(config: Config) -> SamplingOptions:
  """Returns how evaluations sample; nothing is learned from them."""
  own = {name: x for name, x in config.evaluation.sampling.items() if x is not None}
  return dataclasses.replace(config.sampling, **{"logprobs": "full", **own})


def resolved(config: configuration.AnyConfig) -> Config:
  """Returns a copy of the config in which the loss's defaults replace None, and the options of an
  adapter that is read replace the defaults.

  Completions of advantage 0 are computed if they matter to the loss: to a user's own, and to a
  choice of tokens among all of the step.
  """
  config = configuration.typed(config)
  made = objective(config)
  names = (*objective_options.BOUNDS, "aggregation")
  values = {f"loss.{name}": getattr(made.options, name) for name in names}
  acts = made.acts_without_advantage and not (config.loss.kl_coef or config.loss.entropy_coef)
  if acts:
    values["batching.skip_zero_advantage"] = False
  return lora_options.resolved(configuration.replaced(config, values))


def objective(config: Config) -> objectives.Objective:
  """Makes the objective of the section `loss`.

  Raises:
    ValueError: The options cannot work, or the user's own loss cannot be used.
  """
  settings = options.values(config.loss)
  arguments, _ = settings.pop("loss_args"), settings.pop("router_replay")
  known = (*custom_functions.LOSS_ARRAYS, *custom_functions.LOSS_OPTIONS)
  settings["loss"] = name_or_function("loss.loss", settings["loss"], arguments, given=known)
  return objectives.make(distillation=teacher_options.distillation(config), **settings)


def estimator(config: Config) -> estimators.Estimator:
  """Makes the estimator of the section `advantages`.

  Raises:
    ValueError: The options cannot work, or the user's own advantages cannot be used.
  """
  settings = options.values(config.advantages)
  arguments, name = settings.pop("estimator_args"), settings.pop("estimator")
  known = (*custom_functions.ADVANTAGE_ARRAYS, *custom_functions.ADVANTAGE_OPTIONS)
  found = name_or_function("advantages.estimator", name, arguments, given=known)
  return estimators.make(found, **settings)


def optimizer(config: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Makes the optimizer of the section `optim`, and its schedule.

  Raises:
    ValueError: The options cannot work, or the user's own schedule cannot be used.
  """
  settings = options.values(config.optim)
  arguments = settings.pop("schedule_args")
  known = ("learning_rate", "total_steps", "final_share")
  name = settings["schedule"]
  settings["schedule"] = name_or_function("optim.schedule", name, arguments, given=known)
  return optim.make(optimizer_steps(config), **settings)


def needs_greedy(config: Config) -> bool:
  """Returns whether each prompt gets one more attempt, at temperature 0, as a baseline."""
  return _estimates(config, "needs_greedy")


def _estimates(config: Config, what: str) -> bool:
  """Returns a property of the estimator; False of a user's own function, and of a wrong one."""
  if "." in config.advantages.estimator:
    return False
  try:
    return getattr(estimator(config), what)
  except (TypeError, ValueError):  # reported apart.
    return False


def optimizer_steps(config: Config) -> int:
  return config.total_steps * config.learn.epochs * config.learn.minibatches


def _refused(make: Callable[[], Any]) -> Iterator[str]:
  """Yields the message of the ValueError that `make` raises, if any."""
  try:
    make()
  except (TypeError, ValueError) as error:
    yield str(error)
