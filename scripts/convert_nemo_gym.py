"""Converts rollouts of NeMo Gym to recorded groups, or to prompts for online training.

python scripts/convert_nemo_gym.py rollouts.jsonl [MORE.jsonl ...] --out groups.jsonl
python scripts/convert_nemo_gym.py rollouts.jsonl --to prompts --out prompts.jsonl
python scripts/convert_nemo_gym.py rollouts.jsonl --check

Groups are rows {"input", "output", "reward"}: strings if there was one message on each side,
otherwise lists of messages; declared tools are in "tools". Rollouts with recorded token ids become
rows of tokens. --text makes strings of all: the user's last message, and the model's messages
joined by blanks, without thoughts and calls. Prompts are rows {"messages", ...} with the other
fields of the rollout, each task once. --check writes nothing and reads every row: it reports how
many cannot be used, by kind. See docs/offline.md.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.data import nemo_gym
from grpo_jax.data.formats import NO_REWARD, PromptStyle
from grpo_jax.data.groups import from_any, index_groups
from grpo_jax.data.jsonl import JsonlSource
from grpo_jax.data.recorded import ASSISTANT, RecordedTurn, Recording, Style
from grpo_jax.data.skipped_rows import HINT, OnError, SkippedRows
from grpo_jax.files import local_paths

# Fields of a rollout that belong to the attempt and not to the task.
ATTEMPT_FIELDS = ("reward", "_ng_rollout_index", "terminated", "truncated")


def group_row(recording: Recording) -> dict[str, Any]:
  """Returns the recording of one rollout as a row {"input", "output", "reward"}."""
  if recording.prompt_ids is not None:
    return _token_row(recording)
  messages = [_message(message) for message in recording.messages]
  is_single = len(messages) == 1 and messages[0]["role"] == "user"
  turns = [_said(turn) for turn in recording.responses[0].turns]
  is_text_alone = len(turns) == 1 and turns[0].keys() == {"role", "content"}
  row: dict[str, Any] = {
    "input": messages[0]["content"] if is_single else messages,
    "output": turns[0]["content"] if is_text_alone else turns,
  }
  if recording.tools:
    row["tools"] = list(recording.tools)
  return row | _quality(recording)


def text_row(recording: Recording, answers: Sequence[str]) -> dict[str, Any]:
  """Returns a rollout as a row of strings, as the script in NeMo Gym's guide does.

  Args:
    recording: Recording of the rollout.
    answers: Texts of the model's messages.
  """
  messages = recording.messages
  users = [m["content"] for m in messages if m["role"] == "user"] or [messages[-1]["content"]]
  return {"input": users[-1], "output": " ".join(answers), **_quality(recording)}


def prompt_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Returns the task of a rollout as a row {"messages", ...}."""
  record = nemo_gym.to_prompt(row, where, PromptStyle(output_key=None))
  left_out = ("responses_create_params", "response", "output", "messages", *ATTEMPT_FIELDS)
  others = {name: value for name, value in row.items() if name not in left_out}
  tools = {"tools": list(record.tools)} if record.tools else {}
  return {"messages": [_message(message) for message in record.messages], **tools, **others}


def convert(
  paths: Sequence[Path],
  *,
  to: str,
  style: Style,
  is_text: bool,
  on_error: OnError,
  skipped: SkippedRows,
) -> Iterator[dict[str, Any]]:
  """Yields the rows of all files.

  Args:
    paths: JSONL files of rollouts.
    to: "groups" or "prompts".
    style: Options for reading rollouts.
    is_text: Whether to reduce prompts and responses to strings.
    on_error: "stop" or "skip", for broken rows.
    skipped: Counter of the rows and of the skipped ones.

  Raises:
    RowError: A row is broken and `on_error` is "stop".
  """
  seen: set[str] = set()
  for path in paths:
    source = JsonlSource(path)
    for number in range(len(source)):
      made = skipped.guard(
        lambda source=source, number=number: _converted(source, number, to, style, is_text),
        on_error,
      )
      if made is None:
        continue
      if to == "groups":
        yield made
        continue
      row = source[number]
      key = json.dumps([row.get("_ng_task_index"), made["messages"]], sort_keys=True)
      if key not in seen:
        seen.add(key)
        yield made


def _converted(
  source: JsonlSource, number: int, to: str, style: Style, is_text: bool
) -> dict[str, Any]:
  """Returns the converted row of that number."""
  row, where = source[number], source.where(number)
  if to == "prompts":
    return prompt_row(row, where)
  recording = nemo_gym.to_recording(row, where, style)
  return text_row(recording, nemo_gym.answers(row, where)) if is_text else group_row(recording)


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit status."""
  parser = argparse.ArgumentParser(description="Convert rollouts of NeMo Gym.")
  parser.add_argument("rollouts", nargs="+", type=local_paths.argument, metavar="ROLLOUTS.jsonl")
  task = parser.add_mutually_exclusive_group(required=True)
  task.add_argument("--out", type=local_paths.argument, help="the JSONL file to write")
  task.add_argument("--check", action="store_true", help="read every row, write nothing")
  parser.add_argument("--to", choices=("groups", "prompts"), default="groups")
  parser.add_argument("--text", action="store_true", help="groups: the model's messages as strings")
  parser.add_argument("--reasoning", choices=("think", "drop"), help="default: think")
  parser.add_argument("--tools", choices=("refuse", "ignore"), default="refuse")
  parser.add_argument("--on-error", choices=("stop", "skip"), default="stop")
  options = parser.parse_args(arguments)
  if options.text and options.reasoning == "think":
    parser.error("--text leaves thoughts out; rows without it have them")
  style = Style(reasoning=options.reasoning or "think", tools=options.tools)
  if options.check:
    return check(options.rollouts, options.to, style)
  if options.out.exists() and any(options.out.samefile(p) for p in options.rollouts if p.exists()):
    parser.error(f"--out={options.out} is one of the files to convert")
  skipped = SkippedRows()
  rows = convert(
    options.rollouts,
    to=options.to,
    style=style,
    is_text=options.text,
    on_error=options.on_error,
    skipped=skipped,
  )
  try:
    count = write(options.out, rows)
  except (OSError, ValueError) as error:
    print(f"error: {error}".replace(HINT, "--on-error=skip leaves such rows out"), file=sys.stderr)
    return 1
  print(f"{count} rows to {options.out}")
  if skipped.kinds:
    print(skipped.line(), file=sys.stderr)
  if options.to == "groups" and count:
    print(groups_line(options.out))
  return 0


def check(paths: Sequence[Path], to: str, style: Style) -> int:
  """Reads all rows and prints what they have; returns 1 if some of them cannot be used."""
  skipped = SkippedRows()
  rows = convert(paths, to=to, style=style, is_text=False, on_error="skip", skipped=skipped)
  with_tools = unrewarded = usable = 0
  try:
    for row in rows:
      usable += 1
      with_tools += "tools" in row
      unrewarded += to == "groups" and "reward" not in row
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  print(f"{usable} of {skipped.rows} rows can be used; {with_tools} of them declare tools")
  if unrewarded:
    print(f"{unrewarded} {NO_REWARD}: offline.rewards='environment' computes it")
  if skipped.kinds:
    print(skipped.line())
  return int(bool(skipped.kinds))


def groups_line(path: Path) -> str:
  """Returns how many groups a file of responses has, and how many of them have one response."""
  source = JsonlSource(path)
  members = index_groups(source, from_any, Style(), on_error="stop")
  counts = f"{len(members)} groups, {members.singles} of them with one response"
  if not members.singles:
    return counts
  return (
    f"{counts}: from these, advantages.estimator='reinforce_pp' learns (configs/nemo_gym.py),"
    " and no estimator that compares within a group"
  )


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
  """Writes the rows, all or none, and returns their number."""
  count = 0
  unfinished = path.with_name(f"{path.name}.tmp")
  try:
    with open(unfinished, "w", encoding="utf-8") as file:
      for row in rows:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        count += 1
    unfinished.replace(path)
  finally:
    unfinished.unlink(missing_ok=True)
  return count


def _quality(recording: Recording) -> dict[str, Any]:
  """Returns what is known of the response apart from its text, as fields of a row."""
  response = recording.responses[0]
  quality: dict[str, Any] = {}
  if response.reward is not None:
    quality["reward"] = response.reward
  if recording.info.get("_ng_task_index") is not None:
    quality["group_id"] = recording.info["_ng_task_index"]
  if recording.group_type is not None:
    quality["group_type"] = recording.group_type
  if response.is_truncated:
    quality["finish_reason"] = "length"
  return quality


def _token_row(recording: Recording) -> dict[str, Any]:
  """Returns a row in the form that runs write: the sampled tokens and logprobs."""
  parts = [_tokens(turn) for turn in recording.responses[0].turns]
  return {
    "prompt_id": recording.key,
    "prompt": "\n".join(str(message["content"]) for message in recording.messages),
    "prompt_ids": list(recording.prompt_ids or ()),
    "completion_ids": [i for ids, _, _ in parts for i in ids],
    "loss_mask": [kept for _, mask, _ in parts for kept in mask],
    "behavior_logprobs": [value for _, _, values in parts for value in values],
    **_quality(recording),
  }


def _tokens(turn: RecordedTurn) -> tuple[list[int], list[int], list[float]]:
  ids = list(turn.token_ids or ())
  is_sampled = turn.role == ASSISTANT
  values = list(turn.logprobs) if turn.logprobs else [0.0] * len(ids)
  return ids, [int(is_sampled)] * len(ids), values


def _said(turn: RecordedTurn) -> dict[str, Any]:
  """Returns a turn as a message."""
  return _message(turn.message or {"role": turn.role, "content": turn.text})


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
  kept = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")
  return {name: message[name] for name in kept if name in message}


if __name__ == "__main__":
  sys.exit(main())
