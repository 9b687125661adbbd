"""The streams of prompts that a run is fed with, made of datasets and loaders."""

import functools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_jax.data import curriculum, loaders, settings
from grpo_jax.data.loaders import Loader
from grpo_jax.data.options import DataOptions
from grpo_jax.data.prompt_stream import PromptStream, cursor_of
from grpo_jax.data.prompts import (
  Dataset,
  PromptDataset,
  held_out,
  name_of,
  open_dataset,
)
from grpo_jax.data.settings import environments, names_a_source, trained_on
from grpo_jax.data.settings import evaluation as evaluation_sets
from grpo_jax.data.settings import training as training_sets
from grpo_jax.data.skipped_rows import OnError, SkippedRows
from grpo_jax.data.tokenizer import Tokenizer, check_vocabulary, find_tool_form, tool_form_of
from grpo_jax.data.tokenizer import load as load_tokenizer
from grpo_jax.registry import check_arguments, choose, function
from grpo_jax.types import Prompt

__all__ = [
  "DATALOADERS",
  "Dataset",
  "Loader",
  "Opener",
  "PromptDataset",
  "PromptStream",
  "Tokenizer",
  "find_tool_form",
  "check_vocabulary",
  "environments",
  "evaluation_sets",
  "first_prompts",
  "held_out",
  "load_tokenizer",
  "make",
  "make_dataloader",
  "make_held_out",
  "name_of",
  "names_a_source",
  "open_dataset",
  "tool_form_of",
  "trained_on",
  "training_sets",
]

Opener = Callable[..., Dataset]  # (tokenizer, **fields) → a dataset; see `open_dataset`.
_ALL = "all"  # name of the loader that reads several datasets as one.


def make(
  tokenizer: Tokenizer,
  *,
  datasets: Sequence[Any] = DataOptions.datasets,
  shuffle: bool = DataOptions.shuffle,
  seed: int = 0,
  epochs: int | None = None,
  on_error: OnError = DataOptions.on_error,
  num_prompts_per_dataloader: int | None = None,
  dataloader: str | None = None,
  dataloader_args: Mapping[str, Any] | None = None,
  state: Mapping[str, Any] | None = None,
  opener: Opener = open_dataset,
  **shared: Any,
) -> PromptStream:
  """Makes the stream of training prompts.

  Args:
    tokenizer: Tokenizer of the model.
    datasets: Differences between several datasets, one mapping each; empty: `shared` is the only
      dataset.
    shuffle: Whether every epoch has its own order.
    seed: Random seed of that order.
    epochs: Passes over the data; None: unlimited. With several loaders, the stream ends as soon as
      one of them is exhausted.
    on_error: "stop" or "skip", for broken rows.
    num_prompts_per_dataloader: Number of prompts that each dataset's own loader gives in turn.
    dataloader: Function that takes from the datasets' loaders: "by_success" or the dotted
      path of another function; see `loaders`.
    dataloader_args: Further arguments of that function.
    state: Position to continue at, from `state()` of an earlier stream.
    opener: Function that opens a dataset; for recorded groups it is `offline.open_groups`.
    **shared: Arguments of `prompts.open_dataset`; and `weight`.

  Raises:
    FileNotFoundError: A file does not exist.
    ImportError: A source needs a library that is not installed.
    ValueError: A field is unknown or has an invalid value.
  """
  found = settings.training(shared, datasets)
  weights = {name: one.pop("weight", None) for name, one in found.items()}
  take, keeps_records = make_dataloader(
    weights,
    num_prompts_per_dataloader=num_prompts_per_dataloader,
    dataloader=dataloader,
    dataloader_args=dataloader_args,
  )
  opened = [opener(tokenizer, **one) for one in found.values()]
  is_one = take is loaders.from_the_only_one
  parts = {_ALL: opened} if is_one and len(opened) > 1 else {one.name: [one] for one in opened}
  made = {}
  for name, members in parts.items():
    made[name] = Loader(
      members,
      shuffle=shuffle,
      # Every loader has its own order, whatever its position in the list.
      seed=[seed, zlib.crc32(name.encode())] if len(parts) > 1 else seed,
      epochs=epochs,
      on_error=on_error,
      cursor=cursor_of(state, name, sum(len(member) for member in members)),
    )
  return PromptStream(made, take, keeps_records=keeps_records, state=state)


def make_dataloader(
  weights: Mapping[str, float | int | None],
  *,
  num_prompts_per_dataloader: int | None = None,
  dataloader: str | None = None,
  dataloader_args: Mapping[str, Any] | None = None,
) -> tuple[loaders.Dataloader, bool]:
  """Returns the function that takes the prompts of a step, and whether it needs past metrics.

  Args:
    weights: Weights of the datasets, by name; None: not given.
    num_prompts_per_dataloader: Argument of `make`.
    dataloader: Argument of `make`.
    dataloader_args: Argument of `make`.

  Raises:
    ValueError: Several ways are requested at once, or one cannot work.
  """
  given = {name: weight for name, weight in weights.items() if weight is not None}
  ways = {
    "num_prompts_per_dataloader": num_prompts_per_dataloader is not None,
    "dataloader": dataloader is not None,
    "weight (of a dataset)": bool(given),
  }
  asked = [way for way, is_asked in ways.items() if is_asked]
  if len(asked) > 1:
    raise ValueError(f"data: give only one of {', '.join(asked)}; each decides which prompts come")
  if dataloader_args and dataloader is None:
    raise ValueError("data.dataloader_args needs data.dataloader, the function that takes them")
  if dataloader is not None:
    chosen = (
      function(dataloader) if "." in dataloader else choose("dataloader", dataloader, DATALOADERS)
    )
    usual = ("num_prompts", "records", "memory")
    from_loaders = functools.partial(chosen, {})  # the name of its first parameter does not matter.
    check_arguments(
      f"data.dataloader {dataloader}", from_loaders, dataloader_args or {}, usual=usual
    )
    if chosen is curriculum.by_success:
      curriculum.check(**(dataloader_args or {}))
    return functools.partial(chosen, **(dataloader_args or {})), True
  if given:
    is_usable = min(given.values()) >= 0 and 0 < sum(given.values()) < math.inf
    if len(given) < len(weights) or not is_usable:
      raise ValueError(
        f"data.datasets: every dataset needs a weight, none negative, one above 0; got {weights}"
      )
    return functools.partial(loaders.by_weight, weights=given), False
  if num_prompts_per_dataloader is not None:
    if num_prompts_per_dataloader < 1:
      raise ValueError(
        f"num_prompts_per_dataloader must be at least 1, got {num_prompts_per_dataloader}"
      )
    return functools.partial(
      loaders.one_after_the_other, num_prompts_per_dataloader=num_prompts_per_dataloader
    ), False
  return loaders.from_the_only_one, False


def first_prompts(dataset: Dataset, count: int) -> list[Prompt]:
  """Returns the prompts of the first `count` rows of a dataset, without broken rows."""
  found = SkippedRows()
  rows = range(min(count, len(dataset)))
  made = [found.guard(lambda row=row: dataset.prompt(row, epoch=0), "skip") for row in rows]
  return [prompt for prompt in made if prompt is not None]


def make_held_out(
  tokenizer: Tokenizer,
  *,
  limit: int | None = None,
  on_error: OnError = DataOptions.on_error,
  opener: Opener = open_dataset,
  **dataset: Any,
) -> list[Prompt]:
  """Makes an evaluation set: the first `limit` rows of a dataset (see `prompts.held_out`)."""
  dataset.pop("weight", None)
  return held_out(opener(tokenizer, **dataset), limit=limit, on_error=on_error)


DATALOADERS: dict[str, loaders.Dataloader] = {"by_success": curriculum.by_success}
