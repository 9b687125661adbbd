r"""Where the answer is in text, and what is equal as text. All expectations by hand."""

import time

import pytest

from grpo_jax.environments.grading.answers import EXTRACTORS, gold
from grpo_jax.environments.grading.comparison import equal_as_text

CASES = [
  # boxed
  ("boxed", r"so \boxed{72}", "72"),
  ("boxed", r"\boxed{\frac{1}{2}} units", r"\frac{1}{2}"),
  ("boxed", r"\boxed{1}, no: \boxed{2}.", "2"),  # the last one counts.
  ("boxed", r"\boxed{1} and then \boxed{2", "1"),  # the last one that closes.
  ("boxed", r"\boxed{\text{A } \boxed{3}}", "3"),  # the inner one begins last.
  ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}"),
  ("boxed", r"\boxed{\left\{x\right\}}", r"\left\{x\right\}"),
  ("boxed", r"a stray } and { then \boxed{5}", "5"),
  ("boxed", r"\boxed {5}", "5"),
  ("boxed", r"\boxed 5.", "5"),
  ("boxed", r"\fbox{9}", "9"),
  ("boxed", r"\\boxed{5}", "5"),  # as in JSON.
  ("boxed", r"\framebox{5}", "5"),
  ("boxed", r"\boxed{5}, and not \boxed{}", "5"),  # an empty box is not an answer.
  ("boxed", r"\boxed{ }", None),
  ("boxed", "The answer is 72.", None),  # strict: no box, no answer.
  ("boxed", r"\boxed{72", None),
  ("boxed", "", None),
  # hash
  ("hash", "48/2 = 24\n#### 72", "72"),
  ("hash", "####72\nBut wait.", "72"),
  ("hash", "#### 1\n#### 2", "2"),
  ("hash", "#### $1,200 ", "$1,200"),
  ("hash", "#### **72**", "72"),
  ("hash", "#### 72 ####", "72"),
  ("hash", "#### −72\u200b", "-72"),
  ("hash", "72", None),
  ("hash", "####", None),
  ("hash", "####\n72", "72"),
  ("hash", "####\n\n72", None),
  ("hash", "#### The answer is 72.", "72"),
  ("hash", "#### **Answer**: −72", "-72"),
  ("hash", "**#### 72**", "72"),
  ("hash", "#### Answer: **72**", "72"),
  ("line", "**Final Answer: 72**", "72"),
  ("line", "Answer： 72", "72"),
  # tag
  ("tag", "<think>1</think><answer> 7 </answer>", "7"),
  ("tag", "<answer>1</answer><answer>2\n3</answer> ok", "2\n3"),
  ("tag", "<Answer>7</ANSWER>", "7"),
  ("tag", "<answer><answer>7</answer></answer>", "7"),
  ("tag", "<answer>7</answer> or <answer>8", "7"),
  ("tag", "<answer>1", None),
  ("tag", "1</answer>", None),
  # last_number
  ("last_number", "First 3, then 72.", "72"),
  ("last_number", "It costs $1,234.50!", "1234.50"),
  ("last_number", "about -5 degrees", "-5"),
  ("last_number", "10-5", "5"),  # a difference, no sign.
  ("last_number", "3/4 of it", "3/4"),
  ("last_number", "That is 40%.", "40%"),
  ("last_number", "room b12 or 7", "7"),
  ("last_number", "12, 13, and that is all,", "13"),
  ("last_number", "none", None),
  # line
  ("line", "Answer: 7", "7"),
  ("line", "so Answer: 7\nAnswer:  $8$ \nbye", "$8$"),
  ("line", "**ANSWER :\n9", "9"),
  ("line", "**Answer**: 7", "7"),
  ("line", "**Answer:** **7**", "7"),
  ("line", "The answer is: 7", "7"),
  ("line", "7", None),
  ("line", "Answer: 7" + " and on" * 60, None),  # not near the end.
  # any, raw
  ("any", r"#### 1 \boxed{2} 3", "2"),
  ("any", "#### 1\nor 3", "1"),
  ("any", "or 3", "3"),
  ("raw", "  72\n", "72"),
  ("raw", " \n", None),
]


def test_an_answer_is_found_in_its_place():
  wrong = [case for case in CASES if EXTRACTORS[case[0]](case[1]) != case[2]]
  assert wrong == []


# Text that ends in a number, and that number.
LAST_NUMBERS = {
  "signs": [
    *((f"7 − 12 = {minus}5", "-5") for minus in "-−‐‑‒–—﹣－➖"),
    *((f"{minus}5", "-5") for minus in ("- ", "−", "−\\,", "minus ", "Negative ", "\u200b-\u200b")),
    *(
      ("x = " + number, "-5")
      for number in ("- 5", r"- \mathbf{5}", "−{5}", r"-\boxed{5}", "−**5**", "-(5)", "-\u202f5")
    ),
    *((text, "-5") for text in ("it is minus 5", "about –5 degrees", "3 × −5", "from −3 to −5")),
    ("x = −0.5", "-0.5"),
    *((text, "-5") for text in ("答案是-5。", "答案是 − 5", "答えは−5", "답은-5", "คำตอบคือ-5")),
    ("= −1,234.5", "-1234.5"),
    *((number, "-5") for number in ("-$5", "−€5", "$-5$", r"-\$5")),
    *((number, "-1/2") for number in (r"-\frac{1}{2}", r"\frac{-1}{2}", "−½", "−1/2")),
    *((f"x = {sign}5", "±5") for sign in ("±", r"\pm ")),
  ],
  "dashes": [
    *((f"3{dash}5", "5") for dash in "-−‑‒–—"),
    *((f"{front}{dash}5", "5") for front in ("step", "the answer", "A") for dash in "-‑–—"),
    *(
      (text, "5")
      for text in ("7 - 5", "7 − 5", "x - 5", "(2)-5", "7 minus 5", "Costs:\n- 5", "- 5 a")
    ),
    ("1914–1918", "1918"),
    ("1914 – 1918", "1918"),
    ("5-3=2", "2"),
    ("共8-5", "5"),
  ],
  "digits": [
    *(
      (number, "1000000")
      for number in ("1 000 000", "1\u202f000\u00a0000", "1'000'000", "1’000’000")
    ),
    *(
      (number, "1000000") for number in ("1,000,000", "1_000_000", "1{,}000{,}000", r"1\,000\,000")
    ),
    *((number, "1234567") for number in ("12,34,567", "１２３４５６７", "١٢٣٤٥٦٧", "१२३४५६७")),
    ("of 2020 100", "100"),
    ("3,5", "5"),  # two numbers.
    ("x=.5", ".5"),
    *((text, "5") for text in ("共有5个", "從3到5。", "答えは5です", "답은 5입니다", "x8 是5")),
    ("长1.5e-3米", "1.5e-3"),
    ("等于3 1/2米", "3.5"),
    ("b5", None),
    ("$5", "5"),
    ("is 12.", "12"),
    ("**42**!", "42"),
  ],
  "exponents": [
    ("that is 1.5e-3", "1.5e-3"),
    ("2E5", "2e5"),
    (r"2.5 \times 10^{4}", "25000"),
    ("2.5 × 10⁴", "25000"),
    ("2.5x10^-4", "2.5e-4"),
    ("10^4", "10000"),
    *((text, "10") for text in ("10⁻", "10⁻⁻")),
    ("2×10²⁻³", "200"),
    ("是10^4米", "10000"),
  ],
  "fractions": [
    *((number, "3.5") for number in ("3½", "3 1/2", r"3\frac{1}{2}", r"3\frac12")),
    *((number, "1/2") for number in ("1/2", "½", r"\dfrac{1}{2}", r"\tfrac12")),
    ("3⅓", "10/3"),
    *(("9" * 5000 + half, "9" * 5000) for half in ("½", " 1/2", r"\frac12")),
    (r"40\%", "40%"),
  ],
}
GOLDS = [
  ("She sold 48/2=<<48/2=24>>24.\n#### 72", "72"),
  (r"Thus \boxed{p - q}.", "p - q"),
  (" 3 ", "3"),
  ("#### Step 1\nAdd them.\n\n#### Final answer\n\n$\\boxed{12}$", "12"),
  ("So \\boxed{12}.\n\n#### Remark\nThere is a shorter proof.", "12"),
  ("#### Step 1\nAdd.\n#### Final answer\n**12**", "12"),
  ("#### Result\nAdd.\n**Answer:** 12", "12"),
  ("#### 1. Add\nAdd.\nSo the answer is 12.", "12"),
  ("Add.\n####\n12", "12"),
  ("#### 12 apples\nThanks to A. N. Author.", "12 apples"),
  ("#### 5\n#### 6", "6"),
  ("#### 6\n\nThanks to A. N. Author.", "6"),
  ("It is 5. #### 5 #### 6", "6"),
  ("#### 72\n####", "72"),
  ("#### Monday", "Monday"),
  ("#### Answer: 12", "12"),
  ("#### Final answer: **12**", "12"),
  ("#### Result\n$$\n12\n$$", "12"),
  ("#### Result\n\\[\n12\n\\]\n---", "12"),
  ("####", "####"),
]


def test_the_last_number_is_the_one_that_a_person_reads():
  find = EXTRACTORS["last_number"]
  cases = [(text, number) for some in LAST_NUMBERS.values() for text, number in some]
  cases += [(f"First 8, then {text}", number) for text, number in LAST_NUMBERS["fractions"]]
  wrong = {text: (find(text), number) for text, number in cases if find(text) != number}
  assert wrong == {}


def test_gold_answer_is_found_in_a_solution_or_is_all_of_it():
  wrong = {text: (gold(text), answer) for text, answer in GOLDS if gold(text) != answer}
  assert wrong == {}


# Gold answer, answer, and what text alone decides.
COMPARED = [
  ("72", "72", True),
  ("72", " 72. ", True),
  ("1,000", "1000", True),
  ("80{,}000", "80000", True),
  ("18", r"\$18", True),
  ("72", "72.00", True),
  ("007", "7", True),
  ("72", "73", False),
  ("72", "-72", False),
  (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
  (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
  (r"\text{Evelyn}", "Evelyn", True),
  ("1 1/2", "11/2", None),  # a space may mean something.
  ("-5", "–5", True),
  ("-5", "minus 5", True),
  ("-5", "negative 5", True),
  ("5", "minus 5", False),
  ("-5.0", "- 5", True),
  ("5", "*5*", True),
  ("7", "\u200b７\ufeff", True),
  ("5", r"\mathbf{5}", True),
  ("0.1234567", "0.1234568", False),
  ("0", "0.0000001", False),
  ("12.5\\%", "12.5", True),
  ("12.5\\%", "0.125", True),
  ("12.5\\%", "1.25", False),
  # words
  ("BCA", "bca", True),
  ("BCA", "ABC", False),
  ("pass", "pas^2", False),
  ("no", "on", False),
  ("xy", "yx", None),  # a product.
  ("Eve and Ann", "Ann and Eve", True),
  ("(C)", "C", True),
  ("C", "c", False),
  # units
  ("15 km", "15", True),
  ("15", "15 km", True),
  (r"15\text{ km}", "15 kilometres", True),
  (r"15\text{ km}", r"15\,\mathrm{m}", False),
  ("15 m/s", "15 meters per second", True),
  ("15 m/s", "15 m/s^2", False),
  ("15 cm^2", "15 sq. cm", True),
  ("15 cm^2", "15 cm", False),
  ("15 m/s^2", r"15\,\mathrm{m\,s^{-2}}", True),
  ("15 m/s^2", r"15\,\mathrm{m\,s^{-1}}", False),
  ("5 apples", "5 red apples", True),
  ("5 apples", "5 pears", False),
  (r"\$5", "5 dollars", True),
  (r"\$5", "5 euros", False),
  ("60", "60°", True),
  ("1011_2", "1011", True),
  ("1011_2", "1011_{3}", False),
  ("1011_2", "1011_{10}", False),
  ("20°C", "20 degrees", True),
  ("20°C", "20°F", False),
  ("1011", "1011_2", False),
  ("40_9", r"40\%", False),
  ("3t", "3", None),  # 3 times t.
  ("60", "60k", None),
  ("60", r"60\text{ (or 61)}", False),
  ("60", "60 dozen", False),
  ("60", "60 millones", False),
  ("5", "5^{th}", True),
  ("5", "5Ω", True),
  (r"\$5", r"\$5/hour", False),
  (r"10\text{ MW}", "10 megawatts", True),
  (r"10\text{ MW}", r"10\text{ mW}", False),
  ("5 kJ", "5", True),
  ("$5.00", "5", True),
  ("$5.00", "5 dollars", True),
  ("$5.00", "5 cents", False),
  ("15 €", r"\$15", False),
  ("15", "15€", True),
  ("2 hours 30 minutes", "30 hours 2 minutes", False),
  (r"2\text{ hours }30\text{ minutes}", "2 hours 30 minutes", True),
  ("2 hours 30 minutes", "2 minutes 30 hours", False),
  (r"21\text{ units}", "21 km", False),
  (r"21\text{ square units}", "21 units^2", True),
  # lists
  (r"\{1,2\}", "(1,2)", False),
  ("1,2", "(1,2)", False),
  ("(1,234)", "1234", None),
  ("1234567", "12,34,567", True),
  ("12,34,567", "1234567", None),  # may be a list.
  ("0.5", r"\frac{1}{2}", None),  # takes mathematics.
  ("1,2", "12", None),  # a list, no thousands.
  ("", "", False),
  ("4", "4 balls", True),
  ("2,125", "2125 toy blocks.", True),
  ("4", "8 balls", False),
  ("4", "4 million", False),
  ("4", "4 x", None),
]


def test_answers_are_compared_as_text_where_that_is_safe():
  wrong = [case for case in COMPARED if equal_as_text(*case[:2]) is not case[2]]
  assert wrong == []


@pytest.mark.parametrize("form", EXTRACTORS)
@pytest.mark.parametrize(
  "unit", [r"\boxed{", r"\boxed{1}", "<answer>", "####", "1", "1,", "$", "{", r"\text{", " "]
)
def test_endless_text_is_read_in_linear_time(form, unit):
  text = unit * 100_000
  start = time.perf_counter()
  answer = EXTRACTORS[form](text)
  equal_as_text("5", answer or text)
  assert time.perf_counter() - start < 5.0  # a quadratic reader takes minutes.
