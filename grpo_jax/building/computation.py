"""The programs of a run, made from its config, and the list of those to compile ahead.

Nothing here needs weights: shapes, dtypes and shardings follow from the config, the model's
config.json and the mesh, so programs can be compiled while the weights are read.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from grpo_kernels.attention import Attention
from grpo_kernels.truncation import Truncation
from jax.sharding import Mesh

from grpo_jax.batching import layout, packing
from grpo_jax.building import group_sizes, router_replay, sync_check, weights_spec
from grpo_jax.compilation import precision
from grpo_jax.compilation.programs import CompileJob, Program
from grpo_jax.config import (
  ahead_options,
  batching_options,
  lora_options,
  modes,
  run_options,
  teacher_options,
)
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.engines.base import SamplingParams
from grpo_jax.groups import credit
from grpo_jax.learn import (
  adapters,
  monitoring,
  operations,
  policy,
  scoring,
  screening,
  sharding,
  token_scores,
  train_step,
)
from grpo_jax.models import export
from grpo_jax.models.config import ModelConfig
from grpo_jax.models.options import REMATS
from grpo_jax.models.placement import attention_partition
from grpo_jax.models.products import Products
from grpo_jax.processes import arrays
from grpo_jax.rl import estimators, objectives
from grpo_jax.types import Batch, ExpertShape, TrainState


@dataclasses.dataclass(frozen=True)
class Teacher:
  """The program of a teacher in the trainer; made by `make`.

  Attributes:
    weights: Shapes, dtypes and shardings of its weights.
    score: Program that computes its logprobs, a `scoring.Scorer`.
  """

  weights: Any
  score: Program


@dataclasses.dataclass(frozen=True)
class Computation:
  """The programs of a run; made by `make`.

  Attributes:
    config: Config of the run.
    model: Sizes of the model.
    mesh: Mesh of the devices.
    read: Form in which the weights of the model are read.
    composition: Composition of the full weights; None: every weight is trained.
    tx: Optimizer.
    objective: Loss.
    estimator: Estimator of the advantages.
    shapes: Shapes that microbatches may have.
    cost: Cost by which the shapes of a step are chosen.
    update: Training step.
    score: Program that computes logprobs, a `scoring.Scorer`; of the whole softmax.
    score_old: The same of the distribution that is trained; `score` itself if that is the whole.
    watch: Program that measures the policy, a `scoring.Watcher`.
    drift: Program made by `monitoring.make_drift`.
    mismatch: Program made by `monitoring.make_mismatch`.
    initialize: Program (what is trained) → state of the optimizer.
    copy: Program (full weights) → a copy of them.
    follow: Program (reference, full weights) → the next reference; None: it never changes.
    teacher: Teacher in the trainer; None: there is none, or servers have it.
    measure: Programs that measure the adapter; None: every weight is trained.
    has_weights: Whether the batches of an update have the weights of completions, because weights
      other than 1 are expected.
    score_served: Scorer that proves new weights at the engine; see `sync_check`. None: they are not
      proven.
    experts: Shape of the records of experts that the update replays; None: it replays none.
  """

  config: Config
  model: ModelConfig
  mesh: Mesh
  read: weights_spec.WeightsSpec
  composition: policy.Composition | None
  tx: optax.GradientTransformation
  objective: objectives.Objective
  estimator: estimators.Estimator
  shapes: tuple[packing.Shape, ...]
  cost: packing.Cost
  update: train_step.Update
  score: Program
  score_old: Program
  watch: Program
  drift: Program
  mismatch: Program
  initialize: Program
  copy: Program
  follow: Program | None = None
  teacher: Teacher | None = None
  measure: adapters.AdapterMonitor | None = None
  has_weights: bool = False
  score_served: Program | None = None
  experts: ExpertShape | None = None

  @property
  def shardings(self) -> Any:
    """Shardings of the weights as they are read."""
    return self.read.shardings

  @functools.cached_property
  def described(self) -> tuple[Any, Any]:
    """Shapes, dtypes and shardings of the policy's weights and of the reference's."""
    return policy.described(self.read.described, self.composition)

  @functools.cached_property
  def full(self) -> Any:
    """Shapes, dtypes and shardings of the full weights, as engines and files take them."""
    return policy.full_weights(self.described[0])

  @functools.cached_property
  def state(self) -> TrainState:
    """Shapes, dtypes and shardings of the training state, without a reference policy."""
    trainable = policy.trainable_of(self.described[0])
    return train_step.shapes_of_state(trainable, self.tx, policy.shardings_of(trainable))

  @functools.cached_property
  def needs_old(self) -> bool:
    """Whether old logprobs are scored: depends on the config only, so it is equal in all steps."""
    learn, objective = self.config.learn, self.objective
    updates = learn.epochs * learn.minibatches
    is_used = objective.needs_old and (updates > 1 or objective.options.kl_in_reward)
    return is_used or objective.drops_by_error

  @functools.cached_property
  def has_ages(self) -> bool:
    """Whether the batches of an update have the ages of tokens; see `LossTokens.ages`."""
    return ahead_options.is_ahead(self.config) or self.objective.needs_ages

  @property
  def skips_zero_advantage(self) -> bool:
    """Whether completions of advantage 0 are not computed, since they add nothing to the loss."""
    adds_something = self.objective.acts_without_advantage or self.estimator.needs_whitening
    return self.config.batching.skip_zero_advantage and not adds_something

  @property
  def proof_shape(self) -> packing.Shape:
    """Shape of the microbatches of a proof of new weights: the smallest with the longest rows."""
    return min(self.shapes, key=lambda shape: (-shape.row_tokens, shape.places))

  @property
  def trainable_shardings(self) -> Any:
    """Shardings of what is trained."""
    return policy.shardings_of(self.state.params)

  def begin(self, params: Any, trained: Any = None) -> tuple[Any, policy.Policy]:
    """Returns what is trained of the weights that were read, and the policy around it.

    Args:
      params: Weights as they were read.
      trained: Adapter to begin with; None: a new one, or every weight is trained.
    """
    is_frozen = self.objective.needs_ref and self.follow is None
    copy = self.copy if is_frozen else None
    return policy.begin(params, self.composition, copy=copy, trained=trained)

  def jobs(self) -> list[CompileJob]:
    """Returns the compilations to make before the first step, the longest first."""
    config, state = self.config, self.state
    weights, reference = self.described
    bare = self._batches()
    found = self.update.jobs(state, self._scored_batches(), weights)
    if self.update.selector is not None:
      bare_scored = self._scored_batches(has_selected=False, has_weights=False)
      found += self.update.selector.jobs(weights, bare_scored)
    threshold = self.objective.options.seq_logprob_error_threshold
    if threshold is not None:
      without = dict.fromkeys(("has_selected", "has_kept", "has_teacher"), False)
      found += screening.jobs(self._scored_batches(**without), threshold=threshold)
    found += monitoring.jobs(
      self.watch,
      self.drift,
      self.mismatch,
      weights,
      bare,
      self._batches(has_ages=self.has_ages) if self.skips_zero_advantage else {},
      initial=None if self.composition is None else reference,
      all_every_steps=config.learn.report_all_every_steps,
      kl_every_steps=config.learn.report_kl_every_steps,
    )
    for program, scored_weights, experts in self._scorings(weights, reference):
      batches = self._batches(experts=experts)
      found += [program.job(scored_weights, x, detail=detail) for detail, x in batches.items()]
    if teacher := self.teacher:
      alone = self._batches(experts=None)
      found += [teacher.score.job(teacher.weights, x, detail=detail) for detail, x in alone.items()]
    if self.follow is not None:
      found.append(self.follow.job(self.full, self.full))
    if self.composition is not None:
      found += self.composition.jobs()
    elif self.objective.needs_ref:
      found.append(self.copy.job(self.full))
    if self.measure is not None:
      found += self.measure.jobs(weights)
    if self.score_served is not None:
      rows, parts = sharding.of_rows(self.mesh), sharding.row_parts(self.mesh)
      batch = layout.described(self.proof_shape, rows, parts=parts)
      found.append(self.score_served.job(weights, batch, detail=_detail(self.proof_shape)))
    found.append(self.initialize.job(state.params))
    found += export.jobs(self.full, self.model, dtype=config.export.dtype)
    return found + self._gather_jobs() + self._credit_jobs()

  def _scorings(
    self, weights: Any, reference: Any
  ) -> list[tuple[Program, Any, ExpertShape | None]]:
    """Returns the programs that score batches, with the weights of each; equal ones once.

    Also returns the experts that are replayed: those of the policy itself.
    """
    is_scored = self.needs_old or modes.is_offline(self.config)
    found = [(self.score_old, weights, self.experts)] if is_scored else []
    is_like_policy = self.score is self.score_old and self.composition is None
    if self.objective.needs_ref and not (found and is_like_policy and self.experts is None):
      found.append((self.score, reference, None))
    return found

  def _scored_batches(self, **without: bool) -> dict[str, Batch]:
    """Returns `_batches` with the fields that the update sees, except for some."""
    fields = {
      "has_old": self.needs_old,
      "has_ref": self.objective.needs_ref,
      "has_teacher": self.objective.needs_teacher,
      "has_selected": self.objective.selects,
      "has_kept": self.objective.drops_by_error,
      "has_ages": self.has_ages,
      "has_weights": self.has_weights,
    }
    return self._batches(**(fields | without))

  def _batches(self, **fields: Any) -> dict[str, Batch]:
    """Returns shapes, dtypes and shardings of a batch of every shape, by its description.

    Args:
      **fields: Optional fields of a batch; see `layout.described`.
    """
    rows, parts = sharding.of_rows(self.mesh), sharding.row_parts(self.mesh)
    fields = {"experts": self.experts, "parts": parts} | fields
    return {_detail(shape): layout.described(shape, rows, **fields) for shape in self.shapes}

  def _gather_jobs(self) -> list[CompileJob]:
    """Returns the compilations of what is fetched; [] if this process has every part of it."""
    fetched: list[Any] = []
    for batch in self._scored_batches(has_selected=False).values():
      like: Any = batch.loss_places
      fetched += [jax.ShapeDtypeStruct(like.shape, np.float32, sharding=like.sharding), batch.kept]
      if self.update.selector is not None:
        fetched.append(self.update.selector.fetched(batch))
    if self.config.teacher.urls:  # what its servers score is read from the batch.
      fetched.append(self._batches(experts=None))
    if self.composition is not None:  # written alone at the end.
      fetched.append(self.state.params)
    return [CompileJob(f"gathering {name}", run) for name, run in arrays.gathers(fetched).items()]

  def _credit_jobs(self) -> list[CompileJob]:
    prompts, widths = self.config.rollout.prompts_per_step, group_sizes.widths_of(self.config)
    found = []
    for width in widths:
      found += credit.jobs(self.estimator, room=(prompts, width))
    if self.estimator.needs_whitening:
      longest = batching_options.load(self.config).completion
      found += credit.whitening_jobs(
        self.estimator,
        self.objective.options,
        tokens=prompts * widths[-1] * longest,
        places=[(shape.rows, shape.loss_tokens) for shape in self.shapes],
        has_weights=self.has_weights,
      )
    return found


def _detail(shape: packing.Shape) -> str:
  return f"{shape.rows} × {shape.row_tokens} ({shape.loss_tokens})"


def make(
  config: Config,
  model: ModelConfig,
  mesh: Mesh,
  objective: objectives.Objective,
  *,
  num_valid: int | None = None,
  teacher: ModelConfig | None = None,
  has_weights: bool = False,
  remedy: str = token_scores.SMALLER_BATCHES,
) -> Computation:
  """Makes the programs of a run; nothing is compiled.

  Args:
    config: Config of the run.
    model: Sizes of the model.
    mesh: Mesh of the devices.
    objective: Loss.
    num_valid: Number of token ids that the tokenizer has; None: those of the model.
    teacher: Sizes of the teacher in the trainer; None: there is none.
    has_weights: Whether completions are expected to have weights other than 1.
    remedy: Advice if memory is short for an update, for error messages.

  Raises:
    ConfigError: The reference policy is a frozen base and cannot follow the policy.
  """
  matmul_precision = precision.resolve(config.model.matmul_precision, config.model.compute_dtype)
  adapter = lora_options.load(config)
  dtype = np.float32 if adapter is None else adapters.read_dtypes(adapter)
  read = weights_spec.WeightsSpec(
    weights_spec.described_weights(model, weights_spec.shardings_of(model, mesh), dtype=dtype),
    dtype,
  )
  composition = None
  if adapter is not None:
    composition = adapters.composition(model, mesh, adapter, seed=config.seed)
  trainable = policy.trainable_of(policy.described(read.described, composition)[0])
  shardings = policy.shardings_of(trainable)
  tx, schedule = run_options.optimizer(config)
  remat = config.model.remat or REMATS[0]  # None: nobody has chosen, or there are no gradients.
  policy_options = {
    "temperature": config.sampling.temperature,
    "products": Products(
      config.model.compute_dtype, config.model.product_dtype, sharding.placement(mesh)
    ),
    "remat": remat,
    "attention": Attention(config.model.attention, attention_partition(mesh)),
    "partition": sharding.head_partition(mesh),
  }
  exact = {"matmul_precision": matmul_precision}
  whole = token_scores.make_logprobs(model, implementation=config.model.logprobs, **policy_options)
  truncation, logprobs = truncation_of(config, num_valid), whole
  if truncation is not None:
    logprobs = token_scores.make_logprobs(model, truncation=truncation, **policy_options)
  token_loss = None
  if takes_one_sweep(config, objective):
    token_loss = token_scores.make_token_loss(model, objective, **policy_options)
  update = train_step.make_update(
    logprobs,
    tx,
    objective,
    epochs=config.learn.epochs,
    report_entropy=config.learn.report_entropy,
    schedule=schedule,
    shardings=shardings,
    token_loss=token_loss,
    remedy=remedy,
    **exact,
  )
  with_entropy = config.learn.report_entropy
  cost = operations.update_cost(model, remat=remat)
  score_old = score = scoring.make_scorer(whole, mesh=mesh, matmul_precision=matmul_precision)
  if truncation is not None:
    score_old = scoring.make_scorer(logprobs, mesh=mesh, matmul_precision=matmul_precision)
  return Computation(
    config=config,
    model=model,
    mesh=mesh,
    read=read,
    composition=composition,
    tx=tx,
    objective=objective,
    estimator=run_options.estimator(config),
    shapes=batching_options.plan(
      config, cost=cost, replicas=sharding.replicas(mesh), parts=sharding.row_parts(mesh)
    ),
    cost=cost,
    update=update,
    score=score,
    score_old=score_old,
    watch=scoring.make_watcher(logprobs, with_entropy=with_entropy, mesh=mesh, **exact),
    drift=monitoring.make_drift(objective, is_frozen=not config.reference.update_every_steps),
    mismatch=monitoring.make_mismatch(objective),
    initialize=train_step.make_initializer(trainable, tx, shardings=shardings),
    copy=_copier(read.shardings),
    follow=_follower(config, read.shardings, composition),
    teacher=None if teacher is None else make_teacher(config, teacher, mesh),
    measure=None if adapter is None else adapters.AdapterMonitor(adapter.scale),
    has_weights=has_weights,
    score_served=sync_check.make_scorer(config, model, mesh),
    experts=router_replay.shape_of(config, model),
  )


def make_teacher(config: Config, model: ModelConfig, mesh: Mesh) -> Teacher:
  """Makes the program of a teacher with its own architecture; nothing is compiled.

  Args:
    config: Config of the run.
    model: Sizes of the teacher.
    mesh: Mesh of the devices, over which it is split as the policy is.
  """
  dtypes = config.model.compute_dtype, config.model.product_dtype
  logprobs = token_scores.make_logprobs(
    model,
    temperature=teacher_options.temperature(config),
    products=Products(*dtypes, sharding.placement(mesh)),
    attention=Attention(config.model.attention, attention_partition(mesh)),
    implementation=config.model.logprobs,
    partition=sharding.head_partition(mesh),
  )
  exact = precision.resolve(config.model.matmul_precision, config.model.compute_dtype)
  weights = weights_spec.described_weights(
    model,
    weights_spec.shardings_of(model, mesh),
    dtype=config.teacher.dtype or config.model.compute_dtype,
  )
  score = scoring.make_scorer(logprobs, mesh=mesh, matmul_precision=exact, name="teacher")
  return Teacher(weights, score)


def _follower(
  config: Config, shardings: Any, composition: policy.Composition | None
) -> Program | None:
  """Returns the program (reference, full weights) → the next reference; None: it is frozen."""
  if not config.reference.update_every_steps:
    return None
  if composition is not None:
    raise ConfigError(
      "reference.update_every_steps: the reference of a policy with a frozen base is that base,"
      " which never changes: set it to 0"
    )
  share = config.reference.mixup
  follow = functools.partial(policy.followed, share=share)
  jitted = jax.jit(follow, donate_argnums=0, out_shardings=shardings)
  return Program(jitted, name="update of the reference", remedy=train_step.SMALLER_STATE)


def _copier(shardings: Any) -> Program:
  """Returns the program that copies the parameters."""

  def copy(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)

  jitted = jax.jit(copy, out_shardings=shardings)
  return Program(jitted, name="copy of the weights", remedy=train_step.SMALLER_STATE)


def truncation_of(config: Config, num_valid: int | None = None) -> Truncation | None:
  """Returns the filters of the distribution that is trained; None: the whole softmax.

  Args:
    config: Config of the run.
    num_valid: Number of token ids that the tokenizer has; None: those of the model.
  """
  sampling = SamplingParams.of(config.sampling)
  if modes.is_offline(config) or not sampling.reports_truncated:
    return None
  is_sglang = config.engine.name == "sglang"
  return Truncation(
    top_k=sampling.top_k,
    top_p=float(sampling.top_p),
    min_p=float(sampling.min_p),
    # Servers sample padding ids of the embedding, too.
    num_valid=None if is_sglang else num_valid,
    is_joint=is_sglang,
  )


def takes_one_sweep(config: Config, objective: objectives.Objective) -> bool:
  """Returns whether the update computes the head's gradients in the same sweep as the loss.

  It does not if `model.logprobs` names an implementation, since that makes two passes, nor if a
  truncated distribution is trained.
  """
  if truncation_of(config) is not None:
    return False
  is_one_step = config.learn.epochs * config.learn.minibatches == 1
  is_free = config.model.logprobs is None
  return config.learn.gradient_in_forward and is_one_step and is_free and objective.is_token_local
