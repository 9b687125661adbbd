"""The pages for users of other programs: complete, and true to the base configuration."""

import pathlib
import re
import shlex

import pytest

import grpo_jax.train
from grpo_jax.api import training
from grpo_jax.config import (
  command_line,
  configuration,
  field_checks,
  other_programs,
  overrides,
)

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from_nemo_rl.md").read_text()

# Every key of examples/configs/grpo_math_1B.yaml in these sections, written out.
KEYS = {
  "grpo": """
    num_prompts_per_step num_generations_per_prompt max_rollout_turns max_num_epochs max_num_steps
    normalize_rewards use_leave_one_out_baseline val_period val_start_at val_at_start val_at_end
    overlong_filtering advantage_clip_low advantage_clip_high max_val_samples
    val_num_generations_per_prompt stop_at_validation_metric stop_at_validation_threshold
    val_batch_size seed use_dynamic_sampling dynamic_sampling_max_gen_batches batch_multiplier
    reward_shaping.enabled reward_shaping.overlong_buffer_length
    reward_shaping.overlong_buffer_penalty reward_shaping.max_response_length
    reward_shaping.stop_properly_penalty_coef adv_estimator.name adv_estimator.normalize_rewards
    adv_estimator.use_leave_one_out_baseline adv_estimator.minus_baseline
    adv_estimator.reward_weights reward_scaling.enabled reward_scaling.source_min
    reward_scaling.source_max reward_scaling.target_min reward_scaling.target_max
    seq_logprob_error_threshold invalid_tool_call_advantage malformed_thinking_advantage
    async_grpo.enabled async_grpo.max_trajectory_age_steps async_grpo.max_generation_failures
    async_grpo.in_flight_weight_updates async_grpo.recompute_kv_cache_after_weight_updates
    skip_reference_policy_logprobs_calculation calculate_advantages_on_gpu
    deduplicate_multimodal_data debug_payload_metrics
  """,
  "reward_penalties": """
    penalize_duplicated_reasoning penalize_empty_final_answer penalize_unwanted_tokens
    penalize_malformed_think_tag token_ids
  """,
  "loss_fn": """
    reference_policy_kl_penalty reference_policy_kl_type kl_input_clamp_value
    kl_output_clamp_value ratio_clip_min ratio_clip_max ratio_clip_c use_on_policy_kl_approximation
    use_importance_sampling_correction truncated_importance_sampling_type
    truncated_importance_sampling_ratio truncated_importance_sampling_ratio_min
    sequence_level_importance_ratios token_level_loss force_on_policy_ratio use_kl_in_reward
    use_cispo disable_ppo_ratio positive_example_nll_weight
  """,
  "policy": """
    model_name tokenizer.name tokenizer.chat_template_kwargs tokenizer.use_fastokens
    hf_config_overrides train_global_batch_size train_micro_batch_size generation_batch_size
    logprob_batch_size max_total_sequence_length precision logprob_chunk_size
    offload_optimizer_for_logprob dtensor_cfg._v2 dtensor_cfg.enabled dtensor_cfg.cpu_offload
    dtensor_cfg.sequence_parallel dtensor_cfg.activation_checkpointing
    dtensor_cfg.tensor_parallel_size dtensor_cfg.context_parallel_size
    dtensor_cfg.custom_parallel_plan dtensor_cfg.automodel_kwargs dtensor_cfg.expert_parallel_size
    dtensor_cfg.dp_replicate_size dtensor_cfg.defer_fsdp_grad_sync
    dtensor_cfg.clear_cache_every_n_steps dtensor_cfg.env_vars dtensor_cfg.lora_cfg.enabled
    dtensor_cfg.lora_cfg.target_modules dtensor_cfg.lora_cfg.exclude_modules
    dtensor_cfg.lora_cfg.match_all_linear dtensor_cfg.lora_cfg.dim dtensor_cfg.lora_cfg.alpha
    dtensor_cfg.lora_cfg.dropout dtensor_cfg.lora_cfg.dropout_position
    dtensor_cfg.lora_cfg.lora_A_init dtensor_cfg.lora_cfg.use_triton megatron_cfg.enabled
    draft.enabled draft.model_name draft.loss_weight draft.num_layers draft.aux_layer_indices
    dynamic_batching.enabled dynamic_batching.train_mb_tokens dynamic_batching.logprob_mb_tokens
    dynamic_batching.sequence_length_round sequence_packing.enabled
    sequence_packing.train_mb_tokens sequence_packing.logprob_mb_tokens sequence_packing.algorithm
    sequence_packing.microbatch_order sequence_packing.sequence_length_round
    make_sequence_length_divisible_by max_grad_norm optimizer.name optimizer.kwargs.lr
    optimizer.kwargs.weight_decay optimizer.kwargs.betas optimizer.kwargs.eps
    optimizer.kwargs.foreach optimizer.kwargs.fused scheduler generation.port_range_low
    generation.port_range_high generation.backend generation.max_new_tokens generation.temperature
    generation.top_p generation.top_k generation.val_temperature generation.val_top_p
    generation.val_top_k generation.stop_token_ids generation.stop_strings
    generation.refit_transport generation.refit_cfg generation.real_quant_export_cpu_offload
    generation.mcore_generation_config generation.vllm_cfg generation.vllm_kwargs
    generation.colocated.enabled generation.colocated.resources refit_buffer_size_gb
    reward_model_cfg router_replay pretrained_checkpoint quant_*
  """,
  "data": """
    max_input_seq_length shuffle num_workers use_multiple_dataloader num_prompts_per_dataloader
    custom_dataloader train.dataset_name train.split_validation_size train.seed validation
    default.prompt_file default.system_prompt_file default.processor default.env_name
  """,
  "env": "math.num_workers math.math_verify_impl math.stop_strings math.verifier_type",
  "checkpointing": """
    enabled checkpoint_dir metric_name higher_is_better keep_top_k save_period
    checkpoint_must_save_by model_save_format save_consolidated save_optimizer ft_save_period
    ft_keep_latest_k pretrained_checkpoint model_cache_dir model_repo_id is_peft peft_config
    is_async
  """,
  "cluster": "gpus_per_node num_nodes master_port_range segment_size",
  "data_plane": """
    enabled impl backend storage_capacity num_storage_units claim_meta_poll_interval_s
    global_segment_size local_buffer_size
  """,
  "on_policy_distillation": "on_policy_distillation",
  "logger": """
    log_dir num_val_samples_to_print wandb_enabled tensorboard_enabled mlflow_enabled
    swanlab_enabled monitor_gpus wandb.project wandb.name wandb.log_nemo_gym_full_result_tables
    swanlab.project swanlab.name tensorboard mlflow.experiment_name mlflow.run_name
    mlflow.tracking_uri gpu_monitoring.collection_interval gpu_monitoring.flush_interval
  """,
}


# Keys of the back ends that are not used here, in the tables of the section policy.
OF_BACKENDS = {
  "megatron_cfg": """
    empty_unused_memory_level activation_checkpointing converter_type tensor_model_parallel_size
    expert_tensor_parallel_size expert_model_parallel_size pipeline_model_parallel_size
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage context_parallel_size
    pipeline_dtype sequence_parallel freeze_moe_router moe_router_dtype
    moe_router_load_balancing_type moe_router_bias_update_rate moe_permute_fusion
    moe_per_layer_logging moe_enable_deepep moe_token_dispatcher_type moe_shared_expert_overlap
    apply_rope_fusion bias_activation_fusion defer_fp32_logits use_fused_linear_logprobs fp8_cfg
    env_vars peft.* recompute_* mtp_* moe_* optimizer.optimizer optimizer.lr optimizer.min_lr
    optimizer.weight_decay optimizer.bf16 optimizer.fp16 optimizer.params_dtype
    optimizer.adam_beta1 optimizer.adam_beta2 optimizer.adam_eps optimizer.sgd_momentum
    optimizer.use_distributed_optimizer optimizer.use_precision_aware_optimizer
    optimizer.clip_grad optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction
    scheduler.start_weight_decay scheduler.end_weight_decay scheduler.weight_decay_incr_style
    scheduler.lr_decay_style scheduler.lr_decay_iters scheduler.lr_warmup_iters
    scheduler.lr_warmup_init distributed_data_parallel_config.grad_reduce_in_fp32
    distributed_data_parallel_config.overlap_grad_reduce
    distributed_data_parallel_config.overlap_param_gather
    distributed_data_parallel_config.average_in_collective
    distributed_data_parallel_config.use_custom_fsdp
    distributed_data_parallel_config.data_parallel_sharding_strategy
  """,
  "generation.mcore_generation_config": """
    buffer_size_gb buffer_guaranteed_fraction num_cuda_graphs block_size_tokens
    use_cuda_graphs_for_non_decode_steps enable_chunked_prefill unified_memory_level max_tokens
  """,
  "generation.vllm_cfg": """
    async_engine precision kv_cache_dtype tensor_parallel_size pipeline_parallel_size
    expert_parallel_size gpu_memory_utilization max_model_len enforce_eager use_deep_gemm
    num_last_layers_in_bf16 num_first_layers_in_bf16 enable_vllm_metrics_logger
    vllm_metrics_logger_interval
  """,
}


@pytest.mark.parametrize("backend", OF_BACKENDS)
def test_every_key_of_a_back_end_has_a_row(backend):
  listed = {key for row in rows_of("policy") for key in re.findall(r"`([^`]+)`", row[0])}
  assert {f"{backend}.{key}" for key in OF_BACKENDS[backend].split()} - listed == set()


def test_the_engines_that_exist_are_named_where_nemo_rl_names_its_own():
  """These rows denied SGLang long after it had landed."""
  rows = {key: row for row in rows_of("policy") for key in re.findall(r"`([^`]+)`", row[0])}
  assert '"sglang"' in rows["generation.backend"][-1]
  for key, field in {
    "generation.port_range_low": "port",
    "generation.colocated.enabled": "gpus",
    "generation.colocated.resources": "servers",
    "generation.vllm_cfg.tensor_parallel_size": "gpus_per_server",
    "generation.refit_transport": "weights_folder",
  }.items():
    assert f"`config.engine.sglang.{field}`" in rows[key][-2], key


def test_the_guides_name_what_is_not_here():
  missing = (ROOT / "docs" / "guides.md").read_text().split("## What is not here")[1]
  assert "asynchronous" in missing
  assert "no LoRA" not in missing + PAGE
  assert "host memory" in (ROOT / "docs" / "guides.md").read_text().split("perf/peak_rss_gib")[1]


def rows_of(section):
  """Returns the cells of every row of a section's tables, less heads and rules."""
  text = PAGE.split(f"\n### {section}\n")[1].split("\n### ")[0]
  lines = [line for line in text.splitlines() if line.startswith("|")]
  rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
  return [row for row in rows if row[0].startswith("`")]


@pytest.mark.parametrize("section", KEYS)
def test_every_key_of_nemo_rl_has_a_row_and_every_row_an_answer(section):
  rows = rows_of(section)
  listed = [key for row in rows for key in re.findall(r"`([^`]+)`", row[0])]
  assert sorted(set(KEYS[section].split()) - set(listed)) == []
  assert sorted({key for key in listed if listed.count(key) > 1}) == []
  for row in rows:
    here, remarks = row[-2:]
    assert here.startswith("`config.") or (here == "—" and remarks), f"{row[0]} has no answer"


PAGES = {
  program: (ROOT / "docs" / f"coming_from_{program.lower().replace(' ', '_')}.md").read_text()
  for program in other_programs.NAMES
}


@pytest.mark.parametrize("program", PAGES)
def test_every_field_named_on_the_pages_exists(program):
  config = configuration.load(str(ROOT / "configs" / "base.py"))
  names = {*configuration.fields(config)}
  sections = {name.rpartition(".")[0] for name in names} | {"environments"}
  named = re.findall(r"`(?:--)?config\.([a-z0-9_.]+)`", PAGES[program])
  assert len(named) > 15
  assert sorted(set(named) - names - sections - {"json"}) == []


@pytest.mark.parametrize("program", PAGES)
def test_a_name_of_another_program_has_the_same_meaning_on_its_page_and_in_the_message(program):
  config = configuration.load(str(ROOT / "configs" / "base.py"))
  rows = [line.split("|") for line in PAGES[program].splitlines() if line.startswith("| `")]
  wrong = []
  for name, fields in other_programs.NAMES[program].items():
    last = name.rpartition(".")[2]
    pattern = re.compile(rf"`(?:[a-z0-9_.]+\.)?{re.escape(last)}`")
    here = {
      field
      for row in rows
      if pattern.search(row[1])
      for field in re.findall(r"`config\.([a-z0-9_.]+)`", "|".join(row[2:]))
    }
    if not set(fields.split()) <= here:
      wrong.append(f"{name}: {fields} is not among {sorted(here)} on the page")
    said = str(configuration.refusal(config, name))
    if not all(repr(field) in said for field in fields.split()) or program not in said:
      wrong.append(f"{name}: {said[:120]}")
  assert wrong == []


@pytest.mark.parametrize(
  "typed, meant",
  [
    ("num_generations", "TRL's and Tunix's num_generations is 'rollout.group_size' here"),
    ("loss.beta", "'loss.kl_coef'"),
    ("rollout.n", "verl's actor_rollout_ref.rollout.n is 'rollout.group_size' here"),
    ("kl_loss_coef", "'loss.kl_coef'"),
    ("policy.lr", "'optim.learning_rate'"),
    ("per_device_train_batch_size", "'rollout.prompts_per_step' and 'batching.microbatch_tokens'"),
    ("rollouts.temprature", "or 'sampling.temperature' or"),
    ("evaluatoin.data.path", "did you mean 'evaluation.data.path'?"),
    ("optim.learning_rte", "did you mean 'optim.learning_rate'?"),
  ],
)
def test_names_of_other_programs_are_answered_on_the_command_line_in_files_and_in_python(
  typed, meant
):
  config = configuration.load(str(ROOT / "configs" / "base.py"))
  assert meant in str(configuration.refusal(config, typed))
  with pytest.raises(configuration.ConfigError, match=re.escape(meant)):
    overrides.override(config, {typed: 3})
  if "temprature" not in typed and "lear" not in typed:
    (in_a_file,) = field_checks.problems({typed: 3})
    assert meant in in_a_file


def test_a_flag_of_another_program_is_answered_with_the_field():
  with pytest.raises(configuration.ConfigError) as raised:
    command_line.parse(["--config=math_1b", "--num_generations=8"])
  assert str(raised.value) == (
    "unknown flag --num_generations (TRL's and Tunix's num_generations is 'rollout.group_size'"
    " here); fields are set by --config.SECTION.FIELD=VALUE"
  )


@pytest.mark.parametrize("program", ["TRL", "Tunix"])
def test_the_program_of_the_page_is_a_run_that_can_begin(program, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  begun = []
  monkeypatch.setattr(training.training, "train", lambda config, *_, **__: begun.append(config))
  (text,) = re.findall(r"```python\n(.*?)```", PAGES[program], re.S)
  scope: dict = {}
  exec(compile(text, program, "exec"), scope)
  (config,) = begun
  assert (config.rollout.group_size, config.loss.kl_coef, config.total_steps) == (8, 0.0, 20)
  assert scope["right"]("2 + 2 =", "4", {"expected_answer": "4"}) == 1.0


@pytest.mark.parametrize("program", ["verl", "NeMo RL"])
def test_the_command_of_the_page_is_understood(program):
  (text,) = re.findall(r"```\n(python -m grpo_jax.main.*?)```", PAGES[program], re.S)
  command = command_line.parse(shlex.split(text.replace("\\\n", " "))[3:])
  configuration.check(command.config, [grpo_jax.train.validate])
  assert command.config.rollout.group_size == 8
