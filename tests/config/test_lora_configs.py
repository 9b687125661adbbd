"""The configs of LoRA: what they change, and that their comments say what they take."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import grpo_jax.train
from configs import math_1b, math_1b_gpu, math_1b_lora, math_8b_lora, quickstart, quickstart_lora
from grpo_jax import main
from grpo_jax.config import configuration, lora_options
from grpo_jax.config.configuration import typed
from grpo_jax.models import config as model_config
from grpo_jax.models import tiny
from grpo_plan import architectures, programs

ROOT = pathlib.Path(__file__).parents[2]
# Config → the full config that it is made from.
MADE_FROM = {
  quickstart_lora: quickstart,
  math_1b_lora: math_1b,
  math_8b_lora: math_1b_gpu,
}


def changed(module):
  """Returns the fields that differ from the full config, with their values."""
  ours, full = (
    configuration.plain_fields(each.get_config()) for each in (module, MADE_FROM[module])
  )
  return {name: value for name, value in ours.items() if value != full.get(name)}


@pytest.mark.parametrize("module", MADE_FROM)
def test_a_config_of_lora_is_valid_and_trains_an_adapter_with_a_larger_learning_rate(module):
  config = module.get_config()
  configuration.check(config, [grpo_jax.train.validate])
  options = lora_options.load(typed(config))
  assert options is not None and options.rank == 32 and options.scale == 1.0
  full = MADE_FROM[module].get_config()
  assert config.optim.learning_rate > full.optim.learning_rate


def test_only_lora_and_the_learning_rate_differ_from_the_full_config():
  """The quickstart's model is a 4-bit file, which bfloat16 would round; others are bfloat16."""
  for module, dtype in ((quickstart_lora, "float32"), (math_1b_lora, "bfloat16")):
    assert set(changed(module)) - {"model.lora.base_dtype"} == {
      "model.lora.rank",
      "optim.learning_rate",
    }
    assert module.get_config().model.lora.base_dtype == dtype
    rates = [each.get_config().optim.learning_rate for each in (module, MADE_FROM[module])]
    assert rates[0] == pytest.approx(10 * rates[1])


def held(module, shape):
  """Returns the arrays of the trainer on one device."""
  config = module.get_config()
  config.engine.name = "sglang"  # the sampler is described elsewhere.
  mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
  model = model_config.from_hf(architectures.SHAPES[shape])
  return programs.described(typed(config), model, mesh).arrays


@pytest.mark.parametrize(
  "module, shape", [(math_1b_lora, "Qwen2.5-1.5B"), (math_8b_lora, "Qwen3-8B")]
)
def test_the_comment_says_what_the_trainer_holds(module, shape):
  arrays = held(module, shape)
  assert arrays.reference == arrays.initial == 0
  parts = {
    "base": arrays.weights - arrays.sums,
    "adapter": arrays.sums,
    "AdamW's two moments": arrays.optimizer,
    "sum of the gradients": arrays.sums,
  }
  for part, size in parts.items():
    found = re.search(rf"^ +{part}.* (\d+\.\d\d) GB", module.__doc__, re.MULTILINE)
    assert found and float(found[1]) == round(size / 1e9, 2), (part, size)


@pytest.mark.usefixtures("one_device")
@pytest.mark.long
def test_a_step_of_math_1b_lora_needs_only_paths_and_sizes(tmp_path):
  model = tiny.write(tmp_path / "model", family="qwen2")
  rows = [{"problem": f"What is {n} + 1?", "expected_answer": "4"} for n in range(4)]
  (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  arguments = {
    "config": ROOT / "configs" / "math_1b_lora.py",
    "workdir": tmp_path / "run",
    "config.model.path": model,
    "config.data.path": tmp_path / "rows.jsonl",
    "config.evaluation.data.path": tmp_path / "rows.jsonl",
    "config.total_steps": 1,
    "config.rollout.prompts_per_step": 4,
    "config.rollout.group_size": 2,
    "config.sampling.max_tokens": 8,
    "config.evaluation.every_steps": 0,
    "config.logging.sinks": ("jsonl", "console"),
  }
  assert main.main([f"--{name}={value}" for name, value in arguments.items()]) == 0
  row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
  assert row["train/learning_rate"] == pytest.approx(5e-5 / 51)
  # B is 0, so the first policy is the reference, up to the rounding of another program.
  assert 0 <= row["train/kl_to_reference"] < 1e-9
