"""Losses and advantages that users write: what they are given, and how they are checked. Pure.

The contract is in docs/algorithms.md. Functions are called by keyword with what their signatures
name, so that a function that looks at single tokens does not have to take a mask.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from grpo_jax.errors import ExpectedFailure, place_and_reason
from grpo_jax.types import LossTokens

Function = Callable[..., Any]

LOSS_NEEDS = ("policy_logprobs", "advantages")
LOSS_ARRAYS = (*LOSS_NEEDS, "old_logprobs", "behavior_logprobs", "mask", "sequence_ids")
LOSS_OPTIONS = ("clip_low", "clip_high", "dual_clip")
ADVANTAGE_NEEDS = ("rewards", "mask")
ADVANTAGE_ARRAYS = (*ADVANTAGE_NEEDS, "components")
ADVANTAGE_OPTIONS = ("baseline", "scale", "ddof", "eps", "weights")


class CustomFunctionError(ExpectedFailure, ValueError):
  """A user's function passed the check on examples and fails on the data of a run."""


def name_of(function: Function) -> str:
  """Returns the dotted name of a function, for messages."""
  inner = function.func if isinstance(function, functools.partial) else function
  return f"{inner.__module__}.{getattr(inner, '__qualname__', type(inner).__name__)}"


def names_of(function: Function) -> Mapping[str, inspect.Parameter]:
  """Returns the parameters that a function takes by name."""
  named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
  found = inspect.signature(function).parameters
  return {name: parameter for name, parameter in found.items() if parameter.kind in named}


def is_token_local(loss: Function) -> bool:
  """Returns whether a loss looks at single tokens: it takes neither mask nor sequence ids."""
  return not {"mask", "sequence_ids"} & names_of(loss).keys()


def call_loss(
  loss: Function,
  policy: Float[Array, "B N"],
  old: Float[Array, "B N"],
  tokens: LossTokens,
  options: Mapping[str, Any],
) -> Any:
  """Returns the loss of each token, to be minimised, as a user's function computes it.

  Args:
    loss: Checked function; see `check_loss`.
    policy: Logprob log πθ of each token.
    old: Logprob log π_old of each token.
    tokens: Gathered batch, zero where its mask is False.
    options: Values of `LOSS_OPTIONS`; those that the function does not name are not passed.

  Raises:
    ValueError: The loss takes `behavior_logprobs`, and the tokens have none.
  """
  arrays = {
    "policy_logprobs": policy,
    "old_logprobs": old,
    "advantages": tokens.advantages,
    "behavior_logprobs": tokens.behavior_logprobs,
    "mask": tokens.mask,
    "sequence_ids": tokens.sequence_ids,
  }
  names = names_of(loss)
  if "behavior_logprobs" in names and tokens.behavior_logprobs is None:
    raise ValueError(f"loss {name_of(loss)} needs behavior_logprobs, and LossTokens has none")
  if "sequence_ids" in names and tokens.sequence_ids is None:
    arrays["sequence_ids"] = jnp.zeros(policy.shape, jnp.int32)  # a row is one completion.
  given = {**arrays, **options}
  return loss(**{name: value for name, value in given.items() if name in names})


def on_data(what: str, function: Function, like: Any, call: Callable[[], Any]) -> Any:
  """Calls a checked function on the data of a run, and returns its result.

  Args:
    what: "loss" or "advantages", for messages.
    function: Function of the user.
    like: Array whose shape the result must have.
    call: Function without arguments that calls `function`.

  Returns:
    The result of the call, of the shape of `like`.

  Raises:
    CustomFunctionError: The function raised an exception, or its result has another shape.
  """
  what, shape = f"{what} {name_of(function)}", list(like.shape)
  try:
    made = call()
  # User code may raise anything, or exit.
  except (Exception, SystemExit) as error:
    raise CustomFunctionError(f"{what} failed on arrays {shape}: {_line(error)}") from error
  found = list(getattr(made, "shape", ()))
  if found != shape:
    raise CustomFunctionError(f"{what} must return an array {shape}, as its arguments, got {found}")
  return made


@functools.lru_cache(maxsize=32)
def check_loss(loss: Function, options: tuple[tuple[str, Any], ...]) -> bool:
  """Checks a user's loss; see docs/algorithms.md for the rules.

  Args:
    loss: Function of the user, or a `functools.partial` of it.
    options: Values of `LOSS_OPTIONS`.

  Returns:
    Whether the loss can differ from 0 where the advantage is 0.

  Raises:
    ValueError: The loss breaks a rule; the message is one line that says which.
  """
  what = f"loss {name_of(loss)}"
  _check_names(what, loss, needs=LOSS_NEEDS, known=(*LOSS_ARRAYS, *LOSS_OPTIONS))
  for shape in ((2, 8), (3, 5)):
    call = functools.partial(call_loss, loss, options=dict(options))
    made = _traced(what, call, *_loss_example(*shape))
    _check_result(what, made, shape, "policy_logprobs")
  policy, old, tokens = _loss_example(2, 8)
  run = jax.jit(functools.partial(_loss_and_gradient, loss, dict(options)))
  found = _ran(what, run, policy, old, tokens)
  _check_finite(what, *found)
  again = _ran(what, run, policy, old, tokens)
  if not all(np.array_equal(a, b) for a, b in zip(found, again, strict=True)):
    raise ValueError(f"{what} is not pure: two calls with the same arrays differ")
  if not np.any(found[1]):
    raise ValueError(f"{what} has no gradient with respect to policy_logprobs: nothing is learned")
  _check_reach(what, loss, run, found, policy, old, tokens)
  silent = dataclasses.replace(tokens, advantages=jnp.zeros_like(tokens.advantages))
  without = _ran(what, run, policy, old, silent)
  return bool(np.any(without[0]) or np.any(without[1]))


def _loss_and_gradient(
  loss: Function, options: Mapping[str, Any], policy: Array, old: Array, tokens: LossTokens
) -> tuple[Any, Any]:
  """Returns the loss of each token, and the gradient of the sum over the mask."""

  def total(policy: Array) -> tuple[Any, Any]:
    made = call_loss(loss, policy, old, tokens, options)
    return jnp.sum(jnp.where(tokens.mask, made, 0.0)), made

  (_, made), gradient = jax.value_and_grad(total, has_aux=True)(policy)
  return made, gradient


def _loss_example(rows: int, n: int) -> tuple[Array, Array, LossTokens]:
  """Returns a batch whose rows hold two completions of good and bad tokens, and padding."""
  rng = np.random.default_rng(0)
  mask = np.ones((rows, n), bool)
  mask[:, -1] = False
  ids = np.where(np.arange(n) < n // 2, 0, 1)
  fill = lambda x: jnp.asarray(np.where(mask, x, 0.0).astype(np.float32))
  old = rng.uniform(-3.0, -0.1, (rows, n))
  advantages = np.where(ids[None, :] == np.arange(rows)[:, None] % 2, 1.0, -0.5)
  tokens = LossTokens(
    mask=jnp.asarray(mask),
    sequence_ids=jnp.asarray(np.where(mask, ids[None, :], 0), jnp.int32),
    advantages=fill(advantages),
    behavior_logprobs=fill(old + rng.normal(0, 0.01, (rows, n))),
    old_logprobs=fill(old),
    ref_logprobs=None,
  )
  return fill(old + rng.normal(0, 0.05, (rows, n))), fill(old), tokens


def _check_reach(
  what: str,
  loss: Function,
  run: Function,
  found: tuple[Any, Any],
  policy: Array,
  old: Array,
  tokens: LossTokens,
) -> None:
  """Raises ValueError if other tokens, or other completions, change the loss of a token."""
  is_local = is_token_local(loss)
  last = 3 if is_local else 7  # the first row has completions at places 0 to 3 and 4 to 6.
  places = np.zeros(policy.shape, bool)
  places[0, last if is_local else slice(4, last)] = True
  more = lambda x, by: jnp.where(places, x + by, x)
  assert tokens.behavior_logprobs is not None
  changed = dataclasses.replace(
    tokens,
    advantages=more(tokens.advantages, -2.0),
    behavior_logprobs=more(tokens.behavior_logprobs, 0.3),
  )
  other = _ran(what, run, more(policy, -0.4), more(old, 0.2), changed)
  kept = np.asarray(tokens.mask) & ~places
  same = functools.partial(np.allclose, rtol=1e-5, atol=1e-7)
  if all(same(a[kept], b[kept]) for a, b in zip(found, other, strict=True)):
    return
  if is_local:
    raise ValueError(
      f"{what} takes neither mask nor sequence_ids, so the loss of a token may depend on that token"
      " alone; it also depends on others"
    )
  raise ValueError(
    f"{what} mixes the completions of a row: the loss of a token may depend on tokens with the same"
    " row and sequence_ids only"
  )


def call_advantages(
  function: Function,
  rewards: Float[Array, "P G"],
  valid: Array,
  components: Float[Array, "K P G"] | None,
) -> Float[Array, "P G"]:
  """Returns the advantages that a user's function computes; 0 for attempts that are not valid.

  Args:
    function: Checked function; see `check_advantages`.
    rewards: One reward for each attempt, P prompts by G attempts.
    valid: Whether each attempt exists and could be scored, of the same shape.
    components: Reward components, or None if there are none.

  Raises:
    ValueError: The function takes components, and there are none.
  """
  names = names_of(function)
  if "components" in names and components is None:
    raise ValueError(f"{name_of(function)} needs reward components, and the rollouts have none")
  arrays = {
    "rewards": jnp.where(valid, rewards, 0.0),
    "mask": valid,
    "components": components,
  }
  made = function(**{name: value for name, value in arrays.items() if name in names})
  return jnp.where(valid, made, 0.0)


@functools.lru_cache(maxsize=32)
def check_advantages(function: Function, num_components: int = 2) -> None:
  """Checks a user's advantages; see docs/algorithms.md for the rules.

  Args:
    function: Function of the user, or a `functools.partial` of it.
    num_components: Number of reward components of the example.

  Raises:
    ValueError: The function breaks a rule; the message is one line that says which.
  """
  what = f"advantages {name_of(function)}"
  known = (*ADVANTAGE_ARRAYS, *ADVANTAGE_OPTIONS)
  _check_names(what, function, needs=ADVANTAGE_NEEDS, known=known)
  names = names_of(function)

  def bare(rewards: Array, mask: Array, components: Array) -> Any:
    arrays = {"rewards": rewards, "mask": mask, "components": components}
    return function(**{name: value for name, value in arrays.items() if name in names})

  for shape in ((5, 4), (6, 3)):
    made = _traced(what, bare, *_rewards_example(*shape, num_components))
    _check_result(what, made, shape, "rewards")
  rewards, mask, components = _rewards_example(5, 4, num_components)
  run = jax.jit(functools.partial(call_advantages, function))
  found = _ran(what, run, rewards, mask, components)
  _check_finite(what, found)
  if not np.array_equal(found, _ran(what, run, rewards, mask, components)):
    raise ValueError(f"{what} are not pure: two calls with the same arrays differ")
  if not np.any(found):
    raise ValueError(f"{what} are 0 for groups of different rewards: nothing would be learned")
  room = lambda x: jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, 1), (0, 1)])
  padded = _ran(what, run, *map(room, (rewards, mask, components)))[:5, :4]
  if not np.allclose(found, padded, rtol=1e-4, atol=1e-6):
    raise ValueError(
      f"{what} depend on attempts whose mask is False: groups are padded with such attempts, so"
      " they must not enter means or counts"
    )


def _rewards_example(prompts: int, group: int, num_components: int) -> tuple[Array, Array, Array]:
  """Returns rewards, a mask and components.

  The groups have: different rewards, some negative; equal rewards; equal rewards with a masked
  attempt; one valid attempt; no valid attempt.
  """
  rng = np.random.default_rng(1)
  components = np.ones((num_components, prompts, group), np.float32)
  components[:, 0] = rng.uniform(-1.0, 1.0, (num_components, group))
  mask = np.ones((prompts, group), bool)
  mask[2, -1] = mask[3, 1:] = mask[4] = False
  rewards = np.where(mask, components.sum(0), 0.0).astype(np.float32)
  return jnp.asarray(rewards), jnp.asarray(mask), jnp.asarray(np.where(mask, components, 0.0))


def _check_names(
  what: str, function: Function, *, needs: tuple[str, ...], known: tuple[str, ...]
) -> None:
  """Raises ValueError unless a function can be called with the available arguments by name."""
  try:
    names = names_of(function)
    every = inspect.signature(function).parameters
  except (TypeError, ValueError) as error:
    raise ValueError(f"{what} has no signature that can be read: {error}") from error
  missing = [name for name in needs if name not in names]
  if missing:
    only = " by name" if set(missing) & set(every) else ""  # positional-only ones cannot be named.
    raise ValueError(f"{what} must take {', '.join(missing)}{only}; it takes: {', '.join(every)}")
  unknown = [
    name
    for name, parameter in every.items()
    if name not in known
    and parameter.default is parameter.empty
    and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
  ]
  if unknown:
    raise ValueError(
      f"{what} needs {', '.join(unknown)}, which it is not given; it may take {', '.join(known)},"
      " and arguments with a default or in its section's *_args"
    )


def _traced(what: str, function: Function, *arrays: Any) -> Any:
  """Returns shapes and dtypes of the result, without computing it."""
  try:
    return jax.eval_shape(function, *arrays)
  # The function is foreign code and may raise anything, or exit.
  except (Exception, SystemExit) as error:
    raise ValueError(f"{what} cannot be compiled: {_line(error)}") from error


def _ran(what: str, function: Function, *arrays: Any) -> Any:
  """Returns the result as NumPy arrays."""
  try:
    return jax.tree.map(np.asarray, function(*arrays))
  # The function is foreign code and may raise anything, or exit.
  except (Exception, SystemExit) as error:
    raise ValueError(f"{what} cannot be computed: {_line(error)}") from error


def _check_result(what: str, made: Any, shape: tuple[int, ...], like: str) -> None:
  if not hasattr(made, "shape") or not hasattr(made, "dtype"):
    raise ValueError(f"{what} must return an array, got {type(made).__name__}")
  if made.shape != shape or made.dtype != np.float32:
    raise ValueError(
      f"{what} must return float32 {list(shape)}, the shape of {like}, got {made.dtype}"
      f" {list(made.shape)}"
    )


def _check_finite(what: str, values: Any, gradient: Any = 0.0) -> None:
  for part, array in (("result", values), ("gradient", gradient)):
    if not np.all(np.isfinite(array)):
      raise ValueError(
        f"{what}: the {part} is not finite on a small example, whose masked places hold 0"
      )


def _line(error: BaseException) -> str:
  """Returns an error as one short line, with the file and the line."""
  text = place_and_reason(error)
  return f"{text[:400]}{'...' if len(text) > 400 else ''}"
