"""Checks a config and its model before any weights are loaded."""

import logging
import pathlib
from collections.abc import Sequence

from grpo_kernels.attention import choice as attention_choice
from grpo_kernels.linear_logprobs import choice
from jax.sharding import Mesh

from grpo_jax import batching, data, environments, processes
from grpo_jax.compilation import accelerators, precision
from grpo_jax.config import (
  batching_options,
  configuration,
  data_options,
  modes,
  removed,
  run_options,
)
from grpo_jax.config.options import Config
from grpo_jax.engines import launching
from grpo_jax.learn import device_mesh, sharding
from grpo_jax.models import leaves, loading, transformer
from grpo_jax.models.chat import tool_calls
from grpo_jax.rollouts import conversations
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)


# Number of prompts of each dataset that environments check before anything is sampled.
TRIED = 8

# Fields that may change without altering what a continued run learns.
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
  "chosen_by_memory",
  "model.lora.path",  # where a run begins; checkpoints hold the adapter.
  "rollout.max_error_share",
  "learn.max_skipped_steps",
)


def before_model(config: Config, mesh: Mesh) -> None:
  """Logs what the run computes on, and checks all that needs no model, which may be a download.

  Raises:
    ConfigError: A kernel cannot run here, or SGLang servers cannot be started.
  """
  log_devices(mesh)
  check_kernels(config, mesh)
  products = precision.resolve(config.model.matmul_precision, config.model.compute_dtype)
  _log.info(precision.describe(products, _chip(mesh).platform))
  log_lengths(config)
  _check_engine(config)


def check_model(config: Config, mesh: Mesh, model: loading.ModelFacts) -> None:
  """Raises ConfigError for a model with which the options cannot work; see `check_split`."""
  check_attention(config, mesh, width=model.config.head_dim)
  check_context(config, model)
  check_split(mesh, model)


def check_prompts(
  config: Config,
  tokenizer: data.Tokenizer,
  factories: environments.Environments,
  sets: Sequence[Sequence[Prompt]],
) -> None:
  """Checks, before anything is sampled, that the model can be asked and answered.

  Args:
    config: Config of the run.
    tokenizer: Tokenizer with the chat template.
    factories: Environments by name.
    sets: Prompts of each dataset.

  Raises:
    ConfigError: The calls of declared tools could not be read, or the template cannot write a role
      that an environment declares.
  """
  _check_tool_form(tokenizer, sets)
  _check_conversations(config, tokenizer, factories, sets)


def log_devices(mesh: Mesh) -> None:
  """Says in one line what the run computes on, and warns of a GPU or TPU that JAX does not use."""
  devices = list(mesh.devices.flat)
  left = accelerators.unused(devices[0].platform)
  is_chosen = left is not None and left[1].is_chosen
  note = f"; {left[0]} not used: {left[1].reason}" if left and is_chosen else ""
  _log.info("devices: %s%s", accelerators.used(devices, processes=processes.count()), note)
  if crossing := device_mesh.describe(mesh.devices, mesh.axis_names):
    _log.info(crossing)
  if left and not is_chosen:
    found, cause = left
    _log.warning(
      "THIS RUN COMPUTES ON THE CPU, and the machine has %s: %s. To repair it: %s"
      " (grpo-jax doctor checks the rest)",
      *(found, cause.reason, cause.repair),
    )


def check_kernels(config: Config, mesh: Mesh) -> None:
  """Raises ConfigError for a `model.logprobs` or `model.attention` that cannot run here."""
  if config.model.logprobs is not None:
    try:
      dtype = config.model.compute_dtype
      with precision.scope(precision.resolve(config.model.matmul_precision, dtype)):
        choice.pick(config.model.logprobs, _chip(mesh), dtype=dtype, width=0)
    except (ValueError, NotImplementedError) as error:
      raise configuration.ConfigError(f"model.logprobs: {error}") from error
  check_attention(config, mesh)


def check_attention(config: Config, mesh: Mesh, *, width: int | None = None) -> None:
  """Raises ConfigError for a `model.attention` that cannot run here.

  Args:
    config: Config of the run.
    mesh: Mesh of the devices.
    width: Width of the model's heads; None: not known yet.
  """
  dtype = config.model.compute_dtype
  try:
    attention_choice.pick(
      config.model.attention,
      _chip(mesh),
      dtype=dtype,
      width=width,
    )
  except (ValueError, NotImplementedError) as error:
    raise configuration.ConfigError(f"model.attention: {error}") from error


def _chip(mesh: Mesh) -> choice.Chip:
  """Returns the kind of chip that the run computes on."""
  return choice.chip_of(mesh.devices.flat[0])


def check_context(config: Config, model: loading.ModelFacts) -> None:
  """Raises ConfigError if completions may exceed the model's context, where the run would fail.

  A run on recorded responses may exceed it, unless its rotary frequencies would then change.
  """
  allowed = run_options.limits(config).max_tokens or 0
  known, of = model.config.context, "max_position_embeddings"
  if model.config.rotary_bound == known:
    of = f"context of its rotary scaling {model.config.rope_scaling}"
  elif modes.is_offline(config):
    return
  if allowed > known:
    bounds, remedy = "rollout.max_tokens lets", "it"
    if batching_options.longest_row(config) is not None:
      rows = "row_buckets" if config.batching.row_tokens is None else "row_tokens"
      bounds, remedy = f"rollout.max_tokens and batching.{rows} let", "one of them"
    raise configuration.ConfigError(
      f"{bounds} a prompt with its completion have {allowed} tokens, but the model in"
      f" {model.directory} reads {known} ({of}): lower {remedy}"
    )


def check_split(mesh: Mesh, model: loading.ModelFacts) -> None:
  """Logs which parts of a model a mesh does not split although it has an axis to split them.

  Raises:
    ConfigError: `mesh.tensor` does not divide the attention heads or the feed-forward width, or
      `mesh.expert` the experts.
  """
  sizes = model.config
  tensor = mesh.shape["tensor"]
  _check_experts(mesh, model)
  width = sizes.intermediate_size if sizes.mixture is None else sizes.mixture.width
  for what, length in (("attention heads", sizes.num_heads), ("mlp", width)):
    if length % tensor:
      raise configuration.ConfigError(
        f"mesh.tensor={tensor} does not divide the model's {length} {what} ({model.directory}): set"
        " it to a divisor, or set mesh.tensor=1 and mesh.fsdp=-1"
      )
  axes, shapes = transformer.logical_axes(sizes), leaves.tree(sizes)
  whole = sharding.unsplit(axes, mesh, shapes=shapes)
  if "fsdp" in whole:
    among = [axis for axis in ("fsdp", "context") if mesh.shape.get(axis, 1) > 1]
    _log.warning(
      "%s does not divide the model's width of %d: every device holds all weights and optimizer"
      " state",
      *(" × ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in among), sizes.hidden_size),
    )
  if "vocab" in whole.get("tensor", {}):
    _log.warning(
      "mesh.tensor=%d does not divide the vocabulary of %d: every device holds the whole"
      " embedding and head",
      *(tensor, sizes.vocab_size),
    )


def _check_experts(mesh: Mesh, model: loading.ModelFacts) -> None:
  """Raises ConfigError if the mesh has an axis for experts that does not divide the model's."""
  expert, mixture = mesh.shape.get("expert", 1), model.config.mixture
  if expert > 1 and mixture is None:
    raise configuration.ConfigError(
      f"mesh.expert={expert} divides experts, but {model.directory} has none: set mesh.expert=1 and"
      " mesh.fsdp=-1"
    )
  if mixture is not None and mixture.num_experts % expert:
    raise configuration.ConfigError(
      f"mesh.expert={expert} does not divide the model's {mixture.num_experts} experts"
      f" ({model.directory}): set it to a divisor"
    )


def _check_engine(config: Config) -> None:
  """Raises ConfigError, before a model is found, if SGLang servers cannot be started here."""
  sglang = config.engine.sglang
  runs_others = sglang.addresses or sglang.command
  if modes.is_offline(config) or config.engine.name != "sglang" or runs_others:
    return
  device = launching.device_of(sglang.device)
  try:
    processes.together(
      lambda: launching.check_environment(pathlib.Path(sglang.python), device),
      what="the environment of the servers",
    )
  except launching.ServerError as error:
    raise configuration.ConfigError(f"engine: {error}") from error


def log_lengths(config: Config) -> None:
  """Warns of completions that cannot become as long as their limit says."""
  longest = batching_options.longest_sequence(config)
  limits = {
    "sampling.max_tokens": config.sampling.max_tokens,
    "evaluation.sampling.max_tokens": config.evaluation.sampling.get("max_tokens") or 0,
  }
  for name, limit in () if modes.is_offline(config) else limits.items():
    if limit > longest:
      _log.warning(
        "%s=%d is never reached: a prompt with its completion has at most %d tokens"
        " (rollout.max_tokens, batching.row_tokens)",
        *(name, limit, longest),
      )


def check_scorable(
  config: Config, sets: Sequence[Sequence[Prompt]], factories: environments.Environments
) -> None:
  """Raises ConfigError, before anything is sampled, if an environment cannot score any row.

  Args:
    config: Config of the run.
    sets: Prompts of each dataset; the first ones are tried.
    factories: Environments by name.
  """
  try:
    for prompts in sets:
      environments.check(factories, prompts[:TRIED])
  except ValueError as error:
    remedy = "choose another environment with data.environment (docs/environments.md)"
    if "nemo_gym" in {one["format"] for one in data_options.training(config).values()}:
      remedy += (
        ". data.environment='nemo_gym' has NeMo Gym's resources server verify these rows, which"
        " must run at environments.nemo_gym.url (docs/third_party_environments.md); mode='offline'"
        " learns from the rewards in the file, without sampling"
      )
    raise configuration.ConfigError(f"{error}. What to do: {remedy}") from error


def has_weights(sets: Sequence[Sequence[Prompt]]) -> bool:
  """Returns whether some of the prompts have a weight other than 0 and 1."""
  tried = [prompt for prompts in sets for prompt in prompts]
  recorded = [prompt.recorded.group for prompt in tried if prompt.recorded is not None]
  return any(p.weight not in (0, 1) for p in tried) or batching.has_weights(recorded)


def _check_tool_form(tokenizer: data.Tokenizer, sets: Sequence[Sequence[Prompt]]) -> None:
  """Raises ConfigError if the calls of declared tools could not be read."""
  if data.tool_form_of(tokenizer) is not None:
    return
  tried = (prompt for prompts in sets for prompt in prompts)
  if with_tools := next((p for p in tried if p.tools), None):
    raise configuration.ConfigError(
      f"prompt {with_tools.prompt_id} declares {len(with_tools.tools)} tools, but the form in which"
      " this model calls them is not known: the chat template shows none of"
      f" {', '.join(tool_calls.FORMS)}; set model.tool_calls to one of these, or to the dotted path"
      " of a function that parses calls (docs/tools.md)"
    )


def _check_conversations(
  config: Config,
  tokenizer: data.Tokenizer,
  factories: environments.Environments,
  sets: Sequence[Sequence[Prompt]],
) -> None:
  """Checks that the chat template can write what environments answer.

  Warns where an environment does not declare the roles of its answers.
  """
  if modes.is_offline(config) or config.rollout.max_turns == 1:
    return
  prompts = (prompt for one in sets for prompt in one)
  tools = {prompt.environment: prompt.tools for prompt in prompts if prompt.tools}
  for name, factory in factories.items():
    refused = conversations.refusals(tokenizer, factory, tools.get(name, ()))
    is_declared = factory.observation_roles is not None or (factory.tools and "tool" in refused)
    if refused and is_declared:
      raise configuration.ConfigError(f"environments.{name}: {'; '.join(refused.values())}")
    for role, reason in refused.items():
      _log.warning(
        "environments.%s does not declare its observation_roles; the run ends if it answers in the"
        " role %r: %s",
        *(name, role, reason),
      )


def log_schedule(config: Config, workdir: pathlib.Path) -> None:
  """Logs that a run which continues has another learning-rate curve, of another length."""
  file = workdir / "config.json"
  if config.optim.schedule == "constant" or not file.exists():
    return
  before = configuration.read(file)
  if before.get("total_steps") != config.total_steps:
    _log.info(
      "total_steps was %s, is %s: optim.schedule=%r now falls over %d optimizer steps, and the next"
      " steps have the learning rates of that curve",
      *(before.get("total_steps"), config.total_steps, config.optim.schedule),
      run_options.optimizer_steps(config),
    )


def log_differences(config: Config, workdir: pathlib.Path) -> None:
  """Logs how the configuration differs from the one that the run began with.

  Raises:
    ConfigError: That file is damaged, or the run used an option that was removed.
  """
  file = workdir / "config.json"
  if not file.exists():
    return
  try:
    before = configuration.read(file)
  except configuration.ConfigError as error:
    raise configuration.ConfigError(
      f"{error}. Move it away to continue the run: the file is only compared with the present"
      " configuration, which is then written instead"
    ) from error
  if refused := list(removed.refusals(before)):
    raise configuration.ConfigError(
      f"{file}: {'; '.join(refused)}. Move the file away to continue the run without it"
    )
  before = removed.without(before)
  for line in configuration.differences(before, config, harmless=HARMLESS).serious:
    _log.warning("the configuration differs from the one that this run began with: %s", line)
