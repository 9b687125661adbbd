"""The input of every program of the benchmark: the task, its sizes, its reward.

A `Workload` is passed as a JSON file, so that programs in different virtual
environments read the same one; problems are in a separate JSONL file, made
once. Standard library only (except to make the problems), because all programs
import this module.
"""

import argparse
import dataclasses
import json
import pathlib
from typing import Any

SYSTEM_PROMPT = "Answer with the final number only."
PROBLEMS = range(1, 513)  # their seeds.
SIZES = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


@dataclasses.dataclass(frozen=True)
class Workload:
  """One training run: `steps` times, `prompts` x `group` completions and one optimizer step."""

  model: str  # Hugging Face folder.
  problems: str  # JSONL file of `question` and `answer`; step i uses rows i·prompts onwards.
  prompts: int  # number of prompts in a step.
  group: int  # number of completions per prompt.
  completion: int  # largest number of tokens in a completion.
  steps: int
  dtype: str = "float32"  # dtype of matrix products, "float32" or "bfloat16".
  learning_rate: float = 1e-5  # AdamW's rate, constant, without decay.
  seed: int = 0
  recompute: bool = False  # activations are recomputed in the backward pass; TRL and Tunix.
  overrides: tuple[str, ...] = ()  # "section.field=value"; used by our program only.

  def write(self, path: pathlib.Path) -> None:
    """Writes the workload as a JSON object."""
    path.write_text(json.dumps(dataclasses.asdict(self), indent=1))


PRESETS: dict[str, dict[str, int]] = {
  "w1": {"prompts": 4, "group": 8, "completion": 16, "steps": 4},
  "w2": {"prompts": 4, "group": 8, "completion": 64, "steps": 3},
}


def read(path: str | pathlib.Path) -> Workload:
  """Reads what `Workload.write` wrote."""
  fields = json.loads(pathlib.Path(path).read_text())
  return Workload(**{**fields, "overrides": tuple(fields["overrides"])})


def write_problems(path: pathlib.Path) -> None:
  """Makes the problems of the quickstart and writes them as JSONL."""
  from grpo_jax.data import arithmetic_problems

  problems = (arithmetic_problems.chain_sum(seed=seed, **SIZES) for seed in PROBLEMS)
  rows = [{"question": row["problem"], "answer": row["expected_answer"]} for row in problems]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_problems(path: str | pathlib.Path) -> list[dict[str, str]]:
  """Returns the rows that `write_problems` wrote, in order."""
  return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def messages(question: str) -> list[dict[str, str]]:
  """Returns the conversation that asks a question."""
  return [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": question},
  ]


def reward(completion: str, answer: str) -> float:
  """Returns 1 for the answer alone, 0.5 for the answer among other text, otherwise 0."""
  stripped = completion.strip()
  if stripped == answer:
    return 1.0
  return 0.5 if answer in stripped.split() else 0.0


def write_endless_model(source: pathlib.Path, target: pathlib.Path) -> str:
  """Makes a model folder whose end-of-sequence token is never sampled.

  Every completion then runs to its limit in every program, without changes to
  the programs: all read the end token from these files. Weights and
  vocabulary are linked and not copied.

  Args:
    source: Hugging Face folder with a `tokenizer.json`.
    target: Folder to create.

  Returns:
    The special token that now ends a sequence.

  Raises:
    ValueError: The tokenizer has no unused special token.
  """
  tokenizer = json.loads((source / "tokenizer.json").read_text())
  settings = json.loads((source / "tokenizer_config.json").read_text())
  template = source / "chat_template.jinja"
  in_use = "".join(str(value) for name, value in settings.items() if name.endswith("_token"))
  in_use += template.read_text() if template.exists() else str(settings.get("chat_template", ""))
  spare = [
    (token["id"], token["content"])
    for token in tokenizer["added_tokens"]
    if token["special"] and token["content"] not in in_use
  ]
  if not spare:
    raise ValueError(f"{source}/tokenizer.json has no unused special token for the end token")
  token_id, token = spare[-1]

  target.mkdir(parents=True)
  for file in source.iterdir():
    if file.name not in ("config.json", "generation_config.json", "tokenizer_config.json"):
      (target / file.name).symlink_to(file.resolve())
  for name in ("config.json", "generation_config.json"):
    content: dict[str, Any] = {}
    if (source / name).exists():
      content = json.loads((source / name).read_text())
    (target / name).write_text(json.dumps(content | {"eos_token_id": token_id}, indent=1))
  settings["eos_token"] = token
  (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
  return token


def command_line(text: str | None) -> tuple[str, str]:
  """Reads the words of a program that compare.py runs: paths of the workload and the record.

  Args:
    text: Text that --help prints.
  """
  parser = argparse.ArgumentParser(
    description=text, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("workload", metavar="WORKLOAD.json")
  parser.add_argument("record", metavar="RECORD.json")
  given = parser.parse_args()
  return given.workload, given.record
