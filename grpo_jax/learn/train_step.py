"""The jitted functions of training: logprobs of a batch, the update, the scorer. Pure.

A training step takes one or more optimizer steps on one batch of rollouts:
`epochs` passes over its minibatches. An optimizer step sums the gradients of
its microbatches; the sum is exact, because each microbatch's loss is already divided
by the minibatch's denominators. A Python loop over jitted functions, not a scan,
runs the microbatches: their number may change from step to step without
recompilation. Each adds its gradients to the sum in place (see
`models.gradient_sums`), so that only one set of gradients is in memory.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_kernels.attention import AUTOMATIC, Attention
from grpo_kernels.linear_logprobs.sharded import Partition
from grpo_kernels.truncation import Truncation
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from grpo_jax import metrics as metric_sums
from grpo_jax.compilation import precision, programs
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import optim, sharding
from grpo_jax.learn.policy import attach, full_weights, trainable_of
from grpo_jax.learn.selecting import Selector
from grpo_jax.models import transformer
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.options import ModelOptions
from grpo_jax.models.products import FLOAT32, Products
from grpo_jax.processes import arrays
from grpo_jax.rl import diagnostics, masks
from grpo_jax.rl.logprobs import (
  gather_loss_tokens,
  token_logprobs,
  token_objective,
  truncated_token_logprobs,
)
from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Denominators, Mean, Metrics, Minibatch, TrainState


class TokenScores(NamedTuple):
  """What a `LogprobsFn` computes for the tokens that are learned from; nats."""

  logprobs: Float[Array, "B N"]  # log πθ of the distribution that is trained.
  entropy: Float[Array, "B N"] | None = None  # its entropy; None: not computed.
  # With top-k, top-p or min-p only: log πθ of the whole softmax, and whether these filters alone
  # would not have kept the token.
  full: Float[Array, "B N"] | None = None
  is_outside: Bool[Array, "B N"] | None = None


# (logprobs of a microbatch) → None; for displays of progress.
OnMicrobatch = Callable[[Any], None]
# (full weights, batch, with entropy) → the fields of a `TokenScores`, the first two at least.
LogprobsFn = Callable[[Any, Batch, bool], Sequence[Any]]
# (full weights, batch, denominators, with entropy) → loss, log πθ [B N], the entropy or None.
LossFn = Callable[[Any, Batch, Denominators, bool], tuple[Array, Array, Array | None]]
# Programs, in runs. Their weights are full weights, or a `policy.Composed`.
Scorer = Callable[[Any, Batch], Float[Array, "B N"]]
Watcher = Callable[[Any, Batch], tuple[Metrics, TokenScores]]
# For each minibatch, for each microbatch: log πθ at `loss_places`, before the (first) update.
MicrobatchLogprobs = list[list[Float[Array, "B N"]]]


# What to do if memory is short; for error messages.
SMALLER_BATCHES = (
  "lower batching.microbatch_tokens, set model.remat='full', or split the weights over more devices"
  " with mesh.fsdp"
)
SMALLER_STATE = "split the weights over more devices with mesh.fsdp"


class NonFiniteGradients(ExpectedFailure, RuntimeError):
  """Too many consecutive steps changed nothing, because their gradients were not finite."""


def make_logprobs(
  config: ModelConfig,
  *,
  temperature: float = 1.0,
  products: Products = FLOAT32,
  remat: str = ModelOptions.remat,
  attention: Attention = AUTOMATIC,
  implementation: str | None = None,
  partition: Partition | None = None,
  truncation: Truncation | None = None,
) -> LogprobsFn:
  """Makes the function from parameters and batch to the logprobs of the loss tokens.

  Args:
    config: Sizes of the model.
    temperature: Temperature at which the completions were sampled.
    products: Options of matrix products, including those of the head.
    remat: Activations that the backward pass recomputes; see `transformer.Transformer`.
    attention: Attention among the tokens of packed rows.
    implementation: Implementation of `grpo_kernels.linear_logprobs`; None: chosen by platform.
    partition: Split of the head and its tokens over a mesh; see `sharding.head_partition`.
    truncation: Filters of the distribution that is trained; None: the whole softmax.
  """
  hidden_states = _make_hidden_states(config, products, remat, attention)

  def logprobs(params: Any, batch: Batch, with_entropy: bool) -> TokenScores:
    head, layout = transformer.head(params, config)
    settings: dict[str, Any] = {
      "head_layout": layout,
      "temperature": temperature,
      "return_entropy": with_entropy,
      "partition": partition,
    }
    hidden = hidden_states(params, batch)
    if truncation is not None:
      return TokenScores(*truncated_token_logprobs(hidden, head, batch, truncation, **settings))
    outputs = token_logprobs(hidden, head, batch, implementation=implementation, **settings)
    return TokenScores(*outputs) if isinstance(outputs, tuple) else TokenScores(outputs)

  return logprobs


def make_token_loss(
  config: ModelConfig,
  objective: Objective,
  *,
  temperature: float = 1.0,
  products: Products = FLOAT32,
  remat: str = ModelOptions.remat,
  attention: Attention = AUTOMATIC,
  partition: Partition | None = None,
) -> LossFn:
  """Makes the function from parameters and batch to a token-local loss, to be minimised.

  The head's gradients are computed in the same sweep as the loss; see
  `grpo_jax.rl.logprobs.token_objective`. The arguments are those of `make_logprobs`.
  """
  hidden_states = _make_hidden_states(config, products, remat, attention)

  def loss(params: Any, batch: Batch, denominators: Denominators, with_entropy: bool):
    head, layout = transformer.head(params, config)
    return token_objective(
      hidden_states(params, batch),
      head,
      batch,
      objective,
      denominators,
      head_layout=layout,
      temperature=temperature,
      return_entropy=with_entropy,
      partition=partition,
    )

  return loss


def _make_hidden_states(
  config: ModelConfig, products: Products, remat: str, attention: Attention
) -> Callable[[Any, Batch], Float[Array, "B T D"]]:
  """Makes the function (params, batch) → hidden states [B T D], in the compute dtype."""

  def hidden_states(params: Any, batch: Batch) -> Float[Array, "B T D"]:
    inputs: Any = (batch.tokens, batch.positions, batch.segment_ids, batch.branch_ids)
    found = transformer.hidden_states(
      params, config, *inputs, products=products, remat=remat, attention=attention
    )
    return found.astype(products.compute_dtype)

  return hidden_states


def init(
  params: Any,
  tx: optax.GradientTransformation,
  *,
  shardings: Any = None,
  initializer: Program | None = None,
) -> TrainState:
  """Returns the state before the first step. The first update consumes (donates) `params`.

  Args:
    params: Master weights, float32; moved only if they do not have these shardings yet.
    tx: Optimizer.
    shardings: Shardings of the parameters; the optimizer's state follows them. None: one device.
    initializer: Program made by `make_initializer`; None: a new one.
  """
  initializer = initializer or make_initializer(params, tx, shardings=shardings)
  if shardings is None:
    return TrainState(jax.device_put(np.int32(0)), params, initializer(params))
  params = jax.tree.map(arrays.put, params, shardings)
  step = arrays.put(np.int32(0), sharding.whole(sharding.mesh_of(shardings)))
  return TrainState(step, params, initializer(params))


def make_initializer(
  params: Any, tx: optax.GradientTransformation, *, shardings: Any = None
) -> Program:
  """Makes the program from parameters to the optimizer's state; it is sharded like them.

  Args:
    params: Arrays of the parameters, or their shapes and dtypes.
    tx: The optimizer.
    shardings: Shardings of the parameters; None: one device.
  """
  of_state = None
  if shardings is not None:
    mesh = sharding.mesh_of(shardings)
    of_state = sharding.opt_state_shardings(tx, params, shardings, mesh)
  return Program(jax.jit(tx.init, out_shardings=of_state), name="optimizer state")


def shapes_of_state(shapes: Any, tx: optax.GradientTransformation, shardings: Any) -> TrainState:
  """Returns shapes, dtypes and shardings of a state, without its arrays.

  Args:
    shapes: Tree of the parameters, with a shape and a dtype at each leaf.
    tx: The optimizer.
    shardings: Shardings of the parameters; the optimizer's state follows them.
  """
  mesh = sharding.mesh_of(shardings)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
  of_optimizer = sharding.opt_state_shardings(tx, shapes, shardings, mesh)
  start = lambda params: TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))
  leaves, tree = jax.tree.flatten(jax.eval_shape(start, shapes))
  places = jax.tree.leaves((sharding.whole(mesh), shardings, of_optimizer))
  return tree.unflatten(
    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
    for leaf, place in zip(leaves, places, strict=True)
  )


@dataclasses.dataclass(frozen=True)
class Update:
  """update(state, minibatches) → state, metrics: one training step; made by `make_update`.

  The old state is donated. An optimizer step whose gradients or loss are not finite changes
  neither parameters nor optimizer state, and counts in "train/skipped_share". `state.step`
  always rises by 1.

  Attributes:
    objective: Loss.
    epochs: Number of passes over the minibatches.
    start: Program (params) → gradients and loss before the first microbatch: zeros.
    differentiate: Program (weights, (gradients, loss), batch, denominators) → (gradients, loss)
      with those of the batch added, (metrics, policy logprobs), compiled once for each shape of a
      microbatch; donates the second argument. The gradients are those of what is trained.
    apply: Program (params, optimizer state, gradients, loss) → params, optimizer state, metrics;
      donates the first two arguments.
    selector: Chooses tokens before each optimizer step, for losses that depend on such a choice;
      None: the loss does not.
  """

  objective: Objective
  epochs: int
  start: Program
  differentiate: Program
  apply: Program
  selector: Selector | None = None

  def __call__(
    self,
    state: TrainState,
    minibatches: Sequence[Minibatch],
    before: Callable[[], None] = lambda: None,
    weights: Callable[[Any], Any] = lambda trainable: trainable,
    on_microbatch: OnMicrobatch = lambda logprobs: None,
  ) -> tuple[TrainState, Metrics, MicrobatchLogprobs]:
    """Takes `epochs` × len(minibatches) optimizer steps.

    Args:
      state: State before the step; consumed.
      minibatches: Minibatches of one training step.
      before: Function called once, when the gradients of the first optimizer step are known and
        nothing has been donated yet; if it raises, `state` is still intact.
      weights: Function from `state.params` to the weights of the policy; see `Policy.weights`. By
        default these are `state.params`.
      on_microbatch: Function called after the gradients of a microbatch were requested, with its
        logprobs, which may not be computed yet.

    Returns:
      The new state; the metrics; and the logprobs of the policy in the first epoch, computed
      before the optimizer step of their minibatch.

    Raises:
      ValueError: There is more than one optimizer step, the loss has a ratio to the old policy,
        and `old_logprobs` were not scored; or there is nothing to learn from.
    """
    _check(self.objective, minibatches, self.epochs)
    params, opt_state, parts, seen = state.params, state.opt_state, [], []
    for epoch in range(self.epochs):
      for number, minibatch in enumerate(minibatches):
        if self.selector is not None:
          place = int(state.step), epoch, number
          minibatch = self.selector(weights(params), minibatch, place)
        of_params = weights(params)
        (grads, loss), metrics, logprobs = self.gradients(of_params, minibatch, on_microbatch)
        if not seen:
          jax.block_until_ready(grads)
          before()
        seen.append(logprobs)
        params, opt_state, applied = self.apply(params, opt_state, grads, loss)
        del grads  # else they would stay in memory together with those of the next minibatch.
        parts.append((metrics, applied))
    step = counted_on(state.step)
    new = dataclasses.replace(state, step=step, params=params, opt_state=opt_state)
    # "train/loss" is the loss that was minimised; the objective sees one microbatch only.
    of_steps = [{**metric_sums.merge(m), **applied} for m, applied in jax.device_get(parts)]
    return new, metric_sums.merge(of_steps), seen[: len(minibatches)]

  def jobs(
    self, state: TrainState, batches: Mapping[str, Batch], weights: Any = None
  ) -> list[CompileJob]:
    """Returns the compilations after which training compiles nothing.

    Args:
      state: Shapes, dtypes and shardings of the state; see `shapes_of_state`.
      batches: Shapes, dtypes and shardings of a microbatch of every planned shape, by its
        description.
      weights: The same of the policy's weights; None: those of `state.params`.
    """
    weights = state.params if weights is None else weights
    denominators = Denominators(1.0, 1.0)
    grads, loss = self.start.eval_shape(state.params)
    grads = jax.tree.map(
      lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
      *(grads, state.params),
    )
    loss = programs.abstract(loss, state.step.sharding)
    return [
      *(
        self.differentiate.job(weights, (grads, loss), batch, denominators, detail=detail)
        for detail, batch in batches.items()
      ),
      self.apply.job(state.params, state.opt_state, grads, loss),
      self.start.job(state.params),
    ]

  def gradients(
    self, weights: Any, minibatch: Minibatch, on_microbatch: OnMicrobatch = lambda logprobs: None
  ) -> tuple[tuple[Any, Float[Array, ""]], list[Metrics], list[Float[Array, "B N"]]]:
    """Returns gradients and loss of an optimizer step, summed over its microbatches.

    Also returns the metrics and the policy's logprobs of each microbatch.
    """
    sums, metrics, logprobs = self.start(trainable_of(weights)), [], []
    for batch in minibatch.microbatches:
      sums, (found, seen) = self.differentiate(weights, sums, batch, minibatch.denominators)
      metrics.append(found)
      logprobs.append(seen)
      on_microbatch(seen)
    return sums, metrics, logprobs


def make_update(
  logprobs: LogprobsFn,
  tx: optax.GradientTransformation,
  objective: Objective,
  *,
  epochs: int = 1,
  report_entropy: bool,
  schedule: optax.Schedule | None = None,
  shardings: Any = None,
  token_loss: LossFn | None = None,
  matmul_precision: str | None = None,
) -> Update:
  """Makes the function of a training step; see `Update`.

  Args:
    logprobs: Function made by `make_logprobs`.
    tx: The optimizer.
    objective: The loss.
    epochs: Number of passes over the minibatches of a batch of rollouts.
    report_entropy: Whether the entropy is computed even if the loss does not need it.
    schedule: Learning rate by step, reported as "train/learning_rate"; None: not reported.
    shardings: Shardings of what is trained, if it is to stay sharded.
    token_loss: Function made by `make_token_loss` with the same objective. It replaces `logprobs`:
      equal results in less time. None: two passes over the vocabulary.
    matmul_precision: Precision of float32 products, the optimizer's too; see `precision.resolve`.
  """
  if epochs < 1:
    raise ValueError(f"epochs must be at least 1, got {epochs}")
  with_entropy = report_entropy or objective.needs_entropy

  def share(sums: Any, weights: Any, batch: Batch, denominators: Denominators):
    params = full_weights(attach(weights, sums))
    tokens = gather_loss_tokens(batch)
    if token_loss is None:
      found = TokenScores(*logprobs(params, batch, with_entropy))
      policy_logprobs = found.logprobs
      loss, metrics = objective(found.logprobs, found.entropy, tokens, denominators, found.full)
      metrics |= _truncation_metrics(found, tokens.mask)
    else:
      loss, policy_logprobs, entropy = token_loss(params, batch, denominators, with_entropy)
      # The objective again, for the metrics only; cheap, since it computes with [B N] numbers.
      _, metrics = objective(policy_logprobs, entropy, tokens, denominators)
    return loss, (metrics, policy_logprobs)

  def start(params: Any):
    return jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.float32)

  def differentiate(weights: Any, sums: Any, batch: Batch, denominators: Denominators):
    grads, total = sums
    compute = jax.value_and_grad(share, has_aux=True)
    (loss, extras), grads = compute(grads, weights, batch, denominators)
    return (_constrain(grads, shardings), total + loss), extras

  def apply(params: Any, opt_state: Any, grads: Any, loss: Float[Array, ""]):
    return _apply(tx, schedule, shardings, params, opt_state, grads, loss)

  # Results get the shardings for which the next program was compiled.
  of_sums, of_update = None, None
  if shardings is not None:
    mesh = sharding.mesh_of(shardings)
    everywhere = sharding.whole(mesh)
    of_sums = shardings, everywhere
    of_update = of_sums, (everywhere, sharding.of_rows(mesh))
  scoped = lambda function: precision.scoped(function, matmul_precision)
  selector = None
  if objective.selects:
    mesh = None if shardings is None else sharding.mesh_of(shardings)
    selector = make_selector(logprobs, objective, matmul_precision=matmul_precision, mesh=mesh)
  return Update(
    objective,
    epochs,
    start=Program(
      jax.jit(start, out_shardings=of_sums), name="empty gradients", remedy=SMALLER_STATE
    ),
    differentiate=Program(
      jax.jit(scoped(differentiate), donate_argnums=1, out_shardings=of_update),
      name="update",
      remedy=SMALLER_BATCHES,
    ),
    apply=Program(
      jax.jit(scoped(apply), donate_argnums=(0, 1)), name="optimizer", remedy=SMALLER_STATE
    ),
    selector=selector,
  )


def make_selector(
  logprobs: LogprobsFn,
  objective: Objective,
  *,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
) -> Selector:
  """Makes what chooses tokens before each optimizer step; it costs one more forward pass.

  Args:
    logprobs: Function made by `make_logprobs`.
    objective: The loss, with `selects`.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.
  """

  def score(weights: Any, batch: Batch) -> tuple[Array, Array | None]:
    found = TokenScores(*logprobs(full_weights(weights), batch, objective.selects_by_entropy))
    return found.logprobs, found.entropy

  of_rows = None if mesh is None else sharding.of_rows(mesh)
  jitted = jax.jit(precision.scoped(score, matmul_precision), out_shardings=of_rows)
  program = Program(jitted, name="scores of the selection", remedy=SMALLER_BATCHES)
  return Selector(objective.options, program)


def _truncation_metrics(found: TokenScores, mask: Bool[Array, "B N"]) -> Metrics:
  """Returns the share of the tokens that the trainer's own filters would not have kept."""
  if found.is_outside is None:
    return {}
  is_outside = found.is_outside.astype(jnp.float32)
  return {"mismatch/outside_truncation_share": diagnostics.token_average(is_outside, mask)}


def make_scorer(
  logprobs: LogprobsFn,
  *,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
  name: str = "score",
) -> Program:
  """Makes score(weights, batch) → logprobs at `batch.loss_places`, without gradient.

  Args:
    logprobs: Function made by `make_logprobs`.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.
    name: Name of the program, shown to the user.
  """

  def score(weights: Any, batch: Batch) -> Float[Array, "B N"]:
    return TokenScores(*logprobs(full_weights(weights), batch, False)).logprobs

  of_rows = None if mesh is None else sharding.of_rows(mesh)
  jitted = jax.jit(precision.scoped(score, matmul_precision), out_shardings=of_rows)
  return Program(jitted, name=name, remedy=SMALLER_BATCHES)


def make_watcher(
  logprobs: LogprobsFn,
  *,
  with_entropy: bool = True,
  matmul_precision: str | None = None,
  mesh: Mesh | None = None,
) -> Program:
  """Makes watch(weights, batch) → metrics of the policy, and its scores at `batch.loss_places`.

  Args:
    logprobs: Function made by `make_logprobs`.
    with_entropy: Whether the metrics include the entropy.
    matmul_precision: Precision of float32 products; see `precision.resolve`.
    mesh: Mesh over which rows are split; None: one device.

  Returns:
    A program. Its metrics are "all/entropy", "all/approx_entropy" and those of
    `diagnostics.mismatch` under "all/", over the tokens of the batch. Its scores have logprobs, and
    those of the whole softmax if other ones are trained.
  """

  def watch(weights: Any, batch: Batch) -> tuple[Metrics, TokenScores]:
    scores = TokenScores(*logprobs(full_weights(weights), batch, with_entropy))
    policy, entropy = scores.logprobs, scores.entropy
    tokens = gather_loss_tokens(batch)
    behavior, mask, found = tokens.behavior_logprobs, tokens.mask, {}
    if behavior is not None:
      found["approx_entropy"] = diagnostics.approx_entropy(policy, behavior, mask)
      found |= diagnostics.mismatch(policy, behavior, mask)
    if entropy is not None:
      found["entropy"] = diagnostics.token_average(masks.fill(entropy, mask), mask)
    found |= _truncation_metrics(scores, mask)
    renamed = {f"all/{name.rpartition('/')[2]}": value for name, value in found.items()}
    return renamed, TokenScores(policy, full=scores.full)

  placed = None if mesh is None else (sharding.whole(mesh), sharding.of_rows(mesh))
  jitted = jax.jit(precision.scoped(watch, matmul_precision), out_shardings=placed)
  return Program(jitted, name="watch", remedy=SMALLER_BATCHES)


def with_logprobs(
  minibatches: Sequence[Minibatch],
  score: Scorer,
  *,
  old_score: Scorer | None = None,
  old_params: Any = None,
  ref_params: Any = None,
  on_microbatch: OnMicrobatch = lambda logprobs: None,
) -> tuple[Minibatch, ...]:
  """Returns the minibatches with old and reference logprobs, each scored once.

  Args:
    minibatches: Minibatches of one training step.
    score: Program made by `make_scorer`.
    old_score: The same for `old_params`; None: `score`.
    old_params: Policy's weights before this step's first update; None: `old_logprobs` stay as they
      are.
    ref_params: Weights of the frozen reference; None: `ref_logprobs` stay as they are.
    on_microbatch: Function called after a microbatch was requested, with its logprobs.
  """

  score_old = old_score or score

  def scored(batch: Batch) -> Batch:
    read = bare(batch)  # by both: a batch with other fields would compile another program.
    old = batch.old_logprobs if old_params is None else score_old(old_params, read)
    ref = batch.ref_logprobs if ref_params is None else score(ref_params, read)
    on_microbatch(old if ref_params is None else ref)
    return dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref)

  return tuple(
    Minibatch(tuple(scored(batch) for batch in minibatch.microbatches), minibatch.denominators)
    for minibatch in minibatches
  )


def bare(batch: Batch) -> Batch:
  """Returns a batch without the fields that only the update reads, so one program scores all."""
  return dataclasses.replace(batch, ages=None, weights=None)


def skipped_in_a_row(before: int, metrics: Mapping[str, float], *, limit: int) -> int:
  """Returns the number of consecutive training steps that changed nothing, this one included.

  Args:
    before: Return value for the previous step; 0 at the start.
    metrics: Metrics of this step as floats; "train/skipped_share" is read.
    limit: Number of such steps at which the run stops.

  Raises:
    NonFiniteGradients: The number has reached the limit.
  """
  count = before + 1 if metrics["train/skipped_share"] == 1.0 else 0
  if count >= limit:
    raise NonFiniteGradients(
      f"the gradients of {count} training steps in a row were not finite, so nothing was learned"
      " from them. Usual causes: a learning rate that is too high, or a damaged checkpoint. The"
      " rollouts of these steps are in the run folder."
    )
  return count


def counted_on(step: Array) -> Int[Array, ""]:
  """Returns step + 1 on the devices of `step`; the host adds, and that saves a compilation."""
  return arrays.put(np.int32(int(step) + 1), step.sharding)


def _apply(tx, schedule, shardings, params, opt_state, grads, loss):
  """Returns parameters and optimizer state after one step, or unchanged, and the metrics.

  Uses `cond`, since `where` keeps old and new arrays alive together: measured for
  AdamW on 135M parameters, 918 MiB of temporaries against none.
  """
  norm = optax.tree.norm(grads)
  is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  of_optimizer = None

  def step(params, opt_state):
    updates, opt_state = tx.update(grads, opt_state, params)
    return _constrain(optax.apply_updates(params, updates), shardings), opt_state

  if shardings is not None:
    mesh = sharding.mesh_of(shardings)
    of_optimizer = sharding.opt_state_shardings(tx, params, shardings, mesh)
  counted = is_finite.astype(jnp.float32)
  metrics: Metrics = {
    "train/loss": Mean(jnp.where(is_finite, loss, 0), counted),
    "train/grad_norm": Mean(jnp.where(is_finite, norm, 0), counted),
    "train/skipped_share": Mean(1 - counted, jnp.ones(())),
  }
  if schedule is not None:
    rate = jnp.asarray(schedule(optim.steps_done(opt_state)), jnp.float32)
    metrics["train/learning_rate"] = Mean(rate, jnp.ones(()))
  keep = lambda params, opt_state: (params, opt_state)
  params, opt_state = jax.lax.cond(is_finite, step, keep, params, opt_state)
  opt_state = _constrain(opt_state, of_optimizer)
  return _constrain(params, shardings), opt_state, metrics


def _constrain(tree: Any, shardings: Any) -> Any:
  """Constrains a tree of the parameters' structure to their shardings."""
  return tree if shardings is None else jax.lax.with_sharding_constraint(tree, shardings)


def _check(objective: Objective, minibatches: Sequence[Minibatch], epochs: int) -> None:
  """Raises ValueError if this objective cannot learn from the minibatches."""
  if not minibatches:
    raise ValueError("no minibatch: nothing to learn from; skip the step (see batching.Assembled)")
  batches = [batch for minibatch in minibatches for batch in minibatch.microbatches]
  steps = epochs * len(minibatches)
  if steps > 1 and objective.needs_old and any(batch.old_logprobs is None for batch in batches):
    raise ValueError(
      f"{steps} optimizer steps on one batch need old_logprobs, scored before the first step"
      " (train_step.with_logprobs)"
    )
