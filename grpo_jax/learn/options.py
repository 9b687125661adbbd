"""The options of the mesh, the update, its rows, its optimizer and its reference policy. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.values import checked
from grpo_jax.values.options import option

_SIZE = checked.whole(low=1)
_EVERY = checked.whole(low=0)
_AXIS = checked.Kind(
  "an integer >= 1, or -1 for the rest of the devices",
  lambda x: checked.whole(low=-1).fits(x) and x != 0,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
  """Sizes of the axes of the mesh: the section `mesh` of a config."""

  data: int = option(
    -1,
    "splits the rows of a batch; weights are copied, once a TPU slice or node if fsdp is -1, too",
    _AXIS,
  )
  fsdp: int = option(1, "splits rows, and also weights and optimizer state (ZeRO-3)", _AXIS)
  tensor: int = option(1, "splits attention heads, feed-forward layers and the vocabulary", _AXIS)
  expert: int = option(1, "splits rows, and the experts of mixtures; 1: they are whole", _AXIS)
  context: int = option(1, "splits the places of each row; 1: rows are whole", _AXIS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimOptions:
  """The optimizer: the section `optim` of a config."""

  optimizer: str = option("adamw", "name of an optax optimizer that takes a learning rate")
  learning_rate: float = option(
    5e-6, "highest learning rate of the schedule", checked.number(above=0)
  )
  schedule: str = option(
    "constant", 'after the warm-up: "constant", "linear", "cosine", or dotted path'
  )
  schedule_args: Mapping[str, Any] = option({}, "further arguments of a schedule of your own")
  warmup_steps: int = option(
    0, "optimizer steps in which the rate rises linearly", checked.whole(low=0)
  )
  final_share: float = option(
    0.0,
    'last rate of "linear" and "cosine", as a share of learning_rate',
    checked.number(low=0, high=1),
  )
  max_grad_norm: float | None = option(
    1.0,
    "larger gradients are scaled down to this norm; None: never",
    checked.number(above=0, none=True),
  )
  weight_decay: float = option(
    0.01, "decoupled weight decay, except for norms and biases", checked.number(low=0)
  )
  options: Mapping[str, Any] = option({}, "further arguments of the optimizer: b1, b2, eps, ...")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnOptions:
  """What an update does with a batch: the section `learn` of a config."""

  epochs: int = option(1, "passes over a batch of rollouts", _SIZE)
  minibatches: int = option(1, "optimizer steps in each pass", _SIZE)
  report_entropy: bool = option(True, "log the entropy even if the loss does not need it")
  report_all_every_steps: int = option(
    10, "log all/*: entropy and mismatch of all completions; 0: never", _EVERY
  )
  report_kl_every_steps: int = option(
    10, "log all/kl_to_initial, the drift of the policy; 0: never", _EVERY
  )
  gradient_in_forward: bool = option(
    True, "compute the head's gradient in its forward pass if the loss allows it"
  )
  max_skipped_steps: int = option(
    5, "updates in a row with non-finite gradients before the run stops", _SIZE
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceOptions:
  """The reference policy of `loss.kl_coef`: the section `reference` of a config."""

  update_every_steps: int = option(
    0,
    "training steps between two updates of the reference from the policy; 0: it never changes",
    _EVERY,
  )
  mixup: float = option(
    1.0,
    "share of the policy in the new reference; 1: a copy of the policy (TRL: 0.6)",
    checked.number(above=0, high=1),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingOptions:
  """How completions are packed into rows: the section `batching` of a config."""

  row_tokens: int | None = option(
    None, "longest row; None: chosen from lengths and memory", checked.whole(low=2, none=True)
  )
  microbatch_tokens: int | None = option(
    8192, "tokens computed at once on one device; None: all", checked.whole(low=1, none=True)
  )
  row_buckets: tuple[int, ...] | None = option(
    None,
    "allowed row lengths, at most 3; None: planned",
    checked.several(checked.whole(low=2), least=1, none=True),
  )
  drop_truncated: bool = option(
    False, "do not learn from truncated completions (overlong filtering)"
  )
  skip_zero_advantage: bool = option(
    True, "skip completions of advantage 0 if that changes nothing"
  )
  share_prefixes: bool = option(True, "store a prompt once, before all completions of its group")
  pack: bool = option(True, "put several groups into a row")
