"""Proofs that an engine samples from the new weights: their statistics, and planted faults."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.building import sync_check
from grpo_jax.building.sync_check import SyncCheck
from grpo_jax.engines import sync_proof
from grpo_jax.engines.base import WrongWeights
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.prompt_scoring import Passage
from grpo_jax.engines.sync_proof import Evidence, Undecided, Verdict
from grpo_jax.models import lora
from tests.engines import proofs, tiny

PASSAGES, LENGTH = 48, 64


def numbers(chance, *, moved, noise):
  """Returns what a trainer and an engine may say: the noise has heavy tails and is correlated.

  Args:
    chance: Random generator.
    moved: Size of an update relative to 1 - p; nats.
    noise: The same of the engine's roundings.
  """
  old = -chance.exponential(1.5, (PASSAGES, LENGTH))
  free = 1.0 - np.exp(old)
  new = old + moved * free * chance.normal(size=old.shape)

  def roundings():
    of_token = chance.standard_t(4, old.shape) / np.sqrt(2)
    return noise * free * (0.9 * of_token + 0.4 * chance.normal(size=(PASSAGES, 1)))

  before = old + roundings()
  return old, new, before, new + roundings()


def proof(old, new, before, served, undecided=None):
  evidence = Evidence(7, [Passage(np.arange(2), 1)] * len(old), list(old), list(new))
  known = None if before is None else list(before)
  found = sync_proof.prove(list(served), evidence, before=known, undecided=undecided or Undecided())
  return found, evidence


@pytest.mark.parametrize("knows_before", [True, False])
@pytest.mark.parametrize("moved", [1.0, 0.3, 0.1, 0.03])
def test_new_weights_are_never_taken_for_others_and_old_ones_never_for_new(moved, knows_before):
  chance, verdicts = np.random.default_rng(0), {"new": [], "old": []}
  for _ in range(125):
    old, new, before, served = numbers(chance, moved=0.02 * moved, noise=0.02)
    again = before if knows_before else old + (served - new)  # old weights, roundings of their own.
    known = before if knows_before else None
    verdicts["new"].append(proof(old, new, known, served)[0].verdict)
    verdicts["old"].append(proof(old, new, known, again)[0].verdict)
  assert set(verdicts["new"]) <= {Verdict.NEW, Verdict.UNKNOWN}
  assert set(verdicts["old"]) <= {Verdict.OLD, Verdict.UNKNOWN}
  if moved >= 0.3:  # strong enough to decide every time.
    assert set(verdicts["new"]) == {Verdict.NEW} and set(verdicts["old"]) == {Verdict.OLD}
  if knows_before:  # an engine that says the same as before has moved nowhere.
    assert set(verdicts["old"]) == {Verdict.OLD}


def test_weak_proofs_are_added_until_they_decide():
  chance, undecided = np.random.default_rng(1), {"new": Undecided(), "old": Undecided()}
  found = {"new": [], "old": []}
  for _ in range(40):
    old, new, _, served = numbers(chance, moved=0.0015, noise=0.02)
    stale = old + (served - new)
    for name, said in (("new", served), ("old", stale)):
      found[name].append(proof(old, new, None, said, undecided[name])[0])
  assert found["new"][0].verdict is found["old"][0].verdict is Verdict.UNKNOWN
  assert {p.verdict for p in found["new"]} == {Verdict.NEW, Verdict.UNKNOWN}
  assert {p.verdict for p in found["old"]} == {Verdict.OLD, Verdict.UNKNOWN}
  errors = [p.error for p in found["new"][:4]]
  assert errors == sorted(errors, reverse=True)  # each proof adds something.


def test_numbers_of_a_proof_worked_by_hand():
  """Two tokens of p = 1/2 in passages of their own: share = Σ d y / Σ d², and its error."""
  old, new = np.log([[0.5], [0.5]]), np.log([[0.5], [0.5]]) + [[0.1], [0.2]]
  found, evidence = proof(old, new, None, old + [[0.05], [0.2]])
  assert found.share == pytest.approx((0.1 * 0.05 + 0.2 * 0.2) / 0.05)  # 0.9
  rest = np.array([0.05 - 0.09, 0.2 - 0.18])
  clustered = 2 * ((0.1 * rest[0]) ** 2 + (0.2 * rest[1]) ** 2)  # K / (K - 1) with two passages.
  assert found.error == pytest.approx(np.sqrt(clustered) / 0.05)
  assert found.noise == pytest.approx(np.sqrt((0.05**2 + 0.0**2) / 2))
  assert (evidence.tokens, evidence.moved) == (2, pytest.approx(np.sqrt(0.025)))


def test_tokens_that_were_not_sampled_do_not_count():
  chance = np.random.default_rng(2)
  old, new, before, served = numbers(chance, moved=0.02, noise=0.02)
  expected = proof(old[:, 8:], new[:, 8:], before[:, 8:], served[:, 8:])[0]
  for values in (old, new):
    values[:, :8] = np.nan
  before[:, :8] = served[:, :8] = -5.0
  found, evidence = proof(old, new, before, served)
  assert evidence.tokens == PASSAGES * (LENGTH - 8)
  assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_weights_that_hardly_moved_are_not_called_old():
  """An engine that rounds them away says exactly what it said before."""
  old, new, before, _ = numbers(np.random.default_rng(3), moved=1e-5, noise=0.02)
  found, evidence = proof(old, new, before, before)
  assert found.verdict is Verdict.UNKNOWN
  why = sync_proof.why_unknown(evidence, [found])
  assert re.search(r"it is unclear .* version 7 .* moved .* 3072 tokens by \d.*e-06 nats", why)
  assert "has moved no logprob" in sync_proof.why_unknown(proof(old, old, None, old)[1], [])


# --- faults, in engines with tiny models ---


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained(request):
  """An embedded sampler, what scores for the trainer, and the weights of two steps."""
  config, dtype = tiny.config(), jnp.dtype(request.param)
  engine = JaxSampler(config, max_rows=16, max_length=128, compute_dtype=dtype)
  steps = proofs.two_steps(engine, config, dtype, groups=16, tokens=32)
  yield engine, proofs.scorer(config, dtype), steps
  engine.close()


@pytest.fixture(scope="module")
def pool(trained):
  """What the trainer and the engine say of passages under the old and the new weights."""
  engine, score, steps = trained
  return proofs.pool(engine, score, steps.old, steps.new, steps.groups[1])


def with_layers(tree, change):
  return {**tree, "layers": {name: change(name, x) for name, x in tree["layers"].items()}}


def lost(steps, chance):
  """One tensor of one layer keeps its initial values.

  In bfloat16 it is a kernel of the first layer: what one in the last layer adds to an update, 2 to
  5 per cent, is below what some thousand tokens can show.
  """
  is_exact = steps.dtype == jnp.float32
  names = [n for n, x in steps.new["layers"].items() if is_exact or x.ndim == 3]
  name, layer = str(chance.choice(names)), int(chance.integers(2)) if is_exact else 0
  lose = lambda n, x: x.at[layer].set(steps.initial["layers"][n][layer]) if n == name else x
  return with_layers(steps.new, lose)


def bucket_twice(steps, chance):
  """A bucket of tensors came twice and the next one not at all: its tensors are old."""
  kernels = sorted(n for n, x in steps.new["layers"].items() if x.ndim == 3)
  at = chance.integers(len(kernels) - 2)
  missing = kernels[at : at + 3]
  return with_layers(steps.new, lambda n, x: steps.old["layers"][n] if n in missing else x)


def half_old(steps, _):
  """The second of two devices, which has half of every kernel's columns, kept the old ones."""

  def mix(name, x):
    half = x.shape[-1] // 2
    return x.at[..., half:].set(steps.old["layers"][name][..., half:]) if x.ndim == 3 else x

  return with_layers(steps.new, mix)


def swapped(steps, _):
  """The tensors of two layers are exchanged."""
  return with_layers(steps.new, lambda _, x: x[::-1])


# What goes wrong, and in how many ways.
FAULTS = {
  "initial weights after a wake-up": (lambda steps, _: steps.initial, 1),
  "version echoed, nothing loaded": (lambda steps, _: steps.old, 1),
  "one tensor lost": (lost, 10),
  "one bucket twice": (bucket_twice, 5),
  "two layers swapped": (swapped, 1),
  "half of a sharded tensor stale": (half_old, 1),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_one_proof(trained, pool, fault):
  """Ten of ten times, each of them with other passages."""
  engine, _, steps = trained
  passages, trainer, served = pool
  plant, ways = FAULTS[fault]
  for seed in range(10):
    chance = np.random.default_rng(seed)
    if seed < ways:
      engine.load_weights(plant(steps, chance), version=2)
      found = engine.score_given(passages)["sampler"]
    kept = chance.random(len(passages)) < 0.85
    some = lambda values, kept=kept: [x for x, is_kept in zip(values, kept, strict=True) if is_kept]
    evidence = Evidence(2, some(passages), some(trainer["old"]), some(trainer["new"]))
    settings = {"before": some(served["old"]), "undecided": Undecided()}
    said = sync_proof.prove(some(found), evidence, **settings)
    assert said.is_wrong, (seed, said)
    if fault.startswith("version echoed"):
      assert said.verdict is Verdict.OLD and said.share == pytest.approx(0.0, abs=1e-6)


def begun(trained, monkeypatch):
  """Returns a check that has proven the first step, and the engine with its weights."""
  monkeypatch.setattr(sync_check, "_COST_SHARE", 1e9)  # every time, whatever it costs.
  engine, score, steps = trained
  check = SyncCheck(engine, score, tokens=1536, begins_new=True)
  engine.load_weights(steps.initial, version=0)
  proofs.checked(engine, check, steps.initial, steps.old, steps.groups[0], steps.old, 1)
  assert check.metrics()["mismatch/sync_proven"] == 1.0
  return engine, check, steps


@pytest.mark.long
def test_new_weights_are_proven_and_others_named_with_what_to_do(trained, monkeypatch):
  engine, check, steps = begun(trained, monkeypatch)
  prove = lambda served: proofs.checked(
    engine, check, steps.old, steps.new, steps.groups[1], served, 2
  )
  found = prove(steps.new)
  assert found["mismatch/sync_proven"] == 1.0
  assert abs(found["mismatch/sync_share"] - 1.0) <= max(
    6 * found["mismatch/sync_share_error"], 0.02
  )
  assert found["mismatch/sync_moved"] > 1e-3 and found["perf/sync_proof_s"] > 0.0
  for served, message in (
    (steps.old, "still samples from the weights before the update"),
    (steps.initial, "samples from the initial weights.*engine.sglang.release_memory=False"),
    (half_old(steps, None), "only a part of its tensors is new|neither the new weights"),
  ):
    engine.load_weights(steps.old, version=1)
    with pytest.raises(WrongWeights, match=message) as raised:
      prove(served)
    assert re.match(
      r"sampler does not sample from version 2 of the weights: .* Over \d+ tokens -?\d\.\d+ ±"
      r" \d\.\d+ of the update has arrived .* To do: [^\n]*$",
      str(raised.value),
    )
    assert check.metrics()["mismatch/sync_proven"] == 0.0


@pytest.mark.long
def test_an_adapter_that_is_dropped_or_not_renewed_is_named(monkeypatch):
  monkeypatch.setattr(sync_check, "_COST_SHARE", 1e9)
  config = tiny.config()
  options = lora.AdapterOptions(rank=4, alpha=16.0)
  base = tiny.params(config)

  old, new = proofs.adapters(base, config, options, scale=0.1, change=0.01)
  engine = JaxSampler(config, max_rows=16, max_length=128, compute_dtype=jnp.bfloat16)
  check = SyncCheck(engine, proofs.scorer(config, jnp.bfloat16), tokens=1024, begins_new=False)
  engine.load_weights(old, version=1)
  groups = proofs.sampled(engine, proofs.prompts_for(config, 12), tokens=24)
  prove = lambda served: proofs.checked(engine, check, old, new, groups, served, 2)
  assert prove(new)["mismatch/sync_proven"] == 1.0
  engine.load_weights(old, version=1)
  with pytest.raises(WrongWeights, match="requests name an older adapter"):
    prove(old)
  engine.load_weights(old, version=1)
  with pytest.raises(WrongWeights, match="neither the new weights nor those before"):
    prove(base)
  engine.close()


def test_a_proof_is_left_out_while_it_is_too_dear(monkeypatch):
  clock = [0.0]
  monkeypatch.setattr(sync_check.time, "monotonic", lambda: clock[0])

  class Engine:
    """An engine that takes ten seconds to score."""

    def score_given(self, passages):
      clock[0] += 10.0
      return {"server 0": [np.full(len(p.tokens) - p.first, -1.0) for p in passages]}

  def score(weights, groups):
    return [[np.full(len(r.completion_ids), weights) for r in g.rollouts] for g in groups]

  groups = [proofs.group_of(reward) for reward in (0.0, 1.0)]
  check = SyncCheck(Engine(), score, tokens=64, begins_new=False)
  proven = []
  for step in range(30):
    check.begin(-1.0, groups, is_learned=True)
    check.finish(-1.0, step)  # nothing has moved: the engine is not asked again.
    clock[0] += 30.0
    proven.append(bool(check.metrics()))
  assert proven[:2] == [True, True] and not any(proven[2:7])
  assert sum(proven) == 2 + 28 // 7  # a proof of 10 s not before 200 s, or 7 steps, have passed.


def test_passages_are_beginnings_of_completions_of_groups_that_learn():
  groups = [proofs.group_of(1.0, 1.0, name="same"), proofs.group_of(0.0, 1.0, name="differ")]
  chosen = sync_check.sample(groups, 1024)
  assert [g.prompt.prompt_id for g in chosen] == ["differ", "same"]
  assert {len(r.completion_ids) for g in chosen for r in g.rollouts} == {1024 // 32}
  unscored = proofs.group_of(np.nan, np.nan, name="unscored")
  assert [g.prompt.prompt_id for g in sync_check.sample([unscored, *groups], 64)][0] == "differ"
  few = sync_check.sample(groups, 16)
  assert [(g.prompt.prompt_id, len(g.rollouts)) for g in few] == [("differ", 1)]
