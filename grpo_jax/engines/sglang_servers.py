"""The servers of an SGLang engine: how they are found or launched, and what is refused."""

import logging
import math
import os
import pathlib
import secrets
from collections.abc import Mapping

from grpo_jax import processes
from grpo_jax.engines import (
  launching,
  multihost,
  probe,
  routed_experts,
  served_adapter,
  server_process,
)
from grpo_jax.engines.server import FleetOptions
from grpo_jax.engines.server_process import LaunchOptions
from grpo_jax.engines.sglang_client import Timeouts
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.http import redaction
from grpo_jax.models import files, hf_rope, lora, multimodal
from grpo_jax.models.config import ModelConfig, Rope

_log = logging.getLogger(__name__)

# Families whose sliding windows and further rotary tables SGLang 0.5.23 computes, by its source; it
# has OLMo 3 in olmo2.py. Which backends do is in `server_windows`.
_WINDOWED = ("gemma3_text", "olmo3")

_CPU_WIDTH = 32  # of SGLang's padding: configs/update_config.py.

# Keeps TF32 out of the servers' float32 products: of NVIDIA's libraries, and of Triton's kernels,
# which round to it by default, SGLang's deterministic products and its attention among them.
_EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}


def refuse(chosen: SGLangOptions, config: ModelConfig) -> None:
  """Raises ValueError for options that cannot work together, or with this model."""
  if chosen.addresses and len(chosen.addresses) < processes.count():
    raise ValueError(
      f"engine.sglang.addresses has {len(chosen.addresses)} servers for {processes.count()}"
      " processes: each process needs at least one of its own"
    )
  for refusal in server_process.refusals(
    addresses=chosen.addresses,
    arguments=chosen.arguments,
    command=chosen.command,
    environment=chosen.environment,
  ):
    raise ValueError(refusal)
  unknown = _unknown_to_sglang(config)
  if unknown:
    raise ValueError(f"{unknown}: use engine.name='jax_sampler'")


def _unknown_to_sglang(config: ModelConfig) -> str | None:
  """Returns what SGLang would compute otherwise than the trainer, by its source; None: nothing."""
  if config.layer_kinds and config.family not in _WINDOWED:
    return (
      "this model has sliding windows or layers without rotary embeddings, and SGLang is not known"
      " to compute these as the trainer does (its Qwen2, Llama and Mistral ignore windows)"
    )
  if config.wide_qk_norm and config.num_heads * config.head_dim != config.hidden_size:
    return (
      f"SGLang's OLMo 2 has heads of hidden_size / num_attention_heads, {config.hidden_size} /"
      f" {config.num_heads}, and those of this model have a head_dim of {config.head_dim}"
    )
  if config.family == "olmo3" and config.ropes[-1] != Rope(config.rope_theta):
    return (
      "SGLang's OLMo 3 has the rope_theta of all layers and no scaling in those with a window, and"
      f" this model has {config.ropes[-1]} there"
    )
  for scaling in filter(None, (rope.scaling for rope in config.ropes)):
    implied = hf_rope.implied_attention_factor(scaling, config.max_position_embeddings)
    if not math.isclose(scaling.attention_factor, implied, rel_tol=1e-6):
      return (
        f"SGLang multiplies cosines and sines of {scaling.kind} by {implied:.6g}, whatever"
        f" attention_factor of config.json says, and this model has {scaling.attention_factor:.6g}"
      )
  return None


def refuse_several_modalities(source: pathlib.Path) -> None:
  """Raises ValueError for a folder of images and text, in which SGLang names tensors otherwise."""
  file = source / "config.json"
  hf = files.read_json(file) if file.is_file() else {}
  if multimodal.text_config(hf, str(file)) is not hf:
    raise ValueError(
      f"{source} is a model of images and text, and the run trains its text model alone: SGLang"
      " would serve both, and find no tensor by the names of the text model. Use"
      " engine.name='jax_sampler', or set model.path to a folder of the text model alone, which is"
      " what runs export"
    )


def refuse_padded(launch: LaunchOptions, config: ModelConfig) -> None:
  """Raises ValueError for a model that SGLang pads on a CPU, where its adapters then do not fit."""
  width = config.intermediate_size
  if launch.device == "cpu" and launch.command is None and width % _CPU_WIDTH:
    raise ValueError(
      "model.lora.sync='adapter' cannot work with SGLang on a CPU and this model: SGLang pads its"
      f" intermediate_size to a multiple of {_CPU_WIDTH}, but not its adapters; it is {width}. Set"
      " model.lora.sync='merged', or use engine.name='jax_sampler'"
    )


def api_key(*, is_launched: bool) -> str | None:
  """Returns the key of the servers' API: from the environment, or a new one for new servers.

  Loopback does not separate the users of a host, so servers that the run starts always need a key.

  Raises:
    ValueError: The key of the environment cannot be sent in a header.
  """
  key = os.environ.get(server_process.API_KEY_VARIABLE, "").strip()
  if key:
    return redaction.check_secret(key, server_process.API_KEY_VARIABLE)
  return secrets.token_urlsafe(32) if is_launched else None


def _share(servers: int) -> range:
  """Returns the numbers of the servers of this process; processes divide those that were given."""
  index, count = processes.index(), processes.count()
  return range(servers * index // count, servers * (index + 1) // count)


def launch_options(
  options: SGLangOptions,
  log_folder: pathlib.Path,
  *,
  dtype: str,
  products: str,
  max_rows: int,
  context_length: int,
  adapter: lora.AdapterOptions | None,
  returns_experts: bool,
) -> LaunchOptions:
  """Returns how the servers of this process are started."""
  for_adapters = served_adapter.arguments(adapter) if adapter else ()
  saver = ["--enable-memory-saver"] if options.release_memory else []
  experts = [routed_experts.ARGUMENT] if returns_experts else []
  return LaunchOptions(
    python=pathlib.Path(options.python),
    log_folder=log_folder,
    device=launching.device_of(options.device),
    arguments=(*saver, *for_adapters, *experts, *options.arguments),
    command=options.command,
    environment=variables(products, options.environment),
    host=options.host,
    port=options.port,
    gpus=options.gpus,
    gpus_per_server=options.gpus_per_server,
    dtype=dtype,
    max_running=max_rows,
    context_length=context_length,
    deterministic=options.deterministic,
    first=options.servers * processes.index(),
    slot=options.servers * multihost.before_on_host(),
  )


def check_launch(launch: LaunchOptions, servers: int, key: str) -> None:
  """Checks on all processes whether servers can be started, and on which GPUs.

  Raises:
    ServerError: A host of the run cannot start them.
  """
  check = lambda _: server_process.check(launch, servers=servers, api_key=key)
  multihost.together(check, what="the options of the servers", failure=server_process.ServerError)
  if launch.device == "cuda" and not launch.gpus and launch.slot:
    _log.warning(
      "several processes share this host, and engine.sglang.gpus does not divide its GPUs: the"
      " servers of each process see the GPUs that the process sees"
    )


def fleet_options(
  chosen: SGLangOptions,
  launch: LaunchOptions | None,
  *,
  model_path: str,
  key: str | None,
  products: str,
  adapter: lora.AdapterOptions | None,
  dtype: str,
  returns_experts: bool,
  has_windows: bool,
) -> FleetOptions:
  """Returns the options of the fleet; `products` decides how far the probe may be off."""
  tolerance = chosen.probe_tolerance
  given = _share(len(chosen.addresses))
  return FleetOptions(
    addresses=chosen.addresses[given.start : given.stop],
    first=launch.first if launch else given.start,
    servers=chosen.servers,
    launch=launch,
    model_path=model_path,
    adapter=adapter,
    dtype=dtype,
    returns_experts=returns_experts,
    has_windows=has_windows,
    key=key,
    timeouts=Timeouts(
      generate_s=chosen.request_timeout_s,
      control_s=chosen.control_timeout_s,
      health_s=chosen.health_timeout_s,
    ),
    start_timeout_s=chosen.start_timeout_s,
    health_every_s=chosen.health_every_s,
    max_restarts=chosen.max_restarts,
    probe_tolerance=probe.TOLERANCES[products] if tolerance is None else tolerance,
  )


def variables(products: str, own: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment variables of servers that are launched.

  Args:
    products: Precision of the trainer's matrix products; see `precision.resolve`.
    own: Variables of the user, which override ours.
  """
  return {**(_EXACT if products == "float32" else {}), **own}
