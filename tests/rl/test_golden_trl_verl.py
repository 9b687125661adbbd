"""Loss and gradient against TRL 1.16 and verl, float64; see tests/golden/README.md.

Left out, because we have no such method:
  verl_kl_abs    |log πθ - log π_ref|: estimates no divergence.
  adv/verl_passk verl's pass@k advantage: only the best of a group learns; its golden case is all
                 zeros. Ours is another one (test_golden_dppo_cov.py).

All cases agree to 1e-9 but for what the settings below say: TRL holds SAPO's
temperature in float32 (so does its case), and verl adds 1e-8 to its denominators,
twice in `geo_mean`: TOLERANCES.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rl import advantages, objectives, selection
from grpo_jax.types import Denominators, LossTokens

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "golden" / "trl_verl.npz")
TOLERANCES = {"verl_geo_mean_token-mean": 1e-8}
LEFT_OUT = {"verl_kl_abs"}
LEFT_OUT_ADVANTAGES = {"verl_passk"}

KL = {"kl_coef": 0.04, "kl_weight": "none", "kl_input_clamp": None, "kl_output_clamp": None}
ONLY_KL = {"kl_coef": 1.0, "kl_weight": "none"}  # verl's clamps, 20 and 10, are our defaults.
SEQUENCE = {"aggregation": "sequence_mean"}
CONSTANT = {"aggregation": "constant_length"}
VERL_CLIP = {"clip_low": 0.2, "clip_high": 0.2}  # verl's defaults, whatever the loss.
GSPO = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, **SEQUENCE}
SAPO = {"loss": "sapo", "sapo_temperature_negative": float(np.float32(1.05)), **SEQUENCE}
LUSPO = {"loss": "luspo", "clip_low": 2e-3, "clip_high": 2.5e-3, **SEQUENCE}
TIS = {"importance_correction": "token", "importance_truncation": "tis", "importance_high": 2.0}
SEQ_MASK = {
  "importance_correction": "sequence",
  "importance_truncation": "icepop",
  "importance_high": 3.0,
}

CASES = {
  "trl_bnpo": {},
  "trl_bnpo_delta1.5": {"dual_clip": 1.5},
  "trl_bnpo_kl.04": KL,
  "trl_bnpo_opsm.02": {"off_policy_mask_threshold": 0.02},
  "trl_bnpo_seqmask3": SEQ_MASK,
  "trl_bnpo_tis2": TIS,
  "trl_bnpo_topent.2": {"top_entropy_share": 0.2},
  "trl_bnpo_unbiasedkl.04": KL | {"kl_weight": "old"},
  "trl_cispo_5.0": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
  "trl_dapo": {},
  "trl_dapo_cliphigh.28": {"clip_high": 0.28},
  "trl_dapo_kl.04": KL,
  "trl_dr_grpo": CONSTANT,
  "trl_dr_grpo_kl.04": CONSTANT | KL,
  "trl_grpo": SEQUENCE,
  "trl_grpo_kl.04": SEQUENCE | KL,
  "trl_gspo": GSPO,
  "trl_luspo": LUSPO,
  "trl_sapo": SAPO,
  "trl_sapo_kl.04": SAPO | KL,
  "trl_vespo": {"loss": "vespo"},
  "trl_vespo_kl.04": {"loss": "vespo"} | KL,
  "verl_cispo_token-mean": {"loss": "cispo", **VERL_CLIP},
  "verl_geo_mean_token-mean": {
    "loss": "gmpo",
    **VERL_CLIP,
    **SEQUENCE,
  },  # its name notwithstanding.
  "verl_gpg_token-mean": {"loss": "reinforce"},
  "verl_gspo_seq-mean-token-mean": {"loss": "gspo_token", **VERL_CLIP, **SEQUENCE},
  "verl_kl_k1": ONLY_KL | {"kl_estimator": "k1"},
  "verl_kl_k2": ONLY_KL | {"kl_estimator": "k2"},
  "verl_kl_k3": ONLY_KL | {"kl_estimator": "k3"},
  "verl_sapo_seq-mean-token-mean": {"loss": "sapo", **SEQUENCE},
  "verl_vanilla_seq-mean-token-mean": {"dual_clip": 3.0, **SEQUENCE},
  "verl_vanilla_seq-mean-token-sum": {"dual_clip": 3.0, **CONSTANT},  # L = 1.
  "verl_vanilla_seq-mean-token-sum-norm": {"dual_clip": 3.0, **CONSTANT},  # 1 sequence: no /B.
  "verl_vanilla_token-mean": {"dual_clip": 3.0},
}


def test_every_golden_case_is_tested_or_left_out_for_a_reason():
  names = {key.split("/")[1] for key in GOLDEN.files if key.startswith("s0/")} - {"in"}
  assert names == set(CASES) | LEFT_OUT
  kinds = {key.split("/")[1] for key in GOLDEN.files if key.startswith("adv/verl")}
  assert kinds == set(ADVANTAGES) | LEFT_OUT_ADVANTAGES


def _inputs(seed, name):
  """Returns log πθ and the tokens, one sequence a row, padded with NaN to one shape [8 33]."""
  read = {key: GOLDEN[f"{seed}/in/{key}"] for key in ("logp", "old", "ref", "mask", "adv", "ent")}
  mask = read["mask"] > 0
  behavior = read["ref"] if name in ("trl_bnpo_tis2", "trl_bnpo_seqmask3") else read["old"]
  advantages_ = np.broadcast_to(read["adv"][:, None], mask.shape)
  if name.startswith("verl_kl"):
    advantages_ = np.zeros_like(advantages_)
  selected = np.zeros_like(mask)  # TRL keeps the denominator of all tokens.
  selected[mask] = selection.top_entropy(read["ent"][mask], share=0.2)
  tokens = {
    "mask": _pad(mask, False),
    "sequence_ids": np.zeros((8, 33), np.int32),
    "advantages": _pad(advantages_),
    "behavior_logprobs": _pad(behavior),
    "old_logprobs": _pad(read["old"]),
    "ref_logprobs": _pad(read["ref"]),
    "selected": _pad(selected, False),
  }
  return _pad(read["logp"]), tokens


def _pad(x, value=np.nan):
  rows, width = x.shape
  return np.pad(x, ((0, 8 - rows), (0, 33 - width)), constant_values=value)


def _packed(logp, tokens):
  """Puts all rows into one: every row is a sequence of it."""
  rows, width = logp.shape
  tokens["sequence_ids"] = np.broadcast_to(np.arange(rows)[:, None], (rows, width)).astype(np.int32)
  return logp.reshape(1, -1), {key: value.reshape(1, -1) for key, value in tokens.items()}


@functools.cache  # one compilation a case and layout.
def _objective(name, width):
  options = {"kl_coef": 0.0} | CASES[name]
  if options.get("aggregation") == "constant_length":
    options["max_completion_tokens"] = 1 if name.endswith("token-sum") else width
  objective = objectives.make(**options)
  share = jax.value_and_grad(lambda *args: objective(args[0], None, *args[1:])[0])
  return jax.jit(share, compiler_options={"xla_backend_optimization_level": 0})


OF_SEQUENCES = [
  name
  for name, options in CASES.items()
  if set(options) & {"aggregation", "importance_correction", "off_policy_mask_threshold"}
]  # packing rows into one matters to these.


@pytest.mark.parametrize("seed", ["s0", "s1", "s2"])
@pytest.mark.parametrize(
  "name, layout",
  [(name, "rows") for name in CASES] + [(name, "packed") for name in (*OF_SEQUENCES, "trl_vespo")],
)
def test_loss_and_gradient_equal_the_published_code(name, layout, seed):
  rows, width = GOLDEN[f"{seed}/in/mask"].shape
  with jax.enable_x64(True):
    logp, tokens = _inputs(seed, name)
    sequences = 1.0 if name.endswith("sum-norm") else float(rows)
    denominators = Denominators(tokens=float(tokens["mask"].sum()), sequences=sequences)
    if layout == "packed":
      logp, tokens = _packed(logp, tokens)
    arrays = LossTokens(**{key: jnp.asarray(value) for key, value in tokens.items()})
    share = _objective(name, width if CASES[name].get("aggregation") == "constant_length" else 0)
    loss, grad = share(jnp.asarray(logp), arrays, denominators)
  tolerance = TOLERANCES.get(name, 1e-9)
  np.testing.assert_allclose(loss, GOLDEN[f"{seed}/{name}/loss"], atol=1e-9, rtol=tolerance)
  expected = _pad(GOLDEN[f"{seed}/{name}/grad"], 0.0).reshape(grad.shape)
  np.testing.assert_allclose(grad, expected, atol=1e-9, rtol=tolerance)


# verl's three tokens a completion, all with the same return: whitening counts each thrice.
def _token_whitened_as_verl(rewards, baseline):
  raw = advantages.group_relative(rewards, baseline=baseline, scale="none")
  tokens = jnp.repeat(raw.reshape(-1, 1), 3, axis=-1)
  return advantages.whiten(tokens, jnp.ones_like(tokens, bool), ddof=1, floor=0.0, eps=1e-8)


ADVANTAGES = {
  "verl_grpo": advantages.grpo,
  "verl_drgrpo": advantages.dr_grpo,
  "verl_rloo": advantages.rloo,
  "verl_opo": lambda r: advantages.opo(r, jnp.full_like(r, 3.0)),
  "verl_rfpp": lambda r: _token_whitened_as_verl(r, "none"),
  "verl_rfpp_baseline": lambda r: _token_whitened_as_verl(r, "group_mean"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_equal_verl(name):
  with jax.enable_x64(True):
    got = jax.jit(ADVANTAGES[name])(jnp.asarray(GOLDEN["adv/in/rewards"].reshape(3, 4)))
  expected = GOLDEN[f"adv/{name}"]
  np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-9, rtol=1e-9)
