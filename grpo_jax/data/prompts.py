"""Rows → Prompts: tokenized, in a reproducible order, resumable from one integer."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from grpo_jax.data import formats
from grpo_jax.data.sources import RowSource, SourceConfig, open_source
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.registry import choose, function
from grpo_jax.types import Prompt

OnError = Literal["stop", "skip"]
Overlong = Literal["drop", "zero_weight"]

_SHOWN_ERRORS = 5


class OverlongError(formats.RowError):
  """A prompt of more tokens than allowed, where such prompts are dropped."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptDataset:
  """A source whose rows come out as prompts."""

  source: RowSource
  tokenizer: Tokenizer
  read_row: formats.RowReader
  style: formats.PromptStyle
  environment: str
  max_prompt_tokens: int
  overlong: Overlong

  def __len__(self) -> int:
    return len(self.source)

  def prompt(self, row: int, *, epoch: int) -> Prompt:
    """Makes the prompt of a row.

    Args:
      row: number of the row in the source.
      epoch: pass over the source; together with the row it makes the prompt's id.

    Returns:
      The prompt. One of more than `max_prompt_tokens` is cut to its first ones and has
      weight 0, if such prompts are not dropped.

    Raises:
      OverlongError: the prompt is too long and such prompts are dropped.
      RowError: the row is broken, or the chat template refuses its messages.
    """
    where = self.source.where(row)
    record = self.read_row(self.source[row], where, self.style)
    ids = self.tokenizer.apply_chat_template(record.messages)
    if not len(ids):
      raise formats.RowError(where, "the prompt has no tokens")
    is_long = len(ids) > self.max_prompt_tokens
    if is_long and self.overlong == "drop":
      raise OverlongError(where, f"{len(ids)} tokens, more than {self.max_prompt_tokens}")
    return Prompt(
      prompt_id=f"{self.source.name}:{epoch}:{row}",
      token_ids=ids[: self.max_prompt_tokens],
      environment=self.environment,
      info=record.info,
      text=self.tokenizer.render(record.messages),
      weight=0.0 if is_long else 1.0,
    )


class PromptStream:
  """Prompts in training order. Its whole state is one integer: the positions passed."""

  def __init__(
    self,
    dataset: PromptDataset,
    *,
    shuffle: bool,
    seed: int,
    epochs: int | None,
    on_error: OnError,
    cursor: int = 0,
  ):
    """Places the stream at a cursor.

    Args:
      dataset: what is read.
      shuffle: whether every epoch has an order of its own, drawn from seed and epoch.
      seed: of the order.
      epochs: passes over the dataset; None: without end.
      on_error: "stop": a broken row raises; "skip": it is counted, shown and passed over.
      cursor: where to go on, from `cursor()` of an earlier stream of the same settings.
    """
    self._dataset = dataset
    rows = grain.MapDataset.range(len(dataset))
    # grain adds the epoch to the seed: hashed first, so that seeds 0 and 1 share no order.
    hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    ordered = rows.shuffle(seed=hashed) if shuffle else rows
    self._rows = ordered.repeat(epochs)
    if not 0 <= cursor <= len(self._rows):
      raise ValueError(f"cursor {cursor} is outside of the data: {len(self._rows)} positions")
    self._on_error: OnError = on_error
    self._cursor = cursor
    self._skipped = _Skipped()

  def take(self, n: int) -> list[Prompt]:
    """Takes the next n prompts; fewer, at last none, when the epochs are over.

    Raises:
      RowError: a row is broken and `on_error` is "stop".
      ValueError: a whole epoch in a row had no prompt that can be used.
    """
    self._skipped = _Skipped()
    prompts: list[Prompt] = []
    fruitless = 0
    while len(prompts) < n and self._cursor < len(self._rows):
      prompt = self._skipped.guard(self._next_prompt, self._on_error)
      fruitless = 0 if prompt else fruitless + 1
      if prompt:
        prompts.append(prompt)
      elif fruitless >= len(self._dataset):
        raise self._skipped.none_left(self._dataset)
    self._skipped.warn()
    return prompts

  def cursor(self) -> int:
    """Returns the number of positions passed, skipped rows included."""
    return self._cursor

  def metrics(self) -> dict[str, float]:
    """Counts of the last `take`, and the epochs done (a resumed run tells the same)."""
    return {"data/epoch": self._cursor / len(self._dataset), **self._skipped.metrics()}

  def _next_prompt(self) -> Prompt:
    position = self._cursor
    self._cursor += 1
    row = self._rows[position]
    assert row is not None  # grain's word for a filtered element; there is no filter.
    return self._dataset.prompt(int(row), epoch=position // len(self._dataset))


def held_out(
  dataset: PromptDataset, *, limit: int | None = None, on_error: OnError = "stop"
) -> list[Prompt]:
  """Lists the first prompts of a dataset, in its own order: a fixed evaluation set.

  Args:
    dataset: what is read.
    limit: number of rows read; None: all.
    on_error: as for PromptStream.

  Raises:
    RowError: a row is broken and `on_error` is "stop".
    ValueError: no row can be used.
  """
  skipped = _Skipped()
  rows = range(len(dataset) if limit is None else min(limit, len(dataset)))
  read = (skipped.guard(lambda row=row: dataset.prompt(row, epoch=0), on_error) for row in rows)
  prompts = [prompt for prompt in read if prompt]
  if not prompts:
    raise skipped.none_left(dataset)
  skipped.warn()
  return prompts


def open_dataset(
  tokenizer: Tokenizer,
  *,
  kind: str = "jsonl",
  name: str | None = None,
  path: str | Path | None = None,
  task: str | None = None,
  task_args: Mapping[str, Any] | None = None,
  task_seed: int = 0,
  size: int = 1000,
  format: str = "auto",
  input_key: str | None = None,
  output_key: str | None = None,
  system_prompt: str | None = None,
  system_prompt_file: str | Path | None = None,
  prompt_template: str | None = None,
  prompt_file: str | Path | None = None,
  environment: str = "math",
  max_prompt_tokens: int = 1024,
  overlong: Overlong = "drop",
) -> PromptDataset:
  """Opens a dataset by the fields of a config.

  Args:
    tokenizer: whose chat template renders the messages.
    kind: "jsonl", "reasoning_gym", or the dotted path of a function
      `SourceConfig -> RowSource`.
    name: of the dataset, the first part of its prompts' ids; from the file or task if None.
    path: the file, for "jsonl".
    task: the task's name, for "reasoning_gym".
    task_args: its further arguments, for "reasoning_gym".
    task_seed: its seed, for "reasoning_gym"; see ReasoningGymSource.
    size: its number of rows, for "reasoning_gym".
    format: "auto", "problem", "messages", "task", or the dotted path of a function
      `(row, where, style) -> Record`.
    input_key: name of the problem's field; None: "problem".
    output_key: name of the expected answer's field; None: "expected_answer"; "": the rows
      have none.
    system_prompt: text of the system message; None: none.
    system_prompt_file: a file with that text.
    prompt_template: text with {} for the problem; None: the problem alone.
    prompt_file: a file with that text.
    environment: name of the environment that scores the completions.
    max_prompt_tokens: longest prompt, chat template included.
    overlong: what becomes of longer ones: "drop", or "zero_weight": kept, cut, learned
      nothing from. Both are counted.

  Raises:
    FileNotFoundError: a file does not exist.
    ValueError: a name is unknown, or a text and its file are both given.
  """
  if overlong not in ("drop", "zero_weight"):
    raise ValueError(f"overlong must be 'drop' or 'zero_weight', got {overlong!r}")
  if max_prompt_tokens < 1:
    raise ValueError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")
  style = prompt_style(
    input_key=input_key or "problem",
    output_key="expected_answer" if output_key is None else output_key or None,
    system_prompt=system_prompt,
    system_prompt_file=system_prompt_file,
    prompt_template=prompt_template,
    prompt_file=prompt_file,
  )
  config = SourceConfig(
    kind=kind,
    name=name,
    path=path,
    task=task,
    task_args=dict(task_args or {}),
    task_seed=task_seed,
    size=size,
  )
  return PromptDataset(
    source=open_source(config),
    tokenizer=tokenizer,
    read_row=function(format) if "." in format else choose("format", format, formats.FORMATS),
    style=style,
    environment=environment,
    max_prompt_tokens=max_prompt_tokens,
    overlong=overlong,
  )


def prompt_style(
  *,
  system_prompt: str | None = None,
  system_prompt_file: str | Path | None = None,
  prompt_template: str | None = None,
  prompt_file: str | Path | None = None,
  **keys: str | None,
) -> formats.PromptStyle:
  """Makes the style of prompts; texts may stand in files. See `open_dataset`."""
  return formats.PromptStyle(
    system_prompt=_text_or_file("system_prompt", system_prompt, system_prompt_file),
    prompt_template=_text_or_file("prompt", prompt_template, prompt_file),
    **keys,  # pyright: ignore[reportArgumentType]
  )


@dataclasses.dataclass(slots=True)
class _Skipped:
  """Counts rows that were passed over, and keeps the first reasons."""

  broken: int = 0
  overlong: int = 0
  reasons: list[str] = dataclasses.field(default_factory=list)

  def guard(self, make, on_error: OnError) -> Prompt | None:
    """Calls `make`; a row that cannot be used is counted and gives None."""
    try:
      prompt = make()
    except OverlongError as error:
      self.overlong += 1
      self._note(error)
      return None
    except formats.RowError as error:
      if on_error == "stop":
        raise
      self.broken += 1
      self._note(error)
      return None
    self.overlong += prompt.weight == 0.0
    return prompt

  def metrics(self) -> dict[str, float]:
    return {
      "data/broken_rows": float(self.broken),
      "data/overlong_prompts": float(self.overlong),
    }

  def warn(self) -> None:
    if self.reasons:
      counts = f"{self.broken} broken rows, {self.overlong} overlong prompts"
      logging.warning("data: %s; first:\n  %s", counts, "\n  ".join(self.reasons))

  def none_left(self, dataset: PromptDataset) -> ValueError:
    reasons = "\n  ".join(self.reasons)
    return ValueError(
      f"no row of {dataset.source.name!r} can be used: {self.broken} are broken, {self.overlong} "
      f"longer than {dataset.max_prompt_tokens} tokens; first:\n  {reasons}"
    )

  def _note(self, error: formats.RowError) -> None:
    if len(self.reasons) < _SHOWN_ERRORS:
      self.reasons.append(str(error))


def _text_or_file(name: str, text: str | None, file: str | Path | None) -> str | None:
  if not file:
    return text
  if text is not None:
    raise ValueError(f"{name}: give the text or a file, not both")
  path = Path(file)
  if not path.is_file():
    raise FileNotFoundError(f"no {name}_file {file}")
  return path.read_text(encoding="utf-8")
