"""The optimizer: schedule, clipping, weight decay, any optimizer of optax. Pure."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from grpo_jax.errors import place_and_reason
from grpo_jax.learn.options import OptimOptions
from grpo_jax.models import leaves
from grpo_jax.values import checked, names
from grpo_jax.values.options import kinds

_KINDS: Mapping[str, checked.Kind] = {
  **kinds(OptimOptions),
  "total_steps": checked.whole(low=1),
  "schedule": checked.Kind(
    "one of 'constant', 'linear', 'cosine', or a function of your own",
    lambda x: callable(x) or (isinstance(x, str) and x in SCHEDULES),
  ),
  "options": checked.mapping(none=True),
}


def make(
  total_steps: int,
  *,
  optimizer: str = OptimOptions.optimizer,
  learning_rate: float = OptimOptions.learning_rate,
  schedule: str | Callable[..., optax.Schedule] = OptimOptions.schedule,
  warmup_steps: int = OptimOptions.warmup_steps,
  final_share: float = OptimOptions.final_share,
  max_grad_norm: float | None = OptimOptions.max_grad_norm,
  weight_decay: float = OptimOptions.weight_decay,
  options: Mapping[str, Any] | None = None,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Makes clip-by-global-norm → optimizer(schedule).

  Args:
    total_steps: Number of optimizer steps of the run, over which the schedule falls.
    optimizer: Name of a function of optax that takes a `learning_rate`.
    learning_rate: Highest learning rate of the schedule.
    schedule: "constant", "linear" or "cosine", after the warm-up; or a function that makes one
      from `learning_rate` and `total_steps`: see docs/algorithms.md.
    warmup_steps: Number of optimizer steps of a linear rise; see `make_schedule`.
    final_share: Last learning rate of "linear" and "cosine", as a share of `learning_rate`.
    max_grad_norm: Largest L2 norm of the gradients over all parameters; larger gradients are
      scaled down to it. None: no limit.
    weight_decay: Decoupled weight decay, of all parameters but norms and biases.
    options: Further keyword arguments of the optimizer, such as b1 or eps.

  Returns:
    The optax transformation, and the schedule: optimizer steps done → learning rate.

  Raises:
    ValueError: A name is unknown, the optimizer does not take an argument, or a schedule breaks a
      rule.
  """
  given = {
    "optimizer": optimizer,
    "max_grad_norm": max_grad_norm,
    "weight_decay": weight_decay,
    "options": options,
  }
  checked.require(_KINDS, given, of="optim")
  rate = make_schedule(
    total_steps,
    learning_rate=learning_rate,
    schedule=schedule,
    warmup_steps=warmup_steps,
    final_share=final_share,
  )
  arguments = dict(options or {})
  factory, accepted = _optimizer(optimizer)
  if "weight_decay" in accepted:
    arguments["weight_decay"] = weight_decay
    if "mask" in accepted:
      arguments["mask"] = decay_mask
  elif weight_decay:
    raise ValueError(
      f"optax.{optimizer} takes no weight_decay, got {weight_decay}: set it to 0, or use adamw"
    )
  unknown = sorted(set(arguments) - set(accepted))
  if unknown:
    raise ValueError(f"optax.{optimizer} takes no {unknown}; it takes {sorted(accepted)}")
  steps = [factory(rate, **arguments)]
  if max_grad_norm is not None:
    steps.insert(0, clip_by_global_norm(max_grad_norm))
  return optax.chain(*steps), rate


def make_schedule(
  total_steps: int,
  *,
  learning_rate: float,
  schedule: str | Callable[..., optax.Schedule] = OptimOptions.schedule,
  warmup_steps: int = OptimOptions.warmup_steps,
  final_share: float = OptimOptions.final_share,
) -> optax.Schedule:
  """Makes the function from optimizer steps done to learning rate.

      warm-up: α (i + 1) / (w + 1), i = 0 .. w - 1, so that the first step does not have rate 0;
      then α · f((i - w) / (n - w)): 1, or linear or half a cosine from 1 to the final share.

  A run of n <= w steps ends within its warm-up.

  Raises:
    ValueError: The schedule is unknown, a number is out of range, or a function breaks a rule.
  """
  given = {
    "total_steps": total_steps,
    "learning_rate": learning_rate,
    "schedule": schedule,
    "warmup_steps": warmup_steps,
    "final_share": final_share,
  }
  checked.require(_KINDS, given, of="optim")
  if schedule == "constant" and final_share:
    raise ValueError(
      f"optim: final_share={final_share} would never be read: schedule='constant' does not fall"
    )
  steps = max(total_steps - warmup_steps, 1)
  if isinstance(schedule, str):
    after = SCHEDULES[schedule](learning_rate, steps, final_share)
  else:
    after = own_schedule(schedule, learning_rate, steps, final_share)
  if not warmup_steps:
    return after
  first = learning_rate / (warmup_steps + 1)
  rise = optax.linear_schedule(first, learning_rate, warmup_steps)
  return optax.join_schedules([rise, after], [warmup_steps])


def own_schedule(
  function: Callable[..., optax.Schedule], learning_rate: float, steps: int, final_share: float
) -> optax.Schedule:
  """Makes the schedule of a user's function, and checks it at some of its steps.

  Args:
    function: Function that takes any of `learning_rate`, `total_steps` and `final_share` by name.
    learning_rate: Highest learning rate.
    steps: Number of optimizer steps after the warm-up.
    final_share: Last learning rate, as a share of the highest.

  Raises:
    ValueError: The function breaks a rule of docs/algorithms.md.
  """
  inner = function.func if isinstance(function, functools.partial) else function
  what = f"schedule {inner.__module__}.{getattr(inner, '__qualname__', type(inner).__name__)}"
  given = {"learning_rate": learning_rate, "total_steps": steps, "final_share": final_share}
  names = inspect.signature(function).parameters
  if "final_share" not in names and final_share:
    raise ValueError(
      f"optim: final_share={final_share} would never be read: {what} does not take it"
    )
  asked = [
    name
    for name, parameter in names.items()
    if parameter.default is parameter.empty
    and name not in given
    and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
  ]
  if asked:
    raise ValueError(f"{what} needs {', '.join(asked)}, but it receives only {', '.join(given)}")
  try:
    made: Any = function(**{name: value for name, value in given.items() if name in names})
    if not callable(made):
      raise TypeError(f"it must return a function of the step, got {type(made).__name__}")
    of_step = lambda step: jnp.asarray(made(step))
    result = jax.eval_shape(of_step, jnp.zeros((), jnp.int32))
    places = np.unique(np.linspace(0, steps, 9).astype(np.int32))
    rates = np.asarray(jax.jit(jax.vmap(of_step))(places))
  # User code may raise anything, or exit.
  except (Exception, SystemExit) as error:
    raise ValueError(f"{what} cannot be computed: {place_and_reason(error):.400}") from error
  if result.shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
    raise ValueError(
      f"{what} must return one float for each step, got {result.dtype} {list(result.shape)}"
    )
  bad = ~np.isfinite(rates) | (rates < 0)
  if bad.any():
    raise ValueError(
      f"{what} must return finite rates that are not negative, got {rates[bad][0]} at step"
      f" {places[bad][0]}"
    )
  if not rates.any():
    raise ValueError(f"{what} is 0 at every step that was tried: nothing would be learned")
  return cast(optax.Schedule, made)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
  """Scales gradients g by min(1, c / ‖g‖₂), over all parameters together.

  optax's own divides every element by the norm, and XLA then keeps the scaled
  gradients as one more copy of the model; a product fuses with the optimizer.
  """

  def update(updates, state, params=None):
    del params
    norm = global_norm(updates)
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state

  return optax.GradientTransformation(optax.init_empty_state, update)


def global_norm(tree: Any) -> Float[Array, ""]:
  """Returns the L2 norm over all elements of all arrays, in float32."""
  squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
  return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def decay_mask(params: Any) -> Any:
  """Returns a tree of bools: True where weight decay applies.

  It does not apply to norms, biases and frozen weights.

  Decided by name, because stacked layers give a vector two axes.
  """
  return jax.tree_util.tree_map_with_path(lambda path, _: _is_decayed(path), params)


def steps_done(opt_state: Any) -> Int[Array, ""] | int:
  """Returns the number of optimizer steps done, without skipped ones; 0 if the state has no
  count."""
  counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
  return jnp.max(jnp.stack([count for _, count in counts])) if counts else 0


def _is_decayed(path: tuple[Any, ...]) -> bool:
  name = jax.tree_util.keystr(path[-1:], simple=True)
  return not (name.endswith("norm") or name.endswith("bias") or name in leaves.FROZEN)


def _optimizer(name: str) -> tuple[Callable[..., optax.GradientTransformation], list[str]]:
  """Returns the optimizer of that name and the keyword arguments that it takes."""
  factory = vars(optax).get(name)
  accepted = list(inspect.signature(factory).parameters) if inspect.isfunction(factory) else []
  if factory is None or accepted[:1] != ["learning_rate"]:
    near = names.nearest(name, _names(), count=3, cutoff=0.6)
    raise ValueError(f"optax has no optimizer {name!r}; similar names: {', '.join(near) or 'none'}")
  return factory, accepted[1:]


def _names() -> list[str]:
  """Returns the names in optax that could be optimizers."""
  functions = {name: f for name, f in vars(optax).items() if inspect.isfunction(f)}
  return [n for n, f in functions.items() if "learning_rate" in inspect.signature(f).parameters]


# Name → (highest rate, steps, final share) → schedule.
SCHEDULES: dict[str, Callable[[float, int, float], optax.Schedule]] = {
  "constant": lambda rate, steps, share: optax.constant_schedule(rate),
  "linear": lambda rate, steps, share: optax.linear_schedule(rate, rate * share, steps),
  "cosine": lambda rate, steps, share: optax.cosine_decay_schedule(rate, steps, alpha=share),
}
