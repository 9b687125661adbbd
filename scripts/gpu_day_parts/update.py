"""The update of a model with random weights: gradients of a microbatch, then the optimizer."""

import math
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_day_parts import child, models, running, work
from grpo_plan import chips

_LONGEST = 15  # number of kernels of a profile that are kept.


TITLE = "an update of Qwen2.5-1.5B, 16384 places in rows of 1024, 4096 and 16384"
LIMIT_S = 240.0
SIZES = {
  "model": "Qwen2.5-1.5B",
  "microbatches": (
    work.Rows(16, 1024, 160, 8, 60, 340),
    work.Rows(4, 4096, 160, 16, 60, 440),
    work.Rows(1, 16384, 160, 8, 1600, 5200),
  ),
  "compute_dtype": "bfloat16",
  "remat": "full",
  "faster": ("none", "dots"),  # the first of these that fits, for the first microbatch, at the end.
  "steps": 5,  # timed updates, after one that compiles.
}
TINY = {"model": "tiny", "microbatches": (work.TINY_ROWS,), "steps": 2}


def measure(record: child.Record, settings: running.Settings) -> None:
  """Measures seconds, memory, and the activity of the device, for one microbatch after the other.

  All microbatches share the state and the program of the optimizer.

  Raises:
    RuntimeError: The loss is not finite.
  """
  device = child.open_device(record, settings)
  import jax

  from grpo_jax.learn import train_step

  sizes = settings.sizes(SIZES, TINY)
  config = models.config_of(sizes.model)
  update, tx = _update(config, sizes.compute_dtype, sizes.remat)
  record.put(model=sizes.model, compute_dtype=sizes.compute_dtype)
  state = train_step.init(models.random_weights(config), tx)
  params, opt_state = state.params, state.opt_state
  del state  # the optimizer step consumes its arrays.

  def of_rows(rows: work.Rows, remat: str) -> None:
    minibatch = work.minibatch(rows, config.vocab_size)
    operations = work.update_operations(config, minibatch.microbatches[0])
    minibatch = jax.device_put(minibatch)
    (batch,), denominators = minibatch.microbatches[:1], minibatch.denominators

    def step() -> tuple[float, float, float]:
      nonlocal params, opt_state
      start = time.perf_counter()
      sums = update.start(params)
      sums, _ = jax.block_until_ready(differentiate(params, sums, batch, denominators))
      between = time.perf_counter()
      params, opt_state, _ = jax.block_until_ready(update.apply(params, opt_state, *sums))
      return between - start, time.perf_counter() - between, float(sums[1])

    differentiate = update.differentiate
    if remat != sizes.remat:
      differentiate = _update(config, sizes.compute_dtype, remat)[0].differentiate
    first, _, loss = step()
    measured: dict[str, Any] = {
      "microbatch": rows[:2],
      "remat": remat,
      "operations": operations,
      "tokens": int((batch.segment_ids > 0).sum()),
      "predicted": int(batch.loss_mask.sum()),
      "first_differentiate_s": first,
      "loss": loss,
    }
    if not math.isfinite(loss):
      raise RuntimeError(f"the loss is {loss}")
    with child.alone(settings):
      samples = [step()[:2] for _ in range(sizes.steps)]
      profile = _profile(step, settings, child.platform_of(device))
    measured |= numbers(samples, measured, device.device_kind)
    measured |= {"samples_s": samples, "peak_gib": child.peak_gib(device), "profile": profile}
    record.append("updates", measured)
    record.put(headline="; ".join(map(headline, record.result["updates"])))

  for rows in sizes.microbatches:
    of_rows(rows, sizes.remat)
  for remat in sizes.faster:
    try:
      of_rows(sizes.microbatches[0], remat)
      break
    except Exception as error:
      if not child.is_out_of_memory(error):
        raise
      record.append("does_not_fit", {"remat": remat, "why": child.first_line(error)})


def numbers(
  samples: Sequence[Sequence[float]], measured: Mapping[str, Any], device_kind: str
) -> dict[str, Any]:
  """Returns the numbers of an update.

  Args:
    samples: Seconds of gradients and of the optimizer, of each update.
    measured: "tokens", "operations" and "microbatch" of the update.
    device_kind: Name of the device.

  Returns:
    "seconds" (median), "tokens_per_s" without padding, "padding" as a share of the places, and
    "mfu", useful operations a second ÷ the bfloat16 rate of the data sheet; None: not known.
  """
  seconds = statistics.median(map(sum, samples))
  rows, row_tokens = measured["microbatch"]
  sheet = chips.of_kind(device_kind)
  return {
    "seconds": seconds,
    "tokens_per_s": measured["tokens"] / seconds,
    "padding": 1 - measured["tokens"] / (rows * row_tokens),
    "mfu": sheet and measured["operations"] / seconds / sheet.bfloat16,
  }


def headline(update: Mapping[str, Any]) -> str:
  """Returns the numbers of one update as text."""
  rows, row_tokens = update["microbatch"]
  memory = "" if update["peak_gib"] is None else f", {update['peak_gib']:.1f} GiB"
  return (
    f"{rows} × {row_tokens}, remat {update['remat']}: {update['seconds']:.3g} s,"
    f" MFU {work.percent(update['mfu'])}{memory} (first {update['first_differentiate_s']:.0f} s)"
  )


def _profile(step: Any, settings: running.Settings, platform: str) -> dict[str, Any]:
  """Returns the seconds of the longest kernels of one update, and those without any kernel."""
  import jax
  import trace_kinds

  folder = pathlib.Path(settings.scratch) / f"profile_{time.time_ns()}"
  with jax.profiler.trace(str(folder)):
    step()
  by_name, nothing = trace_kinds.seconds(trace_kinds.load(folder, platform))
  longest = sorted(by_name.items(), key=lambda item: -item[1])[:_LONGEST]
  return {"longest_s": dict(longest), "all_s": sum(by_name.values()), "no_kernel_s": nothing}


def _update(config: Any, compute_dtype: str, remat: str) -> tuple[Any, Any]:
  """Makes the update of a run with the default options, and its optimizer."""
  from grpo_jax.learn import optim, token_scores, train_step
  from grpo_jax.models.products import Products
  from grpo_jax.rl import objectives

  objective = objectives.make(kl_coef=0.0)
  options: dict[str, Any] = {"products": Products(compute_dtype=compute_dtype), "remat": remat}
  tx, schedule = optim.make(1000, learning_rate=1e-6, weight_decay=0.01)
  return train_step.make_update(
    token_scores.make_logprobs(config, **options),
    tx,
    objective,
    report_entropy=True,
    schedule=schedule,
    token_loss=token_scores.make_token_loss(config, objective, **options),
  ), tx
