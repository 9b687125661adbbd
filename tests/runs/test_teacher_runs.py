"""A whole run with a teacher and a reference policy that follows, stopped and continued."""

import json
import shutil

import jax
import numpy as np
import pytest

import configs.distillation
from grpo_jax import train
from grpo_jax.models import export, loading, tiny
from grpo_jax.run_folder import stored_leaves

pytestmark = pytest.mark.slow

SETTINGS = {
  "model.compute_dtype": "float32",
  "data.kind": "auto",
  "data.task": None,
  "data.environment": "own",
  "teacher.dtype": "float32",
  "rollout.prompts_per_step": 2,
  "rollout.group_size": 16,
  "rollout.max_tokens": 96,
  "sampling.max_tokens": 12,
  "engine.max_rows": 8,
  "batching.row_tokens": 128,
  "batching.microbatch_tokens": 128,
  "loss.kl_coef": 0.01,
  "reference.update_every_steps": 2,
  "reference.mixup": 0.6,
  "learn.report_all_every_steps": 0,
  "learn.report_kl_every_steps": 1,
  "optim.learning_rate": 1e-2,
  "optim.warmup_steps": 0,
  "optim.weight_decay": 0.0,
  "evaluation.every_steps": 0,
  "evaluation.at_start": False,
  "evaluation.at_end": False,
  "checkpoint.every_steps": 3,
  "checkpoint.keep_last": None,
  "logging.sinks": ("jsonl", "console"),
}
STEPS = 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """A model of another family and width, which prefers some tokens whatever came before them."""
  folder = tmp_path_factory.mktemp("teacher")
  read = loading.load(tiny.write(folder / "plain", family="qwen3", seed=5, hidden_size=64))
  params = jax.tree.map(np.array, read.params)
  # A direction that all states share gives every token a logit of its own.
  params["embed"][:, 0] = 1 + 0.15 * np.random.default_rng(0).normal(size=len(params["embed"]))
  written = export.to_huggingface(params, read.config, folder / "teacher")
  tiny.write_tokenizer(written)
  return written


def run(model, teacher, folder, *, total_steps):
  """Trains in folder/run, with all programs compiled ahead; returns the metrics of all steps."""
  rows = [{"problem": f"{i} + {i}", "expected_answer": str(2 * i)} for i in range(9)]
  (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  config = configs.distillation.get_config()
  config.environments = {"own": {"module": "function", "path": "tests.rewards.vowels"}}
  paths = {
    "model.path": str(model),
    "teacher.path": str(teacher),
    "data.path": str(folder / "rows.jsonl"),
  }
  config.update_from_flattened_dict({**SETTINGS, **paths, "total_steps": total_steps})
  assert not list(train.validate(config))
  first = jax.devices()[:1]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, "devices", lambda *_: first)
    train.train(config, folder / "run")
  lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if "weight_version" in line]


@pytest.fixture(scope="module")
def finished(model, teacher, tmp_path_factory):
  """The folder of a run that was not stopped, and its metrics."""
  folder = tmp_path_factory.mktemp("finished")
  return folder, run(model, teacher, folder, total_steps=STEPS)


def test_the_policy_comes_closer_to_a_teacher_of_another_family(finished):
  distances = [line["teacher/kl"] for line in finished[1]]
  assert np.mean(distances[-2:]) < 0.7 * np.mean(distances[:2])


def test_every_completion_is_learned_from_whatever_its_reward(finished):
  for line in finished[1]:
    assert line["batch/computed_token_share"] == 1 and line["signal/lost_share"] == 0


def test_the_kl_is_to_the_present_reference(finished):
  _, lines = finished
  assert [line["train/reference_age"] for line in lines] == [0, 1] * (STEPS // 2)
  present = [line["train/kl_to_reference"] for line in lines]
  initial = [line["all/kl_to_initial"] for line in lines]
  assert max(present[0], initial[0]) < 1e-9
  assert 1e-6 < present[2] < 0.5 * initial[2]  # 0.4 of the way back to the initial weights.
  assert present[2] < present[3]


def test_all_of_it_is_compiled_before_the_first_step(finished):
  assert {line["perf/compilations"] for line in finished[1][1:]} == {0.0}


def test_the_reference_is_in_the_checkpoint(finished):
  step = finished[0] / "run" / "checkpoints" / f"step_{STEPS:08}"
  names = stored_leaves.read(step / "info.json").leaves
  of = lambda part: {n.partition(".")[2]: x for n, x in names.items() if n.startswith(f"{part}.")}
  assert of("reference") == of("params") != {}


def test_a_run_that_was_stopped_continues_bit_for_bit(finished, model, teacher, tmp_path):
  shutil.copytree(finished[0] / "run", tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{STEPS:08}")  # killed after step 3.
  lines = run(model, teacher, tmp_path, total_steps=STEPS)
  for name in ("train/loss", "train/kl_to_reference", "train/reference_age", "teacher/kl"):
    assert [line[name] for line in lines] == [line[name] for line in finished[1]], name
  one, other = (loading.load(f / "run" / "export").params for f in (tmp_path, finished[0]))
  jax.tree.map(np.testing.assert_array_equal, one, other)
