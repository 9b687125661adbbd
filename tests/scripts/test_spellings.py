"""scripts/spellings.py: gold answers of every kind; the environment misses no spelling of them."""

import json

import pytest

from grpo_jax.commands import cli
from scripts import spellings

GOLDS = [
  "She has 72.\n#### -72",
  "1,234",
  r"-\frac{7}{4}",
  r"\frac{189}{16384}",
  r"12.5\%",
  r"60^\circ",
  r"15\text{ km}",
  r"\text{east}",
  "1011_2",
  r"\left( 3, -4 \right)",
  r"2\sqrt{3}\pi",
  "x^2 - 2x",
]


def test_every_gold_answer_has_ten_right_spellings_and_some_wrong_answers():
  for gold in GOLDS:
    value = gold.rpartition("####")[2].strip()
    right, wrong = set(spellings.right(value)), set(spellings.wrong(value))
    assert len(right) >= 10 and len(wrong) >= 4 and not right & wrong, value


def test_a_file_that_cannot_be_read_is_one_message(tmp_path, capsys):
  file = tmp_path / "golds.jsonl"
  for text, said in (
    (None, "cannot read"),
    ('{"a": 1}', "golds.jsonl:1"),
    ('{"answer": 1}\n{', "golds.jsonl:2"),
  ):
    if text:
      file.write_text(text)
    assert cli.reported(spellings.main, [str(file)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and said in printed, printed


@pytest.mark.long
def test_the_environment_misses_none_and_pays_no_wrong_answer(tmp_path, capsys):
  file = tmp_path / "golds.jsonl"
  file.write_text("".join(json.dumps({"answer": gold}) + "\n" for gold in GOLDS))
  spellings.main([str(file)])
  *_, row = capsys.readouterr().out.splitlines()
  name, golds, right, missed, wrong, paid = row.strip("| ").split(" | ")
  assert (name, golds, missed, paid) == ("golds", str(len(GOLDS)), "0", "0")
  assert int(right) > 200 and int(wrong) > 100
