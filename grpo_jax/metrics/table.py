"""The table of all metrics: name or pattern, unit, meaning, and what is healthy. Pure.

docs/metrics.md holds the same table; a test compares the two. A run that records a name that
is in no row here warns, and its tests fail.
"""

from typing import NamedTuple


class Definition(NamedTuple):
  """What a metric is: unit, meaning, and the range in which a healthy run keeps it."""

  unit: str
  meaning: str
  healthy: str = ""


METRICS: dict[str, Definition] = {
  # --- what was sampled ---
  "rollout/reward_mean": Definition("reward", "mean over scored completions", "rises"),
  "rollout/reward_std": Definition("reward", "standard deviation over completions", "> 0"),
  "rollout/reward_min": Definition("reward", "lowest"),
  "rollout/reward_max": Definition("reward", "highest"),
  "rollout/reward_group_std_mean": Definition(
    "reward", "mean over groups of the standard deviation within the group", "> 0"
  ),
  "rollout/no_signal_share": Definition(
    "share", "groups whose rewards are all equal; what is learned: signal/lost_share", "< 0.7"
  ),
  "rollout/failed_share": Definition("share", "completions that could not be scored (NaN)", "0"),
  "rollout/truncated_share": Definition("share", "completions cut at the token limit", "< 0.1"),
  "rollout/errors/*": Definition("count", "attempts of the step that failed, by kind", "0"),
  "rollout/aborted_share": Definition("share", "completions that the engine aborted", "0"),
  "rollout/prompts": Definition("count", "groups of the step, before filters"),
  "rollout/completions": Definition("count", "completions of the step, before filters"),
  "rollout/prompt_tokens_mean": Definition("tokens", "mean prompt length"),
  "rollout/completion_tokens_mean": Definition(
    "tokens", "mean completion length", "no sudden growth, no collapse"
  ),
  "rollout/completion_tokens_min": Definition("tokens", "shortest completion"),
  "rollout/completion_tokens_max": Definition("tokens", "longest completion"),
  "rollout/completion_tokens_stopped_mean": Definition(
    "tokens", "mean length of the completions that were not cut"
  ),
  "rollout/behavior_entropy": Definition(
    "nats",
    "-mean logprob, when sampled, of all sampled tokens of the step: estimates the entropy of"
    " the policy that sampled them",
    "> 0.05",
  ),
  "rollout/unique_share": Definition(
    "share",
    "different completions of a group, by token ids, divided by its size; mean over groups",
    "> 0.5",
  ),
  "rollout/reward_length_correlation": Definition(
    "correlation",
    "of reward and length in tokens, both as deviations from the mean of their group, over scored"
    " completions; -1 to 1",
    "not near 1 or -1",
  ),
  "rollout/reward_of_length/*": Definition(
    "reward",
    "mean over the scored completions of a quarter of the lengths: 1 up to the first quartile, 4"
    " above the third",
  ),
  "rollout/greedy_reward_mean": Definition(
    "reward", "mean over the greedy completions, one per prompt: ReMax's baseline", "rises"
  ),
  "rollout/greedy_tokens_mean": Definition("tokens", "mean length of the greedy completions"),
  "rollout/turns_mean": Definition("turns", "turns of a conversation with the environment"),
  "rollout/turns_total": Definition("turns", "turns of the step, all conversations"),
  "rollout/turns_max": Definition("turns", "the longest conversation"),
  "rollout/turns_p95": Definition("turns", "95 of 100 conversations have at most that many turns"),
  "rollout/turn_limit_share": Definition(
    "share", "conversations cut at rollout.max_turns", "< 0.1"
  ),
  "rollout/ended_by_environment_share": Definition(
    "share", "conversations that ended by themselves: at no limit, with no failure", "rises"
  ),
  "rollout/sampled_tokens_mean": Definition("tokens", "mean sampled in a conversation"),
  "rollout/sampled_tokens_max": Definition("tokens", "most sampled in one conversation"),
  "rollout/environment_tokens_mean": Definition(
    "tokens", "mean written by the environment in a conversation, never learned from"
  ),
  "rollout/turn_tokens_mean": Definition("tokens", "mean sampled in a turn"),
  "rollout/turn_tokens_max": Definition("tokens", "most sampled in one turn"),
  "rollout/turn/*/reached_share": Definition(
    "share", "conversations that reached this turn; 01 is the first, 10 the last one reported"
  ),
  "rollout/turn/*/reward_mean": Definition("reward", "mean reward of this turn alone"),
  "rollout/turn/*/sampled_tokens_mean": Definition("tokens", "mean length of this turn"),
  "rollout/staleness_mean": Definition(
    "steps", "weights to be updated minus weights that sampled, over sampled tokens", "0 if in turn"
  ),
  "rollout/staleness_max": Definition("steps", "the stalest token", "<= max_staleness"),
  "rollout/mixed_versions_share": Definition(
    "share", "completions whose tokens were sampled by several versions of the weights"
  ),
  "env/*/reward_mean": Definition("reward", "mean over the environment's completions", "rises"),
  "env/*/reward/*": Definition("reward", "mean of one component of the reward"),
  "env/*/completions": Definition("count", "completions of the step that this environment scored"),
  "env/*/failed_share": Definition(
    "share", "completions of the environment that could not be scored", "0"
  ),
  "env/*": Definition(
    "any", "a metric of the environment itself: mean over the attempts of a step"
  ),
  "data/epoch": Definition("epochs", "passes over the training data so far"),
  "data/broken_rows": Definition("count", "rows of the data skipped as broken in the step", "0"),
  "data/overlong_prompts": Definition(
    "count", "prompts above data.max_prompt_tokens in the step", "0"
  ),
  "data/*/epoch": Definition("epochs", "passes over one of several datasets so far"),
  "data/*/prompts": Definition("count", "prompts of the step from one of several datasets"),
  "data/*/reward_mean": Definition("reward", "mean over its scored completions", "rises"),
  "data/*/accuracy": Definition("share", "its completions that are right", "rises"),
  "data/*/no_signal_share": Definition("share", "its groups whose rewards are all equal", "< 0.7"),
  # --- dynamic sampling: what was drawn, to fill a step with groups that pass the filters ---
  "dynamic_sampling/rounds": Definition(
    "count", "rounds of drawing prompts and sampling them", "< max_rounds"
  ),
  "dynamic_sampling/prompts": Definition("count", "prompts drawn in the step, all rounds"),
  "dynamic_sampling/discarded/*": Definition("count", "drawn groups that do not count, by reason"),
  "dynamic_sampling/from_surplus": Definition("count", "groups taken from earlier steps' surplus"),
  "dynamic_sampling/surplus": Definition("count", "groups kept for the next step"),
  "dynamic_sampling/reward_mean": Definition(
    "reward", "mean over everything drawn, not only the groups that count", "rises"
  ),
  "dynamic_sampling/limit_reached": Definition(
    "0 or 1", "the step was not full after max_rounds", "0"
  ),
  # --- shaping: what the advantages are computed of, where it is not rollout/reward_* ---
  "shaping/reward_mean": Definition("reward", "mean of the shaped rewards, scored completions"),
  "shaping/changed_share": Definition("share", "completions whose reward shaping changes"),
  "shaping/no_signal_share": Definition("share", "groups whose shaped rewards are all equal"),
  "shaping/clamped_share": Definition("share", "rewards outside shaping.scale_from", "0"),
  "shaping/overlong_share": Definition("share", "completions with an overlong penalty", "< 0.1"),
  "shaping/overlong_penalty_mean": Definition("reward", "mean overlong penalty, at most 0", "0"),
  "engine/restarts": Definition(
    "count", "servers replaced since the run was started or resumed", "0"
  ),
  "engine/preemptions": Definition(
    "count",
    "completions that the embedded sampler put back for lack of memory and continued later, since"
    " the run was started or resumed",
    "0",
  ),
  "engine/retries": Definition("count", "requests sent again since then", "0"),
  "lora/merged_share": Definition(
    "share",
    "part of the adapter that is left where merged weights are rounded, at the newest sync: "
    "⟨round(W + Δ) - round(W), Δ⟩ / ⟨Δ, Δ⟩ with Δ = s A B; only if they are. With adapters apart:"
    " that of experts, which the trainer rounds, too",
    "> 0.5",
  ),
  # --- what the update learns from ---
  "filter/*": Definition("count", "groups left out of the step, by reason"),
  # --- what is learned from ---
  "signal/lost_share": Definition(
    "share",
    "completions of the step that nothing is learned from: advantage 0, or not in the loss; 1:"
    " nothing is learned from rewards",
    "< 0.7",
  ),
  "signal/lost/*": Definition(
    "count",
    "completions that nothing is learned from, by the first reason that applies; 0 is omitted",
  ),
  "batch/computed_token_share": Definition(
    "share",
    "sampled tokens of the step that the update computes: train/* and mismatch/* cover these. If it"
    " is 0, mismatch/*, staleness/* and train/entropy cover all completions",
  ),
  "batch/advantage_mean": Definition(
    "advantage",
    "mean over the completions kept, without their weights; before REINFORCE++ whitens tokens",
    "about 0",
  ),
  "batch/advantage_std": Definition("advantage", "standard deviation of the same", "> 0"),
  "batch/advantage_min": Definition("advantage", "lowest", "> -5"),
  "batch/advantage_max": Definition("advantage", "highest", "< 5"),
  "batch/loss_tokens": Definition(
    "tokens",
    "tokens learned from in the step, in all its epochs; each once, whatever its weight, and before"
    " loss.seq_logprob_error_threshold leaves some out",
  ),
  "router/replayed_share": Definition(
    "share",
    "tokens whose experts are those that the engine recorded, in all layers; the last token of an"
    " attempt has none",
    "> 0.9",
  ),
  "router/changed_share": Definition(
    "share",
    "replayed choices of experts that the trainer's own router would not have made",
    "< 0.1",
  ),
  "router/largest_load": Definition(
    "ratio",
    "tokens of the busiest expert of a layer, relative to the mean of all its experts, in a"
    " microbatch; mean of the layers. 1: all experts have as many",
    "does not rise",
  ),
  "router/load_entropy": Definition(
    "share",
    "entropy of the experts' shares in a layer's tokens, in a microbatch, as a share of its highest"
    " value; mean of the layers",
    "does not fall",
  ),
  "batch/rows": Definition("count", "packed rows of one epoch, padding rows included"),
  "batch/row_tokens": Definition(
    "tokens", "mean length of a row; times batch/rows: the places computed in one epoch"
  ),
  "batch/repeated_prompt_tokens": Definition(
    "tokens",
    "prompt tokens repeated in several rows of an optimizer step, without their first copy; one"
    " epoch",
  ),
  "batch/microbatches": Definition("count", "forward and backward passes, in all epochs"),
  "batch/optimizer_steps": Definition(
    "count", "optimizer steps, in all epochs; train/skipped_share of them changed nothing", "> 0"
  ),
  "batch/packing_efficiency": Definition("share", "places of the rows that hold a token", "> 0.7"),
  "batch/busiest_part": Definition(
    "ratio",
    "live tiles of attention of the device that has most of a row, relative to the mean of the"
    " devices of the row; only with mesh.context",
    "< 1.1",
  ),
  "batch/skipped_zero_advantage": Definition("count", "completions with advantage 0, not computed"),
  "batch/left_out/*": Definition("count", "completions left out of the update, by reason", "0"),
  # --- evaluation on held-out prompts; the second part is evaluation.name ---
  "eval/*/accuracy": Definition(
    "share",
    "mean over prompts of the share of completions that their environment calls right; missing"
    " if it does not say. Offline: mean over groups of the share of pairs that the policy orders"
    " as their rewards do",
    "rises",
  ),
  "eval/*/accuracy_se": Definition(
    "share", "standard error of the accuracy, over prompts (docs/evaluation.md)"
  ),
  "eval/*/pass@*": Definition(
    "share",
    "chance that one of K completions is right, unbiased; missing if accuracy is missing",
    "rises",
  ),
  "eval/*/reward_mean": Definition("reward", "mean over scored completions", "rises"),
  "eval/*/truncated_share": Definition("share", "completions cut at the token limit", "< 0.1"),
  "eval/*/failed_share": Definition("share", "completions that could not be scored", "0"),
  "eval/*/errors/*": Definition("count", "attempts that failed, by kind", "0"),
  "eval/*/completion_tokens_mean": Definition("tokens", "mean completion length"),
  "eval/*/turns_mean": Definition("turns", "turns of a conversation with the environment"),
  "eval/*/turn_limit_share": Definition("share", "conversations cut at rollout.max_turns", "< 0.1"),
  "eval/*/ended_by_environment_share": Definition(
    "share", "conversations that ended by themselves: at no limit, with no failure", "rises"
  ),
  "eval/*/prompts": Definition("count", "prompts evaluated"),
  # --- evaluation on recorded groups (docs/offline.md); eval/NAME/TYPE/*: of one type of groups ---
  "eval/*/exact_accuracy": Definition("share", "groups whose whole order is right", "rises"),
  "eval/*/place_accuracy": Definition(
    "share",
    "responses at their place in the order of their group, or at the place of an equal one",
    "rises",
  ),
  "eval/*/best_accuracy": Definition(
    "share", "groups whose most likely response is a best one", "rises"
  ),
  "eval/*/chosen_reward_mean": Definition(
    "reward", "mean over groups of the reward of the most likely response", "rises"
  ),
  "eval/*/margin": Definition(
    "nats", "score of the best responses minus that of the other responses", "rises"
  ),
  "eval/*/consistency": Definition(
    "share", "1 - (highest - lowest accuracy of a type of groups)", "about 1"
  ),
  "eval/*/groups": Definition("count", "groups evaluated"),
  "eval/*/no_order_share": Definition("share", "groups whose rewards are all equal: left out"),
  # --- the update: means over the tokens (or sequences) learned from, over all its parts ---
  "train/loss": Definition(
    "loss",
    "the quantity that is minimised; its value does not show what is learned (docs/metrics.md)",
  ),
  "train/policy_loss": Definition(
    "loss",
    "the part of train/loss without KL and entropy; with one update a batch and no correction,"
    " minus the mean advantage, as the reduction weighs it",
  ),
  "train/kl_to_reference": Definition(
    "nats",
    "KL to the present reference, as in the loss, without its coefficient; if loss.kl_coef is 0:"
    " to the initial weights, over all completions, in the steps that report all/kl_to_initial",
    "< 0.5",
  ),
  "train/reference_age": Definition(
    "steps", "training steps since reference.update_every_steps updated the reference last"
  ),
  "teacher/kl": Definition(
    "nats",
    "KL of the policy before the update to the teacher, estimated by the mean of log policy/teacher"
    " over the tokens that the update computes",
    "falls",
  ),
  "teacher/clamped_share": Definition(
    "share", "tokens whose log teacher/policy teacher.clamp bounds", "< 0.1"
  ),
  "train/rank_accuracy": Definition(
    "share",
    "offline: pairs of responses of the step that the policy orders as their rewards do",
    "rises",
  ),
  "train/entropy_bonus": Definition(
    "nats", "the entropy's part of the loss, without its coefficient"
  ),
  "train/entropy": Definition(
    "nats",
    "mean entropy of the distribution that is trained (sampling.logprobs), over the tokens that the"
    " update computes (batch/computed_token_share; if it is 0, of all completions); always of all:"
    " all/entropy",
    "> 0.05",
  ),
  "train/approx_entropy": Definition(
    "nats", "the same, of the same tokens, estimated from their logprobs alone", "> 0.05"
  ),
  "train/grad_norm": Definition(
    "L2 norm", "norm of the gradient, before clipping", "level, finite"
  ),
  "train/adapter_norm": Definition(
    "L2 norm", "norm of s A B over all kernels with an adapter, after the update", "finite"
  ),
  "lora/relative_change": Definition(
    "ratio",
    "train/adapter_norm divided by the norm of the base's kernels that have an adapter",
    "< 0.1",
  ),
  "train/skipped_share": Definition(
    "share", "updates skipped because gradients were not finite", "0"
  ),
  "train/learning_rate": Definition("per step", "learning rate of the optimizer at this step"),
  "train/ratio_mean": Definition("ratio", "policy / old, mean over tokens", "about 1"),
  "train/ratio_min": Definition("ratio", "smallest; 1 with one update a batch, if scored", "> 0.1"),
  "train/ratio_max": Definition("ratio", "largest; 1 with one update a batch, if scored", "< 10"),
  "train/clipped_ratio_mean": Definition("ratio", "mean after the clip", "about 1"),
  "train/clipped_ratio_min": Definition("ratio", "smallest after the clip"),
  "train/clipped_ratio_max": Definition("ratio", "largest after the clip"),
  "train/selected_share": Definition(
    "share",
    "tokens that loss.top_entropy_share, clip_cov or kl_cov chose among all of the optimizer step",
  ),
  "train/clip_low_share": Definition(
    "share",
    "tokens whose gradient the lower clip sets to 0; cispo: of negative advantage, whose ratio it"
    " bounds",
    "< 0.1",
  ),
  "train/clip_high_share": Definition(
    "share",
    "tokens whose gradient the upper clip sets to 0; cispo: of positive advantage, whose ratio it"
    " bounds",
    "< 0.1",
  ),
  "train/clip_dual_share": Definition(
    "share", "tokens whose gradient the dual clip sets to 0", "< 0.01"
  ),
  # --- all completions of a step, learned from or not; every learn.report_*_every_steps ---
  "all/entropy": Definition("nats", "train/entropy, over all completions of the step", "> 0.05"),
  "all/approx_entropy": Definition(
    "nats", "the same, of the same tokens, estimated from their logprobs alone", "> 0.05"
  ),
  "all/kl_to_initial": Definition(
    "nats",
    "KL of the policy before the update to the initial weights, which are those of model.path"
    " without an adapter (k3), over all completions of the step; for recorded completions, which it"
    " did not sample, a distance and not an estimate",
    "< 0.5",
  ),
  "all/covered_token_share": Definition(
    "share",
    "sampled tokens of the step that all/* covers; less than 1 if some do not fit in a row",
    "1",
  ),
  "all/abs_logprob_max": Definition("nats", "mismatch/abs_logprob_max, of all completions"),
  "all/abs_logprob_mean": Definition("nats", "mismatch/abs_logprob_mean, of all completions"),
  "all/token_mult_prob_error": Definition(
    "factor", "mismatch/token_mult_prob_error, of all completions", "< 1.05"
  ),
  "all/sampling_importance_ratio": Definition(
    "ratio", "mismatch/sampling_importance_ratio, of all completions", "about 1"
  ),
  "all/sampling_importance_ratio_min": Definition("ratio", "smallest of these ratios"),
  "all/sampling_importance_ratio_max": Definition("ratio", "largest of these ratios"),
  "all/gen_kl_error": Definition("nats", "mismatch/gen_kl_error by k3, of all completions"),
  "all/policy_kl_error": Definition("nats", "mismatch/policy_kl_error by k3, of all completions"),
  "all/outside_truncation_share": Definition(
    "share",
    "mismatch/outside_truncation_share, of all completions and before the update",
    "< 0.001 jax_sampler; < 0.01",
  ),
  "all/js_divergence_error": Definition("nats", "mismatch/js_divergence_error, of all completions"),
  # --- engine against trainer, on the same tokens, in every step; over the tokens that the update
  # computes (batch/computed_token_share), or over all completions if it computes none ---
  "mismatch/abs_logprob_max": Definition(
    "nats", "largest |trainer - engine|", "< 1e-4 jax_sampler; < 1"
  ),
  "mismatch/abs_logprob_mean": Definition(
    "nats", "mean |trainer - engine|", "< 1e-5 jax_sampler; < 0.05"
  ),
  "mismatch/probe_abs_logprob_max": Definition(
    "nats", "largest |trainer - server| of a fixed prompt, after the newest sync", "< 1e-3 float32"
  ),
  "mismatch/sync_share": Definition(
    "share",
    "share of the newest update that the engine samples with, by its logprobs: 1 with the new"
    " weights, 0 with the old ones; of the server that is furthest from 1, in steps with a proof",
    "1 ± 6 errors",
  ),
  "mismatch/sync_share_error": Definition("share", "standard error of mismatch/sync_share"),
  "mismatch/sync_proven": Definition(
    "share", "1: every server was proven to have the new weights; 0: it is unclear", "1"
  ),
  "mismatch/sync_moved": Definition(
    "nats", "root mean square by which the update moved the logprobs of a proof"
  ),
  "mismatch/sync_noise": Definition(
    "nats", "root mean square of |trainer in float32 - engine| under the new weights"
  ),
  "mismatch/token_mult_prob_error": Definition("factor", "mean exp(|trainer - engine|)", "< 1.05"),
  "mismatch/gen_kl_error": Definition("nats", "KL(engine to trainer), estimated", "< 1e-3"),
  "mismatch/policy_kl_error": Definition(
    "nats", "KL the other way; detects spikes, but is not an estimate", "< 1e-3"
  ),
  "mismatch/js_divergence_error": Definition(
    "nats", "Jensen-Shannon divergence of the two", "< 1e-3"
  ),
  "mismatch/sampling_importance_ratio": Definition(
    "ratio", "mean trainer / engine over tokens, before any truncation", "about 1"
  ),
  "mismatch/sampling_importance_ratio_min": Definition("ratio", "smallest of these ratios"),
  "mismatch/sampling_importance_ratio_max": Definition("ratio", "largest of these ratios"),
  "mismatch/effective_sample_share": Definition(
    "share",
    "effective sample size of the weights that the loss uses, after truncation; 1 if all are equal",
    "> 0.9",
  ),
  "mismatch/outside_truncation_share": Definition(
    "share",
    "sampled tokens that the trainer's own top-k, top-p and min-p do not keep"
    " (sampling.logprobs='truncated'); after the first optimizer step of a batch they may differ",
    "< 0.1",
  ),
  "mismatch/out_of_bounds_share": Definition("share", "weights truncated or masked", "< 0.01"),
  "mismatch/seq_logprob_error_max": Definition(
    "ratio",
    "largest mean over a completion of old/behavior or its inverse, whichever is larger, those left"
    " out included; only with loss.seq_logprob_error_threshold",
    "< 1.5",
  ),
  "mismatch/seq_logprob_error_masked_share": Definition(
    "share", "completions left out because theirs is above the threshold", "< 0.02"
  ),
  "mismatch/off_policy_masked_share": Definition(
    "share", "completions masked as too far off-policy", "< 0.1"
  ),
  # --- by age, in runs that sample ahead: 0, 1, 2 to 3, 4 to 7, 8 and more training steps between
  # the weights that sampled a token and those that the step begins with ---
  "staleness/*/share": Definition(
    "share", "tokens of this age, of the tokens that mismatch/* covers"
  ),
  "staleness/*/ratio": Definition(
    "ratio", "mean weight old / behavior of these tokens, before truncation", "about 1"
  ),
  "staleness/*/ess": Definition(
    "share", "effective sample size of these weights; 1 if all are equal", "> 0.5"
  ),
  "staleness/*/reward": Definition(
    "reward", "mean over scored completions whose oldest token has this age"
  ),
  # --- clock and machine: differ between two runs that are equal otherwise ---
  "time/step_s": Definition("s", "wall clock of the step: all of the times below"),
  "time/sample_s": Definition("s", "sampling completions, and scoring them"),
  "time/score_s": Definition("s", "old and reference logprobs, if the loss needs them"),
  "time/assemble_s": Definition("s", "filters, advantages, packing of the rows"),
  "time/learn_s": Definition("s", "the update"),
  "time/monitor_s": Definition(
    "s", "scoring all completions for all/*, in the steps that report it"
  ),
  "time/sync_s": Definition(
    "s", "sending new weights to the engine; before that, waiting for completions under way"
  ),
  "time/*_share": Definition(
    "share", "what a phase takes of time/step_s; other: what none of the phases does"
  ),
  "time/*_s": Definition("s", "any other named span: evaluate, checkpoint, ..."),
  "perf/overlap_share": Definition(
    "share",
    "of the time since the step before: the engine samples and the trainer does not wait for it",
  ),
  "perf/engine_idle_share": Definition(
    "share", "of the same time: the engine has nothing to sample", "small"
  ),
  "perf/trainer_idle_share": Definition(
    "share", "of the same time: the trainer waits for groups", "small"
  ),
  "perf/tokens_per_s": Definition(
    "tokens/s", "prompt and completion tokens of the step / time/step_s"
  ),
  "perf/compilations": Definition(
    "count",
    "programs that XLA compiled since the step before; programs read from the cache do not count",
    "0 after the first step",
  ),
  "perf/compile_s": Definition(
    "s", "time that XLA took for them; times of parallel compilations add up", "0 after the first"
  ),
  "perf/env/*": Definition(
    "count",
    "work of an environment's workers since the process started; hanging_attempts, hanging_calls:"
    " threads that block now in calls that were given up",
  ),
  # --- the newest sync: parts of time/sync_s; of several processes, with SGLang the largest ---
  "perf/sync_gather_s": Definition(
    "s",
    "SGLang: waiting for tensors on their way to the host: gathered, merged, transposed and cast by"
    " one program each; what happens while others are written is not in it",
  ),
  "perf/sync_write_s": Definition("s", "SGLang: the rest of writing the folder of the weights"),
  "perf/sync_load_s": Definition(
    "s", "SGLang: loading the folder and clearing the cache, at the slowest server"
  ),
  "perf/sync_flush_s": Definition(
    "s", "SGLang: pausing and resuming around it, at the slowest server; 0 for an adapter"
  ),
  "perf/sync_checksum_s": Definition(
    "s",
    "SGLang: the checksums of its tensors, at the slowest server; 0 for an adapter, and if a server"
    " gives none",
  ),
  "perf/sync_probe_s": Definition(
    "s", "SGLang: the fixed prompt that each server scores, at the slowest one"
  ),
  "perf/sync_proof_s": Definition(
    "s",
    "the newest proof that the engine has the new weights: what was scored before the update and"
    " after it; of the main process",
  ),
  "perf/sync_copy_s": Definition(
    "s", "embedded sampler: copying the weights, and waiting for the update if it still runs"
  ),
  "perf/sync_bytes": Definition(
    "bytes",
    "SGLang: the tensors that were written, which are those that the folder did not have;"
    " embedded sampler: what was copied on this process."
    " With model.lora.sync='adapter' the base once, then the adapter",
  ),
  "perf/sync_copies": Definition(
    "copies per byte",
    "SGLang: on the devices, to the host, on the host and into the file, over perf/sync_bytes; each"
    " server then copies what it loads",
  ),
  "perf/peak_rss_gib": Definition(
    "GiB", "highest host memory of the process so far; of several, the main one", "level"
  ),
  "perf/device_gib": Definition(
    "GiB", "memory in use at the end of the step, of the fullest device; a CPU counts none", "level"
  ),
  "perf/device/*/gib": Definition("GiB", "memory in use at the end of the step, of one device"),
  "perf/device_peak_gib": Definition(
    "GiB", "highest memory in use so far, of the fullest device; a CPU counts none", "< the limit"
  ),
  "perf/device_limit_gib": Definition("GiB", "memory that a device makes available to the process"),
  "perf/device/*/peak_gib": Definition(
    "GiB", "highest memory in use so far, of one device", "level"
  ),
  # --- the processes of a run, if there are several ---
  "hosts/processes": Definition("count", "processes of the run; perf/* and time/* are the main's"),
  "hosts/step_s_*": Definition(
    "s", "wall clock of the step: max, min and median over the processes"
  ),
  "hosts/busy_s_*": Definition(
    "s", "the step without waiting for other processes: max, min and median", "nearly equal"
  ),
  "hosts/wait_s_*": Definition("s", "waiting for other processes: max, min and median"),
  "hosts/sample_s_*": Definition(
    "s", "sampling and scoring, without waiting: max, min and median", "nearly equal"
  ),
  "hosts/learn_s_*": Definition(
    "s", "wall clock of the update, waiting included: max, min and median"
  ),
  "hosts/peak_rss_gib_*": Definition(
    "GiB", "highest host memory of a process so far: max, min and median", "level"
  ),
  "hosts/device_peak_gib_*": Definition(
    "GiB", "highest memory so far of a process's fullest device: max, min and median", "< the limit"
  ),
  "hosts/slowest": Definition(
    "number", "process with the largest busy_s, counted from 0", "varies"
  ),
  "hosts/slowest_excess": Definition(
    "share", "what its busy_s exceeds the median of the other processes by", "< 0.2"
  ),
  "hosts/wait_share": Definition(
    "share", "what waiting for other processes takes of the step, mean over processes", "< 0.1"
  ),
  "hosts/compilations": Definition(
    "count", "perf/compilations of all processes together", "0 after the first step"
  ),
  "hosts/process/*": Definition(
    "", "those values of each process, of at most 16: hosts/process/003/busy_s"
  ),
  # --- state ---
  "weight_version": Definition(
    "steps", "updates done before this step: the weights it starts from"
  ),
}
