"""Whether an engine samples from the newest weights: by its logprobs, also in bfloat16. Pure.

An update moves the logprobs of what was just sampled by less than the roundings of an engine in
bfloat16, so no bound on their difference separates new weights from those before. A projection
does. Over some thousand tokens, with the trainer's logprobs under the old and the new weights

    served - old = share · (new - old) + noise · (served before - old) + rest

is solved by least squares. The share is 1 for an engine with the new weights and 0 for one that
kept the old ones. What the engine said before the new weights came, minus the trainer's logprobs
under the same weights, is its noise at the last good sync; an engine that has not moved repeats it,
so its share is 0 exactly. Roundings of logits move log p by about 1 - p, the weight of a token is
therefore 1 / (1 - p)². The standard error treats the tokens of a passage as dependent.
"""

import dataclasses
import enum
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.engines.prompt_scoring import Passage

# Logprobs of the tokens of some passages from their `first` on; NaN where they do not count; nats.
Logprobs = Sequence[Float[np.ndarray, " _"]]

_SURE = 6.0  # standard errors by which a share has to differ from a value to count as another one.
_NEAR = 0.02  # of a share: systematic roundings may shift it by so much.
_LARGEST_ERROR = 0.1  # with a larger standard error 0 and 1 are not separated.
_LEAST_SPREAD = 1e-3  # of (1 - p)², below which a token gets no more weight.
# Of the noise. Weights that move logprobs by less than 1/100 of it may not move those of an engine
# that rounds, so an engine that repeats itself may have them all the same.
_LEAST_MOVE = 0.001
_NOISIER = 2.0  # factor by which an engine's noise may grow from one version to the next.
ROUNDING = 2e-5  # nats: root mean square by which float32 results differ on any engine.


class Verdict(enum.StrEnum):
  """What a proof says of the weights that an engine samples from."""

  NEW = "new"
  OLD = "old"  # those before the newest update.
  PART = "part"  # some tensors are new and others are not.
  OTHER = "other"  # neither new nor old ones.
  UNKNOWN = "unknown"  # the update has moved too little to decide.


@dataclasses.dataclass(frozen=True)
class Evidence:
  """Passages of the last rollouts, and the trainer's logprobs of them.

  Attributes:
    version: Version of the new weights.
    passages: Sequences that are scored.
    old: The trainer's logprobs under the weights before the update.
    new: The same after it.
  """

  version: int
  passages: Sequence[Passage]
  old: Logprobs
  new: Logprobs

  @property
  def tokens(self) -> int:
    """Number of tokens that count."""
    return int(np.isfinite(np.concatenate(self.new)).sum())

  @property
  def moved(self) -> float:
    """Root mean square by which the update moved the logprobs; nats."""
    return _rms(_difference(self.new, self.old))


@dataclasses.dataclass(frozen=True)
class Proof:
  """What the logprobs of one engine, or of one of its servers, say.

  Attributes:
    share: Share of the update that it samples with; 1: new weights, 0: old ones.
    error: Standard error of the share.
    noise: Root mean square of its difference from the trainer under the new weights; nats.
    verdict: Conclusion from these numbers.
  """

  share: float
  error: float
  noise: float
  verdict: Verdict

  @property
  def is_wrong(self) -> bool:
    """Whether it samples from other weights than the new ones."""
    return self.verdict not in (Verdict.NEW, Verdict.UNKNOWN)


@dataclasses.dataclass
class Undecided:
  """Sums over proofs that were too weak to decide: together they may be strong enough."""

  _weights: float = 0.0
  _shares: float = 0.0

  def add(self, share: float, error: float) -> tuple[float, float]:
    """Adds a proof; returns the share and the standard error of all since the last decision."""
    if not math.isfinite(error):  # nothing has moved.
      return share, error
    weight = 1.0 / max(error, 1e-9) ** 2
    self._weights += weight
    self._shares += share * weight
    return self._shares / self._weights, self._weights**-0.5

  def clear(self) -> None:
    """Forgets all proofs, since there was a decision."""
    self._weights = self._shares = 0.0


def prove(
  served: Logprobs, evidence: Evidence, *, before: Logprobs | None, undecided: Undecided
) -> Proof:
  """Returns what logprobs say of the weights that they were computed with.

  Args:
    served: The engine's logprobs of the passages.
    evidence: The passages, with the trainer's logprobs.
    before: The engine's logprobs when it had the old weights; None: not known, because it is a
      server that was started since.
    undecided: Earlier proofs of the same engine that were too weak; this one is added if it is too,
      and otherwise they are forgotten.
  """
  moved = _difference(evidence.new, evidence.old)
  change = _difference(served, evidence.old)
  noise_before = None if before is None else _difference(before, evidence.old)
  count = [len(each) for each in evidence.new]
  counts = np.isfinite(moved) & np.isfinite(change)
  if noise_before is not None:
    counts &= np.isfinite(noise_before)
  passages = np.repeat(np.arange(len(count)), count)[counts]
  others = [] if noise_before is None or not noise_before.any() else [noise_before[counts]]
  spread = (1.0 - np.exp(np.minimum(np.concatenate(evidence.old)[counts], 0.0))) ** 2
  weights = 1.0 / (spread + _LEAST_SPREAD)
  share, error = _projected(change[counts], [moved[counts], *others], weights, passages)
  noise = _rms((change - moved)[counts])
  usual = None if noise_before is None else _rms(noise_before[counts])
  if moved_by := _rms(moved[counts]):
    error = max(error, _LEAST_MOVE * (noise if usual is None else usual) / moved_by)
  verdict = _verdict(share, error)
  from_old = change if noise_before is None else change - noise_before
  far = {Verdict.NEW: (noise, Verdict.PART), Verdict.OLD: (_rms(from_old[counts]), Verdict.OTHER)}
  distance_from, otherwise = far.get(verdict, (noise, Verdict.OTHER))
  if verdict is not Verdict.PART and _is_noisier(distance_from, usual):
    verdict = otherwise
  if verdict is Verdict.UNKNOWN:
    share, error = undecided.add(share, error)
    verdict = _verdict(share, error)
  if verdict is not Verdict.UNKNOWN:
    undecided.clear()
  return Proof(share, error, noise, verdict)


def _verdict(share: float, error: float) -> Verdict:
  if not math.isfinite(share):
    return Verdict.OTHER
  bound = max(_SURE * error, _NEAR)
  if abs(share - 1.0) > bound:
    if abs(share) <= bound:
      return Verdict.OLD
    return Verdict.PART if 0.0 < share < 1.0 else Verdict.OTHER
  return Verdict.NEW if error <= _LARGEST_ERROR else Verdict.UNKNOWN


def _is_noisier(noise: float, usual: float | None) -> bool:
  return usual is not None and not noise <= _NOISIER * max(usual, ROUNDING)


def _projected(
  values: Float[np.ndarray, " n"],
  directions: Sequence[Float[np.ndarray, " n"]],
  weights: Float[np.ndarray, " n"],
  passages: Int[np.ndarray, " n"],
) -> tuple[float, float]:
  """Returns the first coefficient of a weighted least-squares fit, and its standard error.

  The error is the larger one of White 1980, which takes the tokens as independent, and of Liang and
  Zeger 1986, with a passage as a cluster.
  """
  design = np.stack(directions, 1) * np.sqrt(weights)[:, None]
  values = values * np.sqrt(weights)
  scale = np.sqrt((design**2).sum(0))
  if not scale[0] > 0.0:
    return 0.0, math.inf
  design = design / np.where(scale > 0.0, scale, 1.0)
  inverse = np.linalg.pinv(design.T @ design)
  found = inverse @ (design.T @ values)
  pulls = design * (values - design @ found)[:, None]
  sums = np.zeros((int(passages.max()) + 1, design.shape[1]))
  np.add.at(sums, passages, pulls)
  clusters = len(np.unique(passages))
  squares = [pulls.T @ pulls, sums.T @ sums * (clusters / max(clusters - 1, 1))]
  variance = max((inverse @ each @ inverse)[0, 0] for each in squares)
  return float(found[0] / scale[0]), float(np.sqrt(variance) / scale[0])


def _difference(one: Logprobs, other: Logprobs) -> Float[np.ndarray, " n"]:
  return np.concatenate(one).astype(np.float64) - np.concatenate(other).astype(np.float64)


def _rms(values: Float[np.ndarray, " n"]) -> float:
  return float(np.sqrt(np.nanmean(values**2))) if np.isfinite(values).any() else 0.0


def distance(one: Logprobs, other: Logprobs) -> float:
  """Returns the root mean square of the differences of logprobs, in nats."""
  return _rms(_difference(one, other))


_FOUND = {
  Verdict.OLD: "it still samples from the weights before the update",
  Verdict.PART: "only a part of its tensors is new",
  Verdict.OTHER: "it samples from neither the new weights nor those before the update",
}
_REMEDY = {
  Verdict.OLD: (
    "the load was answered but had no effect, or requests name an older adapter: see what it logged"
    " about the load, and start it again"
  ),
  Verdict.PART: (
    "tensors were lost on the way or kept by one of its devices: see which names it logged as"
    " skipped, and start it again"
  ),
  Verdict.OTHER: (
    "tensors were damaged or exchanged, or an adapter is applied that should not be, or none: see"
    " what it logged about the load, and start it again"
  ),
}
_INITIAL = (
  "it samples from the initial weights",
  "it fell back to what it was started with, as after a restart or after its memory was freed, or"
  " it drops the adapter: set engine.sglang.release_memory=False, see what it logged, and start it"
  " again",
)


def message(name: str, proof: Proof, evidence: Evidence, *, is_initial: bool) -> str:
  """Returns what is wrong with a part of an engine, and what to do, in one line.

  Args:
    name: Name of the part.
    proof: Proof of its logprobs.
    evidence: Passages that it was asked for, with the trainer's logprobs.
    is_initial: Whether its logprobs are those of the initial weights.
  """
  found, remedy = _INITIAL if is_initial else (_FOUND[proof.verdict], _REMEDY[proof.verdict])
  return (
    f"{name} does not sample from version {evidence.version} of the weights: {found}. Over"
    f" {evidence.tokens} tokens {proof.share:.3f} ± {proof.error:.3f} of the update has arrived (1:"
    f" new weights, 0: old ones), and its logprobs differ from the trainer's by"
    f" {proof.noise:.2g} nats. To do: {remedy}"
  )


def why_unknown(evidence: Evidence, proofs: Sequence[Proof]) -> str:
  """Returns why a proof could not decide whether an engine has the new weights, in one line."""
  begin = (
    f"it is unclear whether the engine samples from version {evidence.version} of the weights:"
  )
  if not evidence.moved > 0.0:
    return f"{begin} the update has moved no logprob of {evidence.tokens} tokens"
  if not proofs:
    return f"{begin} no part of it answered"
  worst = max(proofs, key=lambda each: each.error)
  return (
    f"{begin} the update has moved the logprobs of {evidence.tokens} tokens by"
    f" {evidence.moved:.2g} nats, and the engine's roundings are {worst.noise:.2g} nats, so"
    f" {worst.share:.2f} ± {worst.error:.2f} of it has arrived; the proofs of the next steps"
    " are added until it is clear (mismatch/sync_proven)"
  )
