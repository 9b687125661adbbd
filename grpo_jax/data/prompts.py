"""A dataset of prompts: a source of rows, and how their text becomes tokens."""

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from grpo_jax.data import (
  formats,
  named,
  nemo_gym,
  prompt_texts,
  recorded_calls,
  rendered_turns,
  routing,
)
from grpo_jax.data.options import DataOptions
from grpo_jax.data.row_selection import RowSelection
from grpo_jax.data.skipped_rows import OnError, OverlongError, SkippedRows
from grpo_jax.data.sources import RowSource, SourceConfig, open_source
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.errors import place_and_reason
from grpo_jax.models.chat import control_tokens
from grpo_jax.registry import choose, function, nearest
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)

Overlong = Literal["drop", "zero_weight"]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
  """How a row becomes a prompt, and which environment scores the answers."""

  read_row: formats.RowReader
  style: formats.PromptStyle
  environment: str


@dataclasses.dataclass(frozen=True, slots=True)
class PromptDataset:
  """A source whose rows become prompts."""

  name: str  # the first part of the ids of its prompts.
  source: RowSource
  part: RowSelection
  tokenizer: Tokenizer
  task: Task
  tasks: Mapping[str, Task]  # tasks by the row's `task_name`; empty: `task` for all rows.
  max_prompt_tokens: int
  overlong: Overlong
  known_environments: Collection[str] | None = None  # names that rows may use; None: not allowed.
  # Field of a row with the tools that it declares; "": none is read.
  tools_key: str = DataOptions.tools_key
  allow_control_tokens: bool = False  # whether text of rows may become control tokens.
  # Tools that environments declare, by the name of the environment.
  tools_of: Mapping[str, Sequence[recorded_calls.Tool]] = dataclasses.field(default_factory=dict)

  def __len__(self) -> int:
    return len(self.part)

  def prompt(self, row: int, *, epoch: int) -> Prompt:
    """Makes the prompt of a row.

    Args:
      row: Number of the row among those that the dataset takes.
      epoch: Pass over the dataset; together with the row it makes the prompt's id.

    Returns:
      The prompt. Its id is NAME:EPOCH:ROW, with the row number of the source; if the dataset
      repeats its rows, the number continues from round to round. A prompt of more than
      `max_prompt_tokens` is cut at its end and has weight 0, if such prompts are not
      dropped; one with more characters than that many tokens can have is cut before encoding.

    Raises:
      OverlongError: The prompt is too long and such prompts are dropped.
      RowError: The row is broken, or the chat template rejects its messages.
    """
    number = self.part.source_row(row)
    where = self.source.where(number)
    fields = self.source[number]
    task = self._task_of(fields, where)
    record = _read(task, fields, where)
    environment = routing.environment_of(
      fields,
      where,
      default=task.environment,
      known=self.known_environments,
      has_tasks=bool(self.tasks),
    )
    tools = self._tools(record, fields, environment, where)
    messages = tuple(record.messages)
    if self.allow_control_tokens:
      messages, tools = (tuple(control_tokens.trusted(each)) for each in (messages, tools))
    asked = rendered_turns.ask(
      self.tokenizer, messages, where, max_tokens=self.max_prompt_tokens, tools=tools
    )
    if asked.too_long and self.overlong == "drop":
      raise OverlongError(where, asked.too_long)
    info = record.info
    text = asked.text
    if asked.too_long:  # what the model reads, and environments and people with it.
      text = self.tokenizer.decode(asked.ids, skip_special=False)
    if asked.is_shortened:
      info, messages = prompt_texts.shortened((info, messages), len(asked.text))
    return Prompt(
      prompt_id=f"{self.name}:{epoch}:{number + len(self.source) * self.part.round_of(row)}",
      token_ids=asked.ids,
      environment=environment,
      info=info,
      text=text,
      where=where,
      weight=0.0 if asked.too_long else formats.loss_multiplier(fields, where),
      dataset=self.name,
      is_cut=bool(asked.too_long),
      messages=messages,
      tools=tools,
      stop_strings=routing.stop_strings_of(fields, where),
      parted=asked.parted,
    )

  def question(self, number: int) -> tuple[Any, Any]:
    """Returns what a row of the source asks, and what makes another row the same one.

    It asks its messages, without the system prompt and the template of the config. A row without
    an expected answer, such as a game, asks the same only if its other fields are equal, too.

    Raises:
      RowError: The row is broken.
    """
    where, fields = self.source.where(number), self.source[number]
    task = self._task_of(fields, where)
    bare = dataclasses.replace(task.style, system_prompt=None, prompt_template=None)
    record = _read(dataclasses.replace(task, style=bare), fields, where)
    asked = record.messages, None if "expected_answer" in record.info else record.info
    return asked, asked

  def _tools(
    self, record: formats.Record, fields: Mapping[str, Any], environment: str, where: str
  ) -> tuple[recorded_calls.Tool, ...]:
    """Returns the tools of a row: its own, otherwise those of its environment."""
    own = fields.get(self.tools_key) if self.tools_key else None
    if record.tools:
      return record.tools
    return (
      tuple(self.tools_of.get(environment, ()))
      if own is None
      else recorded_calls.tools_of(own, where)
    )

  def _task_of(self, fields: Mapping[str, Any], where: str) -> Task:
    if not self.tasks:
      return self.task
    name = formats.lookup(fields, "task_name", where)
    if not isinstance(name, str) or name not in self.tasks:
      known = ", ".join(self.tasks)
      raise formats.RowError(
        where, f"task_name {name!r} is not in data.tasks{nearest(str(name), self.tasks)}: {known}"
      )
    return self.tasks[name]


@runtime_checkable
class Dataset(Protocol):
  """The parts of a dataset that loaders use: of a `PromptDataset`, or of recorded groups."""

  @property
  def name(self) -> str:
    """The first part of the ids of its prompts."""
    ...

  @property
  def source(self) -> RowSource:
    """Its rows, in the form in which they are read."""
    ...

  @property
  def part(self) -> RowSelection:
    """The rows of the source, or groups, that it selects."""
    ...

  @property
  def max_prompt_tokens(self) -> int:
    """Length of the longest prompt that is not cut."""
    ...

  def __len__(self) -> int: ...

  def prompt(self, row: int, *, epoch: int) -> Prompt:
    """Makes the prompt of a row; see `PromptDataset.prompt`."""
    ...

  def question(self, number: int) -> tuple[Any, Any]:
    """Returns what a row of the source, or a group, asks; see `PromptDataset.question`."""
    ...


def _read(task: Task, fields: Mapping[str, Any], where: str) -> formats.Record:
  """Calls the processor; errors of a user's processor name the row as well."""
  try:
    record = task.read_row(fields, where, task.style)
    messages = [
      recorded_calls.checked(message, f"message {i + 1}", where)
      if message.get("tool_calls")
      else message
      for i, message in enumerate(record.messages)
    ]
    return dataclasses.replace(record, messages=tuple(messages))
  except formats.RowError:
    raise
  # A user's processor may raise anything.
  except Exception as error:
    raise formats.RowError(where, place_and_reason(error)) from error


def _from_any(row: Mapping[str, Any], where: str, style: formats.PromptStyle) -> formats.Record:
  """Recognises tasks of NeMo Gym as well."""
  read = nemo_gym.to_prompt if nemo_gym.is_rollout(row) else formats.from_any
  return read(row, where, style)


def held_out(
  dataset: Dataset, *, limit: int | None = None, on_error: OnError = DataOptions.on_error
) -> list[Prompt]:
  """Lists the first prompts of a dataset, in its own order: a fixed evaluation set.

  Args:
    dataset: Dataset to read.
    limit: Number of rows to read, each as often as the dataset repeats it; None: all.
    on_error: "stop": a broken row raises; "skip": it is counted, logged and skipped.

  Raises:
    RowError: A row is broken and `on_error` is "stop".
    ValueError: No row can be used.
  """
  skipped = SkippedRows()
  once = dataset.part.rows
  rows = [row for row in range(len(dataset)) if limit is None or row % once < limit]
  read = (skipped.guard(lambda row=row: dataset.prompt(row, epoch=0), on_error) for row in rows)
  prompts = [prompt for prompt in read if prompt]
  if not prompts:
    raise skipped.none_left(dataset.name, dataset.max_prompt_tokens)
  skipped.warn()
  skipped.warn_of_parted()
  cut = sum(prompt.is_cut for prompt in prompts)
  if cut:
    _log.warning(
      "data: %d of the %d held-out prompts of %r are longer than %d tokens, and are cut",
      *(cut, len(prompts), dataset.name, dataset.max_prompt_tokens),
    )
  return prompts


def open_dataset(
  tokenizer: Tokenizer,
  *,
  kind: str = DataOptions.kind,
  name: str | None = None,
  path: str | Path | None = None,
  dataset: str | None = None,
  subset: str | None = None,
  split: str | None = None,
  task: str | None = None,
  task_args: Mapping[str, Any] | None = None,
  task_seed: int = DataOptions.task_seed,
  size: int = DataOptions.size,
  side: str = "all",
  for_evaluation: bool = False,
  split_validation_size: float | int = DataOptions.split_validation_size,
  split_seed: int = 0,
  repeat: int = DataOptions.repeat,
  format: str = DataOptions.format,
  input_key: str | None = None,
  output_key: str | None = None,
  system_prompt: str | None = None,
  system_prompt_file: str | Path | None = None,
  prompt_template: str | None = None,
  prompt_file: str | Path | None = None,
  environment: str | None = None,
  tasks: Mapping[str, Mapping[str, Any]] | None = None,
  max_prompt_tokens: int = DataOptions.max_prompt_tokens,
  overlong: Overlong = DataOptions.overlong,
  rows_choose_environment: bool = DataOptions.rows_choose_environment,
  known_environments: Collection[str] | None = None,
  tools_key: str = DataOptions.tools_key,
  tools_of: Mapping[str, Sequence[recorded_calls.Tool]] | None = None,
  allow_control_tokens: bool = DataOptions.allow_control_tokens,
) -> PromptDataset:
  """Opens a dataset described by the fields of a config.

  Args:
    tokenizer: Tokenizer whose chat template renders the messages.
    kind: "auto": what path, dataset or task imply; "jsonl", "json", "parquet" (whatever the
      file's extension), "hub", "reasoning_gym", "function" (see FunctionSource), or the dotted
      path of a function `SourceConfig -> RowSource`.
    name: Name of the dataset, the first part of its prompts' ids; None: see `name_of`.
    path: File, or folder of files. With `dataset`: a local copy of it.
    dataset: Name of one in `named.DATASETS`, or owner/name on the Hugging Face hub.
    subset: Subset of the hub dataset; None: that of the named dataset, if any.
    split: Split of the hub dataset, of a folder, or of a JSON file with several lists; None: that
      of the named dataset if there are several, otherwise all rows.
    task: Name of the task, for "reasoning_gym"; dotted path, for "function".
    task_args: Further arguments of the task.
    task_seed: Seed of the task; see ReasoningGymSource.
    size: Number of rows of the task.
    side: Side of the validation split, see `RowSelection`.
    for_evaluation: Whether a named dataset's evaluation split is used, if `split` is None.
    split_validation_size: Size of the validation split, see `RowSelection`.
    split_seed: Random seed of the split.
    repeat: Number of times that an epoch has every row.
    format: Processor of a row: "auto", "problem", "messages", "task", "nemo_gym", or the path
      of a function `(row, where, style) -> Record`.
    input_key: Name of the problem's field; None: that of the named dataset, otherwise "problem".
    output_key: Name of the answer's field; None: likewise, otherwise "expected_answer"; "": none.
    system_prompt: Text of the system message; None: no system message.
    system_prompt_file: File with that text.
    prompt_template: Text with {} for the problem; None: that of the named dataset, otherwise the
      problem alone.
    prompt_file: File with that text.
    environment: Name of the environment that scores the completions; None: that of the named
      dataset, otherwise "math".
    tasks: Differing fields by the rows' `task_name`: environment, format, the keys and the prompts.
    max_prompt_tokens: Longest prompt, chat template included, in tokens.
    overlong: Treatment of longer prompts: "drop", or "zero_weight", which keeps and cuts them
      but learns nothing from them. Both are counted.
    rows_choose_environment: Whether a row's own `environment` or `task_name` decides, see
      routing.environment_of.
    known_environments: Names that rows may use; None: not checked.
    tools_key: Field of the tools that a row declares for the chat template; "": none is read.
    tools_of: Tools that environments declare, by the name of the environment. A row's own tools
      come before them, also if they are an empty list.
    allow_control_tokens: Whether text of control tokens in rows becomes these tokens.

  Raises:
    FileNotFoundError: A file does not exist.
    ImportError: The source needs a library that is not installed.
    ValueError: A name is unknown, or both text and file are given.
  """
  _check_lengths(overlong, max_prompt_tokens)
  entry = named.find(dataset) if dataset else None
  given_name = name_of({"name": name, "dataset": dataset}) if name or dataset else None
  common: dict[str, Any] = {
    "format": format,
    "input_key": input_key,
    "output_key": output_key,
    "system_prompt": system_prompt,
    "system_prompt_file": system_prompt_file,
    "prompt_template": prompt_template,
    "prompt_file": prompt_file,
    "environment": environment,
  }
  source = open_source(
    SourceConfig(
      kind=kind,
      name=given_name,
      path=path,
      hub=entry.hub if entry else dataset,
      files=entry.files if entry else None,
      subset=subset or (entry.subset if entry else None),
      split=split,
      usual_split=usual_split(entry, for_evaluation),
      task=task,
      task_args=dict(task_args or {}),
      task_seed=task_seed,
      size=size,
      rearranged=entry.rearranged if entry else None,
    )
  )
  part = RowSelection(
    len(source),
    side=side,
    split_validation_size=split_validation_size,
    split_seed=split_seed,
    repeat=repeat,
  )
  return PromptDataset(
    name=given_name or source.name,  # without a given name the source chooses it.
    source=source,
    part=part,
    tokenizer=tokenizer,
    task=make_task(entry, **common),
    tasks=_tasks_by_word(entry, common, tasks or {}),
    max_prompt_tokens=max_prompt_tokens,
    overlong=overlong,
    known_environments=known_environments if rows_choose_environment else None,
    tools_key=tools_key,
    tools_of=tools_of or {},
    allow_control_tokens=allow_control_tokens,
  )


def _check_lengths(overlong: str, max_prompt_tokens: int) -> None:
  if overlong not in ("drop", "zero_weight"):
    raise ValueError(f"overlong must be 'drop' or 'zero_weight', got {overlong!r}")
  if max_prompt_tokens < 1:
    raise ValueError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")


def _tasks_by_word(
  entry: named.NamedDataset | None,
  common: Mapping[str, Any],
  tasks: Mapping[str, Mapping[str, Any]],
) -> dict[str, Task]:
  """Returns the task of each `task_name`: the fields that all share, and its own over them."""
  return {
    word: make_task(entry, **{**common, **_without_twins(own)}) for word, own in tasks.items()
  }


def make_task(
  entry: named.NamedDataset | None,
  *,
  format: str,
  input_key: str | None,
  output_key: str | None,
  system_prompt: str | None,
  system_prompt_file: str | Path | None,
  prompt_template: str | None,
  prompt_file: str | Path | None,
  environment: str | None,
) -> Task:
  """Determines how rows are read and asked; see `open_dataset`. Values of None are from `entry`."""
  template = _text_or_file("prompt", prompt_template, prompt_file)
  read_row = function(format) if "." in format else choose("format", format, ROW_READERS)
  if entry is not None:
    template = entry.prompt_template if template is None else template
    environment = environment or entry.environment
    if format == "auto":
      read_row = named.reader(entry, input_key=input_key, output_key=output_key)
  style = formats.PromptStyle(
    input_key=input_key or "problem",
    output_key="expected_answer" if output_key is None else output_key or None,
    system_prompt=_text_or_file("system_prompt", system_prompt, system_prompt_file),
    prompt_template=template,
  )
  return Task(read_row, style, environment or "math")


def environment_of(settings: Mapping[str, Any]) -> str:
  """Returns the name of the environment of a dataset with these fields, ignoring its `tasks`."""
  entry = named.find(settings["dataset"]) if settings.get("dataset") else None
  return settings.get("environment") or (entry.environment if entry else "math")


def style_of(settings: Mapping[str, Any]) -> formats.PromptStyle:
  """Returns how a dataset with these fields asks a problem, ignoring its `tasks`."""
  entry = named.find(settings["dataset"]) if settings.get("dataset") else None
  names = ("input_key", "output_key", "environment")
  names += ("system_prompt", "system_prompt_file", "prompt_template", "prompt_file")
  return make_task(entry, format="auto", **{name: settings.get(name) for name in names}).style


def usual_split(entry: named.NamedDataset | None, for_evaluation: bool) -> str | None:
  """Returns the split that is read if none is given; None: the dataset is not a named one."""
  if entry is None:
    return None
  return (for_evaluation and entry.evaluation_split) or entry.split


def name_of(settings: Mapping[str, Any]) -> str | None:
  """Returns the name of a dataset with these fields, as far as they determine it: `name`, or that
  of the file or folder, of the named dataset, of the task."""
  if settings.get("name"):
    return settings["name"]
  if settings.get("dataset"):
    return named.known_as(str(settings["dataset"]))
  if settings.get("path"):
    return Path(str(settings["path"]).removesuffix(".gz")).stem
  if settings.get("task"):
    return f"{settings['task']}-{settings.get('task_seed', 0)}"
  return None


def _without_twins(own: Mapping[str, Any]) -> dict[str, Any]:
  """Adds None for the other form of each text, so that a task's own prompt replaces a file."""
  twins = {"prompt_template": "prompt_file", "system_prompt": "system_prompt_file"}
  both = {**twins, **{file: text for text, file in twins.items()}}
  return {**{both[key]: None for key in own if key in both}, **own}


def _text_or_file(name: str, text: str | None, file: str | Path | None) -> str | None:
  if not file:
    return text
  if text is not None:
    raise ValueError(f"{name}: give the text or a file, not both")
  path = Path(file)
  if not path.is_file():
    raise FileNotFoundError(f"no {name}_file {file}")
  try:
    return path.read_text(encoding="utf-8-sig")
  except UnicodeDecodeError as error:
    raise ValueError(f"the {name}_file {file} is not UTF-8 text: {error}") from error


ROW_READERS: dict[str, formats.RowReader] = {
  **formats.FORMATS,
  "auto": _from_any,
  "nemo_gym": nemo_gym.to_prompt,
}
