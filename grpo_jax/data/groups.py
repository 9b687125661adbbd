"""Reads groups of rollouts from files of recorded attempts: tokenized, rewarded, by number.

A group is one row, or all rows of equal `Recording.key`, wherever they are in the file. In the
second case the file is read once when it is opened, and only the row numbers are kept.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from grpo_jax.data import formats, nemo_gym, prompt_texts, recorded, rendered_turns, response_tokens
from grpo_jax.data.formats import RowError
from grpo_jax.data.prompts import Overlong
from grpo_jax.data.recorded import ASSISTANT, Reader, Recording, Response, Style
from grpo_jax.data.row_selection import RowSelection
from grpo_jax.data.skipped_rows import OnError, OverlongError, SkippedRows
from grpo_jax.data.sources import RowSource
from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.models.chat import control_tokens
from grpo_jax.models.chat.tokenizer_files import TokenizerFailure
from grpo_jax.types import FinishReason, Prompt, RecordedGroup, Rollout, RolloutGroup

RECORDED = "recorded"  # replaces an environment if the file has the rewards.
UNKNOWN_VERSION = -1  # version of weights that do not belong to this run.
_LONGEST_KEY = 256  # characters.
_WITHOUT_TOOLS = ", record the rollouts with their token ids, or set offline.tools='ignore'"
_WHOLE = "\0whole"  # in place of a key: the row is a whole group.

Check = Callable[[Recording, str], None]  # (recording, where)
# The ranks of a group's responses → their rewards.
RankRewards = Callable[[Sequence[float]], Float[np.ndarray, " G"]]


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
  """The rows of each group."""

  rows: Int[np.ndarray, " rows"]  # rows of the first group, then of the second, ...
  starts: Int[np.ndarray, " bounds"]  # where each group begins in `rows`, then the number of rows.
  is_whole: bool  # every row is a group.

  def __len__(self) -> int:
    return len(self.starts) - 1

  @property
  def singles(self) -> int:
    """Number of groups with a single row; 0 if every row is a whole group."""
    return 0 if self.is_whole else int((np.diff(self.starts) == 1).sum())

  def of(self, number: int) -> list[int]:
    """Returns the rows of a group, in the order of the file."""
    return self.rows[self.starts[number] : self.starts[number + 1]].tolist()


@dataclasses.dataclass(frozen=True, slots=True)
class GroupDataset:
  """A source whose rows are groups. For loaders it is a dataset of the groups' prompts."""

  source: RowSource
  part: RowSelection  # selection of the groups.
  tokenizer: Tokenizer
  read_row: Reader
  style: Style
  members: Members
  rank_rewards: RankRewards
  environment: str  # environment that scores responses; RECORDED: the file has the rewards.
  max_prompt_tokens: int
  overlong: Overlong  # what happens to longer prompts.
  max_tokens: int | None  # bound of prompt and response; longer responses are cut. None: no bound.
  allow_control_tokens: bool = False  # whether text of prompts may become control tokens.

  @property
  def name(self) -> str:
    """The first part of the ids of its prompts."""
    return self.source.name

  def __len__(self) -> int:
    return len(self.part)

  def prompt(self, row: int, *, epoch: int) -> Prompt:
    """Makes the prompt of a group. The prompt holds the group itself; see `group_of`.

    Args:
      row: Number of the group among those that the dataset selects.
      epoch: Pass over the dataset; together with the row it makes the prompt's id.

    Raises:
      OverlongError: The prompt is too long and such prompts are dropped.
      RowError: A row is broken, or the chat template rejects its messages.
    """
    item = self.group(self.part.source_row(row), prompt_id=f"{self.name}:{epoch}:{row}")
    return dataclasses.replace(item.group.prompt, recorded=item)

  def group(self, number: int, *, prompt_id: str) -> RecordedGroup:
    """Makes a group by its number in the file; raises the same errors as `prompt`."""
    rows = self.members.of(number)
    places = [self.source.where(row) for row in rows]
    recordings = [
      self.read_row(self.source[row], place, self.style)
      for row, place in zip(rows, places, strict=True)
    ]
    first, where = recordings[0], places[0]
    if self.members.is_whole and first.key is not None:
      raise RowError(where, "a single response, among rows that are whole groups")
    if any(recording.prompt_ids != first.prompt_ids for recording in recordings):
      raise RowError(where, "the rows of this group have different token ids for one prompt")
    prompt = self._prompt(first, prompt_id, where)
    responses = [
      (response, place)
      for place, recording in zip(places, recordings, strict=True)
      for response in recording.responses
    ]
    rewards, components = self._rewards(responses, where)
    room = None if self.max_tokens is None else self.max_tokens - len(prompt.token_ids)
    made = [
      self._rollout(response, reward, parts, place, room, prompt.tools)
      for (response, place), reward, parts in zip(responses, rewards, components, strict=True)
    ]
    return RecordedGroup(
      dataset=self.name,
      number=number,
      group=RolloutGroup(prompt, tuple(rollout for rollout, _ in made)),
      is_known=tuple(known for _, known in made),
      group_type=first.group_type,
      where=where,
    )

  def question(self, number: int) -> tuple[Any, Any]:
    """Returns what a group asks, as a problem with an answer does, and the whole group."""
    prompt = dataclasses.replace(self.style.prompt, system_prompt=None, prompt_template=None)
    style = dataclasses.replace(self.style, prompt=prompt)
    read = [
      self.read_row(self.source[row], self.source.where(row), style)
      for row in self.members.of(number)
    ]
    asked = read[0].messages or read[0].prompt_ids, None
    return asked, (asked, [dataclasses.asdict(each) for one in read for each in one.responses])

  def _prompt(self, recording: Recording, prompt_id: str, where: str) -> Prompt:
    """Returns the prompt of a group; one that is too long is cut with weight 0, or rejected."""
    asked = self._asked(recording, where)
    if asked.too_long and self.overlong == "drop":
      raise OverlongError(where, asked.too_long)
    info, text = recording.info, asked.text
    if asked.too_long:  # what the model reads.
      text = self.tokenizer.decode(asked.ids, skip_special=False)
    return Prompt(
      prompt_id=prompt_id,
      token_ids=asked.ids,
      environment=self.environment,
      info=prompt_texts.shortened(info, len(asked.text)) if asked.is_shortened else info,
      text=text,
      where=where,
      weight=0.0 if asked.too_long else recording.weight,
      dataset=self.name,
      is_cut=bool(asked.too_long),
      tools=recording.tools,
      parted=asked.parted,
    )

  def _asked(self, recording: Recording, where: str) -> prompt_texts.Asked:
    """Returns the text and tokens of a prompt, recorded or encoded."""
    longest = self.max_prompt_tokens
    if recording.prompt_ids is None:
      return self._encoded(recording, where)
    ids = response_tokens.checked(self.tokenizer, recording.prompt_ids, where)
    if not len(ids):
      raise RowError(where, "the prompt has no tokens")
    too_long = f"{len(ids)} tokens, more than {longest}" if len(ids) > longest else ""
    text = recording.prompt_text
    is_shortened = bool(too_long) and len(text) > self.tokenizer.longest_text(longest)
    text = text[: self.tokenizer.longest_text(longest)] if is_shortened else text
    return prompt_texts.Asked(text, ids[:longest].copy(), too_long, is_shortened)

  def _encoded(self, recording: Recording, where: str) -> prompt_texts.Asked:
    """Returns the text and tokens of a prompt whose tokens are not recorded."""
    messages, tools = recording.messages, recording.tools
    if self.allow_control_tokens:
      messages, tools = control_tokens.trusted(messages), control_tokens.trusted(tools)
    return rendered_turns.ask(
      self.tokenizer,
      messages,
      where,
      max_tokens=self.max_prompt_tokens,
      tools=tools,
      otherwise=_WITHOUT_TOOLS,
    )

  def _rewards(
    self, responses: Sequence[tuple[Response, str]], where: str
  ) -> tuple[list[float], list[Mapping[str, float]]]:
    """Returns the reward and the reward components of every response of a group."""
    given = [response for response, _ in responses]
    if len({(response.rank is None, *sorted(response.ranks)) for response in given}) > 1:
      raise RowError(where, "all responses of a group need the same ranks, or none")
    components: list[dict[str, float]] = [dict(response.components) for response in given]
    for criterion in given[0].ranks:
      each = self.rank_rewards([response.ranks[criterion] for response in given])
      for parts, reward in zip(components, each, strict=True):
        parts[criterion] = float(reward)
    if given[0].rank is not None:
      ranks = [math.nan if response.rank is None else response.rank for response in given]
      return [float(r) for r in self.rank_rewards(ranks)], [*components]
    rewards = []
    for (response, place), parts in zip(responses, components, strict=True):
      if response.reward is not None:
        rewards.append(response.reward)
      elif parts:
        rewards.append(sum(parts.values()))
      elif self.environment != RECORDED:
        rewards.append(math.nan)  # the environment scores it later.
      else:
        _check_reward(response, place, self.style)
    return rewards, [*components]

  def _rollout(
    self,
    response: Response,
    reward: float,
    components: Mapping[str, float],
    where: str,
    room: int | None,
    tools: Sequence[Mapping[str, Any]],
  ) -> tuple[Rollout, bool]:
    """Makes a rollout, and says whether its behavior logprobs are known."""
    encoder = response_tokens.Encoder(self.tokenizer, where, tools=tools, room=room)
    try:
      ids, mask, logprobs = encoder.encode(response)
    except TokenizerFailure as error:
      raise RowError(where, str(error)) from error
    is_cut = room is not None and len(ids) > room
    kept = slice(0, max(room, 0) if is_cut and room is not None else len(ids))
    truncated = is_cut or response.is_truncated
    known = np.zeros(len(ids), np.float32) if logprobs is None else logprobs
    return Rollout(
      completion_ids=ids[kept],
      loss_mask=mask[kept],
      behavior_logprobs=known[kept],
      weight_versions=np.full(len(ids[kept]), UNKNOWN_VERSION, np.int32),
      finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
      reward=reward,
      text=self.tokenizer.decode(ids[kept], skip_special=True),
      reward_components=components,
      turns=sum(turn.role == ASSISTANT for turn in response.turns),
      weight=response.weight,
    ), logprobs is not None


def group_of(prompt: Prompt) -> RecordedGroup:
  """Returns the group of a prompt that `GroupDataset.prompt` has made.

  Raises:
    ValueError: The prompt is not from a file of recorded attempts.
  """
  if prompt.recorded is None:
    raise ValueError(f"prompt {prompt.prompt_id!r} has no recorded attempts")
  return prompt.recorded


def from_any(row: Mapping[str, object], where: str, style: Style) -> Recording:
  """Reads a row in the format that its fields indicate."""
  if nemo_gym.is_rollout(row):
    return nemo_gym.to_recording(row, where, style)
  if "group" in row and "completion_ids" not in row:
    return recorded.from_ranked(row, where, style)
  if "completion_ids" in row:
    return recorded.from_rollouts(row, where, style)
  return recorded.from_recorded(row, where, style)


def is_recorded(row: Mapping[str, object]) -> bool:
  """Returns whether a row has responses, by the fields that `from_any` reads."""
  if nemo_gym.is_rollout(row):
    return "response" in row or "output" in row
  has_pair = {"input", "output"} <= row.keys() and "problem" not in row
  return "group" in row or "completion_ids" in row or has_pair


def index_groups(
  source: RowSource,
  read_row: Reader,
  style: Style,
  *,
  on_error: OnError,
  check: Check | None = None,
) -> Members:
  """Finds the rows of every group; logs how many rows of each kind were skipped.

  Args:
    source: Source of the rows.
    read_row: Reader of their format.
    style: Names of the fields, and other options of reading.
    on_error: "stop": a broken row raises; "skip": it is left out of its group. If a row is a
      whole group, rows are read here only up to the first readable one.
    check: Function (recording, where) that raises RowError for a row that cannot be used; None: all
      rows that can be read are used.

  Returns:
    The groups, in the order of their first rows.

  Raises:
    RowError: A row is broken and `on_error` is "stop".
    ValueError: No row can be read.
  """
  groups: dict[str, list[int]] = {}
  skipped = SkippedRows()
  for row in range(len(source)):
    key = skipped.guard(lambda row=row: _key(source, row, read_row, style, groups, check), on_error)
    if key == _WHOLE:
      every = np.arange(len(source))
      return Members(every, np.arange(len(source) + 1), is_whole=True)
    if key is not None:
      groups.setdefault(_short(key), []).append(row)
  if not groups:
    raise skipped.none_left(source.name)
  skipped.warn()
  sizes = [len(rows) for rows in groups.values()]
  rows = np.concatenate([np.asarray(rows) for rows in groups.values()])
  return Members(rows, np.concatenate([[0], np.cumsum(sizes)]), is_whole=False)


def _key(
  source: RowSource,
  row: int,
  read_row: Reader,
  style: Style,
  groups: Mapping[str, Sequence[int]],
  check: Check | None,
) -> str:
  """Returns the key of a row's group; _WHOLE for a row that is one, if it is the first row."""
  where = source.where(row)
  recording = read_row(source[row], where, style)
  if recording.key is None and groups:
    raise RowError(where, "a whole group in one row, among rows of single responses")
  if check is not None:
    check(recording, where)
  return _WHOLE if recording.key is None else recording.key


def checker(tokenizer: Tokenizer, style: Style, *, needs_rewards: bool) -> Check:
  """Returns a function that raises RowError for rows that a run cannot learn from.

  Args:
    tokenizer: Tokenizer whose chat template has to write the tools that a row declares.
    style: Names of the fields.
    needs_rewards: Whether a response needs a reward.
  """

  def check(recording: Recording, where: str) -> None:
    if recording.prompt_ids is None:
      rendered_turns.check_tools(tokenizer, recording.tools, where, _WITHOUT_TOOLS)
    for response in recording.responses if needs_rewards else ():
      _check_reward(response, where, style)

  return check


def _check_reward(response: Response, where: str, style: Style) -> None:
  """Raises RowError for a response without a reward, a rank, or parts of either."""
  if response.reward is None and response.rank is None:
    if not response.components and not response.ranks:
      raise RowError(
        where,
        f"no key {style.reward_key!r}; offline.rewards='environment' computes it",
        kind=formats.NO_REWARD,
      )


def _short(key: str) -> str:
  """Returns a short form of a key: prompts may be long, and every key is kept."""
  if len(key) <= _LONGEST_KEY:
    return key
  return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


GROUP_FORMATS: dict[str, Reader] = {
  "auto": from_any,
  "ranked": recorded.from_ranked,
  "recorded": recorded.from_recorded,
  "nemo_gym": nemo_gym.to_recording,
  "rollouts": recorded.from_rollouts,
}
