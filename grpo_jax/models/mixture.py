"""The sizes and switches of a mixture of experts, and their fields in config.json. Pure; no arrays.

A layer with a mixture has many small gated MLPs in place of one, and a router that chooses a few of
them for each token.
"""

import dataclasses
from typing import Any

from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields

MOST_EXPERTS = 1 << 14  # the largest accepted number: far above every published model.
WIDEST = 1 << 20


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The experts of every layer; hashable.

  Attributes:
    num_experts: Number X of experts.
    experts_per_token: Number k of experts that compute a token.
    width: Feed-forward width F of each expert.
    normalised: Whether the k weights of a token are divided by their sum.
    shared_width: Feed-forward width of the expert that computes every token; None: there is none.
  """

  num_experts: int
  experts_per_token: int
  width: int
  normalised: bool = False
  shared_width: int | None = None

  def __post_init__(self):
    if not 1 <= self.experts_per_token <= self.num_experts:
      raise ModelError(
        f"num_experts_per_tok must be between 1 and num_experts {self.num_experts}, got"
        f" {self.experts_per_token}"
      )


def from_fields(fields: Fields, *, default_experts: int, has_shared: bool) -> Mixture:
  """Reads the mixture from a config.json of the Qwen families.

  `router_aux_loss_coef` and `output_router_logits` are ignored: they concern pre-training's
  balancing loss only, which the logits do not depend on.

  Args:
    fields: Content of config.json, with the family's defaults.
    default_experts: Number of experts if config.json has none.
    has_shared: Whether the family has an expert that computes every token.

  Raises:
    ModelError: Some layers have no experts, or a field is missing or out of range.
  """
  _refuse_dense_layers(fields)
  if "num_experts" in fields and "num_local_experts" in fields:
    given = fields.get("num_experts"), fields.get("num_local_experts")
    if given[0] != given[1]:
      raise ModelError(
        f"{fields.where}: num_experts is {given[0]}, but num_local_experts is {given[1]}: they are"
        " two names of one number"
      )
  name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
  shared = "shared_expert_intermediate_size"
  return Mixture(
    num_experts=fields.integer(name, default_experts, low=1, high=MOST_EXPERTS),
    experts_per_token=fields.integer("num_experts_per_tok", low=1, high=MOST_EXPERTS),
    width=fields.integer("moe_intermediate_size", low=1, high=WIDEST),
    normalised=fields.boolean("norm_topk_prob", default=False),
    shared_width=fields.integer(shared, low=1, high=WIDEST) if has_shared else None,
  )


def to_hf(mixture: Mixture) -> dict[str, Any]:
  """Returns the fields of config.json that describe a mixture."""
  written = {
    "num_experts": mixture.num_experts,
    "num_experts_per_tok": mixture.experts_per_token,
    "moe_intermediate_size": mixture.width,
    "norm_topk_prob": mixture.normalised,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
  }
  if mixture.shared_width is not None:
    written["shared_expert_intermediate_size"] = mixture.shared_width
  return written


def _refuse_dense_layers(fields: Fields) -> None:
  """Raises ModelError if some layers have a dense MLP: all layers are one scanned program."""
  step = fields.integer("decoder_sparse_step", 1, low=1, high=2**31 - 1)
  dense = fields.get("mlp_only_layers")
  if step != 1:
    raise fields.wrong("decoder_sparse_step", "1 (experts in every layer)")
  if dense:
    raise fields.wrong("mlp_only_layers", "an empty list (experts in every layer)")
