r"""The verifiers of the math environment: real answers of MATH and GSM8K, choices, attacks.

math_pairs.jsonl: reference answers of MATH and GSM8K (both MIT), each with an answer as a model
would write it, and whether it is right (by hand) and the same to Minerva's normalisation.
"""

import asyncio
import json
import pathlib
import time

import numpy as np
import pytest

from grpo_jax import environments
from grpo_jax.environments.base import StepResult
from grpo_jax.environments.grading import choices, minerva
from grpo_jax.types import FinishReason, Prompt

FILE = pathlib.Path(__file__).with_name("math_pairs.jsonl")
PAIRS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def judge(factory, text: str, **info) -> StepResult:
  environment = factory(Prompt("x:0:0", np.zeros(1, np.int32), "math", info))
  return asyncio.run(environment.step(text, np.zeros(0, np.int32), FinishReason.STOP))


def wrong_verdicts(factory, form: str, verdict: str) -> list[str]:
  found = []
  for pair in PAIRS:
    result = judge(factory, form % pair["answer"], expected_answer=pair["gold"])
    if result.metrics["accuracy"] != float(pair[verdict]):
      found.append(f"{pair['gold'][-60:]} | {pair['answer']} is {pair[verdict]}")
  return found


def test_there_are_right_and_wrong_pairs_of_both_sources():
  counts = {(s, r): 0 for s in ("MATH", "GSM8K") for r in (True, False)}
  for pair in PAIRS:
    counts[pair["source"], pair["right"]] += 1
  assert min(counts.values()) >= 20 and len(PAIRS) == sum(counts.values()) == 231


@pytest.mark.long
def test_math_verify_judges_every_known_pair_right():
  with environments.make(math=dict(timeout_s=20.0, workers=1)) as made:
    assert wrong_verdicts(made["math"], r"So it is \boxed{%s}.", "right") == []
    assert made["math"].metrics()["grader_starts"] == 1.0


def test_minerva_judges_every_known_pair_as_dapo_does_and_needs_no_worker():
  with environments.make(math=dict(verifier="minerva")) as made:
    assert wrong_verdicts(made["math"], "Let me think.\nAnswer: %s", "minerva") == []
    assert wrong_verdicts(made["math"], "**Answer:** %s", "minerva") == []
    assert made["math"].metrics()["grader_starts"] == 0.0


@pytest.mark.parametrize(
  ("answer", "normalized"),
  [
    ("x = 5", "5"),
    (r"\$1,234", "1234"),
    ("1,2", "12"),  # Minerva's own: a list of digits is read as a number.
    (r"$\frac12$ of them", r"\frac{1}{2}"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"90^{\circ}", "90"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"15\mbox{ cm}^2", "15"),
    ("an apple", "apple"),
    ("3 square inches", "3"),
    ("**7**", "7"),
    ("", ""),
  ],
)
def test_minerva_normalises_as_its_list_says(answer, normalized):
  assert minerva.normalized(answer) == normalized


def test_minerva_compares_text_and_an_empty_answer_is_not_one():
  assert not minerva.equal("1/2", "0.5")
  assert not minerva.equal("units", "cm")  # both are nothing.
  assert not minerva.equal("5" * 3000, "5" * 3000)  # longer than any answer.


OPTIONS = {"A": "5", "B": "seven", "C": "A cat", "D": r"$\frac{1}{2}$"}
CHOSEN = [
  # (completion, with these options, with unknown ones)
  ("Answer: B", "B", "B"),
  ("**Answer:** (C)", "C", "C"),
  ("Answer: $\\boxed{C}$", "C", "C"),
  (r"So \boxed{\text{(B)}}.", "B", "B"),
  ("<answer>D</answer>", "D", "D"),
  ("The answer is D.", "D", "D"),
  ("Answer: A\nNo, wait.\nAnswer: B", "B", "B"),  # the last one counts.
  ("Answer: B because A is wrong", "B", "B"),
  ("Option A is correct", "A", "A"),
  ("It is 5, so:\n(A)", "A", "A"),
  ("b)", "B", "B"),
  ("Answer: C. A cat", "C", "C"),
  # the text of an option
  ("seven", "B", None),
  ("Answer: Seven.", "B", None),
  ("I saw:\nA cat", "C", None),
  (r"\boxed{\frac{1}{2}}", "D", None),
  # several choices, or none, or one that there is not
  ("Answer: A or B", None, None),
  (r"\boxed{A, B}", None, None),
  ("A B C D", None, None),
  ("Answer: (A)(B)", None, None),
  ("Answer: E", None, "E"),
  ("Answer: none of these", None, None),
  ("A cat sat on B", None, None),
  ("I think so", None, None),
  ("Answer: not B", None, None),
  ("Answer:", None, None),
  ("", None, None),
  # in Markdown and LaTeX, on the next line, in quotes
  ("**Answer**: B", "B", "B"),
  ("__Answer__:\n\n**B**", "B", "B"),
  ("Answer -> B", "B", "B"),
  ("Answer = `B`", "B", "B"),
  ("Answer: “B”", "B", "B"),
  ("Answer: 'B'!!!", "B", "B"),
  ("Answer: ✅ B\u200b", "B", "B"),
  (r"\boxed{\rm B}", "B", "B"),
  (r"\boxed{\underline{\bold{B}}}", "B", "B"),
  ("So I choose (B).", "B", "B"),
  ("The answer is not A but B", "B", "B"),
  ("The answer is not A.", None, None),
  ("So it is not (B).", None, None),
  ("It is (A) or (B)", None, None),
  ("Answer:\nA or B", None, None),
  ("Answer: A, I think", "A", None),  # I is not an option here.
  ("Antwort: A oder B", None, None),
  ("答案：A或B", None, None),
  ("答案：A、B", None, None),
  ("It cannot be (B)", None, None),
  ("It isn't (B)", None, None),
  ("Answer: A? B?", None, None),
  ("Answer: A? Or B?", None, None),
  ("<answer>Answer: B</answer>", "B", "B"),
  (r"\boxed{\text{The answer is B}}", "B", "B"),
  # what is behind the thought counts first
  ("<think>Answer: C</think>\nB", "B", "B"),
  (r"\boxed{C}</think>B", "B", "B"),
  ("<think>Answer: B</think>\nThat is all.", "B", "B"),
  # other languages and letters
  ("La respuesta correcta es B.", "B", "B"),
  ("La réponse correcte est B.", "B", "B"),
  ("La risposta corretta è B.", "B", "B"),
  ("答案是B。", "B", "B"),
  ("答案：B，因为它是七", "B", "B"),
  ("正确答案为（B）。", "B", "B"),
  ("答案选【B】。", "B", "B"),
  ("答えはBです。", "B", "B"),
  ("答えはBではない", None, None),
  ("정답은 B입니다.", "B", "B"),
  ("उत्तर: B।", "B", "B"),
  ("الإجابة: B۔", "B", "B"),
  ("A resposta é B", "B", "B"),
  ("Svaret är B.", "B", "B"),
  ("Đáp án là B.", "B", "B"),
  ("Jawabannya adalah B", "B", "B"),
  ("Ответ — B.", "B", "B"),
  ("Antwort: B", "B", "B"),
  ("La réponse est C", "C", "C"),
  ("故选C。", "C", "C"),
  ("คำตอบคือ C", "C", "C"),
  ("Απάντηση: C", "C", "C"),
  ("答案：Ｃ", "C", "C"),
  ("الإجابة: ب", "B", "B"),
  ("উত্তর: ঢ", "D", "D"),
  ("정답: A", "A", "A"),
  ("Ответ: D", "D", "D"),
]


def test_a_choice_is_read_however_it_is_written():
  wrong = [
    (text, found)
    for text, *expected in CHOSEN
    if (found := [choices.find(text, options) for options in (OPTIONS, {})]) != expected
  ]
  assert wrong == []


@pytest.mark.parametrize("expected", ["B", "(B)", r"\text{(B)}", "b", "seven", "thus #### B"])
@pytest.mark.parametrize("field", ["options", "choices"])
def test_multiple_choice_rewards_the_letter_or_the_text_of_the_gold_option(expected, field):
  for options in (OPTIONS, list(OPTIONS.values())):
    info = {"expected_answer": expected, field: options}
    with environments.make(mc=dict(module="math", verifier="multiple_choice")) as made:
      texts = ("Answer: (B)", r"\boxed{seven}", "Answer: A", "Who knows")
      results = [judge(made["mc"], text, **info) for text in texts]
      assert made["mc"].metrics()["grader_starts"] == 0.0
    assert [r.total for r in results] == [1.0, 1.0, 0.0, 0.0]
    assert [r.metrics["has_answer"] for r in results] == [1.0, 1.0, 1.0, 0.0]


def test_multiple_choice_can_be_strict_about_the_place():
  with environments.make(
    mc=dict(module="math", verifier="multiple_choice", answer="boxed")
  ) as made:
    texts = ("Answer: B", r"\boxed{B}")
    results = [judge(made["mc"], text, expected_answer="B").total for text in texts]
  assert results == [0.0, 1.0]


def test_rows_and_names_that_cannot_be_judged_are_refused():
  with environments.make(mc=dict(module="math", verifier="multiple_choice")) as made:
    with pytest.raises(ValueError, match="expected_answer '7' is not a choice: .*no field options"):
      judge(made["mc"], "Answer: B", expected_answer="7")
    with pytest.raises(
      ValueError, match="'E' is not a choice: the options are {'A': '1', 'B': '2'}"
    ):
      judge(made["mc"], "Answer: B", expected_answer="E", options=["1", "2"])
    with pytest.raises(ValueError, match="options must be a list of at most 26 or a mapping"):
      judge(made["mc"], "Answer: B", expected_answer="A", options="AB")
  with pytest.raises(ValueError, match="unknown verifier 'minverva'.*did you mean 'minerva'"):
    environments.make(math=dict(verifier="minverva"))
  with pytest.raises(ValueError, match="unknown answer form 'letter'"):
    environments.make(math=dict(verifier="multiple_choice", answer="letter"))


ATTACKS = [
  "10**10**10",
  "10^{10^{10}}",
  "9^{9^{9^{9^{9^9}}}}",
  "100000000!!",
  "(10^{9})!",
  r"\binom{10^{12}}{10^{11}}",
  r"\sqrt[3]{" * 150 + "7" + "}" * 150,
  r"\sqrt{2+" * 120 + "2" + "}" * 120,
  "x^{" * 300 + "x" + "}" * 300,
  r"\frac{" * 330,
  r"\left(" * 330,
  "(" * 950 + "1" + ")" * 950,
  "{" * 1999,
  r"\prod_{k=1}^{10^{12}} \sum_{i=1}^{10^{12}} \frac{k^i}{i!}",
  r"\int_0^{\infty} e^{-x^{x^x}} dx",
  r"\lim_{n \to \infty} \left(1+\frac{1}{n}\right)^{n^{n}}",
  "(a+b+c+d+e+f+g)^{4000}",
  r"\begin{pmatrix}" + r"1 & 2 \\ " * 150 + r"\end{pmatrix}",
  "9" * 1999,
  "0." + "3" * 1990,
  "1" + "/7" * 900,
  "1,2" * 600,
  r"\text{" * 300 + "7" + "}" * 300,
  r"\frac" * 390,
  "sqrt" * 490,
  "\x00" * 500,
  "٣" * 900,
  "__import__('os').system('sleep 30')",
  "=" * 1999,
  "$" * 1999,
]
SLOW = [pytest.param(a, marks=pytest.mark.slow, id=repr(a[:24])) for a in ATTACKS[4:]]
SETTINGS = {
  "minerva": ("Answer: %s", {"expected_answer": r"\frac{22}{7}"}),
  "multiple_choice": (r"\boxed{%s}", {"expected_answer": "B", "options": OPTIONS}),
}


@pytest.fixture(scope="module")
def impatient():
  """Compares for a second at most."""
  with environments.make(math=dict(timeout_s=1.0, workers=1, must_be_evaluated=False)) as made:
    yield made["math"]


@pytest.mark.long
@pytest.mark.parametrize("attack", [*ATTACKS[:4], *SLOW], ids=lambda attack: repr(attack[:24]))
def test_an_attack_costs_math_verify_no_more_than_its_time_out(impatient, attack):
  easy = lambda: judge(impatient, r"\boxed{2/4}", expected_answer=r"\frac12").total
  assert easy() == 1.0  # the worker has started.
  start = time.perf_counter()
  result = judge(impatient, rf"\boxed{{{attack}}}", expected_answer=r"\frac{22}{7}")
  assert time.perf_counter() - start < 1.0 + 1.0
  assert result.total == 0.0 and result.metrics["accuracy"] == 0.0
  assert easy() == 1.0  # the next one is judged as ever.


@pytest.mark.parametrize("name", SETTINGS)
def test_an_attack_costs_the_verifiers_of_text_nothing(name):
  form, info = SETTINGS[name]
  with environments.make(e=dict(module="math", verifier=name)) as made:
    for attack in ATTACKS:
      start = time.perf_counter()
      assert judge(made["e"], form % attack, **info).total == 0.0
      assert time.perf_counter() - start < 1.0
    assert made["e"].metrics()["grader_starts"] == 0.0


UNITS = ["Answer: ", "answer is A", "A ", "(", r"\boxed{A}", r"\text{", "答案", "$", "=", "ﷺ", "A,"]


@pytest.mark.parametrize("unit", UNITS)
def test_endless_completions_are_read_in_linear_time(unit):
  text = unit * 50_000
  start = time.perf_counter()
  for name, (_, info) in SETTINGS.items():  # math_verify's forms: test_answers.py.
    with environments.make(e=dict(module="math", verifier=name)) as made:
      judge(made["e"], text, **info)
  minerva.equal("5", text)
  assert time.perf_counter() - start < 5.0  # a quadratic reader takes minutes.
