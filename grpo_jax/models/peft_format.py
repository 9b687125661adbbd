"""PEFT's format of an adapter: the names of its tensors, and the options in adapter_config.json.

Options that change what an adapter computes are refused by name. A file may be untrusted: its
patterns are never executed.

Experts are parameters [X o i] in transformers, which PEFT adapts by `target_parameters`: lora_A
[X r, i] has the A of all experts one after another, and lora_B [o, r X] the experts innermost. If
both parameters of a module have an adapter, that of gate and up is named `base_layer`, being the
first.

Reference:
  Format: https://huggingface.co/docs/peft/developer_guides/checkpoint (PEFT 0.21), and ParamWrapper
  in peft/tuners/lora/layer.py for parameters.
"""

import dataclasses
import math
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.models import leaves, lora
from grpo_jax.models.config import MOST_LAYERS, ModelConfig
from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields, short


@dataclasses.dataclass(frozen=True)
class StoredFactor:
  """One tensor of a PEFT folder, and its place in the tree of an adapter.

  Attributes:
    name: Name of the tensor.
    kernels: Kernels whose factors are side by side in it: one, or gate and up of experts.
    part: "a" or "b".
    layer: Number of the layer.
    shapes: Shape of each factor in the tree, without the layers: [(X) i r] or [(X) r o].
  """

  name: str
  kernels: tuple[str, ...]
  part: str
  layer: int
  shapes: tuple[tuple[int, ...], ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape in the file: [r, i] or [o, r], with experts [X r, i] or [o, r X]."""
    *experts, rows, _ = self.shapes[0]
    columns, count = sum(shape[-1] for shape in self.shapes), math.prod(experts)
    return (count * columns, rows) if self.part == "a" else (columns, rows * count)

  def in_file(self, values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Returns the tensor that is made of the factors of all kernels."""
    joined = values[0] if len(values) == 1 else np.concatenate(values, axis=-1)
    order = {2: (1, 0), 3: (0, 2, 1) if self.part == "a" else (2, 1, 0)}[joined.ndim]
    return np.ascontiguousarray(joined.transpose(order), dtype).reshape(self.shape)

  def in_tree(self, values: np.ndarray, kernel: str) -> np.ndarray:
    """Returns the factor of one of the kernels from the tensor."""
    number = self.kernels.index(kernel)
    start = sum(shape[-1] for shape in self.shapes[:number])
    *experts, rows, columns = self.shapes[number]
    if self.part == "a":
      return values.reshape(*experts, columns, rows).swapaxes(-1, -2)
    own = values[start : start + columns].reshape(columns, rows, *experts)
    return own.transpose(range(own.ndim)[::-1])


def stored(config: ModelConfig, options: lora.AdapterOptions) -> list[StoredFactor]:
  """Returns every tensor of a PEFT folder, in the order of the adapter's tree."""
  tree = lora.tree(config, options)
  gate, up, _ = leaves.EXPERTS
  found = []
  for kernel in tree:
    for part in ("a", "b") if kernel != up else ():
      kernels = (gate, up) if (kernel, part) == (gate, "b") else (kernel,)
      shapes = tuple(tree[each][part].shape[1:] for each in kernels)
      for layer in range(config.num_layers):
        name = _tensor_name(kernel, layer, part, tree)
        found.append(StoredFactor(name, kernels, part, layer, shapes))
  return found


def by_leaf(
  config: ModelConfig, options: lora.AdapterOptions
) -> dict[tuple[str, str], list[StoredFactor]]:
  """Returns the tensors of each leaf (kernel, part) of an adapter, in the order of the layers."""
  found: dict[tuple[str, str], list[StoredFactor]] = {}
  for each in stored(config, options):
    for kernel in each.kernels:
      found.setdefault((kernel, each.part), []).append(each)
  return found


def to_peft(config: ModelConfig, options: lora.AdapterOptions, *, base: str) -> dict[str, Any]:
  """Returns the content of adapter_config.json.

  SGLang 0.5.23 multiplies by lora_alpha / r whatever use_rslora says. So a rank-stabilised scale
  α / √r is written as lora_alpha = α √r without use_rslora, which all readers understand alike.

  Args:
    config: Sizes of the base model.
    options: Options of the adapter.
    base: Name or folder of the base model.
  """
  kernels = lora.kernels(config, options)
  parameters = {lora.EXPERT_PARAMETERS[each] for each in kernels if each in leaves.EXPERTS}
  modules = dict.fromkeys(_module(each) for each in kernels if each in _MODULES)
  alpha = options.alpha * math.sqrt(options.rank) if options.rank_stabilized else options.alpha
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": options.rank,
    "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
    "lora_dropout": 0.0,
    "bias": "none",
    "target_modules": [*modules],
    **({"target_parameters": sorted(parameters)} if parameters else {}),
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "modules_to_save": None,
  }


def refuse_other_methods(fields: Fields) -> None:
  """Raises ModelError for options that change what an adapter computes, each by its name."""
  kind = fields.get("peft_type")
  if kind != "LORA":
    raise fields.wrong("peft_type", "LORA; adapters of other kinds are not supported")
  if fields.get("task_type") not in (None, "CAUSAL_LM"):
    raise fields.wrong("task_type", "CAUSAL_LM")
  if fields.get("bias") not in (None, "none"):
    raise fields.wrong("bias", "none; trained biases are not supported")
  initial = fields.get("init_lora_weights")
  if not isinstance(initial, bool | None) and initial not in _HARMLESS_INITIALIZERS:
    needed = "true, false, or one of " + ", ".join(_HARMLESS_INITIALIZERS)
    reason = "other initialisers change the base, too, which is not in these files"
    raise fields.wrong("init_lora_weights", f"{needed}; {reason}")
  for name in fields.names():
    if name in _HARMLESS or _is_off(fields.get(name)):
      continue
    reason = _REFUSED.get(name, "this option is not known here, and may change the adapter")
    raise ModelError(f"{fields.where}: {name}={short(fields.get(name))}: {reason}")


def _is_off(value: Any) -> bool:
  """Returns whether an option has no effect; a 0 may be the number of a layer."""
  return value is False or (isinstance(value, str | list | dict) and not value)


def targets(
  fields: Fields, shapes: Mapping[str, Any], layers: int | None, where: str
) -> tuple[str, ...]:
  """Returns the kernels with an adapter.

  A list is resolved as PEFT resolves it. A regular expression from a file is not executed, as it
  could take for ever: the tensors say which modules it has matched.

  Args:
    fields: Content of adapter_config.json.
    shapes: Shapes of the tensors of the folder, by name.
    layers: Number of layers of the base model; None: as many as have an adapter.
    where: File of the tensors, for errors.

  Raises:
    ModelError: No kernel has an adapter, or the list has a kernel of some layers only.
  """
  given, excluded = fields.get("target_modules"), fields.get("exclude_modules") or []
  parameters = fields.get("target_parameters") or []
  if given is None and parameters:  # of parameters alone.
    given = []
  for name, value in {"target_modules": given, "exclude_modules": excluded}.items():
    if not isinstance(value, str | list):
      raise fields.wrong(name, "a list of modules, or a string")
  present = _present(shapes)
  of_experts = _of_experts(fields, shapes) if parameters else ()
  if not present and not of_experts:
    raise ModelError(f"{where}: no tensor is an adapter of a kernel of a layer")
  own = {kernel for kernel, _ in present}
  found = tuple(kernel for kernel in _MODULES if kernel in own)
  if isinstance(given, list) and isinstance(excluded, list) and (given or not of_experts):
    count = 1 + max((layer for _, layer in present), default=0) if layers is None else layers
    # The names of the MLP's modules are also those of a shared expert's.
    is_shared = not own.isdisjoint(leaves.SHARED)
    found = _listed(fields, min(count, MOST_LAYERS), is_shared=is_shared)
  return (*found, *of_experts)


def _present(shapes: Mapping[str, Any]) -> set[tuple[str, int]]:
  """Returns the kernels and layers that have tensors."""
  kernels = {module: kernel for kernel, module in _MODULES.items()}
  found = set()
  for name in shapes:
    match = _TENSOR_NAME.fullmatch(name)
    if match and match["module"] in kernels:
      found.add((kernels[match["module"]], int(match["layer"])))
  return found


def _of_experts(fields: Fields, shapes: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the kernels of experts that a list of parameters means, resolved as PEFT does it."""
  wanted = set(fields.strings("target_parameters"))
  known = sorted(set(lora.EXPERT_PARAMETERS.values()))
  is_in = {each: not wanted.isdisjoint(_endings(f"model.layers.0.{each}")) for each in known}
  of = {end for each in known for end in _endings(each)}
  if not wanted <= of or not any(_EXPERTS in name for name in shapes):
    raise fields.wrong("target_parameters", f"those of experts: {', '.join(known)}")
  return tuple(kernel for kernel, each in lora.EXPERT_PARAMETERS.items() if is_in[each])


def _listed(fields: Fields, layers: int, *, is_shared: bool) -> tuple[str, ...]:
  """Returns the kernels that lists of module names mean; raises the same errors as `targets`."""
  wanted = set(fields.strings("target_modules"))
  excluded = set(fields.strings("exclude_modules"))
  left_out = _IN_MLP if is_shared else leaves.SHARED
  found = []
  for kernel in _MODULES:
    if kernel in left_out:
      continue
    endings = [_endings(_module_path(kernel, layer)) for layer in range(layers)]
    are_in = [not wanted.isdisjoint(own) and excluded.isdisjoint(own) for own in endings]
    if any(are_in) and not all(are_in):
      raise ModelError(
        f"{fields.where}: target_modules has {_module(kernel)} of some layers and not of layer"
        f" {are_in.index(False)}; an adapter of all layers is needed"
      )
    if all(are_in):
      found.append(kernel)
  if not found:
    known = [_module(kernel) for kernel in lora.MODULES]
    raise fields.wrong("target_modules", f"kernels of a layer: {', '.join(known)}")
  return tuple(found)


def _endings(path: str) -> list[str]:
  """Returns what PEFT takes for the name of a module: its path, from any dot on."""
  parts = path.split(".")
  return [".".join(parts[start:]) for start in range(len(parts))]


def _tensor_name(kernel: str, layer: int, part: str, adapted: Container[str]) -> str:
  """Returns the name of the tensor of a factor, part "a" or "b", of a kernel in a layer.

  Args:
    kernel: Kernel; gate for gate and up of experts.
    layer: Number of the layer.
    part: "a" or "b".
    adapted: Kernels with an adapter.
  """
  gate, _, down = leaves.EXPERTS
  path = _module_path(kernel, layer)
  if kernel in leaves.EXPERTS:
    is_inner = kernel == gate and down in adapted
    path = f"model.layers.{layer}.{_EXPERTS}{'.base_layer' if is_inner else ''}"
  return f"base_model.model.{path}.lora_{part.upper()}.weight"


def _module_path(kernel: str, layer: int) -> str:
  return f"model.layers.{layer}.{_MODULES.get(kernel)}"


def _module(kernel: str) -> str:
  return _MODULES[kernel].rpartition(".")[2]


_MODULES = {**lora.MODULES, **lora.SHARED_MODULES}
_IN_MLP = ("gate", "up", "down")
_EXPERTS = "mlp.experts"  # module of the experts' parameters.
_TENSOR_NAME = re.compile(
  r"base_model\.model\.model\.layers\.(?P<layer>\d{1,6})\.(?P<module>[\w.]+)\.lora_[AB]\.weight"
)

# Initialisers that leave the base as it is.
_HARMLESS_INITIALIZERS = ("gaussian", "orthogonal", "eva")

# Options that do not change what a trained adapter computes, or that are read.
_HARMLESS = frozenset(
  (
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",  # without layers_to_transform.
    "loftq_config",  # without init_lora_weights "loftq".
    "lora_alpha",
    "lora_dropout",  # of training only.
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",  # without use_qalora.
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
  )
)

# Options that are refused unless they are off, with the reason.
_REFUSED = {
  "alpha_pattern": "all kernels need the same lora_alpha",
  "alora_invocation_tokens": "an adapter of all tokens is needed",
  "fan_in_fan_out": "the base must hold its kernels as [out, in]",
  "layer_replication": "the base must have its own layers",
  "layers_to_transform": "an adapter of all layers is needed",
  "lora_bias": "adapters with biases are not supported",
  "modules_to_save": "only adapters of kernels are supported, not whole modules",
  "rank_pattern": "all kernels need the same rank r",
  "trainable_token_indices": "only adapters of kernels are supported, not embeddings",
  "use_dora": "DoRA is not supported",
  "use_qalora": "QA-LoRA is not supported",
}
