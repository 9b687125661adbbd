"""DPPO, clip-cov, kl-cov, MaxRL, OPO, ReMax and pass@k against the published code, in float64.

tests/golden/README.md names the sources and their versions. All cases agree to 1e-9; verl's
divisions add 1e-8.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import advantages, importance, objectives, selection
from grpo_jax.types import Denominators, LossTokens

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "dppo_cov.npz")
PRIME = {"loss": "dppo_tv", "use_behavior_logprobs": True}
VERL_CLIP = {"clip_low": 0.2, "clip_high": 0.28}
CASES = {
  "prime_dppo_tau0": PRIME,
  "prime_dppo_tau0.001": PRIME | {"dppo_kl_tau": 1e-3},
  "prime_dppo_tau0.1": PRIME | {"dppo_kl_tau": 0.1},
  "verl_dppo_tv_c3": {
    **{"loss": "dppo_tv", "dppo_mask_low": 0.15, "dppo_mask_high": 0.1},
    "dppo_ratio_cap": 3.0,
  },
  "verl_dppo_kl_c1e4": {"loss": "dppo_kl", "dppo_mask_high": 0.02, "dppo_ratio_cap": 1e4},
  "verl_dppo_kl_c1.5": {"loss": "dppo_kl", "dppo_ratio_cap": 1.5},
  "verl_kl_cov_0.05": {"loss": "kl_cov", "kl_cov_ratio": 0.05, "kl_cov_coef": 0.5},
  "verl_kl_cov_0.2": {"loss": "kl_cov", "kl_cov_ratio": 0.2, "kl_cov_coef": 0.5},
  "verl_kl_cov_0.002": {"loss": "kl_cov", "kl_cov_ratio": 0.002, "kl_cov_coef": 0.5},
  "verl_clip_cov_all": {
    **{"loss": "clip_cov", "clip_cov_ratio": 0.5, "clip_cov_lb": 0.3, "clip_cov_ub": 5.0},
    **VERL_CLIP,
  },
  "verl_clip_cov_some": {
    **{"loss": "clip_cov", "clip_cov_ratio": 0.06, "clip_cov_lb": 0.05, "clip_cov_ub": 2.0},
    **VERL_CLIP,
  },
  "verl_clip_cov_one": {
    **{"loss": "clip_cov", "clip_cov_ratio": 2e-4, "clip_cov_lb": 0.2, "clip_cov_ub": 5.0},
    **VERL_CLIP,
  },
}


def test_every_golden_case_is_tested():
  names = {key.split("/")[1] for key in GOLDEN.files if key.startswith("s0/")}
  assert names - {"in", "nemo_seq_error"} == set(CASES)


@functools.cache
def _share(name):
  objective = objectives.make(kl_coef=0.0, **CASES[name])

  def share(logp, tokens, denominators):
    return objective(logp, None, tokens, denominators)

  options = {"xla_backend_optimization_level": 0}
  return objective, jax.jit(jax.value_and_grad(share, has_aux=True), compiler_options=options)


def _inputs(seed):
  return (GOLDEN[f"{seed}/in/{key}"] for key in ("logp", "old", "mask", "adv"))


def _selected(objective, name, seed):
  """The tokens that our own selection takes, or verl's random ones, if it had a choice."""
  logp, old, mask, adv = _inputs(seed)
  selected = np.zeros(mask.shape, bool)
  if name in ("verl_clip_cov_some", "verl_clip_cov_one"):
    return GOLDEN[f"{seed}/{name}/chosen"]
  flat = {"advantages": adv[mask], "old_logprobs": old[mask]}
  keys = np.arange(mask.sum(), dtype=np.uint64)
  selected[mask] = selection.choose(objective.options, logp[mask], keys=keys, **flat)
  return selected


@pytest.mark.parametrize("seed", ["s0", "s1", "s2"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_the_published_code(name, seed):
  logp, old, mask, adv = _inputs(seed)
  junk = lambda x: jnp.asarray(np.pad(np.where(mask, x, np.nan), ((0, 6 - len(x)), (0, 0))))
  wide = lambda x: jnp.asarray(np.pad(x, ((0, 6 - len(x)), (0, 0))))
  objective, share = _share(name)
  with jax.enable_x64(True):
    tokens = LossTokens(
      mask=wide(mask),
      sequence_ids=None,
      advantages=junk(adv),
      behavior_logprobs=junk(old),
      old_logprobs=None if objective.options.use_behavior_logprobs else junk(old),
      selected=wide(_selected(objective, name, seed)) if objective.selects else None,
    )
    denominators = Denominators(float(mask.sum()), float(len(mask)))
    (loss, metrics), grad = share(junk(logp), tokens, denominators)
  np.testing.assert_allclose(loss, GOLDEN[f"{seed}/{name}/loss"], rtol=2e-9, atol=1e-10)
  expected = np.pad(GOLDEN[f"{seed}/{name}/grad"], ((0, 6 - len(mask)), (0, 0)))
  np.testing.assert_allclose(grad, expected, rtol=2e-9, atol=1e-10)
  if name.startswith("prime"):
    shares = [metrics[f"train/clip_{side}_share"].value() for side in ("low", "high")]
    np.testing.assert_allclose(shares, GOLDEN[f"{seed}/{name}/shares"], rtol=1e-6)


@pytest.mark.parametrize("seed", ["s0", "s1", "s2"])
@pytest.mark.parametrize("name", ["verl_clip_cov_some", "verl_clip_cov_one"])
def test_as_many_random_tokens_of_large_covariance_are_chosen_as_by_verl(name, seed):
  objective, _ = _share(name)
  logp, old, mask, adv = _inputs(seed)
  flat = {"advantages": adv[mask], "old_logprobs": old[mask]}
  draw = lambda rng: selection.choose(
    objective.options, logp[mask], keys=rng.permutation(mask.sum()).astype(np.uint64), **flat
  )
  drawn = [draw(np.random.default_rng(i)) for i in range(300)]
  theirs = GOLDEN[f"{seed}/{name}/chosen"][mask]
  assert {int(x.sum()) for x in drawn} >= {int(theirs.sum())}
  # verl's choice is one that is drawn here too: among all candidates, with equal chances.
  assert not theirs[~np.any(drawn, axis=0)].any()


@jax.jit
def _errors(*inputs):
  kept = importance.seq_logprob_error_mask(*inputs, threshold=1.6)
  return importance.seq_logprob_errors(*inputs), kept


@pytest.mark.parametrize("seed", ["s0", "s1", "s2"])
def test_completions_are_left_out_as_by_nemo_rl(seed):
  logp, old, mask, _ = _inputs(seed)
  with jax.enable_x64(True):
    errors, kept = jax.device_get(_errors(logp, old, mask))
  np.testing.assert_allclose(errors[:, 0], GOLDEN[f"{seed}/nemo_seq_error/errors"], rtol=1e-12)
  np.testing.assert_array_equal(kept.any(axis=1), GOLDEN[f"{seed}/nemo_seq_error/kept"] > 0)
  np.testing.assert_array_equal(kept, mask & kept.any(axis=1, keepdims=True))


@pytest.mark.long
def test_advantages_equal_the_published_code():
  @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
  def estimates(rewards, lengths, greedy, of_groups):
    found = {
      "verl_opo": advantages.opo(rewards, lengths),
      "verl_remax": advantages.remax(rewards, greedy),
      "prime_max_rl": advantages.maxrl(rewards),
    }
    return found, {k: advantages.pass_at_k(of_groups, k=k) for k in (1, 2, 4, 8)}

  rewards, lengths, greedy = (GOLDEN[f"adv/in/{x}"] for x in ("rewards", "lengths", "greedy"))
  with jax.enable_x64(True):
    got, of_sets = estimates(rewards, lengths, greedy, rewards[[0, 1, 2, 3, 7, 8]])
  for name, values in got.items():
    np.testing.assert_allclose(values, GOLDEN[f"adv/{name}"], rtol=1e-9, atol=1e-9, err_msg=name)
  for k, values in of_sets.items():
    np.testing.assert_allclose(values, GOLDEN[f"adv/passk_{k}"], rtol=1e-9, atol=1e-9)
