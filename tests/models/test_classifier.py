"""Our scores of sequence classifiers against transformers' logits, and what is refused."""

import json

import numpy as np
import pytest
import torch
import transformers

from grpo_jax.models import classifier, loading
from grpo_jax.models import tiny as shipped
from grpo_jax.models.products import Products
from tests.models import tiny

CLASSES = {
  "llama": (transformers.LlamaConfig, transformers.LlamaForSequenceClassification),
  "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForSequenceClassification),
  "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForSequenceClassification),
  "gemma3_text": (
    transformers.Gemma3TextConfig,
    transformers.models.gemma3.Gemma3TextForSequenceClassification,
  ),
}
PAD = 7
LENGTHS = (1, 5, 12, 9)


def hf_classifier(family, **options):
  """Returns transformers' classifier with every weight random."""
  config_class, model_class = CLASSES[family]
  settings = {**tiny.SIZES, "num_labels": 1, "pad_token_id": PAD, **options}
  model = model_class(config_class(**settings)).eval()
  generator = torch.Generator().manual_seed(1)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator) * 0.15
      weight.copy_(noise + 1.0 if "norm" in name else noise)
  return model


def sequences(seed=0):
  """Returns sequences of several lengths; two of them end in the padding token itself."""
  rng = np.random.default_rng(seed)
  made = [rng.integers(8, 61, length).astype(np.int32) for length in LENGTHS]
  made[1][-1] = PAD
  made[2][-3:] = (PAD, 9, PAD)
  return made


def padded(rows, width=16):
  tokens = np.zeros((len(rows), width), np.int32)
  for row, ids in enumerate(rows):
    tokens[row, : len(ids)] = ids
  return tokens, np.asarray([len(ids) for ids in rows], np.int32)


def our_scores(loaded, rows, width=16, compute_dtype=np.float32):
  tokens, lengths = padded(rows, width)
  pool_at = np.asarray([classifier.pooled_place(ids, loaded.pad_id) for ids in rows], np.int32)

  def run(params, tokens, lengths, pool_at):
    return classifier.scores(
      params, loaded.config, tokens, lengths, pool_at, products=Products(compute_dtype)
    )

  return np.asarray(tiny.jit(run)(loaded.params, tokens, lengths, pool_at))


def their_scores(model, rows):
  """One sequence at a time, and once more padded on the right as transformers batches them."""
  with torch.no_grad():
    alone = np.concatenate([model(torch.tensor(ids[None])).logits.numpy() for ids in rows])
    tokens, lengths = padded(rows)
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    inputs = np.where(is_token, tokens, PAD), is_token.astype(np.int64)
    together = model(torch.tensor(inputs[0]), attention_mask=torch.tensor(inputs[1])).logits
  np.testing.assert_allclose(alone, together.numpy(), atol=1e-5)
  return alone


@pytest.mark.parametrize(
  ("family", "options"),
  [
    ("llama", {"num_labels": 3}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 10}),
    ("gemma3_text", {"head_dim": 10, "sliding_window": 5, "sliding_window_pattern": 2}),
  ],
)
def test_scores_are_those_of_transformers(family, options, tmp_path):
  model = hf_classifier(family, **options)
  model.save_pretrained(tmp_path)
  loaded = loading.load_classifier(tmp_path)
  ours, theirs = our_scores(loaded, sequences()), their_scores(model, sequences())
  assert ours.shape == (len(LENGTHS), options.get("num_labels", 1)) == theirs.shape
  assert tiny.relative_error(ours, theirs) < 2e-5
  assert np.ptp(theirs) > 0.1  # the sequences differ.


def test_a_model_without_padding_token_is_pooled_at_the_last_token(tmp_path):
  model = hf_classifier("qwen2", pad_token_id=None)
  model.save_pretrained(tmp_path)
  loaded = loading.load_classifier(tmp_path)
  assert loaded.pad_id is None
  rows = sequences()
  with torch.no_grad():
    theirs = np.concatenate([model(torch.tensor(ids[None])).logits.numpy() for ids in rows])
  assert tiny.relative_error(our_scores(loaded, rows), theirs) < 2e-5


@pytest.mark.parametrize(
  ("tokens", "pad", "place"),
  [([3, 4, 5], 7, 2), ([3, 4, 7, 7], 7, 1), ([7, 4, 7], 7, 1), ([7, 7], 7, 0), ([3, 7], None, 1)],
)
def test_the_pooled_token_is_the_last_before_the_padding(tokens, pad, place):
  assert classifier.pooled_place(np.asarray(tokens, np.int32), pad) == place


@pytest.mark.long
def test_width_and_company_do_not_change_a_score(tmp_path):
  loaded = loading.load_classifier(shipped.write_reward_model(tmp_path / "tiny", family="qwen3"))
  rows = sequences()
  alone = np.concatenate([our_scores(loaded, [ids]) for ids in rows])
  np.testing.assert_allclose(our_scores(loaded, rows), alone, rtol=1e-5)
  np.testing.assert_allclose(our_scores(loaded, rows, width=40), alone, rtol=1e-5)
  np.testing.assert_array_equal(our_scores(loaded, rows[::-1])[::-1], our_scores(loaded, rows))


@pytest.mark.long
def test_bfloat16_scores_are_near(tmp_path):
  folder = shipped.write_reward_model(tmp_path / "tiny")
  exact = our_scores(loading.load_classifier(folder), sequences())
  half = loading.load_classifier(folder, dtype="bfloat16")
  assert {str(x.dtype) for x in half.params["body"]["layers"].values()} == {"bfloat16"}
  assert (
    0 < tiny.relative_error(our_scores(half, sequences(), compute_dtype="bfloat16"), exact) < 0.05
  )


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_shipped_tiny_reward_model_is_one_of_transformers(family, tmp_path):
  folder = shipped.write_reward_model(tmp_path / "tiny", family=family, hidden_size=16)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
  theirs = np.concatenate(
    [model(torch.tensor(ids[None])).logits.detach().numpy() for ids in sequences()]
  )
  assert (
    tiny.relative_error(our_scores(loading.load_classifier(folder), sequences()), theirs) < 2e-5
  )


def test_what_is_not_a_reward_model_is_refused_by_name(tmp_path):
  language_model = shipped.write(tmp_path / "lm")
  with pytest.raises(ValueError, match="'LlamaForCausalLM' is not a supported sequence classifier"):
    loading.load_classifier(language_model)
  reward_model = shipped.write_reward_model(tmp_path / "rm")
  with pytest.raises(ValueError, match="'LlamaForSequenceClassification' is not supported"):
    loading.load(reward_model)
  config = json.loads((language_model / "config.json").read_text())
  config["architectures"] = ["LlamaForSequenceClassification"]
  (language_model / "config.json").write_text(json.dumps(config))
  with pytest.raises(ValueError, match=r"needs score.weight \[labels, 32\], but has none"):
    loading.load_classifier(language_model)
