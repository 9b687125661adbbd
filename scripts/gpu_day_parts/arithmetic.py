"""Operations, bytes and data sheets, with which measured times are compared. Pure.

A multiplication and an addition are two operations.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

if TYPE_CHECKING:  # used for its sizes only; importing it would start JAX.
  from grpo_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Sheet:
  """Figures from the data sheet of a device."""

  bf16_tflops: float  # dense products of bfloat16, without sparsity.
  memory_gb_per_s: float  # bandwidth of the device's memory, in 1e9 bytes per second.


# Name of the device, or its beginning, as JAX reports it (`device_kind`) → its maker's data sheet.
SHEETS = {
  "NVIDIA H200": Sheet(989.0, 4800.0),
  "NVIDIA H100 80GB HBM3": Sheet(989.0, 3350.0),
  "NVIDIA H100 PCIe": Sheet(756.0, 2000.0),
  "NVIDIA A100-SXM4-80GB": Sheet(312.0, 2039.0),
  "NVIDIA A100-SXM4-40GB": Sheet(312.0, 1555.0),
  "NVIDIA A100 80GB PCIe": Sheet(312.0, 1935.0),
  "TPU v4": Sheet(275.0, 1228.0),
  "TPU v5 lite": Sheet(197.0, 819.0),
  "TPU v5e": Sheet(197.0, 819.0),
  "TPU v5p": Sheet(459.0, 2765.0),
  "TPU v6 lite": Sheet(918.0, 1640.0),
  "TPU v6e": Sheet(918.0, 1640.0),
}


def data_sheet(device_kind: str) -> Sheet | None:
  """Returns the data sheet of a device; None if it is not in `SHEETS`."""
  names = [name for name in SHEETS if device_kind.startswith(name)]
  return SHEETS[max(names, key=len)] if names else None


def attended_pairs(segment_ids: Int[np.ndarray, "B T"], branch_ids: Int[np.ndarray, "B T"]) -> int:
  """Counts the pairs of query and key that the mask of packed rows allows.

  Token q attends to token k if both are in one segment (0 is padding), k is not after q,
  and k belongs to the prompt (branch 0) or to the branch of q.

  Args:
    segment_ids: Segment of every place.
    branch_ids: Branch of every place.
  """
  total = 0
  for segments, branches in zip(segment_ids, branch_ids, strict=True):
    for segment in np.unique(segments[segments != 0]):
      segment_branches = branches[segments == segment]
      prompt = int(np.sum(segment_branches == 0))
      total += prompt * (prompt + 1) // 2
      for branch in np.unique(segment_branches[segment_branches != 0]):
        length = int(np.sum(segment_branches == branch))
        total += length * prompt + length * (length + 1) // 2
  return total


def weights_of_layers(model: "ModelConfig") -> int:
  """Returns the number of weights in the kernels of all layers; norms and biases are left out."""
  attention = 2 * model.num_heads + 2 * model.num_kv_heads  # q and o; k and v.
  mlp = 3 * model.intermediate_size
  return model.num_layers * model.hidden_size * (attention * model.head_dim + mlp)


def forward_operations(model: "ModelConfig", *, tokens: int, pairs: int, predicted: int) -> int:
  """Returns the operations of the matrix products of a forward pass.

      2 · tokens · (weights of the layers) + 4 · pairs · H · E · layers + 2 · predicted · D · V

  Norms, rotary embeddings, softmax and the nonlinearity are left out.

  Args:
    model: Sizes of the model.
    tokens: Number of tokens that pass through the layers, without padding.
    pairs: Number of pairs of query and key that the mask allows; see `attended_pairs`.
    predicted: Number of tokens that pass through the LM head, the loss tokens.
  """
  attention = 4 * pairs * model.num_heads * model.head_dim * model.num_layers
  head = 2 * predicted * model.hidden_size * model.vocab_size
  return 2 * tokens * weights_of_layers(model) + attention + head


def update_operations(model: "ModelConfig", *, tokens: int, pairs: int, predicted: int) -> int:
  """Returns the operations that a forward and a backward pass need.

  The backward pass counts as two forward passes. Recomputed operations count once, and
  the optimizer does not count. The arguments are those of `forward_operations`.
  """
  return 3 * forward_operations(model, tokens=tokens, pairs=pairs, predicted=predicted)


def share_of_peak(operations: float, seconds: float, tflops: float) -> float:
  """Returns operations per second as a share of a rate, which is given in 1e12 per second."""
  return operations / seconds / (1e12 * tflops)


def decode_bytes(
  model: "ModelConfig",
  *,
  rows: int,
  own_tokens: float,
  prompts: int,
  prompt_tokens: int,
  itemsize: int,
) -> int:
  """Returns the bytes that one decode step must read: weights once, each cache once.

  A prompt that several rows share is read once. Activations, logits and writes are left
  out.

  Args:
    model: Sizes of the model.
    rows: Number of completions decoded at the same time.
    own_tokens: Tokens in the cache of a row; the mean over the timed steps.
    prompts: Number of different prompts.
    prompt_tokens: Length of a prompt.
    itemsize: Bytes of each number in weights and caches.
  """
  weights = weights_of_layers(model) + model.vocab_size * model.hidden_size
  token_numbers = 2 * model.num_layers * model.num_kv_heads * model.head_dim
  cached = rows * own_tokens + prompts * prompt_tokens
  return round(itemsize * (weights + token_numbers * cached))


def parameters(tree: Any) -> int:
  """Returns the number of elements in a tree of arrays."""
  import jax

  return sum(leaf.size for leaf in jax.tree.leaves(tree))
