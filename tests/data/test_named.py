"""Datasets by name, each on rows of its real shape, read from a local copy."""

import collections
import json

import pytest

from grpo_jax import data
from grpo_jax.data import columns, named
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.data.formats import LeftOut, RowError
from grpo_jax.data.groups import group_of
from grpo_jax.offline import recorded_groups

TOKENIZER = ByteTokenizer()

DAPO_PROMPT = (
  "Solve the following math problem step by step. The last line of your response should be of the"
  " form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
  "In triangle $ABC$, find $n$.\n\n"
  'Remember to put your answer on its own line after "Answer:".'
)
HUMANEVAL_PROMPT = 'def add(x: int, y: int):\n    """Add two numbers x and y"""\n'

# name, a row as the hub has it, the problem, the expected answer, the environment.
ROWS = {
  "OpenMathInstruct-2": (
    {
      "problem": "What is $2+2$?",
      "generated_solution": "We add. \\boxed{4}",
      "expected_answer": "4",
      "problem_source": "augmented_math",
    },
    "What is $2+2$?",
    "4",
    "math",
  ),
  "GSM8K": (
    {
      "question": "Natalia sold 1,000 clips and then 80. How many?",
      "answer": "She sold 1000+80 = <<1000+80=1080>>1080 clips.\n#### 1,080",
    },
    "Natalia sold 1,000 clips and then 80. How many?",
    "1080",
    "math",
  ),
  "MATH": (
    {
      "problem": "Simplify $\\sqrt{1/4}$.",
      "level": "Level 2",
      "type": "Algebra",
      "solution": "First \\boxed{x}, so it is $\\boxed{\\frac{1}{2}}$.",
    },
    "Simplify $\\sqrt{1/4}$.",
    "\\frac{1}{2}",
    "math",
  ),
  "MATH-500": (
    {
      "problem": "Convert $(0,3)$.",
      "solution": "So $\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}.$",
      "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
      "subject": "Precalculus",
      "level": 2,
      "unique_id": "test/precalculus/807.json",
    },
    "Convert $(0,3)$.",
    "\\left( 3, \\frac{\\pi}{2} \\right)",
    "math",
  ),
  "DeepScaleR": (
    {"problem": "Find $f(-2)$.", "answer": "\\frac{14}{3}", "solution": "Then $\\frac{14}{3}$."},
    "Find $f(-2)$.",
    "\\frac{14}{3}",
    "math",
  ),
  "DAPO-Math-17K": (
    {
      "data_source": "math_dapo",
      "prompt": [{"content": DAPO_PROMPT, "role": "user"}],
      "ability": "MATH",
      "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
      "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
    },
    "In triangle $ABC$, find $n$.",
    "34",
    "math",
  ),
  "AIME2024": (
    {
      "id": 60,
      "problem": "Find the number of minutes.",
      "solution": "It is $\\boxed{204}$.",
      "answer": "204",
      "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_I_Problems/Problem_1",
      "year": "2024",
    },
    "Find the number of minutes.",
    "204",
    "math",
  ),
  "AIME2025": (
    {"question": "Find the sum of all bases $b>9$.", "answer": "70"},
    "Find the sum of all bases $b>9$.",
    "70",
    "math",
  ),
  "AIME2026": (
    {"problem_idx": 1, "answer": 277, "problem": "Find the distance."},
    "Find the distance.",
    "277",
    "math",
  ),
  "GPQA": (
    {
      "Question": "Which is a metal?",
      "Correct Answer": " Iron\n",
      "Incorrect Answer 1": "Neon",
      "Incorrect Answer 2": "Argon",
      "Incorrect Answer 3": "Helium",
      "Subdomain": "Chemistry",
    },
    "Which is a metal?\n\nA) Argon\nB) Neon\nC) Helium\nD) Iron",
    "D",
    "multiple_choice",
  ),
  "MMLU-Pro": (
    {
      "question_id": 70,
      "question": "2 + 2?",
      "options": ["3", "4", "5"],
      "answer": "B",
      "answer_index": 1,
      "category": "math",
    },
    "2 + 2?\n\nA) 3\nB) 4\nC) 5",
    "B",
    "multiple_choice",
  ),
  "SQuAD": (
    {
      "id": "5733be284776f41900661182",
      "title": "University_of_Notre_Dame",
      "context": "The Virgin Mary appeared to Saint Bernadette Soubirous in 1858.",
      "question": "To whom did the Virgin Mary appear in 1858?",
      "answers": {"text": ["Saint Bernadette Soubirous"], "answer_start": [31]},
    },
    "The Virgin Mary appeared to Saint Bernadette Soubirous in 1858.\n\n"
    "Question: To whom did the Virgin Mary appear in 1858?",
    "Saint Bernadette Soubirous",
    "short_answer",
  ),
  "HumanEval": (
    {
      "task_id": "HumanEval/53",
      "prompt": HUMANEVAL_PROMPT,
      "entry_point": "add",
      "canonical_solution": "    return x + y\n",
      "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n",
    },
    HUMANEVAL_PROMPT,
    None,
    "code",
  ),
}
NUMINA = {
  "problem": "Find $x$.",
  "solution": "It is $\\boxed{7}$.",
  "answer": "7",
  "problem_type": "Algebra",
  "question_type": "math-word-problem",
  "problem_is_valid": "Yes",
  "solution_is_valid": "Yes",
  "source": "olympiads",
  "synthetic": False,
}
OPENR1 = {
  "problem": "Find $x$.",
  "solution": "So.",
  "answer": "\\frac{1}{2}",
  "problem_type": "Algebra",
  "question_type": "math-word-problem",
  "source": "olympiads",
  "uuid": "586fd646-76d6-5070-8c81-9993ab9d8559",
  "is_reasoning_complete": [True, True],
  "generations": ["<think>…</think>", "<think>…</think>"],
  "correctness_math_verify": [True, False],
  "correctness_llama": None,
  "finish_reasons": None,
  "correctness_count": 1,
  "messages": [{"content": "Find $x$.", "role": "user"}],
}
MMLU = {"question": "2 + 2?", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": 1}
ROWS["DAPOMathAIME2024"] = ROWS["DAPO-Math-17K"]
ROWS["GPQA-Main"] = ROWS["GPQA-Extended"] = ROWS["GPQA"]
ROWS["NuminaMath-1.5"] = (NUMINA, "Find $x$.", "7", "math")
ROWS["OpenR1-Math-220k"] = (OPENR1, "Find $x$.", "\\frac{1}{2}", "math")
ROWS["MMLU"] = (MMLU, "2 + 2?\n\nA) 3\nB) 4\nC) 5\nD) 6", "B", "multiple_choice")
ROWS["NuminaMath"] = (
  {
    "source": "cn_k12",
    "problem": "Find $x$.",
    "solution": "First \\boxed{3}, so $\\boxed{7}$.",
    "messages": [{"content": "Find $x$.", "role": "user"}],
  },
  "Find $x$.",
  "7",
  "math",
)

# Conversations without an answer that a rule can check: a row, the prompt, the reference.
TULU = {
  "id": "personahub_0",
  "messages": [
    {"content": "Be kind.", "role": "system"},
    {"content": "Hello?", "role": "user"},
    {"content": "Hello!", "role": "assistant"},
    {"content": "And now?", "role": "user"},
    {"content": "Goodbye.", "role": "assistant"},
  ],
  "source": "ai2-adapt-dev/personahub",
}
HELPSTEER = {
  "domain": "general",
  "language": "english",
  "context": [{"role": "user", "content": "A colour?"}],
  "response1": "Blue.",
  "response2": "A colour is a sensation.",
  "overall_preference": -2,
  "individual_preference": [{"score": -2, "reasoning": "Short.", "feedback1": "", "feedback2": ""}],
}


def oasst(name, parent, role, text, **fields):
  """A message as the rows of the hub have it."""
  named = {"message_id": name, "parent_id": parent, "role": role, "text": text, "lang": "en"}
  return {**named, "message_tree_id": "q", "deleted": False, "rank": None, **fields}


OASST = [
  oasst("q", None, "prompter", "A colour?"),
  oasst("a1", "q", "assistant", "Sky.", rank=1),
  oasst("a0", "q", "assistant", "Blue.", rank=0),
  oasst("a2", "q", "assistant", "Gone.", rank=2, deleted=True),
  oasst("q2", "a0", "prompter", "Another?"),
  oasst("a3", "q2", "assistant", "Red."),
  oasst("q3", "a3", "prompter", "Nobody answers this?"),
]


def copy_of(folder, row, ending=".jsonl"):
  path = folder / f"copy{ending}"
  path.write_text(json.dumps(row) + "\n")
  return path


def only(path, name, **settings):
  settings = {"max_prompt_tokens": 10_000, **settings}
  return data.make_held_out(TOKENIZER, dataset=name, path=path, **settings)[0]


def lines_of(folder, rows):
  path = folder / "copy.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_every_dataset_of_the_table_is_tested():
  chats = {name for name, entry in named.DATASETS.items() if entry.messages}
  assert chats == {"OpenAssistant", "Tulu3SftMixture", "HelpSteer3"}
  assert {*ROWS, *chats} == set(named.DATASETS)


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts(tmp_path, name):
  row, problem, answer, environment = ROWS[name]
  prompt = only(copy_of(tmp_path, row), name)
  assert prompt.info["problem"] == problem
  assert prompt.info.get("expected_answer") == answer
  assert prompt.environment == environment
  template = named.DATASETS[name].prompt_template
  asked = (
    template.replace("\\boxed{}", "\\BOX").replace("{}", problem).replace("\\BOX", "\\boxed{}")
  )
  assert prompt.text == f"<role>user\n{asked}<end><role>assistant\n"
  # All columns reach the environment untouched, whatever was made of them.
  for key, value in row.items():
    assert value in (prompt.info.get(key), prompt.info.get(f"row/{key}")), key


def test_the_right_option_has_every_letter_equally_often():
  """GPQA lists it first; a model that always says A must not profit from that."""
  letters = collections.Counter()
  for number in range(100):
    row = {f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}
    row |= {"Question": str(number), "Correct Answer": f"right {number}"}
    options = named.DATASETS["GPQA"].options(row, "here")
    letter = named.DATASETS["GPQA"].answer(row, "here")
    assert options[letter] == f"right {number}" and len(set(options.values())) == 4
    letters[letter] += 1
  assert sorted(letters) == ["A", "B", "C", "D"] and min(letters.values()) > 12


def test_a_conversation_asks_its_last_question_and_keeps_the_answer_as_reference(tmp_path):
  prompt = only(copy_of(tmp_path, TULU), "tulu3_sft_mixture")
  assert prompt.text.startswith("<role>system\nBe kind.<end><role>user\nHello?<end>")
  assert prompt.text.endswith("<role>user\nAnd now?<end><role>assistant\n")
  assert prompt.info["problem"] == "And now?" and prompt.info["expected_answer"] == "Goodbye."
  assert prompt.info["source"] == "ai2-adapt-dev/personahub"
  assert prompt.environment == "reward_model"
  unanswered = {**TULU, "messages": TULU["messages"][:-1]}
  with pytest.raises(RowError, match=r"copy.jsonl:1: 'messages' must end with a message of the as"):
    only(copy_of(tmp_path, unanswered), "Tulu3SftMixtureDataset")
  bare = only(copy_of(tmp_path, TULU), "Tulu3SftMixture", output_key="")
  assert "expected_answer" not in bare.info


@pytest.mark.parametrize("preference, reference", [(-2, 1), (3, 2), (0, 1)])
def test_a_preference_names_the_reference(tmp_path, preference, reference):
  row = {**HELPSTEER, "overall_preference": preference}
  prompt = only(copy_of(tmp_path, row), "HelpSteer3")
  assert prompt.text == "<role>user\nA colour?<end><role>assistant\n"
  assert prompt.info["expected_answer"] == row[f"response{reference}"]
  assert prompt.environment == "reward_model"


def groups(path, name):
  dataset = recorded_groups.open_groups(
    TOKENIZER, options=recorded_groups.RecordedOptions(), on_error="stop", path=path, dataset=name
  )
  return [group_of(dataset.prompt(row, epoch=0)) for row in range(len(dataset))]


@pytest.mark.parametrize(
  "preference, rewards", [(-2, [1, 0]), (1, [0, 1]), (0, [0.5, 0.5]), ("-2", None), (4, None)]
)
def test_two_responses_and_their_preference_are_a_ranked_group(tmp_path, preference, rewards):
  path = copy_of(tmp_path, {**HELPSTEER, "overall_preference": preference})
  if rewards is None:
    with pytest.raises(RowError, match=r"copy.jsonl:1: 'overall_preference' must be from -3 to 3"):
      groups(path, "HelpSteer3")
    return
  (item,) = groups(path, "HelpSteer3")
  assert [r.text for r in item.group.rollouts] == [HELPSTEER["response1"], HELPSTEER["response2"]]
  assert item.group.rewards.tolist() == rewards and item.group_type == "general"


def as_tree(rows, name="q"):
  (message,) = [row for row in rows if row["message_id"] == name]
  replies = [as_tree(rows, row["message_id"]) for row in rows if row["parent_id"] == name]
  return {**message, "replies": replies}


@pytest.mark.parametrize("as_rows", [True, False], ids=["hub", "trees"])
def test_answered_questions_of_openassistant_are_prompts_and_ranked_groups(tmp_path, as_rows):
  tree = {"message_tree_id": "q", "tree_state": "ready_for_export", "prompt": as_tree(OASST)}
  path = lines_of(tmp_path, OASST if as_rows else [tree])
  prompts = data.make_held_out(TOKENIZER, dataset="open_assistant", path=path)
  by_problem = {prompt.info["problem"]: prompt for prompt in prompts}
  assert [*by_problem] == ["A colour?", "Another?"]
  first, second = by_problem.values()
  assert first.info["expected_answer"] == "Blue." and first.info["message_id"] == "q"
  assert second.text.startswith("<role>user\nA colour?<end><role>assistant\nBlue.<end><role>user")
  assert second.info["expected_answer"] == "Red."
  dataset = recorded_groups.open_groups(
    TOKENIZER,
    options=recorded_groups.RecordedOptions(),
    on_error="stop",
    path=path,
    dataset="oasst1",
  )
  item = group_of(dataset.prompt(0, epoch=0))
  assert {r.text: r.reward for r in item.group.rollouts} == {"Sky.": 0.0, "Blue.": 1.0}
  with pytest.raises(LeftOut, match="fewer than two replies have a rank"):
    dataset.prompt(1, epoch=0)  # left out even if broken rows stop a run.


def test_a_thread_without_its_beginning_is_broken(tmp_path):
  with pytest.raises(RowError, match=r"copy.jsonl:4: the messages before this one are not in"):
    data.make_held_out(TOKENIZER, dataset="OpenAssistant", path=lines_of(tmp_path, OASST[1:]))
  with pytest.raises(ValueError, match="'copy' has no message|'OpenAssistant' has no message"):
    data.make_held_out(TOKENIZER, dataset="OpenAssistant", path=lines_of(tmp_path, OASST[:1]))


def test_rows_without_an_answer_to_compare_are_left_out_and_counted(tmp_path, caplog):
  """Proofs belong to NuminaMath: a run goes past them whatever data.on_error says."""
  rows = [
    {**NUMINA, "answer": "proof"},
    {**NUMINA, "answer": "notfound"},
    {**NUMINA, "question_type": "proof"},
    {**NUMINA, "answer": ""},
    {**NUMINA, "problem_is_valid": "Incomplete"},
    NUMINA,
  ]
  (prompt,) = data.make_held_out(TOKENIZER, dataset="NuminaMath-1.5", path=lines_of(tmp_path, rows))
  assert prompt.info["expected_answer"] == "7"
  assert "skipped 5 of 6 rows: 4 without an answer that can be checked, 1 marked" in caplog.text
  unboxed = [{**ROWS["NuminaMath"][0], "solution": "Q.E.D."}, ROWS["NuminaMath"][0]]
  stream = data.make(
    TOKENIZER, dataset="NuminaMath", path=lines_of(tmp_path, unboxed), shuffle=False, epochs=1
  )
  assert [prompt.info["expected_answer"] for prompt in stream.take(2)] == ["7"]
  assert stream.metrics()["data/broken_rows"] == 1.0
  with pytest.raises(RowError, match=r"copy.jsonl:1: no key 'problem'.*data.input_key names"):
    only(copy_of(tmp_path, {"answer": "7"}), "NuminaMath-1.5")


@pytest.mark.parametrize("answer, letter", [(0, "A"), (3, "D"), ("c", "C"), (" B ", "B")])
def test_an_option_is_named_by_its_number_or_letter(tmp_path, answer, letter):
  prompt = only(copy_of(tmp_path, {**MMLU, "answer": answer}), "mmlu")
  assert prompt.info["expected_answer"] == letter


@pytest.mark.parametrize("answer", [4, -1, "E", True, None, 1.0])
def test_an_answer_that_no_option_has_is_broken(tmp_path, answer):
  with pytest.raises(RowError, match=r"copy.jsonl:1: 'answer' is .*; there are: A to D, or a num"):
    only(copy_of(tmp_path, {**MMLU, "answer": answer}), "MMLU")


@pytest.mark.parametrize(
  "spelling, name",
  [
    ("DeepScaler", "DeepScaleR"),
    ("DeepScaleR", "DeepScaleR"),
    ("agentica-org/DeepScaleR-Preview-Dataset", "DeepScaleR"),
    ("squad", "SQuAD"),
    ("Squad", "SQuAD"),
    ("open_assistant", "OpenAssistant"),
    ("Tulu3SftMixtureDataset", "Tulu3SftMixture"),
    ("tulu3_sft_mixture", "Tulu3SftMixture"),
    ("tulu-3-sft-mixture", "Tulu3SftMixture"),
    ("numinamath_1.5", "NuminaMath-1.5"),
    ("NuminaMath-CoT", "NuminaMath"),
    ("OpenR1-Math-220k", "OpenR1-Math-220k"),
    ("aime_2026", "AIME2026"),
    ("aime25", "AIME2025"),
    ("gpqa_diamond", "GPQA"),
    ("Idavidrein/gpqa", "GPQA"),
    ("gpqa_main", "GPQA-Main"),
    ("mmlu_pro", "MMLU-Pro"),
    ("DAPOMath17K", "DAPO-Math-17K"),
    ("DAPOMathAIME2024", "DAPOMathAIME2024"),
    ("HelpSteer3", "HelpSteer3"),
  ],
)
def test_the_names_of_the_guides_are_found(spelling, name):
  assert named.known_as(spelling) == name and named.find(spelling) is named.DATASETS[name]


@pytest.mark.parametrize(
  "typed, meant",
  [
    ("DeepScalar", "DeepScaleR"),
    ("OpenAsistant", "OpenAssistant"),
    ("helpstear3", "HelpSteer3"),
    ("NuminaMath-1.6", "NuminaMath-1.5"),
    ("mmlupr", "MMLU-Pro"),
  ],
)
def test_a_mistyped_name_suggests_the_nearest(typed, meant):
  with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
    named.find(typed)


@pytest.mark.parametrize("spelling", ["gsm8k", "GSM-8K", "openai/gsm8k", "OpenAI/GSM8K", "GSM8K"])
def test_a_name_is_found_whatever_its_capitals_and_hyphens(tmp_path, spelling):
  prompt = only(copy_of(tmp_path, ROWS["GSM8K"][0]), spelling)
  assert (prompt.prompt_id, prompt.dataset) == ("GSM8K:0:0", "GSM8K")


def test_an_unknown_name_lists_those_that_there_are(tmp_path):
  with pytest.raises(ValueError, match=r"unknown dataset 'MATH-50' \(did you mean 'MATH-500'\?\)"):
    only(copy_of(tmp_path, {}), "MATH-50")


def test_what_the_user_gives_overrides_the_table(tmp_path):
  path = copy_of(tmp_path, {"q": "1+1?", "a": "so\n#### 2"})
  prompt = only(
    path, "gsm8k", input_key="q", output_key="a", prompt_template="{}!", environment="mine"
  )
  assert prompt.text == "<role>user\n1+1?!<end><role>assistant\n"
  assert (prompt.info["expected_answer"], prompt.environment) == ("so\n#### 2", "mine")


def test_a_copy_of_another_shape_is_refused_with_its_place(tmp_path):
  with pytest.raises(RowError, match=r"copy.jsonl:1: no key 'question'; the row has 'text'"):
    only(copy_of(tmp_path, {"text": "1"}), "GSM8K")
  with pytest.raises(RowError, match=r"copy.jsonl:1: no 'prompt.0.content': there is no '0'"):
    only(copy_of(tmp_path, {"prompt": []}), "DAPO-Math-17K")
  row = {**ROWS["SQuAD"][0], "answers": {"text": [], "answer_start": []}}
  with pytest.raises(RowError, match=r"no 'answers.text.0': there is no '0' in an empty list"):
    only(copy_of(tmp_path, row), "SQuAD")


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
    ("\\boxed 5.", "5"),
    ("\\fbox{\\{1, 2\\}}", "\\{1, 2\\}"),
    ("no box", "no box"),
    ("\\boxed{unclosed", "\\boxed{unclosed"),
  ],
)
def test_last_box(text, answer):
  assert columns.last_boxed(text) == answer


def test_a_named_dataset_that_is_not_here_says_how_to_get_it(monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ImportError, match=r"grpo-jax\[datasets\].*data.path"):
    data.make_held_out(TOKENIZER, dataset="MATH")
