"""Proves after an update that the engine samples from the new weights; see `engines.sync_proof`.

Before the update the trainer scores passages of the last rollouts, and so does the engine. Once the
engine was given the new weights, both score them again. The trainer does it in float32, with the
weights rounded as the engine has them.
"""

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from grpo_jax import processes
from grpo_jax.batching import packing
from grpo_jax.compilation.programs import Program
from grpo_jax.config import configuration, lora_options, run_options
from grpo_jax.config.options import Config
from grpo_jax.engines import multihost, sync_proof
from grpo_jax.engines.base import Engine, ScoresGiven, WrongWeights
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sync_proof import Evidence, Logprobs, Proof, Undecided, Verdict
from grpo_jax.learn import served_weights
from grpo_jax.learn.group_scoring import GroupScorer
from grpo_jax.models.config import ModelConfig
from grpo_jax.types import RolloutGroup

T = TypeVar("T")

# Function (weights as programs take them, groups) → logprobs [completion] of each completion of
# each group; NaN on tokens that were not sampled.
ScoreGroups = Callable[[Any, Sequence[RolloutGroup]], Sequence[Logprobs]]

_log = logging.getLogger(__name__)

_COST_SHARE = 0.05  # largest share of the run's time that proofs take, after the first two.
_PASSAGES = 32  # least number into which the tokens are divided: the error is that of passages.
_LEAST_TOKENS = 16  # of a passage.
_INITIAL_TOKENS = 512  # of what is kept of the first step, to recognise the initial weights.
_REPEATS = 1e-3  # share of an update below which an engine says the same as before.
_SAME = 1.5  # factor of the usual noise within which logprobs are those of the initial weights.


@dataclasses.dataclass(frozen=True)
class _Scored:
  """Passages with the trainer's logprobs, and those of the parts of the engine; nats."""

  groups: Sequence[RolloutGroup]
  is_kept: Sequence[bool]  # for each completion of the groups: whether it is one of the passages.
  passages: Sequence[Passage]
  trainer: Logprobs
  served: Mapping[str, Logprobs]


class SyncCheck:
  """Proves new weights: `begin` before an update, `finish` once the engine was given the result."""

  def __init__(self, engine: ScoresGiven, scorer: ScoreGroups, *, tokens: int, begins_new: bool):
    """Makes it.

    Args:
      engine: Engine that is asked.
      scorer: Function that scores groups in float32, with the weights as the engine has them.
      tokens: Number of tokens of a proof.
      begins_new: Whether the run begins with its initial weights, rather than continuing.
    """
    self._engine, self._scorer, self._tokens = engine, scorer, tokens
    self._wants_initial = begins_new
    self._initial: _Scored | None = None  # under the initial weights; None: they are not known.
    self._begun: _Scored | None = None
    self._undecided: dict[str, Undecided] = {}
    self._metrics: dict[str, float] = {}
    self._count = 0  # proofs so far; the first one compiles.
    self._spent, self._ended = 0.0, time.monotonic()  # s of the newest proof; when it ended.
    self._has_explained = False

  def metrics(self) -> dict[str, float]:
    """Returns the metrics of the proof of the newest step; empty if it was not due."""
    return dict(self._metrics)

  def begin(self, weights: Any, groups: Sequence[RolloutGroup], *, is_learned: bool) -> None:
    """Scores passages of a step before its update. All processes have to call this.

    Args:
      weights: Weights before the update, as programs take them.
      groups: Groups of the step.
      is_learned: Whether there is anything to learn from.

    Raises:
      EngineFailure: The engine failed.
    """
    self._metrics, self._begun = {}, None
    if not (is_learned and self._is_due()):
      return
    began = time.monotonic()
    chosen = sample(groups, self._tokens)
    prompts = [g.prompt.token_ids for g in chosen for _ in g.rollouts]
    completions = [rollout.completion_ids for g in chosen for rollout in g.rollouts]
    scored = [logprobs for own in self._scorer(weights, chosen) for logprobs in own]
    is_kept = [bool(np.isfinite(logprobs).any()) for logprobs in scored]  # it fits in a row.
    if not any(is_kept):
      return
    whole = map(np.concatenate, zip(prompts, completions, strict=True))
    passages = [
      Passage(ids, len(prompt)) for ids, prompt in _kept(zip(whole, prompts, strict=True), is_kept)
    ]
    score = lambda _: self._engine.score_given(passages)
    served = multihost.together(score, what="the logprobs of the engines before the update")
    self._begun = _Scored(chosen, is_kept, passages, _kept(scored, is_kept), served)
    if self._wants_initial:
      self._wants_initial, self._initial = False, _first(self._begun, _INITIAL_TOKENS)
    self._spent = time.monotonic() - began

  def finish(self, weights: Any, version: int) -> None:
    """Proves that the engine samples from new weights. All processes have to call this.

    Args:
      weights: Weights after the update, as programs take them.
      version: Their version, which the engine was given.

    Raises:
      WrongWeights: A part of the engine samples from other weights.
      EngineFailure: The engine failed.
    """
    begun, self._begun = self._begun, None
    if begun is None:
      return
    began = time.monotonic()
    scored = [logprobs for own in self._scorer(weights, begun.groups) for logprobs in own]
    new = _kept(scored, begun.is_kept)
    evidence = Evidence(version, begun.passages, begun.trainer, new)
    what = f"the proof that the engines have version {version}"
    proofs = multihost.together(lambda _: self._proofs(begun, evidence), what=what)
    self._count, self._ended = self._count + 1, time.monotonic()
    self._spent += self._ended - began
    plain = [dataclasses.astuple(proof) for proof in proofs.values()]
    of_all = [own for of_one in processes.exchange(plain, what=what) for own in of_one]
    self._record(
      evidence, [Proof(share, error, noise, Verdict(said)) for share, error, noise, said in of_all]
    )
    multihost.together(lambda _: self._refuse(begun, evidence, proofs), what=what)

  def _proofs(self, begun: _Scored, evidence: Evidence) -> dict[str, Proof]:
    """Returns what each part of the engine of this process says."""
    if not evidence.moved > 0.0:
      return {}
    return {
      name: sync_proof.prove(
        served,
        evidence,
        before=begun.served.get(name),
        undecided=self._undecided.setdefault(name, Undecided()),
      )
      for name, served in self._engine.score_given(begun.passages).items()
    }

  def _refuse(self, begun: _Scored, evidence: Evidence, proofs: Mapping[str, Proof]) -> None:
    """Raises WrongWeights for the first part of the engine that samples from other weights."""
    for name, proof in proofs.items():
      if proof.is_wrong:
        is_initial = self._is_initial(name, proof, begun)
        raise WrongWeights(sync_proof.message(name, proof, evidence, is_initial=is_initial))

  def _is_due(self) -> bool:
    """Returns whether a proof is cheap enough by now; all processes decide as the main one."""
    waited = time.monotonic() - self._ended
    is_due = self._count < 2 or waited >= self._spent / _COST_SHARE
    return processes.exchange(is_due, what="whether weights are proven")[0]

  def _record(self, evidence: Evidence, proofs: Sequence[Proof]) -> None:
    """Sets the metrics: of the part, of all processes, that is furthest from 1."""
    is_proven = bool(proofs) and all(each.verdict is Verdict.NEW for each in proofs)
    self._metrics = {
      "mismatch/sync_moved": evidence.moved,
      "mismatch/sync_proven": float(is_proven),
      "perf/sync_proof_s": self._spent,
    }
    if proofs:
      worst = max(proofs, key=lambda each: abs(each.share - 1.0))
      self._metrics |= {
        "mismatch/sync_share": worst.share,
        "mismatch/sync_share_error": worst.error,
        "mismatch/sync_noise": max(each.noise for each in proofs),
      }
    is_wrong = any(each.is_wrong for each in proofs)
    if not (is_proven or is_wrong or self._has_explained):
      self._has_explained = True
      _log.warning("%s", sync_proof.why_unknown(evidence, proofs))

  def _is_initial(self, name: str, proof: Proof, begun: _Scored) -> bool:
    """Returns whether a part of the engine has gone back to the initial weights."""
    initial, repeats = self._initial, abs(proof.share) < _REPEATS
    if initial is None or name not in begun.served or repeats:  # it has gone nowhere.
      return False
    served = self._engine.score_given(initial.passages).get(name)
    if served is None:
      return False
    usual = sync_proof.distance(begun.served[name], begun.trainer)
    return sync_proof.distance(served, initial.trainer) <= _SAME * usual + sync_proof.ROUNDING


def make_scorer(config: Config, model: ModelConfig, mesh: Mesh) -> Program | None:
  """Returns the program that scores what the engine has; None: new weights are not proven."""
  if not run_options.proof_tokens(config):
    return None
  return served_weights.make_scorer(
    model,
    mesh,
    dtype=jnp.dtype(config.model.compute_dtype),
    is_merged=lora_options.is_unmerged(config) is False,
  )


def make(
  config: Config,
  engine: Engine,
  scorer: GroupScorer,
  score: Program | None,
  *,
  begins_new: bool,
) -> SyncCheck | None:
  """Makes what proves new weights at the engine; None: nothing does.

  Args:
    config: Config of the run.
    engine: Engine of the run.
    scorer: Scorer of groups, in the shape of a proof; its program is replaced.
    score: Program made by `make_scorer`.
    begins_new: Whether the run begins with its initial weights.

  Raises:
    ConfigError: The engine cannot score tokens that are given.
  """
  if score is None:
    return None
  if not isinstance(engine, ScoresGiven):
    raise configuration.ConfigError(
      f"engine.proof_tokens={config.engine.proof_tokens} needs an engine that scores tokens which"
      f" are given; {config.engine.name!r} has no score_given: set it to 0"
    )
  own = dataclasses.replace(scorer, score=score, cost=packing.PLACES, experts=None)
  tokens = run_options.proof_tokens(config)
  return SyncCheck(engine, own, tokens=tokens, begins_new=begins_new)


def sample(groups: Sequence[RolloutGroup], tokens: int) -> list[RolloutGroup]:
  """Returns the beginnings of some completions, with about as many tokens as are asked for.

  Groups whose rewards differ come first, since the update moves these most; one completion of each
  is taken in turn.

  Args:
    groups: Groups of a step.
    tokens: Number of sampled tokens.
  """
  longest = max(_LEAST_TOKENS, tokens // _PASSAGES)
  teaches = lambda group: len(set(group.rewards[np.isfinite(group.rewards)].tolist())) > 1
  ordered = sorted(groups, key=lambda group: not teaches(group))
  chosen: dict[int, list[Any]] = {}
  left = tokens
  for turn in range(max((len(group.rollouts) for group in ordered), default=0)):
    for number, group in enumerate(ordered):
      if left <= 0 or turn >= len(group.rollouts):
        continue
      rollout = group.rollouts[turn]
      fields = ("completion_ids", "loss_mask", "behavior_logprobs", "weight_versions")
      begun = {name: getattr(rollout, name)[:longest] for name in fields}
      if count := int(begun["loss_mask"].sum()):
        begun_here = dataclasses.replace(rollout, experts=None, **begun)  # both sides choose.
        chosen.setdefault(number, []).append(begun_here)
        left -= count
  return [RolloutGroup(ordered[number].prompt, tuple(own)) for number, own in chosen.items()]


def _first(scored: _Scored, tokens: int) -> _Scored:
  """Returns the first passages, with about `tokens` tokens."""
  count = int(np.searchsorted(np.cumsum([len(x) for x in scored.trainer]), tokens)) + 1
  return _Scored((), (), scored.passages[:count], scored.trainer[:count], {})


def _kept(values: Iterable[T], is_kept: Sequence[bool]) -> list[T]:
  return list(itertools.compress(values, is_kept))
