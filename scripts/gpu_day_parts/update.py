"""The update of a model with random weights: gradients of a microbatch, then the optimizer."""

import dataclasses
import math
import pathlib
import statistics
import time
from typing import Any

from gpu_day_parts import arithmetic, child, models, rows, running, traces


def measure(
  record: child.Record,
  settings: running.Settings,
  *,
  model: str,
  microbatch: list[int],
  lengths: dict[str, int],
  compute_dtype: str,
  steps: int,
) -> None:
  """Measures seconds, memory, and the activity of the device.

  Args:
    record: Record of the measurements.
    settings: Settings of the day.
    model: Name in `models`.
    microbatch: Sizes [rows, tokens of a row].
    lengths: Fields of `rows.Lengths`.
    compute_dtype: Dtype of matrix products.
    steps: Number of timed updates, after one that compiles.

  Raises:
    RuntimeError: The loss is not finite.
  """
  device = child.open_device(record, settings)
  import jax

  from grpo_jax.learn import train_step
  from grpo_jax.types import Denominators

  config = models.config_of(model)
  batch, counted, operations = _microbatch(config, microbatch, rows.Lengths(**lengths))
  record.put(
    model=model,
    microbatch=microbatch,
    compute_dtype=compute_dtype,
    operations=operations,
    **dataclasses.asdict(counted),
  )
  update, tx = _update(config, compute_dtype)
  state = train_step.init(models.random_weights(config), tx)
  params, opt_state = state.params, state.opt_state
  record.put(parameters=arithmetic.parameters(params))
  del state  # the optimizer step consumes its arrays.
  denominators = Denominators(float(counted.predicted), float(counted.predicted))

  def step() -> tuple[float, float, float]:
    nonlocal params, opt_state
    start = time.perf_counter()
    sums = update.start(params)
    sums, _ = jax.block_until_ready(update.differentiate(params, sums, batch, denominators))
    between = time.perf_counter()
    params, opt_state, _ = jax.block_until_ready(update.apply(params, opt_state, *sums))
    return between - start, time.perf_counter() - between, float(sums[1])

  first, *_ = compiled = step()
  record.put(first_differentiate_s=first, first_apply_s=compiled[1], loss=compiled[2])
  if not math.isfinite(compiled[2]):
    raise RuntimeError(f"the loss is {compiled[2]}")
  for _ in range(steps):
    differentiate, apply, _ = step()
    record.append("samples", {"differentiate_s": differentiate, "apply_s": apply})
    record.put(peak_bytes=child.peak_bytes(device))
    if settings.left_s() < 4 * (differentiate + apply) + 5:
      break
  folder = pathlib.Path(settings.scratch) / f"profile_{microbatch[1]}"
  with jax.profiler.trace(str(folder)):
    step()
  profile = traces.summarise(traces.load(folder), child.platform_of(device))
  record.put(profile=dataclasses.asdict(profile))


def seconds(result: dict[str, Any]) -> float:
  """Returns the median time of an update, gradients and optimizer together."""
  return statistics.median(x["differentiate_s"] + x["apply_s"] for x in result["samples"])


def _microbatch(config: Any, sizes: list[int], lengths: rows.Lengths) -> tuple[Any, Any, int]:
  """Returns a batch on the device, the sizes of its work, and the operations of that work."""
  import jax

  from grpo_jax.types import Batch

  count, row_tokens = sizes
  arrays, counted = rows.make(count, row_tokens, lengths, config.vocab_size)
  pairs = arithmetic.attended_pairs(arrays["segment_ids"], arrays["branch_ids"])
  operations = arithmetic.update_operations(
    config, tokens=counted.tokens, pairs=pairs, predicted=counted.predicted
  )
  batch = Batch(**{name: jax.device_put(array) for name, array in arrays.items()})
  return batch, counted, operations


def _update(config: Any, compute_dtype: str) -> tuple[Any, Any]:
  """Makes the update of a run with the default options, and its optimizer."""
  from grpo_jax.learn import optim, token_scores, train_step
  from grpo_jax.models.products import Products
  from grpo_jax.rl import objectives

  objective = objectives.make(kl_coef=0.0)
  options: dict[str, Any] = {"products": Products(compute_dtype=compute_dtype), "remat": "full"}
  tx, schedule = optim.make(1000, learning_rate=1e-6, weight_decay=0.01)
  return train_step.make_update(
    token_scores.make_logprobs(config, **options),
    tx,
    objective,
    report_entropy=True,
    schedule=schedule,
    token_loss=token_scores.make_token_loss(config, objective, **options),
  ), tx
