"""Tokenizers with any chat template, for tests: one vocabulary, the special tokens of all families.

Templates of public models are read from the folder that the environment variable
GRPO_JAX_CHAT_TEMPLATES names, such as `trl/chat_templates` of github:huggingface/trl.
"""

import functools
import os
import pathlib

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from grpo_jax.data.tokenizer import HuggingFaceTokenizer
from grpo_jax.models.chat.tokenizer_files import OpenedTokenizer

FOLDER = os.environ.get("GRPO_JAX_CHAT_TEMPLATES", "")
# Stop tokens of the models that have these templates; the first one ends the tokenizer's texts.
STOPS = {
  "gemma3": ("<eos>", "<end_of_turn>"),
  "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
  "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
  "llama3": ("<|end_of_text|>", "<|eot_id|>"),
  "llama3_1": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
  "llama3_2": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
  "phi3_5": ("<|endoftext|>", "<|assistant|>", "<|end|>"),
  "cohere": ("<|END_OF_TURN_TOKEN|>",),
  "deepseek_r1_distill": ("<｜end▁of▁sentence｜>",),
  "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
  # Those of small_templates.py:
  "answers_within": ("<|im_end|>", "<|tool_response>"),
  "alternates": ("<eos>", "<end_of_turn>"),
  "leaves_out": ("<|endoftext|>", "<|end|>"),
  "header_ends": ("<|endoftext|>", "<|user|>", "<|observation|>"),
  "channels": ("<|return|>", "<|call|>"),
}
CHATML_STOPS = ("<|endoftext|>", "<|im_end|>")
SPECIAL = sorted(
  {
    *("<bos>", "<|begin_of_text|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<start_of_turn>", "[gMASK]", "<sop>", "<|system|>", "<|start|>", "<|message|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<|turn>", "<|end_response|>"),
    *("<|channel|>", "<|end|>", *CHATML_STOPS, *(stop for one in STOPS.values() for stop in one)),
  }
)


@functools.cache
def backend(bos):
  """Bytes as tokens, and the special tokens of all families."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  bpe = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  bpe.decoder = decoders.ByteLevel()
  bpe.add_special_tokens(SPECIAL)
  return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=bos)


def make(template, stops=CHATML_STOPS, *, where="a.jinja", **variables):
  """Returns a tokenizer with a template."""
  one = backend("<bos>")
  ids = tuple(sorted(one.get_vocab()[stop] for stop in stops))
  return HuggingFaceTokenizer(OpenedTokenizer(one, template, where), ids, template_args=variables)


def public():
  """Returns the templates of public models, by name; none if there is no folder of them."""
  return (
    {file.stem: file for file in sorted(pathlib.Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
  )
