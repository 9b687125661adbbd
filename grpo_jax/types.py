"""Data types that flow through the system, in the order in which they appear.

Host types are ragged NumPy; device types are rectangular JAX arrays. Every
per-token array is aligned with the token it describes: index t of `logprobs`,
`loss_mask`, `advantages`, ... refers to `tokens[t]`, never to `tokens[t + 1]`.

  P prompts in a step   G completions of one prompt   B rows   T tokens in a row
  N tokens learned from, of one row                   V vocabulary   D model width

Logprobs are natural logarithms (nats), at the sampling temperature. Names
distinguish three kinds: `policy_logprobs` (live, the only differentiated
ones), `old_logprobs` (the trainer's, before this batch's first update),
`behavior_logprobs` (the engine's, at sampling).
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

Kind = TypeVar("Kind")
Numbers = Array | np.ndarray  # batches are made on the host, then put on the devices.
Scalar = Float[Numbers, ""] | np.floating | float  # of a metric; NumPy's once it was fetched.
MAX_ANSWER = 1000  # characters of an expected answer, which may be a solution or a set of tests.


def pytree(kind: type[Kind]) -> type[Kind]:
  """Registers a dataclass as a JAX tree of its fields.

  Its trees may hold other values than arrays, e.g. shapes or shardings. As JAX requires, such a
  tree is made without the constructor, whose types are checked in tests.
  """
  names = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
  keys = [jax.tree_util.GetAttrKey(name) for name in names]

  def flatten(tree: Any) -> tuple[list[Any], None]:
    return [getattr(tree, name) for name in names], None

  def flatten_with_keys(tree: Any) -> tuple[list[Any], None]:
    return [(key, getattr(tree, key.name)) for key in keys], None

  def unflatten(_: None, leaves: Iterable[Any]) -> Any:
    made = object.__new__(kind)
    for name, leaf in zip(names, leaves, strict=True):
      object.__setattr__(made, name, leaf)
    return made

  jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
  return kind


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShape:
  """Shape of a record of experts: which ones each token of a mixture of experts went through.

  A record is [tokens layers chosen]. The entry of a token says where the token went when it was fed
  to the model, which decides about the next token. `NOT_RECORDED` stands for entries that nobody
  knows; the model's router chooses there.
  """

  layers: int  # of the model, also those without experts.
  chosen: int  # experts that a token goes through in a layer.
  experts: int  # experts of a layer.

  @property
  def dtype(self) -> Any:
    """The smallest signed type that holds every expert."""
    return np.int8 if self.experts <= 128 else np.int16

  def unknown(self, *sizes: int) -> Int[np.ndarray, "*sizes L k"]:
    """Returns a record without any known entry."""
    return np.full((*sizes, self.layers, self.chosen), NOT_RECORDED, self.dtype)


NOT_RECORDED = -1


class FinishReason(enum.StrEnum):
  """Why a completion ended."""

  STOP = "stop"  # the model wrote a stop id or a stop string.
  LENGTH = "length"  # the token limit cut it: the completion is truncated.
  ABORT = "abort"  # the engine gave up on it.
  ENV_DONE = "env_done"  # the environment ended a conversation of several turns.


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
  """One task, before anything is sampled."""

  prompt_id: str  # unique within a run; equal prompts under two ids are two groups.
  token_ids: Int[np.ndarray, " prompt"]
  environment: str  # name of the environment that scores it.
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the environment needs.
  text: str = ""  # the prompt as rendered by the chat template.
  weight: float = 1.0  # of its completions in the loss; 0: in the batch, but not learned from.
  dataset: str = ""  # name of its dataset.
  is_cut: bool = False  # whether only its beginning is here because it was too long.
  messages: tuple[Mapping[str, Any], ...] = ()  # unrendered, for other chat templates.
  # Tools that the chat template received, each {"type": "function", "function": {"name",
  # "description", "parameters": JSON schema}}.
  tools: tuple[Mapping[str, Any], ...] = ()
  stop_strings: tuple[str, ...] = ()  # also end the first turn.
  recorded: "RecordedGroup | None" = None  # attempts from a file; None: they are sampled.
  parted: int = 0  # places where the text of a control token is written as ordinary characters.
  where: str = ""  # place of its row, "FILE:LINE"; "" if it has none.

  @property
  def expected_answer(self) -> str | None:
    """The row's answer, shortened for display; None if it has none."""
    answer = self.info.get("expected_answer")
    text = None if answer is None else str(answer)
    return text if text is None or len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]}…"


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
  """The part of a completion that one turn of a conversation added."""

  sampled_tokens: int
  environment_tokens: int  # of the observation that followed; 0 after the last turn.
  reward: float  # NaN: the turn could not be judged.


@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
  """One attempt at a prompt: everything after the prompt, plus its reward.

  A completion of several turns interleaves sampled tokens with tokens that the
  environment wrote; `loss_mask` is True on the sampled ones only. A reward of
  NaN means that the attempt could not be scored: it is excluded from the baseline
  and from the loss.
  """

  completion_ids: Int[np.ndarray, " completion"]
  loss_mask: Bool[np.ndarray, " completion"]
  behavior_logprobs: Float[np.ndarray, " completion"]  # 0 where loss_mask is False.
  weight_versions: Int[np.ndarray, " completion"]  # of the weights; -1: not sampled.
  finish_reason: FinishReason
  reward: float
  text: str = ""
  reward_components: Mapping[str, float] = dataclasses.field(default_factory=dict)
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  turns: int = 1
  turn_log: tuple[Turn, ...] = ()  # one entry per turn; () if they were not recorded.
  error: str = ""  # "KIND: message" of the failure that prevented scoring.
  failure: str = ""  # that KIND, such as "timeout"; "": the attempt was scored.
  close_failure: str = ""  # kind of failure when its environment was closed; costs no reward.
  hit_turn_limit: bool = False  # ended at the turn limit, although the environment was not done.
  weight: float = 1.0  # multiplies the prompt's weight, for this attempt alone.
  # Experts that the engine chose, see `ExpertShape`; None: they are not recorded.
  experts: Int[np.ndarray, "completion L k"] | None = None

  def __post_init__(self):
    lengths = {
      len(self.completion_ids),
      len(self.loss_mask),
      len(self.behavior_logprobs),
      len(self.weight_versions),
      len(self.completion_ids if self.experts is None else self.experts),
    }
    if len(lengths) != 1:
      raise ValueError(f"per-token arrays of one rollout differ in length: {sorted(lengths)}")
    sampled = self.behavior_logprobs[self.loss_mask]
    if not (np.isfinite(sampled).all() and (sampled <= 0).all()):
      raise ValueError("behavior_logprobs must be finite and at most 0 on sampled tokens")

  @property
  def is_truncated(self) -> bool:
    return self.finish_reason is FinishReason.LENGTH


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutGroup:
  """The attempts at one prompt, over which advantages are computed."""

  prompt: Prompt
  rollouts: tuple[Rollout, ...]
  greedy: Rollout | None = None  # an attempt at temperature 0, never learned from: a baseline.
  # Experts of the prompt's tokens in one of the attempts; None: they are not recorded.
  prompt_experts: Int[np.ndarray, "prompt L k"] | None = None

  @property
  def rewards(self) -> Float[np.ndarray, " G"]:
    return np.asarray([r.reward for r in self.rollouts], np.float32)

  def weight_of(self, r: int) -> float:
    """Returns the weight of a rollout in the loss: the prompt's times its own."""
    return self.prompt.weight * self.rollouts[r].weight


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedGroup:
  """A group from a file of recorded attempts."""

  dataset: str  # name of the dataset.
  number: int  # index of the group in the file, in the order of first rows.
  group: RolloutGroup  # behavior_logprobs are 0 where they are not known.
  is_known: tuple[bool, ...]  # for each response: whether the file has its behavior_logprobs.
  group_type: str | None
  where: str  # place of its first row: "file:line".


@pytree
@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows with shared prefixes, ready for the device. Row order carries no meaning.

  A row holds segments. A segment is one prompt, stored once, followed by completions
  of its group. Token q attends to token k if both are in the same segment, k is not
  after q, and k is in the prompt (branch 0) or in the same branch as q. Padding has
  segment 0 and attends to nothing.
  """

  tokens: Int[Numbers, "B T"]
  segment_ids: Int[Numbers, "B T"]  # 0 is padding; 1.. number the segments of the row.
  branch_ids: Int[Numbers, "B T"]  # 0 is the prompt; 1.. the completions of the segment.
  positions: Int[Numbers, "B T"]  # in prompt + completion; a completion starts at len(prompt).
  predecessors: Int[Numbers, "B T"]  # place, in the row, of the token that predicts this one.
  loss_mask: Bool[Numbers, "B T"]  # True on tokens that are learned from.
  rollout_ids: Int[Numbers, "B T"]  # 0.. number the completions of the row; -1: prompt, padding.
  advantages: Float[Numbers, "B T"]
  behavior_logprobs: Float[Numbers, "B T"]  # as the engine reported them.
  loss_places: Int[Numbers, "B N"]  # places where loss_mask is True, in order; then -1.
  old_logprobs: Float[Numbers, "B N"] | None = None  # at `loss_places`; None: the policy's.
  ref_logprobs: Float[Numbers, "B N"] | None = None  # at `loss_places`, by the reference policy.
  teacher_logprobs: Float[Numbers, "B N"] | None = None  # at `loss_places`; None: no teacher.
  selected: Bool[Numbers, "B N"] | None = None  # at `loss_places`; see `LossTokens.selected`.
  kept: Bool[Numbers, "B N"] | None = None  # at `loss_places`; see `LossTokens.kept`.
  ages: Int[Numbers, "B N"] | None = None  # at `loss_places`; see `LossTokens.ages`.
  weights: Float[Numbers, "B N"] | None = None  # at `loss_places`; see `LossTokens.weights`.
  experts: Int[Numbers, "B T L k"] | None = None  # to use; see `ExpertShape`. None: none are set.
  # Place of each slot, if the places of rows are dealt out to devices (`grpo_kernels.row_parts`).
  # All else stays in the order of the places. None: rows are whole.
  order: Int[Numbers, "B T"] | None = None


@pytree
@dataclasses.dataclass(frozen=True)
class LossTokens:
  """The tokens that are learned from, gathered from a batch: the input of an objective.

  `sequence_ids` identifies the completion of each token within its row; a completion
  never spans two rows. Objectives also accept masks of 0 and 1, and lists.
  """

  mask: Bool[Array, "B N"]  # False on the padding of N.
  sequence_ids: Int[Array, "B N"] | None  # 0 <= id < N; None: a row is one completion.
  advantages: Float[Array, "B N"]  # of the completion, on each of its tokens.
  behavior_logprobs: Float[Array, "B N"] | None = None  # None: no correction, no mismatch metrics.
  old_logprobs: Float[Array, "B N"] | None = None
  ref_logprobs: Float[Array, "B N"] | None = None
  teacher_logprobs: Float[Array, "B N"] | None = None
  # Tokens chosen among all of the optimizer step, by entropy or covariance; see `rl.selection`.
  selected: Bool[Array, "B N"] | None = None
  # False on completions left out because of their logprob error; None: all are in the loss.
  kept: Bool[Array, "B N"] | None = None
  # Training steps between the weights that sampled a token and those that the step begins with; -1
  # where the former are not known. None: all tokens are taken to be of the newest weights.
  ages: Int[Array, "B N"] | None = None
  # Weight of the completion, on each of its tokens: it multiplies every term of the loss, and
  # counts in the denominators. Not negative. None: all weights are 1.
  weights: Float[Array, "B N"] | None = None


@pytree
@dataclasses.dataclass(frozen=True)
class Denominators:
  """The divisors of the loss: global to one optimizer step, over all microbatches
  and devices, so that splitting the batch does not change the result."""

  tokens: Float[Array, ""] | float  # tokens learned from, by the weights of their completions.
  sequences: Float[Array, ""] | float  # completions with at least one such token, by weight.


@pytree
@dataclasses.dataclass(frozen=True)
class Minibatch:
  """The batch of one optimizer step: microbatches of equal shapes, one set of denominators."""

  microbatches: tuple[Batch, ...]
  denominators: Denominators


class _Measured:
  """What metrics have in common: they can be read as a float, and formatted like one."""

  def value(self) -> float:
    raise NotImplementedError

  def __float__(self) -> float:
    return self.value()

  def __format__(self, spec: str) -> str:
    return format(self.value(), spec) if spec else str(self)


@pytree
@dataclasses.dataclass(frozen=True)
class Mean(_Measured):
  """A mean stored as total and count, so that merging over microbatches and devices is exact."""

  total: Scalar
  count: Scalar

  def merge(self, other: "Mean") -> "Mean":
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> float:
    """Returns total / count; NaN if nothing was counted."""
    return float(self.total) / float(self.count) if float(self.count) else float("nan")


@pytree
@dataclasses.dataclass(frozen=True)
class Maximum(_Measured):
  """The largest of the values seen; -inf if there were none."""

  largest: Scalar

  def merge(self, other: "Maximum") -> "Maximum":
    xp = _computing(self.largest, other.largest)
    return Maximum(xp.maximum(self.largest, other.largest))

  def value(self) -> float:
    return float(self.largest)


@pytree
@dataclasses.dataclass(frozen=True)
class Minimum(_Measured):
  """The smallest of the values seen; inf if there were none."""

  smallest: Scalar

  def merge(self, other: "Minimum") -> "Minimum":
    xp = _computing(self.smallest, other.smallest)
    return Minimum(xp.minimum(self.smallest, other.smallest))

  def value(self) -> float:
    return float(self.smallest)


@pytree
@dataclasses.dataclass(frozen=True)
class EffectiveSampleShare(_Measured):
  """(Σw)² / (n Σw²) of importance weights w: 1 if all are equal, 1/n if one has all the weight."""

  total: Scalar
  squares: Scalar
  count: Scalar

  def merge(self, other: "EffectiveSampleShare") -> "EffectiveSampleShare":
    return EffectiveSampleShare(
      self.total + other.total, self.squares + other.squares, self.count + other.count
    )

  def value(self) -> float:
    below = float(self.count) * float(self.squares)
    return float(self.total) ** 2 / below if below else float("nan")


def _computing(*values: Any) -> Any:
  """Returns the array module for these values: JAX on the device, NumPy for fetched values."""
  return jnp if any(isinstance(value, jax.Array) for value in values) else np


Metric = Mean | Maximum | Minimum | EffectiveSampleShare
Metrics = dict[str, Metric]


@pytree
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The state that training changes. A frozen reference policy and a frozen base are not in it."""

  step: Int[Array, ""]  # training steps done so far = version of the weights.
  params: Any
  opt_state: Any
  reference: Any = None  # weights of a reference that follows the policy; None: it is frozen.
