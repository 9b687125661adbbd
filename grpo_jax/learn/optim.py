"""The optimizer: schedule, clipping, weight decay, any optimizer of optax. Pure."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from grpo_jax import checked

KINDS: Mapping[str, checked.Kind] = {
  "total_steps": checked.whole(low=1),
  "optimizer": checked.text(),
  "learning_rate": checked.number(above=0),
  "schedule": checked.choice(("constant", "linear", "cosine")),
  "warmup_steps": checked.whole(low=0),
  "final_share": checked.number(low=0, high=1),
  "max_grad_norm": checked.number(above=0, none=True),
  "weight_decay": checked.number(low=0),
  "options": checked.mapping(none=True),
}


def make(
  total_steps: int,
  *,
  optimizer: str = "adamw",
  learning_rate: float = 5e-6,
  schedule: str = "constant",
  warmup_steps: int = 0,
  final_share: float = 0.0,
  max_grad_norm: float | None = 1.0,
  weight_decay: float = 0.01,
  options: Mapping[str, Any] | None = None,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
  """Makes clip-by-global-norm → optimizer(schedule).

  Args:
    total_steps: optimizer steps of the run, over which the schedule falls.
    optimizer: name of a function of optax that takes a `learning_rate`.
    learning_rate: the highest of the schedule.
    schedule: "constant", "linear" or "cosine", after the warm-up.
    warmup_steps: optimizer steps of a linear rise; see `make_schedule`.
    final_share: what "linear" and "cosine" end at, as a share of `learning_rate`.
    max_grad_norm: gradients of a larger L2 norm, over all parameters, are scaled down to it;
      None: never.
    weight_decay: decoupled, of all but norms and biases.
    options: further keyword arguments of the optimizer, b1 or eps, say.

  Returns:
    The optax transformation, and the schedule: optimizer steps done → learning rate.

  Raises:
    ValueError: an unknown name, or an optimizer that does not take what was asked for.
  """
  given = {
    "optimizer": optimizer,
    "max_grad_norm": max_grad_norm,
    "weight_decay": weight_decay,
    "options": options,
  }
  checked.require(KINDS, given, of="optim")
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
    raise ValueError(f"optax.{optimizer} takes no weight_decay, got {weight_decay}; try adamw")
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
  schedule: str = "constant",
  warmup_steps: int = 0,
  final_share: float = 0.0,
) -> optax.Schedule:
  """Makes the function from optimizer steps done to learning rate.

      warm-up: α (i + 1) / (w + 1), i = 0 .. w - 1, so that the first step is not wasted on 0;
      then α · f((i - w) / (n - w)): 1, or linear or half a cosine from 1 to the final share.

  A run of n <= w steps ends within its warm-up.

  Raises:
    ValueError: an unknown schedule, or a number out of range.
  """
  given = {
    "total_steps": total_steps,
    "learning_rate": learning_rate,
    "schedule": schedule,
    "warmup_steps": warmup_steps,
    "final_share": final_share,
  }
  checked.require(KINDS, given, of="optim")
  if schedule == "constant" and final_share:
    raise ValueError(
      f"optim: final_share={final_share} would never be read: schedule='constant' does not fall"
    )
  after = SCHEDULES[schedule](learning_rate, max(total_steps - warmup_steps, 1), final_share)
  if not warmup_steps:
    return after
  first = learning_rate / (warmup_steps + 1)
  rise = optax.linear_schedule(first, learning_rate, warmup_steps)
  return optax.join_schedules([rise, after], [warmup_steps])


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
  """Returns a tree of bools: True where weight decay applies, i.e. not on norms and biases.

  Told by name, since stacked layers give a vector two axes.
  """
  return jax.tree_util.tree_map_with_path(lambda path, _: _is_decayed(path), params)


def steps_done(opt_state: Any) -> Int[Array, ""] | int:
  """Returns how many optimizer steps were taken (skipped ones do not count); 0 if nobody counts."""
  counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
  return jnp.max(jnp.stack([count for _, count in counts])) if counts else 0


def _is_decayed(path: tuple[Any, ...]) -> bool:
  name = jax.tree_util.keystr(path[-1:], simple=True)
  return not (name.endswith("norm") or name.endswith("bias"))


def _optimizer(name: str) -> tuple[Callable[..., optax.GradientTransformation], list[str]]:
  """Returns the optimizer of that name and the keyword arguments that it takes."""
  factory = vars(optax).get(name)
  accepted = list(inspect.signature(factory).parameters) if inspect.isfunction(factory) else []
  if factory is None or accepted[:1] != ["learning_rate"]:
    near = difflib.get_close_matches(name, _names(), n=3)
    raise ValueError(f"optax has no optimizer {name!r}; near: {', '.join(near) or 'none'}")
  return factory, accepted[1:]


def _names() -> list[str]:
  """The names of what could be an optimizer of optax."""
  functions = {name: f for name, f in vars(optax).items() if inspect.isfunction(f)}
  return [n for n, f in functions.items() if "learning_rate" in inspect.signature(f).parameters]


# Name → (highest rate, steps, final share) → schedule.
SCHEDULES: dict[str, Callable[[float, int, float], optax.Schedule]] = {
  "constant": lambda rate, steps, share: optax.constant_schedule(rate),
  "linear": lambda rate, steps, share: optax.linear_schedule(rate, rate * share, steps),
  "cosine": lambda rate, steps, share: optax.cosine_decay_schedule(rate, steps, alpha=share),
}
