r"""Datasets by name: their place on the hub, the meaning of their columns, their prompts. Pure.

A name is found regardless of case, hyphens and underscores: "OpenMathInstruct-2", "gsm8k",
"AIME2024", "open_assistant". All columns of a row reach the environment unchanged, in addition to
`problem` and `expected_answer`.

Sources of the names and columns: the datasets' cards on the hub, NeMo RL's
`nemo_rl/data/datasets` (response_datasets, eval_datasets, preference_datasets), and the task files
of lm-evaluation-harness for MMLU, MMLU-Pro and GPQA.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from grpo_jax.data import columns, formats, message_trees, recorded
from grpo_jax.data.columns import Column, Row, column
from grpo_jax.registry import nearest

BOXED = (
  "Think step-by-step to solve the following problem. Output your answer inside of \\boxed{} tags.:"
  "\n{}\n\nLet's think step-by-step"
)
COMPLETE = (
  "Complete this Python function. Answer with the whole function, its imports included, in one "
  "```python block.\n\n```python\n{}\n```"
)
CHOOSE = (
  "Answer the following multiple choice question. Think step by step, and finish with a line"
  ' "Answer: X" in which X is the letter of one option.\n\n{}'
)
SPAN = "Answer the question with a short passage of the text, and nothing else.\n\n{}"
_OTHERWISE = "; set data.dataset=None if the rows are not of that dataset"
# Environment of datasets whose answers no rule can check: their answer is one of reference.
UNJUDGED = "reward_model"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedDataset:
  """An entry of the table of datasets."""

  hub: str  # repository on the Hugging Face hub.
  problem: Column = column("problem")
  answer: Column | None = column("answer")  # None: the environment needs other columns.
  prompt_template: str | None = BOXED
  subset: str | None = None  # several, separated by commas, are read one after another.
  split: str = "train"
  evaluation_split: str | None = None  # None: the same.
  environment: str = "math"  # name of the environment that scores it.
  options: Column | None = None  # letter → text of a question's options, added to the problem.
  # Conversation that ends with an answer of reference; `problem` and `answer` are then not read.
  messages: Column | None = None
  group: Column | None = None  # row of a ranked group, for learning from recorded responses.
  rearranged: Callable[[Any], Any] | None = None  # source of rows → one with other rows.
  # Pattern of the parquet files of a {split}, and {subset}, on the hub; None: the datasets library
  # finds them. It downloads all splits, which are 22 million rows of OpenMathInstruct-2.
  files: str | None = None


def reader(
  dataset: NamedDataset, *, input_key: str | None, output_key: str | None
) -> formats.RowReader:
  """Returns the processor of a named dataset.

  Args:
    dataset: Entry of the table.
    input_key: Column of the problem, if a copy of the dataset differs; None: the entry's column.
    output_key: Column of the answer, as for `input_key`; "": the rows have no answer.
  """
  if dataset.messages is not None:
    return _chat_reader(dataset.messages, input_key, output_key)
  problem_of = column(input_key) if input_key else dataset.problem
  answer_of = column(output_key) if output_key else dataset.answer

  def read(row: Row, where: str, style: formats.PromptStyle) -> formats.Record:
    with formats.option_names("data.input_key", row, _OTHERWISE):
      problem = formats.as_text(problem_of(row, where), "the problem", where)
    standard: dict[str, Any] = {}
    if dataset.options is not None:
      standard["options"] = options = dataset.options(row, where)
      problem += "\n\n" + "\n".join(f"{letter}) {text}" for letter, text in options.items())
    standard["problem"] = problem
    if answer_of is not None and output_key != "":
      with formats.option_names("data.output_key", row, _OTHERWISE):
        standard["expected_answer"] = formats.as_answer(answer_of(row, where), "the answer", where)
    extra = {k: v for k, v in row.items() if k not in standard or v != standard[k]}
    return formats.Record(formats.ask(problem, style), formats.merged(extra, standard))

  return read


def _chat_reader(
  messages: Column, input_key: str | None, output_key: str | None
) -> formats.RowReader:
  """Returns the processor of conversations that end with an answer of reference."""
  messages_of = columns.conversation(input_key) if input_key else messages

  def read(row: Row, where: str, style: formats.PromptStyle) -> formats.Record:
    *asked, answer = messages_of(row, where)
    if output_key:
      text = formats.as_answer(column(output_key)(row, where), repr(output_key), where)
      answer = {"role": "assistant", "content": text}
    chat = asked if output_key == "" else [*asked, answer]
    return formats.from_messages({**row, "messages": chat}, where, style)

  return read


def group_reader(dataset: NamedDataset) -> recorded.Reader | None:
  """Returns the processor of a dataset's ranked responses; None if it has none."""
  group_of = dataset.group
  if group_of is None:
    return None

  def read(row: Row, where: str, style: recorded.Style) -> recorded.Recording:
    made = {key: value for key, value in group_of(row, where).items() if value is not None}
    style = dataclasses.replace(style, input_key=None, output_key=None)
    return recorded.from_ranked({**row, **made}, where, style)

  return read


def find(name: str) -> NamedDataset | None:
  """Returns the entry for a name, or for a repository on the hub; None for other repositories.

  Raises:
    ValueError: The name is neither in the table nor of the form owner/name.
  """
  key = _key(name)
  if key is None and "/" not in name:
    known = ", ".join(sorted(DATASETS))
    hint = nearest(name, [*DATASETS, *ALIASES])
    raise ValueError(f"unknown dataset {name!r}{hint}; there are: {known}")
  return None if key is None else DATASETS[key]


def known_as(name: str) -> str:
  """Returns the name in the table; for another repository on the hub, its last part."""
  return _key(name) or name.rstrip("/").rpartition("/")[2]


def _key(name: str) -> str | None:
  # Of several entries of one repository, the first is meant by the repository's name.
  by_repository = {entry.hub.lower(): key for key, entry in reversed(DATASETS.items())}
  by_word = {_word(alias): key for alias, key in ALIASES.items()}
  by_word |= {_word(key): key for key in DATASETS}
  word = _word(name)
  return by_repository.get(name.lower()) or by_word.get(word) or by_word.get(_short(word))


def _word(name: str) -> str:
  return re.sub(r"[^a-z0-9]", "", name.lower())


def _short(word: str) -> str:
  return word.removesuffix("dataset")  # NeMo RL's classes: Tulu3SftMixtureDataset.


_GPQA_OPTIONS = columns.shuffled_options(
  "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"
)
_MMLU_OPTIONS = columns.listed_options("choices")
_MMLU_PRO_OPTIONS = columns.listed_options("options")


def _gpqa(subset: str) -> NamedDataset:
  return NamedDataset(
    "Idavidrein/gpqa",
    column("Question"),
    columns.letter_of("Correct Answer", _GPQA_OPTIONS),
    prompt_template=CHOOSE,
    subset=subset,
    environment="multiple_choice",
    options=_GPQA_OPTIONS,
  )


DATASETS: dict[str, NamedDataset] = {
  "OpenMathInstruct-2": NamedDataset(
    "nvidia/OpenMathInstruct-2",
    column("problem"),
    column("expected_answer"),
    split="train_1M",
    files="data/{split}-*.parquet",
  ),
  "GSM8K": NamedDataset(
    "openai/gsm8k",
    column("question"),
    columns.after_hashes("answer"),
    subset="main",
    evaluation_split="test",
    files="{subset}/{split}-*.parquet",
  ),
  "MATH": NamedDataset(
    "DigitalLearningGmbH/MATH-lighteval",
    column("problem"),
    columns.in_box("answer", "solution"),
    evaluation_split="test",
  ),
  "MATH-500": NamedDataset(
    "HuggingFaceH4/MATH-500", column("problem"), columns.in_box("answer", "solution"), split="test"
  ),
  "DeepScaleR": NamedDataset(
    "agentica-org/DeepScaleR-Preview-Dataset", column("problem"), column("answer")
  ),
  "DAPO-Math-17K": NamedDataset(
    "BytedTsinghua-SIA/DAPO-Math-17k",
    columns.without_instructions("prompt.0.content"),
    column("reward_model.ground_truth"),
  ),
  "DAPOMathAIME2024": NamedDataset(
    "BytedTsinghua-SIA/AIME-2024",
    columns.without_instructions("prompt.0.content"),
    column("reward_model.ground_truth"),
  ),
  "AIME2024": NamedDataset("HuggingFaceH4/aime_2024", column("problem"), column("answer")),
  "AIME2025": NamedDataset(
    "opencompass/AIME2025",
    column("question", "problem"),
    column("answer"),
    subset="AIME2025-I,AIME2025-II",
    split="test",
  ),
  "AIME2026": NamedDataset("MathArena/aime_2026", column("problem"), column("answer")),
  "NuminaMath-1.5": NamedDataset("AI-MO/NuminaMath-1.5", answer=columns.verifiable("answer")),
  "NuminaMath": NamedDataset(
    "AI-MO/NuminaMath-CoT", answer=columns.boxed_alone("solution"), evaluation_split="test"
  ),
  "OpenR1-Math-220k": NamedDataset(
    "open-r1/OpenR1-Math-220k", answer=columns.verifiable("answer"), subset="default"
  ),
  "GPQA": _gpqa("gpqa_diamond"),
  "GPQA-Main": _gpqa("gpqa_main"),
  "GPQA-Extended": _gpqa("gpqa_extended"),
  "MMLU": NamedDataset(
    "cais/mmlu",
    column("question"),
    columns.letter_at("answer", _MMLU_OPTIONS),
    prompt_template=CHOOSE,
    subset="all",
    split="auxiliary_train",
    evaluation_split="test",
    environment="multiple_choice",
    options=_MMLU_OPTIONS,
  ),
  "MMLU-Pro": NamedDataset(
    "TIGER-Lab/MMLU-Pro",
    column("question"),
    columns.letter_at("answer", _MMLU_PRO_OPTIONS),
    prompt_template=CHOOSE,
    split="test",
    environment="multiple_choice",
    options=_MMLU_PRO_OPTIONS,
  ),
  "SQuAD": NamedDataset(
    "rajpurkar/squad",
    columns.question_in_context,
    column("answers.text.0"),
    prompt_template=SPAN,
    evaluation_split="validation",
    environment="short_answer",
  ),
  "HumanEval": NamedDataset(
    "openai/openai_humaneval",
    column("prompt"),
    None,
    prompt_template=COMPLETE,
    split="test",
    environment="code",
  ),
  "OpenAssistant": NamedDataset(
    "OpenAssistant/oasst1",
    prompt_template=None,
    evaluation_split="validation",
    environment=UNJUDGED,
    messages=columns.best_reply,
    group=columns.reply_group,
    rearranged=message_trees.MessageTrees,
  ),
  "Tulu3SftMixture": NamedDataset(
    "allenai/tulu-3-sft-mixture",
    prompt_template=None,
    environment=UNJUDGED,
    messages=columns.conversation("messages"),
  ),
  "HelpSteer3": NamedDataset(
    "nvidia/HelpSteer3",
    prompt_template=None,
    subset="preference",
    evaluation_split="validation",
    environment=UNJUDGED,
    messages=columns.preferred,
    group=columns.preference_group,
  ),
}
# Other names of these datasets, in the guides and in daily use.
ALIASES: dict[str, str] = {
  "oasst": "OpenAssistant",
  "oasst1": "OpenAssistant",
  "tulu3": "Tulu3SftMixture",
  "NuminaMath-CoT": "NuminaMath",
  "OpenR1-Math": "OpenR1-Math-220k",
  "DeepScaleR-Preview": "DeepScaleR",
  "GPQA-Diamond": "GPQA",
  "aime24": "AIME2024",
  "aime25": "AIME2025",
  "aime26": "AIME2026",
}
