"""What options of TRL, verl, NeMo RL and Tunix are called here, for those who type them. Pure.

The pages docs/coming_from_*.md have the same names with more explanation; a test compares them.
Names are those of TRL 1.16, verl 0.9.1, NeMo RL of August 2026 and Tunix 0.1.7.
"""

import itertools
from collections.abc import Mapping, Sequence

from grpo_jax.config.options import OPTIONS

# Program → its option → the fields of this program, separated by blanks.
NAMES: Mapping[str, Mapping[str, str]] = {
  "TRL": {
    "num_generations": "rollout.group_size",
    "generation_batch_size": "rollout.prompts_per_step",
    "steps_per_generation": "learn.minibatches",
    "gradient_accumulation_steps": "learn.minibatches",
    "num_iterations": "learn.epochs",
    "per_device_train_batch_size": "rollout.prompts_per_step batching.microbatch_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "use_vllm": "engine.name",
    "vllm_mode": "engine.name",
    "train_dataset": "data.path data.dataset",
    "eval_dataset": "evaluation.data.path evaluation.data.dataset",
    "reward_funcs": "environments",
    "reward_weights": "advantages.weights",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.dual_clip",
    "loss_type": "loss.loss loss.aggregation",
    "importance_sampling_level": "loss.loss",
    "scale_rewards": "advantages.scale",
    "mask_truncated_completions": "batching.drop_truncated",
    "top_entropy_quantile": "loss.top_entropy_share",
    "vllm_importance_sampling_correction": "loss.importance_correction",
    "vllm_importance_sampling_mode": "loss.importance_correction loss.importance_truncation",
    "vllm_importance_sampling_clip_max": "loss.importance_high",
    "sync_ref_model": "reference.update_every_steps",
    "ref_model_sync_steps": "reference.update_every_steps",
    "ref_model_mixup_alpha": "reference.mixup",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "learning_rate": "optim.learning_rate",
    "warmup_steps": "optim.warmup_steps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "peft_config": "model.lora.rank model.lora.alpha",
    "bf16": "model.compute_dtype",
    "gradient_checkpointing": "model.remat",
    "max_steps": "total_steps",
    "num_train_epochs": "data.epochs",
    "eval_steps": "evaluation.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "log_completions": "logging.samples_every_steps",
    "report_to": "logging.sinks",
    "model_name_or_path": "model.path",
  },
  "verl": {
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "data.train_batch_size": "rollout.prompts_per_step",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learn.minibatches",
    "actor_rollout_ref.actor.ppo_epochs": "learn.epochs",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "batching.microbatch_tokens",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batching.microbatch_tokens",
    "data.max_response_length": "sampling.max_tokens",
    "data.max_prompt_length": "data.max_prompt_tokens",
    "data.truncation": "data.overlong",
    "data.train_files": "data.path",
    "data.val_files": "evaluation.data.path",
    "data.prompt_key": "data.input_key",
    "custom_reward_function.path": "environments",
    "actor_rollout_ref.actor.use_kl_loss": "loss.kl_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "loss.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "loss.kl_estimator",
    "algorithm.use_kl_in_reward": "loss.kl_in_reward",
    "actor_rollout_ref.actor.clip_ratio": "loss.clip_low loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "loss.dual_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "loss.aggregation",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "loss.loss",
    "actor_rollout_ref.actor.entropy_coeff": "loss.entropy_coef",
    "algorithm.norm_adv_by_std_in_grpo": "advantages.scale",
    "algorithm.adv_estimator": "advantages.estimator",
    "algorithm.filter_groups.enable": "dynamic_sampling.enabled",
    "algorithm.filter_groups.max_num_gen_batches": "dynamic_sampling.max_rounds",
    "reward_model.overlong_buffer.len": "shaping.overlong_buffer_tokens",
    "reward_model.overlong_buffer.penalty_factor": "shaping.overlong_penalty",
    "algorithm.rollout_correction.rollout_is": "loss.importance_correction",
    "algorithm.rollout_correction.rollout_is_threshold": "loss.importance_high",
    "actor_rollout_ref.actor.optim.lr": "optim.learning_rate",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optim.schedule",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "optim.warmup_steps",
    "actor_rollout_ref.actor.optim.clip_grad": "optim.max_grad_norm",
    "actor_rollout_ref.actor.grad_clip": "optim.max_grad_norm",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "model.compute_dtype",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.remat",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "mesh.tensor",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "mesh.context",
    "trainer.total_training_steps": "total_steps",
    "trainer.total_epochs": "data.epochs",
    "trainer.test_freq": "evaluation.every_steps",
    "trainer.val_before_train": "evaluation.at_start",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "trainer.logger": "logging.sinks",
  },
  "NeMo RL": {
    "grpo.num_prompts_per_step": "rollout.prompts_per_step",
    "grpo.num_generations_per_prompt": "rollout.group_size",
    "grpo.max_rollout_turns": "rollout.max_turns",
    "grpo.max_num_epochs": "data.epochs",
    "grpo.max_num_steps": "total_steps",
    "grpo.normalize_rewards": "advantages.scale",
    "grpo.use_leave_one_out_baseline": "advantages.baseline",
    "grpo.val_period": "evaluation.every_steps",
    "grpo.max_val_samples": "evaluation.num_prompts",
    "grpo.use_dynamic_sampling": "dynamic_sampling.enabled",
    "loss_fn.reference_policy_kl_penalty": "loss.kl_coef",
    "loss_fn.reference_policy_kl_type": "loss.kl_estimator",
    "loss_fn.ratio_clip_min": "loss.clip_low",
    "loss_fn.ratio_clip_max": "loss.clip_high",
    "loss_fn.ratio_clip_c": "loss.dual_clip",
    "loss_fn.token_level_loss": "loss.aggregation",
    "loss_fn.use_importance_sampling_correction": "loss.importance_correction",
    "policy.model_name": "model.path",
    "policy.train_micro_batch_size": "batching.microbatch_tokens",
    "policy.max_total_sequence_length": "rollout.max_tokens",
    "policy.max_grad_norm": "optim.max_grad_norm",
    "policy.dtensor_cfg.tensor_parallel_size": "mesh.tensor",
    "policy.dtensor_cfg.context_parallel_size": "mesh.context",
    "policy.dtensor_cfg.expert_parallel_size": "mesh.expert",
    "policy.dtensor_cfg.activation_checkpointing": "model.remat",
    "policy.generation.max_new_tokens": "sampling.max_tokens",
    "checkpointing.save_period": "checkpoint.every_steps",
    "checkpointing.keep_top_k": "checkpoint.keep_best",
  },
  "Tunix": {
    "num_generations": "rollout.group_size",
    "num_iterations": "learn.epochs",
    "beta": "loss.kl_coef",
    "epsilon": "loss.clip_low loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "loss_agg_mode": "loss.aggregation",
    "advantage_estimator": "advantages.estimator",
    "policy_loss_fn": "loss.loss",
    "reward_fns": "environments",
    "mini_batch_size": "learn.minibatches",
    "train_micro_batch_size": "batching.microbatch_tokens",
    "max_tokens_to_generate": "sampling.max_tokens",
    "max_response_length": "sampling.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "eval_every_n_steps": "evaluation.every_steps",
    "max_steps": "total_steps",
    "rollout_engine": "engine.name",
  },
}


def hint(name: str) -> str:
  """Returns " (TRL's num_generations is 'rollout.group_size' here)", or "" if no program has it.

  The end of a dotted name is enough, and a section of one's own does not matter: "kl_loss_coef",
  "actor.kl_loss_coef" and "loss.kl_loss_coef" are verl's. A last part that this program has, too,
  is not enough: "evaluatoin.data.path" is not verl's custom_reward_function.path, and
  "evaluation.smapling.temperature" is not TRL's temperature. Where programs mean different things
  by one name there is no hint.

  Args:
    name: Name as it was typed, without "config.".
  """
  typed = name.lower().split(".")
  found = [(_shared(typed, key), program, key) for program in NAMES for key in NAMES[program]]
  most = max(shared for shared, _, _ in found)
  is_ours = any(field.rpartition(".")[2] == typed[-1] for field in OPTIONS)
  best = {
    program: key
    for shared, program, key in found
    if shared == most > 0 and (not is_ours or shared == len(typed) or shared > key.count(".") > 0)
  }
  meant = [set(NAMES[program][key].split()) for program, key in best.items()]
  if not best or not set.intersection(*meant):
    return ""
  program, key = next(iter(best.items()))
  fields = " and ".join(map(repr, NAMES[program][key].split()))
  owners = " and ".join(f"{each}'s" for each in best)
  return f" ({owners} {key} is {fields} here)"


def _shared(typed: Sequence[str], key: str) -> int:
  """Returns how many last parts of two dotted names are equal."""
  parts = key.lower().split(".")
  pairs = zip(reversed(typed), reversed(parts), strict=False)
  return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
