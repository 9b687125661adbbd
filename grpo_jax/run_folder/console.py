"""What a run prints: one aligned line per step, evaluations, samples. Formatting is pure.

A line starts with the reward and omits the loss: as long as the old and the live policy are the
same, its value is minus the mean advantage of the tokens, whatever is learned.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from grpo_jax.run_folder import screen
from grpo_jax.run_folder.screen import ALL_COLUMNS, NOTABLE, duration, printable, seconds
from grpo_jax.run_folder.time_left import TimeLeft, of_steps
from grpo_jax.types import Prompt, Rollout, RolloutGroup

HEADER_EVERY = 20  # lines between two headers.
PROMPT_CHARACTERS = 600
PROMPT_LINES = 24  # of the first prompt.
COMPLETION_CHARACTERS = 1200
ERROR_CHARACTERS = 200
DASH = "-"  # shown for unknown values.


class Column(NamedTuple):
  """One column of a step's line."""

  title: str
  width: int  # characters, with the blank before it.
  metrics: tuple[str, ...]  # their sum is shown.
  format: Callable[[float], str]
  alarm: Callable[[float], bool] = lambda value: False  # coloured on a terminal.


def number(value: float) -> str:
  """Returns the value in at most 8 characters: 0.4127, 182.4, 12.3k, 1.2e-06."""
  size = abs(value)
  if not math.isfinite(value):
    return DASH if math.isnan(value) else ("inf" if value > 0 else "-inf")
  if value == 0:
    return "0"
  if size < 1e-3 or size >= 1e9:
    return f"{value:.1e}"
  for digits, limit in ((4, 1.0), (3, 10.0), (2, 100.0), (1, 9_999.95)):
    if size < limit:
      return f"{value:.{digits}f}"
  return f"{value / 1e3:.1f}k" if size < 999_950 else f"{value / 1e6:.1f}M"


def share(value: float) -> str:
  """Returns a share as per cent: 25%, 0.4%, 0%."""
  if not math.isfinite(value):
    return DASH
  percent = 100 * value
  return f"{percent:.0f}%" if percent == 0 or abs(percent) >= 9.95 else f"{percent:.1f}%"


def share_with_error(value: float, error: float) -> str:
  """Returns a share with its standard error: 57.0 % ± 5.0; without one as `share` does: 57%."""
  return f"{100 * value:.1f} % ± {100 * error:.1f}" if math.isfinite(error) else share(value)


def columns_within(width: int, total_steps: int | None) -> tuple[Column, ...]:
  """Returns the columns of a step's line that fit; the least important ones are left out.

  Args:
    width: Width of a line, in characters.
    total_steps: Number of steps of the run; None if there is no end.
  """
  kept = list(COLUMNS)
  for title in LEAST_IMPORTANT:
    if _step_width(total_steps) + REWARD_WIDTH + sum(c.width for c in kept) <= width:
      break
    kept = [column for column in kept if column.title != title]
  return tuple(kept)


def header(width: int = ALL_COLUMNS, total_steps: int | None = None) -> str:
  """Returns the line of column titles; takes the arguments of `columns_within`."""
  titles = "".join(f"{c.title:>{c.width}}" for c in columns_within(width, total_steps))
  return f"{'step':>{_step_width(total_steps)}}{'reward ± std':>{REWARD_WIDTH - 1}} {titles}"


def step_line(
  step: int, total_steps: int | None, values: Mapping[str, float], width: int = ALL_COLUMNS
) -> Text:
  """Returns the line of one step; missing values and NaN are shown as a dash.

  Args:
    step: Number of the step, counted from 0.
    total_steps: Number of steps of the run; None if there is no end.
    values: Metrics of the step.
    width: Width of a line, in characters; columns that do not fit are left out.
  """
  of_total = f"{step}/{total_steps}" if total_steps is not None else str(step)
  mean, std = (values.get(f"rollout/reward_{what}", math.nan) for what in ("mean", "std"))
  line = Text(f"{of_total:>{_step_width(total_steps)}}")
  line.append(f"{_signed(mean):>8}", style="bold")
  line.append(f" ±{_signed(std):<6}", style="dim")
  for column in columns_within(width, total_steps):
    known = [values[name] for name in column.metrics if name in values]
    value = sum(known) if known else math.nan
    style = NOTABLE if math.isfinite(value) and column.alarm(value) else ""
    line.append(f"{column.format(value):>{column.width}}", style=style)
  return line


def eval_line(name: str, step: int, values: Mapping[str, float], first: Mapping[str, float]) -> str:
  """Returns the line of one evaluation, with the change since the first evaluation of the run.

  Args:
    name: Name of the evaluation set.
    step: Number of updates done before it.
    values: Metrics of the step.
    first: Metrics of the first evaluation of the run; empty if this is the first.
  """
  prefix = f"eval/{name}/"
  parts = []
  for metric in sorted(key for key in values if key.startswith(prefix)):
    what, value = metric.removeprefix(prefix), values[metric]
    if not math.isfinite(value):
      continue  # e.g. recorded groups with one response each: there is nothing to compare.
    if what == "accuracy" or (what.startswith("pass@") and what != "pass@1"):  # pass@1 is accuracy.
      change = 100 * (value - first.get(metric, math.nan))
      since = f" ({change:+.1f} points)" if math.isfinite(change) else ""
      error = values.get(f"{metric}_se", math.nan)
      parts.append(f"{what} {share_with_error(value, error)}{since}")
  for what, label, form in (
    ("reward_mean", "reward", _signed),
    ("truncated_share", "truncated", share),
    ("completion_tokens_mean", "tokens", number),
  ):
    if prefix + what in values:
      parts.append(f"{label} {form(values[prefix + what])}")
  for metric in sorted(key for key in values if key.startswith(f"{prefix}errors/")):
    parts.append(f"failed: {metric.rpartition('/')[2]} {number(values[metric])}")
  took = values.get("time/evaluate_s", math.nan)
  summary = "  ".join(parts) or "nothing was measured"
  return f"{'eval':>9}  {name} at step {step}: {summary}" + (
    f"  ({seconds(took)} s)" if math.isfinite(took) else ""
  )


def failure_lines(groups: Sequence[RolloutGroup]) -> list[str]:
  """Returns, for each kind of failure among the attempts, the count and the first example.

  Where user code has raised, its last frames and the prompt follow.
  """
  attempts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
  failed = [(prompt, rollout.error) for prompt, rollout in attempts if rollout.error]
  kinds: dict[str, list[tuple[Prompt, str]]] = {}
  for prompt, error in failed:
    kinds.setdefault(error.partition(":")[0], []).append((prompt, error))
  lines = []
  for same_kind in kinds.values():
    prompt, error = same_kind[0]
    row = f", row {prompt.where}" if prompt.where else ""
    where = printable(f"{prompt.prompt_id} ({prompt.environment}){row}")
    said, *frames = error.split("\n")
    reason = printable(shorten(said, ERROR_CHARACTERS))
    share_failed = f"{len(same_kind)} of {len(attempts)} completions"
    lines.append(f"{'failed':>9}  {share_failed}: {reason}; {where}")
    if frames:
      asked = printable(prompt.text).replace("\n", "\\n")
      frames = [*map(printable, frames), f"prompt: {shorten(asked, ERROR_CHARACTERS)}"]
    lines += [f"{'':>8} │ {shorten(frame, 2 * ERROR_CHARACTERS)}" for frame in frames]
  return lines


def sample_lines(
  step: int, group: RolloutGroup, advantages: Sequence[float] | np.ndarray, width: int = 106
) -> list[str]:
  """Returns the lines that show a group's best and worst completion.

  Args:
    step: Number of the step that sampled the group.
    group: Group with at least one rollout.
    advantages: Advantage of each rollout.
    width: Width of the rules above and below, in characters.
  """
  order = np.argsort(-np.nan_to_num(group.rewards, nan=-np.inf), kind="stable")
  shown = [order[0]] if len(order) == 1 else [order[0], order[-1]]
  cut = f", prompt cut to {len(group.prompt.token_ids)} tokens" if group.prompt.is_cut else ""
  title = f"── sample of step {step}: {group.prompt.prompt_id}, {len(order)} completions{cut} "
  lines = [f"{printable(title):─<{width}}"]
  lines += _indented("prompt", shorten(group.prompt.text, PROMPT_CHARACTERS))
  if (expected := group.prompt.expected_answer) is not None:
    lines += _indented("expected", shorten(expected, PROMPT_CHARACTERS))
  for label, index in zip(("best", "worst"), shown, strict=False):
    rollout = group.rollouts[index]
    lines.append(f"{label:>8} │ {_facts(rollout, float(advantages[index]))}")
    lines += _indented("", shorten(rollout.text, COMPLETION_CHARACTERS))
  return [*lines, "─" * width]


def closing_lines(
  folder: str,
  workdir: str,
  *,
  is_offline: bool = False,
  has_sets: bool = True,
  adapter: str | None = None,
  names: Mapping[str, str] | None = None,
  note: str = "",
) -> list[str]:
  """Returns the lines that name the final weights and say how to use them.

  Args:
    folder: Folder of the exported weights.
    workdir: Run folder.
    is_offline: Whether the run learned from recorded groups; its sets cannot be sampled.
    has_sets: Whether the run has evaluation sets.
    adapter: Folder of the trained adapter, which is merged in `folder`; None: there is none.
    names: PEFT's `key_mapping` for the adapter's base; None or empty: it needs none.
    note: Line about the use of the adapter alone; empty: there is none.
  """
  run = shlex.quote(workdir)
  sets = "" if has_sets else " --sets=FILE"
  measuring = f"  to measure them: grpo-jax evaluate --model={run}{sets}"
  mapping = f", key_mapping={dict(names)!r}" if names else ""
  loading = f"PeftModel.from_pretrained(base_model, {adapter!r}{mapping})"
  alone = [f"adapter alone: {adapter}", f"  in PEFT: {loading}", *([f"  {note}"] if note else [])]
  merged = "" if adapter is None else " (merged with the adapter)"
  return [
    *([] if adapter is None else alone),
    f"final weights{merged}: {folder}",
    f"  in transformers: AutoModelForCausalLM.from_pretrained({folder!r})",
    f"  in SGLang: python -m sglang.launch_server --model-path {shlex.quote(folder)}",
    *([] if is_offline else [measuring]),
    f"  weights of another checkpoint: grpo-jax export {run}:STEP OUT",
    f"  in Python or a notebook: grpo_jax.open({workdir!r})",
    "  to train further: the same command, or call, with a larger total_steps",
  ]


def sampled_from(versions: Sequence[int]) -> str:
  """Describes which weights tokens were sampled from; version n was updated n times."""
  if not versions:
    return "no token"
  first, last = min(versions), max(versions)
  if first < 0:
    return "by weights that are not known"
  if last == 0:
    return "before any update"
  return (
    f"after {last} update{'s' * (last > 1)}"
    if first == last
    else f"after {first} to {last} updates"
  )


def shorten_middle(text: str, limit: int) -> str:
  """Returns the text; what exceeds `limit` characters is left out before its last third."""
  left = len(text) - limit
  if left <= 0:
    return text
  return f"{text[: limit - limit // 3]} … [{left} more characters] … {text[-(limit // 3) :]}"


def shorten(text: str, limit: int) -> str:
  """Returns the text, cut to `limit` characters with a note of how many were left out."""
  left = len(text) - limit
  return text if left <= 0 else f"{text[:limit]} … [{left} more characters]"


def cut_mark(record: Mapping[str, Any]) -> str:
  """Returns what follows the prompt of a record of rollouts/ if only its beginning was asked."""
  is_cut = record.get("prompt_is_cut")  # missing in older files.
  return f" … [cut to {len(record['prompt_ids'])} tokens]" if is_cut else ""


def prompt_lines(prompt: Prompt) -> list[str]:
  """Returns the lines that show what a prompt is, as the model reads it."""
  cut = ", cut" if prompt.is_cut else ""
  title = f"the first prompt, {prompt.prompt_id}, {len(prompt.token_ids)} tokens{cut}:"
  return [printable(title), *_indented("", _excerpt(prompt.text))]


def _excerpt(text: str) -> str:
  """Returns the beginning and the end of some text, at most PROMPT_CHARACTERS and PROMPT_LINES."""
  lines = shorten_middle(text, PROMPT_CHARACTERS).split("\n")
  left = len(lines) - PROMPT_LINES
  if left <= 0:
    return "\n".join(lines)
  half = PROMPT_LINES // 2
  return "\n".join([*lines[:half], f"… [{left} more lines]", *lines[-half:]])


class TrainingScreen(screen.Screen):
  """A screen that also prints steps and samples."""

  def __init__(self, *arguments: Any, **options: Any):
    """Makes a screen; takes the arguments of `screen.Screen`."""
    super().__init__(*arguments, **options)
    self._lines_since_header = HEADER_EVERY
    self._header = ""
    self._left: TimeLeft | None = None

  def expect(self, left: TimeLeft) -> None:
    """Sets what expects the time that the run still takes; otherwise only its steps count."""
    self._left = left

  def recall(self, rows: Iterable[Mapping[str, Any]], done: int) -> None:
    """Expects the time that is left from what an earlier process of the run has measured.

    Args:
      rows: Metrics of the steps before this process, in order.
      done: Number of steps done.
    """
    if self._left is not None:
      self._left.recall(rows, done)

  def evaluated(self, step: int, values: Mapping[str, float]) -> None:
    """Takes how long an evaluation took; its lines are printed by themselves.

    Args:
      step: Number of steps done.
      values: Metrics of the evaluation.
    """
    if self._left is not None:
      self._left.evaluated(step, values)

  def run_left(self) -> str:
    """Returns the expected time until the end of the run, "12min"; "" if it is not known."""
    left = math.nan if self._left is None else self._left.seconds()
    return duration(left) if math.isfinite(left) else ""

  def step(self, step: int, total_steps: int | None, values: Mapping[str, float]) -> None:
    """Prints a step's line; a header precedes every 20 lines and every change of width.

    Args:
      step: Number of the step, counted from 0.
      total_steps: Number of steps of the run; None if there is no end.
      values: Metrics of the step.
    """
    if self._left is None:
      self._left = TimeLeft(of_steps(total_steps), clock=self._clock)
    self._left.stepped(step + 1, values)
    values = {**values, LEFT: self._left.seconds()}
    titles = header(self.width, total_steps)
    if self._lines_since_header >= HEADER_EVERY or titles != self._header:
      self.print(Text(titles, style="bold"))
      self._lines_since_header = 0
      self._header = titles
    self._lines_since_header += 1
    self.print(step_line(step, total_steps, values, self.width))

  def prompt(self, prompt: Prompt) -> None:
    """Prints the first prompt of a run."""
    for line in prompt_lines(prompt):
      self.print(line)

  def sample(
    self, step: int, group: RolloutGroup, advantages: Sequence[float] | np.ndarray
  ) -> None:
    """Prints a group's best and worst completion; the next step gets a header."""
    for line in sample_lines(step, group, advantages, min(106, self.width)):
      self.print(line)
    self._lines_since_header = HEADER_EVERY


def _step_width(total_steps: int | None) -> int:
  return 9 if total_steps is None else max(9, len(f" {total_steps - 1}/{total_steps}"))


def _signed(value: float) -> str:
  """Returns a reward with three digits (most rewards are 0 or 1), in at most 7 characters."""
  return f"{value:.3f}" if math.isfinite(value) and abs(value) < 99.9995 else number(value)


def _facts(rollout: Rollout, advantage: float) -> str:
  sampled = rollout.weight_versions[rollout.loss_mask]
  return "  ".join(
    [
      f"reward {_signed(rollout.reward)}",
      f"advantage {advantage:+.2f}" if math.isfinite(advantage) else f"advantage {DASH}",
      rollout.finish_reason.value,
      f"{len(rollout.completion_ids)} tokens",
      sampled_from(sampled.tolist()),
    ]
  )


def _indented(label: str, text: str) -> list[str]:
  lines = printable(text).split("\n")
  return [f"{label if number == 0 else '':>8} │ {line}" for number, line in enumerate(lines)]


LEFT = "left_s"  # expected seconds until the end of the run; computed here, not a metric.
CLIPS = ("train/clip_low_share", "train/clip_high_share", "train/clip_dual_share")  # disjoint.
COLUMNS = (
  Column("no-signal", 10, ("signal/lost_share",), share, lambda value: value > 0.7),
  Column("trunc", 6, ("rollout/truncated_share",), share, lambda value: value > 0.2),
  Column("tokens", 7, ("rollout/completion_tokens_mean",), number),
  Column("entropy", 8, ("train/entropy",), number),
  Column("mismatch", 9, ("mismatch/abs_logprob_max",), number, lambda value: value > 0.5),
  Column("clip", 6, CLIPS, share, lambda value: value > 0.3),
  Column("sample s", 9, ("time/sample_s",), seconds),
  Column("score s", 8, ("time/score_s",), seconds),
  Column("learn s", 8, ("time/learn_s",), seconds),
  Column("tokens/s", 9, ("perf/tokens_per_s",), number),
  Column("left", 6, (LEFT,), duration),
)
# In the order in which a narrow terminal omits them.
LEAST_IMPORTANT = (
  "tokens/s",
  "score s",
  "mismatch",
  "clip",
  "entropy",
  "learn s",
  "tokens",
  "left",
)
REWARD_WIDTH = 16  # characters of "reward ± std".
