"""Conversations with an environment: stop strings by turn, tokens as sampled, metrics, failures."""

import asyncio
import dataclasses
import math
import time

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax import metrics
from grpo_jax.data.byte_tokenizer import END
from grpo_jax.data.tokenizer import PromptText
from grpo_jax.engines.base import SamplingParams
from grpo_jax.engines.fake import FakeEngine
from grpo_jax.environments.base import StepResult
from grpo_jax.groups import credit, filters
from grpo_jax.metrics import scored_groups
from grpo_jax.rl import estimators
from grpo_jax.rollouts.failures import TooManyFailures, error_counts
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.run_folder import console
from grpo_jax.types import FinishReason, Prompt, Rollout, RolloutGroup, Turn

SAMPLING = SamplingParams(max_tokens=16, stop_ids=(END,))


def prompts(*texts: str, **fields) -> list[Prompt]:
  return [
    Prompt(f"set:0:{i}", TOKENIZER.encode(text), "env", text=text, **fields)
    for i, text in enumerate(texts)
  ]


def run(engine, factory, tasks, *, tokenizer=TOKENIZER, **overrides):
  limits = AttemptLimits(max_turns=9, max_error_share=0.5)
  settings = dict(group_size=1, sampling=SAMPLING, seed=3, step=5, limits=limits)
  return collect_sync(engine, {"env": factory}, tasks, tokenizer, **(settings | overrides))


class Talk:
  """Answers turn by turn what it is given; the last answer ends the conversation."""

  def __init__(self, *results):
    self.results = list(results)
    self.heard = []

  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    self.heard.append(text)
    result = self.results[len(self.heard) - 1]
    return result(text) if callable(result) else result

  async def close(self):
    pass


def continuing(observation="|", **fields) -> StepResult:
  return StepResult(0.0, done=False, observation=observation, **fields)


# --- stop strings ---


class Stopping:
  """A factory that asks for a stop string, and whose environments ask for others."""

  stop_strings = ("</action>", "END")

  def __call__(self, prompt):
    results = [
      continuing(),  # as before.
      continuing(stop_strings=["</answer>"]),
      continuing(),
      continuing(stop_strings=()),
      StepResult(1.0, done=True),
    ]
    return Talk(*results)


def test_an_environment_chooses_the_stop_strings_of_every_turn():
  engine = ScriptedEngine(lambda r: "x")
  sampling = dataclasses.replace(SAMPLING, stop_strings=("END", "\n\n"))
  run(engine, Stopping(), prompts("a", stop_strings=("of the row",)), sampling=sampling)
  first = ("END", "\n\n", "of the row", "</action>")  # each once, the config's first.
  assert [call[0].sampling.stop_strings for call in engine.calls] == [
    first,
    first,
    ("END", "\n\n", "</answer>"),
    ("END", "\n\n", "</answer>"),
    ("END", "\n\n"),
  ]


def test_attempts_of_one_call_have_stop_strings_of_their_own():
  factory = Stopping()
  environments = {"env": factory, "other": lambda p: Talk(StepResult(1.0, done=True))}
  one, two = prompts("a", "b")
  engine = ScriptedEngine(lambda r: "x")
  collect_sync(
    engine,
    environments,
    [one, dataclasses.replace(two, environment="other")],
    TOKENIZER,
    group_size=1,
    sampling=SAMPLING,
    seed=0,
    step=0,
  )
  assert [r.sampling.stop_strings for r in engine.calls[0]] == [("</action>", "END"), ()]


@pytest.mark.parametrize("strings", ["</action>", ("",), (7,)], ids=["a_text", "empty", "no_text"])
def test_stop_strings_that_are_not_a_list_of_strings_are_a_failure(strings):
  result = dataclasses.replace(continuing())
  object.__setattr__(result, "stop_strings", strings)  # what an unchecked environment may do.
  limits = AttemptLimits(max_turns=3, max_error_share=1.0)
  groups = run(ScriptedEngine(lambda r: "x"), lambda p: Talk(result), prompts("a"), limits=limits)
  assert error_counts(groups) == {"rollout/errors/type": 1.0}
  assert "stop_strings must be a list of strings" in groups[0].rollouts[0].error


class NoScalar:
  def __float__(self):
    raise RuntimeError("two elements")


@pytest.mark.parametrize(
  ("field", "value", "kind"),
  [
    ("metrics", None, "AttributeError"),
    ("reward", NoScalar(), "RuntimeError"),
    ("done", np.asarray([True, False]), "ValueError"),
  ],
)
def test_a_result_that_cannot_be_read_costs_its_attempt_only(field, value, kind):
  broken = continuing()
  object.__setattr__(broken, field, value)  # what an unchecked environment may do.
  factory = lambda p: Talk(broken if p.text == "a" else StepResult(1.0, done=True))
  groups = run(ScriptedEngine(lambda r: "x"), factory, prompts("a", "b"))
  assert error_counts(groups) == {f"rollout/errors/{kind}": 1.0}
  assert groups[1].rewards.tolist() == [1.0]


def test_a_factory_with_wrong_stop_strings_is_refused_before_anything_is_sampled():
  class Wrong(Stopping):
    stop_strings = "</action>"

  engine = ScriptedEngine(lambda r: "x")
  with pytest.raises(ValueError, match="stop_strings must be a list of strings, got '</action>'"):
    run(engine, Wrong(), prompts("a"))
  assert engine.calls == []


# --- token in, token out ---

PIECES = ["<act", "ion>up</ac", "tion>!\n ", "é", "a", "b", "ab", "q:", "\x00"]
A, B, AB, EOS = 4, 5, 6, 8


class Pieces:
  """A tokenizer of whole pieces that takes the longest first: decoding and encoding differ."""

  vocab_size, stop_ids, end_id, pad_id = len(PIECES), (EOS,), EOS, EOS

  def encode(self, text):
    ids = []
    while text:
      best = max((p for p in PIECES if text.startswith(p)), key=len)
      ids.append(PIECES.index(best))
      text = text[len(best) :]
    return np.asarray(ids, np.int32)

  def decode(self, ids, *, skip_special=True):
    return "".join(PIECES[i] for i in ids if not (skip_special and i == EOS))

  def render(self, messages, *, tools=()):
    return "".join(m["content"] for m in messages)

  def apply_chat_template(self, messages, *, tools=()):
    return self.encode(self.render(messages))

  def prompt(self, messages, *, max_tokens, tools=()):
    return PromptText(self.render(messages), self.apply_chat_template(messages))

  def longest_text(self, tokens):
    return tokens * max(map(len, PIECES))

  def turn_ids(self, messages, *, after, tools=(), calls=()):
    return self.encode(messages[0]["content"])


def test_what_was_sampled_is_never_encoded_again_where_a_stop_string_ends_within_a_token():
  tokenizer = Pieces()
  assert tokenizer.encode(tokenizer.decode([A, B])).tolist() == [AB]  # no round trip.
  script = {0: [A, B, 0, 1, 2, AB, AB], 1: [B, A, B, EOS]}  # the token 2 completes </action>.
  talk = Talk(continuing("ab"), StepResult(1.0, done=True))

  class Once:
    stop_strings = ("</action>",)

    def __call__(self, prompt):
      return talk

  engine = FakeEngine(
    np.zeros((len(PIECES), len(PIECES))),
    script=lambda r: script[int(r.request_id.rpartition(".")[2])],
    decode=lambda ids: tokenizer.decode(ids, skip_special=False),
  )
  task = Prompt("set:0:0", np.asarray([7], np.int32), "env", text="q:")
  sampling = SamplingParams(max_tokens=8, stop_ids=(EOS,))
  got = run(engine, Once(), [task], tokenizer=tokenizer, sampling=sampling)[0].rollouts[0]

  # The token in which the stop string ends is kept whole, with what stands behind it.
  assert talk.heard == ["ab<action>up</action>!\n ", "bab"]
  assert got.completion_ids.tolist() == [A, B, 0, 1, 2, AB, B, A, B, EOS]
  assert got.loss_mask.tolist() == [True] * 5 + [False] + [True] * 4
  assert [r.prompt_ids.tolist() for r in engine.requests] == [[7], [7, A, B, 0, 1, 2, AB]]
  uniform = -math.log(len(PIECES))
  expected = [uniform] * 5 + [0.0] + [uniform] * 4
  np.testing.assert_allclose(got.behavior_logprobs, expected, rtol=1e-6)
  assert got.turn_log == (Turn(5, 1, 0.0), Turn(4, 0, 1.0))


# --- metrics ---


def talked(*turns: Turn, environment: str = "env", **fields) -> Rollout:
  """A rollout of these turns."""
  mask = [x for t in turns for x in [True] * t.sampled_tokens + [False] * t.environment_tokens]
  size = len(mask)
  settings = {"finish_reason": FinishReason.ENV_DONE, "reward": sum(t.reward for t in turns)}
  return Rollout(
    completion_ids=np.zeros(size, np.int32),
    loss_mask=np.asarray(mask, bool),
    behavior_logprobs=np.zeros(size, np.float32),
    weight_versions=np.zeros(size, np.int32),
    turns=len(turns),
    turn_log=turns,
    **(settings | fields),
  )


def group(*rollouts: Rollout, environment: str = "env") -> RolloutGroup:
  return RolloutGroup(Prompt("p", np.zeros(2, np.int32), environment), rollouts)


def test_conversations_are_described_turn_by_turn():
  groups = [
    group(
      talked(Turn(4, 2, 0.0), Turn(3, 1, 0.5), Turn(5, 0, 1.0)),
      talked(Turn(2, 2, 0.25), Turn(8, 0, 0.0), hit_turn_limit=True),
    ),
    group(
      talked(Turn(6, 0, 0.0), finish_reason=FinishReason.LENGTH),
      talked(Turn(1, 3, 0.0), Turn(7, 0, math.nan), reward=math.nan, error="KeyError: 'x'"),
    ),
  ]
  found = scored_groups.rollout_metrics(groups)
  expected = {
    "rollout/turns_mean": 2.0,
    "rollout/turns_total": 8.0,
    "rollout/turns_max": 3.0,
    "rollout/turns_p95": np.percentile([3, 2, 1, 2], 95),
    "rollout/turn_limit_share": 1 / 4,
    "rollout/ended_by_environment_share": 1 / 4,
    "rollout/truncated_share": 1 / 4,
    "rollout/sampled_tokens_mean": (12 + 10 + 6 + 8) / 4,
    "rollout/sampled_tokens_max": 12.0,
    "rollout/environment_tokens_mean": (3 + 2 + 0 + 3) / 4,
    "rollout/turn_tokens_mean": (4 + 3 + 5 + 2 + 8 + 6 + 1 + 7) / 8,
    "rollout/turn_tokens_max": 8.0,
    "rollout/turn/01/reached_share": 1.0,
    "rollout/turn/01/reward_mean": 0.25 / 4,
    "rollout/turn/01/sampled_tokens_mean": (4 + 2 + 6 + 1) / 4,
    "rollout/turn/02/reached_share": 3 / 4,
    "rollout/turn/02/reward_mean": 0.5 / 2,  # the third was not judged.
    "rollout/turn/02/sampled_tokens_mean": (3 + 8 + 7) / 3,
    "rollout/turn/03/reached_share": 1 / 4,
    "rollout/turn/03/reward_mean": 1.0,
  }
  assert {name: found[name] for name in expected} == pytest.approx(expected)
  assert "rollout/turn/04/reached_share" not in found
  assert not metrics.unknown(found)
  single = scored_groups.rollout_metrics([group(talked(Turn(6, 0, 0.0)))])
  assert "rollout/turns_max" not in single and "rollout/turn/01/reached_share" not in single


def test_flags_of_attempts_are_not_averaged_for_their_environment():
  failed = talked(Turn(1, 0, 0.0), reward=math.nan, failure="timeout", error="x")
  found = scored_groups.rollout_metrics(
    [group(failed, talked(Turn(1, 0, 1.0), hit_turn_limit=True))]
  )
  assert not [name for name in found if name.startswith(("env/env/error", "env/env/turn_limit"))]
  assert found["env/env/failed_share"] == 0.5 and found["env/env/completions"] == 2.0


def test_metrics_are_separate_for_every_environment_of_a_group():
  solved, missed = (talked(Turn(1, 0, r), metrics={"accuracy": r}) for r in (1.0, 0.0))
  groups = [group(solved, missed, environment="math"), group(solved, environment="puzzle")]
  found = scored_groups.rollout_metrics(groups)
  assert (found["env/math/accuracy"], found["env/puzzle/accuracy"]) == (0.5, 1.0)
  assert (found["env/math/completions"], found["env/puzzle/completions"]) == (2.0, 1.0)
  evaluated = scored_groups.evaluation_metrics(groups, name="heldout")
  assert evaluated["eval/heldout/accuracy"] == 0.75
  assert evaluated["eval/heldout/math/accuracy"] == 0.5
  assert evaluated["eval/heldout/puzzle/accuracy"] == 1.0
  assert not metrics.unknown(evaluated)
  alone = scored_groups.evaluation_metrics(groups[:1], name="heldout")
  assert "eval/heldout/math/accuracy" not in alone


# --- failures ---


def failing_at(turn: int, fault):
  """A factory: the attempt whose first turn says 1 meets the fault in a turn."""

  def result(number):
    def answer(text):
      if number == turn and "1" in text:
        return fault()
      return StepResult(float(text == "0"), done=number == 2, observation="|")

    return answer

  return lambda prompt: Talk(result(1), result(2))


def raising():
  raise KeyError("no such board")


def hanging():
  time.sleep(1.2)
  return continuing()


@pytest.mark.long
@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize(
  ("fault", "kind"),
  [
    (raising, "KeyError"),
    (hanging, "timeout"),
    (lambda: StepResult(math.nan, done=False), "nan"),
    (lambda: StepResult({"a": 1.0, "b": math.nan}, done=False), "nan"),
    (lambda: None, "type"),
    (lambda: "0.5", "type"),
  ],
  ids=["raises", "hangs", "nan", "nan_part", "nothing", "text"],
)
def test_a_fault_in_any_turn_costs_the_attempt_and_the_group_continues_or_is_dropped(
  fault, kind, turn
):
  engine = ScriptedEngine(lambda r: r.request_id.rpartition("#")[2].partition(".")[0])
  limits = AttemptLimits(max_turns=3, environment_timeout_s=0.3, max_error_share=0.4)
  groups = run(engine, failing_at(turn, fault), prompts("a", "b"), group_size=3, limits=limits)
  assert error_counts(groups) == {f"rollout/errors/{kind}": 2.0}
  for one in groups:
    assert np.isnan(one.rewards).tolist() == [False, True, False]
    assert one.rollouts[1].turns == turn and one.rollouts[1].error.startswith(f"{kind}: ")
  # The group goes on: mean 0.5 of the two that were scored, and nothing is learned from the third.
  estimator = estimators.make(estimator="grpo", scale="none")
  np.testing.assert_allclose(
    credit.advantages_of(groups, estimator), [[1.0, 0.0, -1.0]] * 2, atol=1e-6
  )
  assert len(filters.apply(groups, min_scored=2).kept) == 2
  assert filters.apply(groups, min_scored=3).dropped["too_few_scored"] == 2  # by option.
  # Counted by kind, and shown with the first message and its place.
  line, *frames = console.failure_lines(groups)
  assert all(" │ " in frame for frame in frames) and len(frames) == (4 if fault is raising else 0)
  assert line.split()[0] == "failed" and f"2 of 6 completions: {kind}: " in line
  assert line.endswith("; set:0:0 (env)")
  with pytest.raises(TooManyFailures, match=f"2 of 6 .*{kind}"):
    few = dataclasses.replace(limits, max_error_share=0.3)
    run(engine, failing_at(turn, fault), prompts("a", "b"), group_size=3, limits=few)


def test_an_observation_that_cannot_be_encoded_costs_its_attempt():
  def factory(prompt):
    return Talk(continuing("\ud800" if prompt.text == "a" else "|"), StepResult(1.0, done=True))

  groups = run(ScriptedEngine(lambda r: "x"), factory, prompts("a", "b"))
  assert error_counts(groups) == {"rollout/errors/observation": 1.0}
  assert "UnicodeEncodeError" in groups[0].rollouts[0].error
  assert groups[1].rewards.tolist() == [1.0]


def test_a_template_that_refuses_the_role_of_an_observation_costs_its_attempt():
  class Strict(type(TOKENIZER)):
    def turn_ids(self, messages, **options):
      if messages[0]["role"] != "user":
        raise RuntimeError("roles must alternate")
      return super().turn_ids(messages, **options)

  def factory(prompt):
    role = "tool" if prompt.text == "a" else "user"
    return Talk(continuing(observation_role=role), StepResult(1.0, done=True))

  engine = ScriptedEngine(lambda r: "x")
  groups = run(engine, factory, prompts("a", "b"), tokenizer=Strict())
  assert groups[0].rollouts[0].error == "observation: RuntimeError: roles must alternate"
  assert groups[1].rewards.tolist() == [1.0]


def test_a_failure_that_says_what_a_terminal_obeys_is_printed_harmlessly():
  failed = talked(
    Turn(1, 0, 0.0), reward=math.nan, error="KeyError: \x1b[2J\nnext\u202e" + "x" * 999
  )
  lines = console.failure_lines([group(failed)])
  assert len(lines) == 3 and "1 of 1 completions: KeyError" in lines[0] and "prompt: " in lines[2]
  assert all("\n" not in line and "\x1b" not in line and len(line) < 500 for line in lines)
  assert not any("\u202e" in line for line in lines)


def test_evaluations_report_the_kinds_of_failures():
  failed = talked(Turn(1, 0, 0.0), reward=math.nan, failure="timeout", error="timeout: 5 s")
  found = scored_groups.evaluation_metrics(
    [group(failed), group(talked(Turn(1, 0, 1.0)))], name="heldout"
  )
  assert found["eval/heldout/errors/timeout"] == 1.0 and found["eval/heldout/failed_share"] == 0.5
  assert "failed: timeout 1.000" in console.eval_line("heldout", 3, found, {})


def test_an_environment_with_a_time_out_of_its_own_keeps_it():
  class Slow:
    timeout_s = 0.2

    def __call__(self, prompt):
      async def later(text):
        await asyncio.sleep(30)

      class Waiting(Talk):
        async def step(self, text, completion_ids, finish_reason):
          await later(text)

      return Waiting()

  started = time.monotonic()
  limits = AttemptLimits(environment_timeout_s=30.0, max_error_share=1.0)
  groups = run(ScriptedEngine(lambda r: "x"), Slow(), prompts("a"), limits=limits)
  assert error_counts(groups) == {"rollout/errors/timeout": 1.0}
  assert "within 0.2 s" in groups[0].rollouts[0].error and time.monotonic() - started < 5
