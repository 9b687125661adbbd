"""The state of training, and its update on a batch of rollouts. Pure.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from grpo_jax import metrics as metric_sums
from grpo_jax.compilation import precision, programs
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.errors import ExpectedFailure
from grpo_jax.learn import optim, sharding
from grpo_jax.learn.policy import attach, full_weights, trainable_of
from grpo_jax.learn.selecting import Selector, make_selector
from grpo_jax.learn.token_scores import (
  SMALLER_BATCHES,
  LogprobsFn,
  LossFn,
  OnMicrobatch,
  TokenScores,
  truncation_metrics,
)
from grpo_jax.processes import arrays
from grpo_jax.rl.logprobs import gather_loss_tokens
from grpo_jax.rl.objectives import Objective
from grpo_jax.types import Batch, Denominators, Mean, Metrics, Minibatch, TrainState

# For each minibatch, for each microbatch: log πθ at `loss_places`, before the (first) update.
MicrobatchLogprobs = list[list[Float[Array, "B N"]]]

# What to do if memory is short for programs of the optimizer; for error messages.
SMALLER_STATE = "split the weights over more devices with mesh.fsdp"


class NonFiniteGradients(ExpectedFailure, RuntimeError):
  """Too many consecutive steps changed nothing, because their gradients were not finite."""


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
  remedy: str = SMALLER_BATCHES,
) -> Update:
  """Makes the function of a training step; see `Update`.

  Args:
    logprobs: Function made by `token_scores.make_logprobs`.
    tx: The optimizer.
    objective: The loss.
    epochs: Number of passes over the minibatches of a batch of rollouts.
    report_entropy: Whether the entropy is computed even if the loss does not need it.
    schedule: Learning rate by step, reported as "train/learning_rate"; None: not reported.
    shardings: Shardings of what is trained, if it is to stay sharded.
    token_loss: Function made by `token_scores.make_token_loss` with the same objective. It
      replaces `logprobs`: equal results in less time. None: two passes over the vocabulary.
    matmul_precision: Precision of float32 products, the optimizer's too; see `precision.resolve`.
    remedy: Advice if memory is short for the gradients, for error messages.
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
      metrics |= truncation_metrics(found, tokens.mask)
      router = found.router
    else:
      found = token_loss(params, batch, denominators, with_entropy)
      loss, policy_logprobs, entropy, router = found
      # The objective again, for the metrics only; cheap, since it computes with [B N] numbers.
      _, metrics = objective(policy_logprobs, entropy, tokens, denominators)
    return loss, (metrics | (router or {}), policy_logprobs)

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
      remedy=remedy,
    ),
    apply=Program(
      jax.jit(scoped(apply), donate_argnums=(0, 1)), name="optimizer", remedy=SMALLER_STATE
    ),
    selector=selector,
  )


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
      " (scoring.with_logprobs)"
    )
