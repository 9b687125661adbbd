"""The sections `teacher` and `reference` of a config: their checks, and what is made of them."""

from collections.abc import Iterator

from grpo_jax.config import modes
from grpo_jax.config.options import Config
from grpo_jax.engines import prompt_scoring
from grpo_jax.http import addresses
from grpo_jax.http.retries import RetryPolicy
from grpo_jax.learn.options import ReferenceOptions
from grpo_jax.rl.distillation import Distillation

_COVARIANCE = ("clip_cov", "kl_cov")  # losses that choose tokens before the update.


def has_teacher(config: Config) -> bool:
  """Returns whether a teacher gives advantages."""
  return bool(config.teacher.path or config.teacher.urls)


def distillation(config: Config) -> Distillation | None:
  """Makes what the objective knows of the teacher; None if there is none."""
  if not has_teacher(config):
    return None
  teacher = config.teacher
  return Distillation(teacher.coef, teacher.reward_coef, teacher.clamp)


def temperature(config: Config) -> float:
  """Returns the temperature of the teacher's logprobs."""
  own = config.teacher.temperature
  return config.sampling.temperature if own is None else own


def scorer(config: Config) -> prompt_scoring.PromptScorer:
  """Makes what asks the teacher's servers; nothing is sent.

  Raises:
    ValueError: An address cannot be used, or the variable with the key is not set.
  """
  teacher = config.teacher
  each = teacher.timeout_s + RetryPolicy().max_backoff_s
  patience = RetryPolicy(
    timeout_s=teacher.timeout_s,
    total_timeout_s=(teacher.retries + 1) * each,
    retries=teacher.retries,
  )
  return prompt_scoring.PromptScorer(
    tuple(teacher.urls),
    api=teacher.api,
    model=teacher.model,
    key=addresses.key(teacher.api_key_env),
    patience=patience,
    concurrency=teacher.concurrency,
  )


def problems(config: Config) -> Iterator[str]:
  """Yields reasons why the teacher, or an update of the reference policy, cannot work."""
  yield from _reference_problems(config)
  teacher = config.teacher
  if not has_teacher(config):
    return
  if teacher.path and teacher.urls:
    yield "teacher.path and teacher.urls name two teachers: leave one of them out"
  if teacher.urls:
    yield from _server_problems(config)
  if modes.is_offline(config):
    yield (
      "a teacher scores what the policy samples, and mode='offline' learns from recorded"
      " completions: set mode='online', or no teacher"
    )
  if config.loss.loss in _COVARIANCE:
    yield (
      f"loss.loss={config.loss.loss!r} chooses tokens by the advantages of rewards, and a teacher"
      " changes these: choose another loss"
    )
  if config.sampling.logprobs == "truncated":
    yield (
      "a teacher's logprobs are of its whole distribution, and sampling.logprobs='truncated'"
      " compares truncated ones: set it to 'full', with top_k=0, top_p=1 and min_p=0"
    )
  for name, is_on in (
    ("filters.drop_no_signal", config.filters.drop_no_signal),
    ("dynamic_sampling.enabled", config.dynamic_sampling.enabled),
  ):
    if is_on:
      yield (
        f"{name}=True drops groups whose rewards are equal, and a teacher teaches on these too:"
        " set it to False"
      )


def _server_problems(config: Config) -> Iterator[str]:
  teacher = config.teacher
  try:
    scorer(config)
  except ValueError as error:
    yield f"teacher: {error}"
  if prompt_scoring.APIS[teacher.api].needs_model and not teacher.model:
    yield f"teacher.api={teacher.api!r} needs teacher.model, the name of the model at the servers"
  if temperature(config) != 1:
    yield (
      f"teacher.urls: servers score at temperature 1, not at {temperature(config):g}: set"
      " sampling.temperature=1, or teacher.temperature=1 to compare the policy at its sampling"
      " temperature with the teacher at temperature 1"
    )


def _reference_problems(config: Config) -> Iterator[str]:
  reference, every = config.reference, config.reference.update_every_steps
  if every and not config.loss.kl_coef > 0:
    yield (
      f"reference.update_every_steps={every} needs loss.kl_coef > 0: without a KL there is no"
      " reference policy"
    )
  if not every and reference.mixup != ReferenceOptions.mixup:
    yield f"reference.mixup={reference.mixup} would never be read: reference.update_every_steps=0"
