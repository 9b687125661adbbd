"""One run of Tunix's GRPOLearner with its own sampler, on the CPU, full fine-tuning.

Run by compare.py with the interpreter of Tunix's environment:
  PYTHON peer_tunix.py WORKLOAD.json RECORD.json

Three things that Tunix 0.1.7 does not do for a Llama model are done here, so that
it trains the same model as the others: its attention ignores the
model's `rope_theta` (1e6 always), so the right one is bound; it gets a separate pad
token, because it masks by `token != pad` and the usual pad is the end token; and it
gets a seed for every step, because it otherwise samples with the same key each time.
"""

# pyright: reportMissingImports=false
# Tunix is installed in a separate environment.

import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
import transformers
import workload as workloads
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

PROMPT_MULTIPLE = 8  # prompts are padded to a multiple of this many tokens.


class TimedCluster(rl_cluster.RLCluster):
  """RLCluster that makes a `record.Step` of every update."""

  def start_clock(self, workload: workloads.Workload, pad_id: int) -> None:
    """Begins the first step."""
    self.workload, self.pad_id = workload, pad_id
    self.steps: list[record.Step] = []
    self.reward_mean = float("nan")
    self.step_start = time.perf_counter()

  def generate(self, *args, **kwargs):
    key = jax.random.PRNGKey(self.workload.seed)
    self.get_rollout_config(rl_cluster.Mode.TRAIN).seed = jax.random.fold_in(key, len(self.steps))
    start = time.perf_counter()
    rollouts = super().generate(*args, **kwargs)
    self.generate_s = time.perf_counter() - start
    self.kept_lengths = [len(tokens) for tokens in rollouts.tokens]
    self.prompt_tokens = int((rollouts.left_padded_prompt_tokens != self.pad_id).sum())
    return rollouts

  def update_actor(self, *args, **kwargs):
    start = time.perf_counter()
    super().update_actor(*args, **kwargs)
    jax.block_until_ready(jax.tree.leaves(nnx.state(self.actor_trainer.model)))
    end = time.perf_counter()
    limit = self.workload.completion
    self.steps.append(
      record.Step(
        wall_s=end - self.step_start,
        generate_s=self.generate_s,
        train_s=end - start,
        prompt_tokens=self.prompt_tokens // self.workload.group,
        # The end token is cut off before training, but it was sampled.
        completion_tokens=sum(min(length + 1, limit) for length in self.kept_lengths),
        trained_tokens=self.prompt_tokens + sum(self.kept_lengths),
        reward_mean=self.reward_mean,
      )
    )
    self.step_start = time.perf_counter()


def load_model(workload: workloads.Workload, mesh: jax.sharding.Mesh) -> nnx.Module:
  """Loads a Llama of the Hugging Face folder, and makes Tunix use its rope_theta.

  Raises:
    ValueError: The model is of another family.
  """
  config = json.loads((pathlib.Path(workload.model) / "config.json").read_text())
  if config["model_type"] != "llama":
    raise ValueError(
      f"this script drives Tunix's Llama only, {workload.model} is a {config['model_type']}"
    )
  theta = (config.get("rope_parameters") or config)["rope_theta"]
  llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=theta)
  sizes = llama.ModelConfig(
    num_layers=config["num_hidden_layers"],
    vocab_size=config["vocab_size"],
    embed_dim=config["hidden_size"],
    hidden_dim=config["intermediate_size"],
    num_heads=config["num_attention_heads"],
    head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    num_kv_heads=config["num_key_value_heads"],
    rope_theta=theta,
    norm_eps=config["rms_norm_eps"],
    weight_tying=config["tie_word_embeddings"],
    remat_config=llama.RematConfig.DECODER if workload.recompute else llama.RematConfig.NONE,
  )
  with mesh:
    return llama_params.create_model_from_safe_tensors(
      workload.model, sizes, mesh=mesh, dtype=jnp.dtype(workload.dtype)
    )


def set_distinct_pad(tokenizer: transformers.PreTrainedTokenizerBase, prompts: list[str]) -> None:
  """Makes a special token the pad: one that is neither the end token nor in any prompt."""
  used = {token_id for prompt in prompts for token_id in tokenizer.encode(prompt)}
  special = [
    token.content
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
    if token.special and token_id not in used and token_id != tokenizer.eos_token_id
  ]
  tokenizer.pad_token = special[0]


def make_learner(
  workload: workloads.Workload,
  tokenizer: transformers.PreTrainedTokenizerBase,
  *,
  prompt_width: int,
) -> tuple[TimedCluster, grpo_learner.GRPOLearner]:
  """Returns the workload as Tunix's options: one optimizer step per batch, no KL, nothing saved."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
  cluster = TimedCluster(
    actor=load_model(workload, mesh),
    reference=None,
    tokenizer=tokenizer,
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh=dict.fromkeys(roles, mesh),
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(workload.learning_rate, weight_decay=0.0),
        eval_every_n_steps=workload.steps + 1,
        max_steps=workload.steps,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=workload.completion,
        max_prompt_length=prompt_width,
        kv_cache_size=prompt_width + workload.completion,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        eos_tokens=[tokenizer.eos_token_id],
      ),
    ),
  )

  def reward(prompts, completions, answer, **_) -> list[float]:
    rewards = [workloads.reward(c, str(a)) for c, a in zip(completions, answer, strict=True)]
    cluster.reward_mean = float(np.mean(rewards))
    return rewards

  algorithm = grpo_learner.GRPOConfig(
    num_generations=workload.group, num_iterations=1, beta=0.0, loss_agg_mode="token-mean"
  )
  return cluster, grpo_learner.GRPOLearner(cluster, algorithm, reward)


def main(workload_path: str, record_path: str) -> None:
  """Runs the workload and writes its record."""
  workload = workloads.read(workload_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(workload.model)
  rows = workloads.read_problems(workload.problems)
  used = [rows[i % len(rows)] for i in range(workload.steps * workload.prompts)]
  prompts = [
    tokenizer.apply_chat_template(
      workloads.messages(row["question"]), add_generation_prompt=True, tokenize=False
    )
    for row in used
  ]
  answers = [row["answer"] for row in used]
  set_distinct_pad(tokenizer, prompts)
  longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
  prompt_width = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
  batches = [
    {
      "prompts": np.array(prompts[start : start + workload.prompts]),
      "answer": np.array(answers[start : start + workload.prompts]),
    }
    for start in range(0, len(used), workload.prompts)
  ]
  cluster, learner = make_learner(workload, tokenizer, prompt_width=prompt_width)
  cluster.start_clock(workload, tokenizer.pad_token_id)
  learner.train(batches)
  record.write(
    record_path,
    program="tunix",
    workload=workload,
    steps=cluster.steps,
    settings={
      "sampler": "vanilla",
      "weights": workload.dtype,
      "remat": workload.recompute,
      "prompt_width": prompt_width,
      "pad_token": tokenizer.pad_token,
    },
    packages=record.versions("google-tunix", "jax", "jaxlib", "flax", "optax", "transformers"),
  )


if __name__ == "__main__":
  main(*workloads.command_line(__doc__))
