"""One run of TRL's GRPOTrainer with transformers' `generate`, on the CPU, full fine-tuning.

Run by compare.py with the interpreter of TRL's environment:
  PYTHON peer_trl.py WORKLOAD.json RECORD.json

A step's time is the time between the trainer's own `on_step_begin` and
`on_step_end`; its time outside of sampling and scoring counts as training.
"""

# pyright: reportMissingImports=false
# TRL is installed in a separate environment.

import tempfile
import time
from typing import Any

import datasets
import record
import torch
import transformers
import trl
import workload as workloads


class TimedTrainer(trl.GRPOTrainer):
  """GRPOTrainer that records how long it sampled and how many tokens there were."""

  generate_s = 0.0
  rollout_s = 0.0
  counts: dict[str, Any]

  def _generate_single_turn(self, *args, **kwargs):
    start = time.perf_counter()
    generated = super()._generate_single_turn(*args, **kwargs)
    self.generate_s += time.perf_counter() - start
    return generated

  def _calculate_rewards(self, *args, **kwargs):
    rewards = super()._calculate_rewards(*args, **kwargs)
    self.counts = {"reward_mean": float(rewards.mean())}
    return rewards

  def _generate_and_score_completions(self, inputs):
    start = time.perf_counter()
    batch = super()._generate_and_score_completions(inputs)
    self.rollout_s += time.perf_counter() - start
    prompt = int(batch["prompt_mask"].sum())
    completion = int(batch["completion_mask"].sum())
    self.counts |= {
      "prompt_tokens": prompt // self.num_generations,
      "completion_tokens": completion,
      "trained_tokens": prompt + completion,
    }
    return batch


class StepClock(transformers.TrainerCallback):
  """Makes a `record.Step` of every optimizer step; `trainer` is set once it exists."""

  def __init__(self):
    self.trainer: TimedTrainer | None = None
    self.steps: list[record.Step] = []
    self.start = 0.0

  def on_step_begin(self, args, state, control, **kwargs):
    self.start = time.perf_counter()
    assert self.trainer is not None
    self.trainer.generate_s = self.trainer.rollout_s = 0.0

  def on_step_end(self, args, state, control, **kwargs):
    wall_s = time.perf_counter() - self.start
    assert self.trainer is not None
    self.steps.append(
      record.Step(
        wall_s=wall_s,
        generate_s=self.trainer.generate_s,
        train_s=wall_s - self.trainer.rollout_s,
        **self.trainer.counts,
      )
    )


def reward(completions, answer, **_) -> list[float]:
  """Scores a batch as TRL passes it: one conversation per completion."""
  return [workloads.reward(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]


def trainer_config(workload: workloads.Workload, directory: str) -> trl.GRPOConfig:
  """Returns the workload as TRL's options: one optimizer step per batch, no KL, nothing saved."""
  return trl.GRPOConfig(
    output_dir=directory,
    use_cpu=True,
    bf16=workload.dtype == "bfloat16",
    per_device_train_batch_size=workload.prompts * workload.group,
    num_generations=workload.group,
    max_completion_length=workload.completion,
    max_steps=workload.steps,
    learning_rate=workload.learning_rate,
    lr_scheduler_type="constant",
    optim="adamw_torch",
    weight_decay=0.0,
    max_grad_norm=0.0,  # no clipping, as in the others.
    beta=0.0,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    loss_type="dapo",  # mean over the tokens of the batch.
    scale_rewards="group",
    shuffle_dataset=False,
    gradient_checkpointing=workload.recompute,
    save_strategy="no",
    report_to=[],
    logging_steps=1,
    disable_tqdm=True,
    seed=workload.seed,
  )


def main(workload_path: str, record_path: str) -> None:
  """Runs the workload and writes its record."""
  workload = workloads.read(workload_path)
  rows = [
    {"prompt": workloads.messages(row["question"]), "answer": row["answer"]}
    for row in workloads.read_problems(workload.problems)
  ]
  tokenizer = transformers.AutoTokenizer.from_pretrained(workload.model)
  model = transformers.AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
  clock = StepClock()
  with tempfile.TemporaryDirectory() as directory:
    clock.trainer = TimedTrainer(
      model=model,
      reward_funcs=reward,
      args=trainer_config(workload, directory),
      train_dataset=datasets.Dataset.from_list(rows),
      processing_class=tokenizer,
      callbacks=[clock],
    )
    clock.trainer.train()
  record.write(
    record_path,
    program="trl",
    workload=workload,
    steps=clock.steps,
    settings={
      "sampler": "transformers generate",
      "attention": model.config._attn_implementation,
      "gradient_checkpointing": workload.recompute,
      "threads": torch.get_num_threads(),
    },
    packages=record.versions("trl", "torch", "transformers", "accelerate"),
  )


if __name__ == "__main__":
  main(*workloads.command_line(__doc__))
