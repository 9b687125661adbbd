"""What a run says when it begins."""

import pytest

from grpo_jax.building import checks
from grpo_jax.config import base, configuration
from grpo_jax.data.byte_tokenizer import ByteTokenizer
from grpo_jax.run_folder import console
from grpo_jax.types import Prompt


@pytest.mark.parametrize(
  "options, warned",
  [
    ({"sampling.max_tokens": 600, "rollout.max_tokens": 128}, "sampling.max_tokens=600"),
    ({"sampling.max_tokens": 64, "batching.row_tokens": 32}, "sampling.max_tokens=64"),
    ({"evaluation.sampling.max_tokens": 2000}, "evaluation.sampling.max_tokens=2000"),
    ({"sampling.max_tokens": 128, "rollout.max_tokens": 128}, None),
    ({"sampling.max_tokens": 9999, "mode": "offline"}, None),
  ],
)
def test_a_length_that_no_completion_reaches_is_said(options, warned, noticed):
  checks.log_lengths(configuration.replaced(base.get_config(), options))
  assert len(noticed) == (warned is not None)
  if warned:
    assert noticed[0].startswith(f"{warned} is never reached: a prompt with its completion has at")


def test_the_first_prompt_is_shown_within_bounds_and_harmlessly():
  def shown(text, **fields):
    return console.prompt_lines(
      Prompt("set:0:0", ByteTokenizer().encode(text), "x", text=text, **fields)
    )

  assert shown("What is\n1 + 1?") == [
    "the first prompt, set:0:0, 14 tokens:", "         │ What is", "         │ 1 + 1?"
  ]  # fmt: skip
  assert shown("a", is_cut=True)[0] == "the first prompt, set:0:0, 1 tokens, cut:"
  long = "\n".join(shown("begin" + "x" * 10**5 + "end"))
  assert len(long) < 700 and "begin" in long and long.endswith("end") and "[99408 more" in long
  assert len(shown("line\n" * 100)) == 26
  assert "\x1b" not in "".join(shown("\x1b[2J")) and "\\x1b[2J" in shown("\x1b[2J")[1]
