"""The reward model's environment: transformers' rewards, batches that change nothing, refusals."""

import json

import numpy as np
import pytest
import torch
import transformers

from grpo_jax import environments
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.models import tiny
from tests.environments.attempts import prompt_of, score, scores

CHAT = prompt_of(("system", "Be brief."), ("user", "What is 2 + 2?"))
TEXTS = ["4", "Four.", "It is 4, since 2 + 2 = 4." * 2, "no" * 60, "", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tiny.write_reward_model(tmp_path_factory.mktemp("reward") / "model", family="qwen2")


@pytest.fixture(scope="module")
def factory(folder):
  settings = dict(path=str(folder), compute_dtype="float32", max_tokens=256, batch_size=4)
  with environments.make(reward_model=settings) as made:
    yield made["reward_model"]


def logits_of(folder, prompt, texts, *, chat_template=None, label=0):
  """What transformers computes, from its own chat template's tokens on."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
  wanted = []
  for text in texts:
    messages = [*prompt.messages, {"role": "assistant", "content": text}]
    ids = tokenizer.apply_chat_template(
      messages, chat_template=chat_template, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
      wanted.append(float(model(ids).logits[0, label]))
  return wanted


@pytest.mark.long
def test_rewards_are_the_logits_of_transformers(factory, folder):
  wanted = logits_of(folder, CHAT, TEXTS)
  np.testing.assert_allclose(scores(factory, CHAT, TEXTS), wanted, rtol=1e-4, atol=1e-5)
  assert np.ptp(wanted) > 0.1


@pytest.mark.long
def test_company_never_changes_a_score_and_only_lengths_are_compiled(factory):
  alone = [score(factory, CHAT, text).total for text in TEXTS]
  before = factory.metrics()
  assert scores(factory, CHAT, TEXTS * 8) == alone * 8  # to the last bit.
  after = factory.metrics()
  assert after["calls"] - before["calls"] == 48
  assert 12 <= after["batches"] - before["batches"] < 40  # of at most 4 each.
  assert factory._scores._cache_size() == 3  # rows of 64, 128 and 256 tokens.


def test_shift_scale_and_a_template_of_ones_own(folder):
  template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
  settings = dict(path=str(folder), compute_dtype="float32", shift=0.5, scale=-2.0)
  with environments.make(
    rm=dict(module="reward_model", chat_template=template, **settings)
  ) as made:
    result = score(made["rm"], CHAT, "4")
  (logit,) = logits_of(folder, CHAT, ["4"], chat_template=template)
  assert result.metrics["score"] == pytest.approx(logit, rel=1e-4)
  assert result.total == pytest.approx((logit - 0.5) * -2.0, rel=1e-4)
  assert result.metrics["score_tokens"] == len("[system] Be brief.\n[user] What is 2 + 2?\n") + 14


def test_what_cannot_be_scored_fails_by_kind(factory):
  with pytest.raises(
    EnvironmentFailure, match=r"x:0:0 .* 3\d\d tokens .* max_tokens is 256"
  ) as long:
    score(factory, CHAT, "long" * 64)
  assert long.value.kind == "TooLong"
  with pytest.raises(EnvironmentFailure, match="x:0:0 has no messages"):
    score(factory, prompt_of(), "4")


def test_the_right_one_of_several_labels_is_asked_for(folder, tmp_path):
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    **{key: json.loads((folder / "config.json").read_text())[key] for key in SIZES}, num_labels=3
  )
  transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path)
  for name in ("tokenizer.json", "tokenizer_config.json"):
    (tmp_path / name).write_bytes((folder / name).read_bytes())
  settings = dict(path=str(tmp_path), compute_dtype="float32")
  with pytest.raises(ValueError, match="has 3 labels: set label"):
    environments.make(reward_model=settings)
  with pytest.raises(ValueError, match="has 3 labels, but label is 3"):
    environments.make(reward_model=dict(label=3, **settings))
  with environments.make(reward_model=dict(label=2, **settings)) as made:
    got = score(made["reward_model"], CHAT, "4").total
  (wanted,) = logits_of(tmp_path, CHAT, ["4"], label=2)
  assert got == pytest.approx(wanted, rel=1e-3, abs=1e-5)


SIZES = (
  *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
  "num_key_value_heads",
)


def test_wrong_settings_are_refused_before_anything_is_sampled(folder, tmp_path):
  make = lambda **settings: environments.make(reward_model=settings)
  with pytest.raises(FileNotFoundError, match="no-such-folder"):
    make(path=str(tmp_path / "no-such-folder"))
  with pytest.raises(ValueError, match="'LlamaForCausalLM' is not a supported sequence classifier"):
    make(path=str(tiny.write(tmp_path / "lm")))
  with pytest.raises(ValueError, match="compute_dtype must be one of .*got 'float16'"):
    make(path=str(folder), compute_dtype="float16")
  with pytest.raises(ValueError, match="batch_size"):
    make(path=str(folder), batch_size=0)
  with pytest.raises(ValueError, match="takes no 'bach_size' .did you mean 'batch_size'"):
    make(path=str(folder), bach_size=2)


def test_a_reward_model_without_chat_template_says_what_to_do(folder, tmp_path):
  bare = tiny.write_reward_model(tmp_path / "bare")
  settings = json.loads((bare / "tokenizer_config.json").read_text())
  del settings["chat_template"]
  (bare / "tokenizer_config.json").write_text(json.dumps(settings))
  with pytest.raises(
    ValueError, match="has no chat template; set environments.NAME.chat_template to a .jinja file"
  ):
    environments.make(reward_model=dict(path=str(bare)))


def test_after_closing_nothing_is_scored(folder):
  made = environments.make(reward_model=dict(path=str(folder), compute_dtype="float32"))
  made.close()
  made.close()
  with pytest.raises(EnvironmentFailure, match="closed"):
    score(made["reward_model"], CHAT, "4")
