"""Routing replay: tokens go through the experts that the engine chose when it sampled.

Where the trainer's router chooses again, roundings and newer weights change a few choices in every
layer, and the policy that learns is another function than the one that sampled. With replay only
the choice is the engine's; how much each expert counts still follows from the trainer's router.

The update and the logprobs of the policy itself use the record: those of the old policy, and
the metrics of all completions. The reference, the initial weights and a teacher are policies of
their own, which nobody sampled from: their routers choose. NeMo RL replays in the same two places,
its `prev_logprobs` and its update.

Reference:
  Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
  Routers", arXiv:2510.11370.
"""

from collections.abc import Sequence

from grpo_jax.config import modes
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.errors import ExpectedFailure
from grpo_jax.models.config import ModelConfig
from grpo_jax.types import ExpertShape, RolloutGroup

_EMBEDDED_OR_SERVED = ("jax_sampler", "sglang")


class MissingExperts(ExpectedFailure, ValueError):
  """The engine did not record the experts that `loss.router_replay=True` needs."""


def shape_of(config: Config, model: ModelConfig) -> ExpertShape | None:
  """Returns the shape of the records that a run replays; None: it replays none.

  Args:
    config: Config of the run.
    model: Sizes of the model.

  Raises:
    ConfigError: The run asks for replay, and the model has no experts.
  """
  if config.loss.router_replay and model.expert_shape is None:
    raise ConfigError(
      f"loss.router_replay=True needs a mixture of experts, and {model.family} of"
      " model.path has none: leave it None"
    )
  is_off = config.loss.router_replay is False or modes.is_offline(config)
  return None if is_off else model.expert_shape


def engine_options(config: Config, model: ModelConfig) -> dict[str, bool]:
  """Returns the options of an engine of the package that has to record experts.

  Raises:
    ConfigError: See `shape_of`.
  """
  has_to = shape_of(config, model) is not None and config.engine.name in _EMBEDDED_OR_SERVED
  return {"record_experts": True} if has_to else {}


def check(config: Config, groups: Sequence[RolloutGroup]) -> None:
  """Checks that groups have what a run is meant to replay.

  Engines of the package always record it; one of a user's own may not.

  Raises:
    MissingExperts: The config demands replay, and a sampled completion has no record.
  """
  if not config.loss.router_replay:
    return
  for group in groups:
    for number, rollout in enumerate(group.rollouts):
      if rollout.experts is None and rollout.loss_mask.any():
        raise MissingExperts(
          f"loss.router_replay=True, but attempt {number} of prompt {group.prompt.prompt_id} has no"
          f" experts: engine.name={config.engine.name!r} must return"
          " `Generation.prompt_experts` and `Generation.experts`, or set loss.router_replay=None"
        )
