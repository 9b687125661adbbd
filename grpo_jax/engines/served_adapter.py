"""An adapter as SGLang serves it: what is written for its servers, and what they must allow. Pure.

SGLang multiplies by q, k and v at once, and by gate and up at once. An adapter of only some of
these makes it fail, so the others are written as zeros.
"""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from grpo_jax.models import lora
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.products import LowRank

# Adapters in one batch, the base among them: the newest two, and one that still ends.
SLOTS = 4
_LEAST_SLOTS = 2  # the newest version is proven while requests of the one before are in flight.
_JOINED = (("q", "k", "v"), ("gate", "up"))
_PREFIX = "grpo_jax-"


def completed(
  params: Mapping[str, Any], config: ModelConfig
) -> tuple[dict[str, dict[str, Any]], lora.AdapterOptions]:
  """Returns the adapter of joined weights as it is written for servers, and its options.

  Args:
    params: Weights made by `lora.join`.
    config: Config of the model.

  Raises:
    ValueError: Experts have an adapter, which servers get merged only.
  """
  if lora.merged_always(params["layers"]):
    raise ValueError("adapters of experts are merged: SGLang needs model.lora.sync='merged'")
  own = {name: x for name, x in params["layers"].items() if isinstance(x, LowRank)}
  first = next(iter(own.values()))
  rank = first.a.shape[-1]
  options = lora.AdapterOptions(rank=rank, alpha=first.scale * rank, targets=_joined(own))
  zeros = lambda leaf: np.zeros(leaf.shape, np.float32)
  adapter = {
    name: {"a": own[name].a, "b": own[name].b}
    if name in own
    else {part: zeros(leaf) for part, leaf in parts.items()}
    for name, parts in lora.tree(config, options).items()
  }
  return adapter, options


def modules(kernels: Iterable[str]) -> tuple[str, ...]:
  """Returns the modules of SGLang's adapter ("q_proj"), with those that it joins to them."""
  return tuple(lora.MODULES[kernel].rpartition(".")[2] for kernel in _joined(kernels))


def _joined(kernels: Iterable[str]) -> tuple[str, ...]:
  own = set(kernels)
  for joined in _JOINED:
    if own & set(joined):
      own |= set(joined)
  return tuple(kernel for kernel in lora.MODULES if kernel in own)


def arguments(options: lora.AdapterOptions) -> tuple[str, ...]:
  """Returns the arguments of a server that is launched for adapters."""
  return (
    "--enable-lora",
    *("--max-lora-rank", str(options.rank)),
    *("--lora-target-modules", *modules(lora.targets(options.targets))),
    *("--max-loras-per-batch", str(SLOTS)),
    "--lora-strict-loading",
  )


def refusal(info: Any, options: lora.AdapterOptions) -> str | None:
  """Returns why a server cannot serve the adapters of a run; None if it can.

  Args:
    info: Answer to GET /server_info.
    options: Options of the adapter.
  """
  if not isinstance(info, dict) or info.get("enable_lora") is not True:
    return "LoRA is off there"
  rank = info.get("max_lora_rank")
  if isinstance(rank, int) and rank < options.rank:
    return f"its --max-lora-rank is {rank}, but model.lora.rank is {options.rank}"
  served = info.get("lora_target_modules")
  if isinstance(served, list) and "all" not in served:
    missing = [m for m in modules(lora.targets(options.targets)) if m not in served]
    if missing:
      return f"its --lora-target-modules are without {' '.join(missing)}"
  for limit in ("max_loras_per_batch", "max_loaded_loras"):
    room = info.get(limit)
    if isinstance(room, int) and room < _LEAST_SLOTS:
      return f"its --{limit.replace('_', '-')} is {room}, but two versions are used at a time"
  replicas = info.get("dp_size")
  if isinstance(replicas, int) and replicas > 1:
    return f"its --dp-size is {replicas}, and SGLang then loads no adapters while it serves"
  return None


def name_of(folder: pathlib.Path) -> str:
  """Returns the name of an adapter at servers: no other run, and no other version, has it."""
  return f"{_PREFIX}{folder.parent.name}-{folder.name}"


def is_name_of_run(name: str) -> bool:
  """Returns whether `name_of` has made a name, in this or in another run."""
  return name.startswith(_PREFIX)
