"""Rollouts: order, masks, seeds, turns, limits, and what a failing environment costs."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data.byte_tokenizer import END, ROLE, ByteTokenizer
from grpo_jax.engines.base import GenerationRequest, SamplingParams
from grpo_jax.environments.base import SingleTurn, StepResult
from grpo_jax.environments.isolation import IsolatedEnvironment
from grpo_jax.metrics import scored_groups
from grpo_jax.rollouts import failures, rollout
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.rollouts.turn_sampling import request_seed
from grpo_jax.run_folder import console, rollout_log
from grpo_jax.types import FinishReason, Prompt

SAMPLING = SamplingParams(max_tokens=16, stop_ids=(END,))


def prompts(*texts: str) -> list[Prompt]:
  return [
    Prompt(prompt_id=f"set:0:{i}", token_ids=TOKENIZER.encode(text), environment="env", text=text)
    for i, text in enumerate(texts)
  ]


def single_turn(reward: Callable):
  return {"env": lambda prompt: SingleTurn(reward, prompt)}


def attempt_of(request: GenerationRequest) -> int:
  return int(request.request_id.rpartition("#")[2].partition(".")[0])


def run(engine, environments, tasks, **overrides):
  settings = dict(group_size=2, sampling=SAMPLING, seed=3, step=5) | overrides
  return collect_sync(engine, environments, tasks, TOKENIZER, **settings)


@pytest.mark.parametrize("reverse", [False, True], ids=["first_first", "last_first"])
def test_collect_returns_prompt_and_attempt_order_whatever_finishes_first(reverse):
  engine = ScriptedEngine(
    lambda r: f"{TOKENIZER.decode(r.prompt_ids)}{attempt_of(r)}", reverse=reverse
  )
  groups = run(engine, single_turn(lambda p, text: float(text[-1])), prompts("a", "b", "c"))
  assert [g.prompt.text for g in groups] == ["a", "b", "c"]
  assert [[r.text for r in g.rollouts] for g in groups] == [
    ["a0", "a1"],
    ["b0", "b1"],
    ["c0", "c1"],
  ]
  assert [g.rewards.tolist() for g in groups] == [[0.0, 1.0]] * 3
  assert len(engine.calls) == 1 and len(engine.calls[0]) == 6


def test_a_greedy_attempt_is_kept_apart_from_its_group():
  engine = ScriptedEngine(lambda r: f"{TOKENIZER.decode(r.prompt_ids)}{attempt_of(r)}")
  environments = single_turn(lambda p, text: float(text[-1]))
  plain = run(engine, environments, prompts("a", "b"))
  groups = run(engine, environments, prompts("a", "b"), with_greedy=True)
  assert [g.rewards.tolist() for g in groups] == [[0.0, 1.0]] * 2
  assert [g.greedy.reward for g in groups] == [2.0, 2.0]
  assert all(g.greedy is None for g in plain)
  by_attempt = {}
  for request in engine.calls[-1]:
    by_attempt.setdefault(attempt_of(request), set()).add(request.sampling.temperature)
  assert by_attempt == {0: {1.0}, 1: {1.0}, 2: {0.0}}
  seeds = lambda requests: [r.seed for r in requests if r.sampling.temperature]
  assert seeds(engine.calls[0]) == seeds(engine.calls[1])  # sampling is as without it.


def test_a_greedy_attempt_that_fails_is_counted_and_costs_no_other():
  def reward(prompt, text):
    if text.endswith("2"):
      raise LookupError("cannot be scored")
    return 1.0

  engine = ScriptedEngine(lambda r: f"{TOKENIZER.decode(r.prompt_ids)}{attempt_of(r)}")
  limits = AttemptLimits(max_error_share=0.5)
  [group] = run(engine, single_turn(reward), prompts("a"), with_greedy=True, limits=limits)
  assert group.rewards.tolist() == [1.0, 1.0] and np.isnan(group.greedy.reward)
  assert sum(failures.error_counts([group]).values()) == 1.0


def test_collect_keeps_the_sampled_ids_logprobs_and_versions_of_a_single_turn():
  groups = run(ScriptedEngine(lambda r: "hi"), single_turn(lambda p, t: 0.5), prompts("a"))
  got = groups[0].rollouts[0]
  assert got.completion_ids.tolist() == [ord("h"), ord("i"), END]
  assert got.behavior_logprobs.tolist() == [-0.125, -0.25, -0.375]
  assert got.weight_versions.tolist() == [7, 7, 7]
  assert got.loss_mask.all() and got.text == "hi"
  assert got.finish_reason is FinishReason.STOP and got.turns == 1 and got.reward == 0.5


def test_collect_scores_while_others_are_still_sampled():
  scored = asyncio.Event()

  class Waiting(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      yield self._generation(requests[0])
      await asyncio.wait_for(scored.wait(), 20)  # ends only if the first is scored meanwhile.
      yield self._generation(requests[1])

  async def body():
    loop = asyncio.get_running_loop()

    def reward(prompt, text):
      loop.call_soon_threadsafe(scored.set)
      return 1.0

    return await rollout.collect(
      Waiting(lambda r: "x"),
      single_turn(reward),
      prompts("a"),
      TOKENIZER,
      group_size=2,
      sampling=SAMPLING,
      seed=0,
      step=0,
    )

  assert asyncio.run(body())[0].rewards.tolist() == [1.0, 1.0]


def test_collect_sync_works_where_a_loop_already_runs():
  async def notebook_cell():
    return run(ScriptedEngine(lambda r: "x"), single_turn(lambda p, t: 1.0), prompts("a"))

  assert asyncio.run(notebook_cell())[0].rewards.tolist() == [1.0, 1.0]


def test_request_seed_is_the_same_in_every_process_and_differs_in_every_argument():
  base = request_seed(1, 2, "p", 3, 4)
  # blake2b of '[1, 2, "p", 3, 4]', 8 bytes, little endian, halved; worked out with b2sum.
  assert base == 0x4F1D7CF219B9F5D5
  others = [request_seed(*a) for a in [(0, 2, "p", 3, 4), (1, 0, "p", 3, 4), (1, 2, "q", 3, 4)]]
  others += [request_seed(1, 2, "p", 0, 4), request_seed(1, 2, "p", 3, 0)]
  assert len({base, *others}) == 6
  assert 0 <= base < 2**63


def test_collect_asks_for_the_seed_of_each_attempt():
  engine = ScriptedEngine(lambda r: "x")
  run(engine, single_turn(lambda p, t: 1.0), prompts("a"))
  assert [r.seed for r in engine.calls[0]] == [request_seed(3, 5, "set:0:0", i) for i in (0, 1)]


class Counting:
  """Talks for as many turns as the prompt has letters; each is worth its number."""

  def __init__(self, prompt: Prompt, role: str | None = None):
    self._turns = len(prompt.text)
    self._role = role
    self._turn = 0

  async def start(self):
    self._turn = 0

  async def step(self, text, completion_ids, finish_reason):
    self._turn += 1
    return StepResult(
      reward={"turns": float(self._turn), "words": 0.25},
      done=self._turn >= self._turns,
      observation=f"<{self._turn}>",
      observation_role=self._role,
      metrics={"last_turn": float(self._turn)},
    )

  async def close(self):
    pass


def test_collect_interleaves_turns_and_masks_what_the_environment_wrote():
  engine = ScriptedEngine(lambda r: "ab")
  groups = run(
    engine, {"env": Counting}, prompts("xyz"), limits=AttemptLimits(max_turns=5), group_size=1
  )
  got = groups[0].rollouts[0]
  turn, observation = [ord("a"), ord("b"), END], lambda i: [ord("<"), ord(i), ord(">")]
  expected = turn + observation("1") + turn + observation("2") + turn
  assert got.completion_ids.tolist() == expected
  assert got.loss_mask.tolist() == ([True] * 3 + [False] * 3) * 2 + [True] * 3
  sampled = [-0.125, -0.25, -0.375]
  assert got.behavior_logprobs.tolist() == (sampled + [0.0] * 3) * 2 + sampled
  assert got.weight_versions.tolist() == ([7] * 3 + [-1] * 3) * 2 + [7] * 3
  assert got.reward == 1 + 2 + 3 + 3 * 0.25
  assert got.reward_components == {"turns": 6.0, "words": 0.75}
  assert got.finish_reason is FinishReason.ENV_DONE and got.turns == 3
  assert got.metrics == {"last_turn": 3.0}
  # Token in, token out: each turn's request is the prompt and all tokens so far, as they were.
  asked = [call[0].prompt_ids.tolist() for call in engine.calls]
  start = TOKENIZER.encode("xyz").tolist()
  assert asked == [start, start + expected[:6], start + expected[:12]]


class Merging(ByteTokenizer):
  """Encodes "ab" to one id, 1000, and decodes any id: decoding and encoding differ."""

  vocab_size, stop_ids, pad_id = 1001, (END,), 0

  def encode(self, text):
    return np.asarray([1000 if c == "§" else ord(c) for c in text.replace("ab", "§")], np.int32)

  def decode(self, ids, *, skip_special=True):
    return "".join("ab" if i == 1000 else chr(i) for i in ids if i < 256 or i == 1000)

  def turn_ids(self, messages, *, after, **_):
    return self.encode(messages[0]["content"])


def test_collect_never_encodes_again_what_was_sampled():
  engine = ScriptedEngine(lambda r: "ab")  # samples the ids of a and of b.
  tokenizer = Merging()
  assert tokenizer.encode(tokenizer.decode([97, 98])).tolist() == [1000]
  groups = collect_sync(
    engine,
    {"env": Counting},
    prompts("xy"),
    tokenizer,
    group_size=1,
    sampling=SAMPLING,
    seed=0,
    step=0,
    limits=AttemptLimits(max_turns=2),
  )
  ids = groups[0].rollouts[0].completion_ids.tolist()
  assert ids == [97, 98, END, *map(ord, "<1>"), 97, 98, END]
  assert engine.calls[1][0].prompt_ids.tolist() == [*map(ord, "xy"), *ids[:6]]


def test_collect_renders_an_observation_with_a_role_as_a_message():
  groups = run(
    ScriptedEngine(lambda r: "ab"),
    {"env": lambda p: Counting(p, role="user")},
    prompts("xy"),
    limits=AttemptLimits(max_turns=2),
    group_size=1,
  )
  written = groups[0].rollouts[0].completion_ids[3:-3].tolist()
  # The model sampled <end> itself, so the template's is not written twice.
  assert written == [ROLE, *b"user\n<1>", END, ROLE, *b"assistant\n"]


def test_free_schedule_gives_what_rounds_give():
  def collected(schedule):
    engine = ScriptedEngine(lambda r: f"{r.seed % 1000:03d}", reverse=schedule == "free")
    groups = run(
      engine,
      {"env": Counting},
      prompts("x", "xyz", "xy"),
      limits=AttemptLimits(max_turns=4),
      schedule=schedule,
    )
    return [[(r.completion_ids.tolist(), r.reward) for r in g.rollouts] for g in groups], engine

  (rounds, by_rounds), (free, by_free) = collected("rounds"), collected("free")
  assert rounds == free
  assert [len(call) for call in by_rounds.calls] == [6, 4, 2]
  assert [len(call) for call in by_free.calls] == [6] + [1] * 6


def test_collect_ends_a_conversation_at_the_turn_limit():
  groups = run(
    ScriptedEngine(lambda r: "ab"),
    {"env": Counting},
    prompts("xyz"),
    limits=AttemptLimits(max_turns=2),
  )
  got = groups[0].rollouts[0]
  assert got.turns == 2 and got.hit_turn_limit
  assert got.loss_mask[-1]  # no observation after the last turn.
  assert got.finish_reason is FinishReason.STOP and got.reward == 3.5


@pytest.mark.parametrize(
  ("max_tokens", "lengths", "turns"),
  [
    # prompt 3, turn 3, observation 3, turn 3.
    (12, [3, 3, 3], 2),  # all fits.
    (11, [3, 3, 2], 2),  # the second turn is cut.
    (9, [3], 1),  # no token is left after the observation: it is not appended.
    (5, [2], 1),  # the first turn is cut.
  ],
)
def test_collect_keeps_the_token_limit_over_all_turns(max_tokens, lengths, turns):
  limits = AttemptLimits(max_turns=2, max_tokens=max_tokens)
  env = {"env": lambda p: Counting(prompts("xy")[0])}
  got = run(ScriptedEngine(lambda r: "ab"), env, prompts("xyz"), limits=limits)[0].rollouts[0]
  assert len(got.completion_ids) == sum(lengths) <= max_tokens - 3
  assert got.turns == turns
  assert got.is_truncated == (max_tokens < 12)


def test_collect_fails_an_attempt_whose_prompt_leaves_no_room():
  groups = run(
    ScriptedEngine(lambda r: "ab"),
    single_turn(lambda p, t: 1.0),
    prompts("xyz", "a"),
    limits=AttemptLimits(max_tokens=3, max_error_share=0.5),
  )
  assert np.isnan(groups[0].rewards).all() and len(groups[0].rollouts[0].completion_ids) == 0
  assert groups[1].rewards.tolist() == [1.0, 1.0]
  assert failures.error_counts(groups) == {"rollout/errors/no_room": 2.0}


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_collect_lets_a_prompt_without_room_stop_the_run_only_if_it_is_learned_from(weight):
  cut, *others = prompts("xyz", "a")
  attempt = lambda: run(
    ScriptedEngine(lambda r: "ab"),
    single_turn(lambda p, t: 1.0),
    [dataclasses.replace(cut, weight=weight), *others],
    limits=AttemptLimits(max_tokens=3, max_error_share=0.2),
  )
  if weight:
    with pytest.raises(failures.TooManyFailures, match="2 of 4 attempts.*no_room"):
      attempt()
  else:
    assert [np.isnan(group.rewards).all() for group in attempt()] == [True, False]


def raising(prompt, text):
  raise KeyError("nothing here")


def exiting(prompt, text):
  raise SystemExit(3)


def blocking(prompt, text):
  time.sleep(1.5)
  return 1.0


async def sleeping(prompt, text):
  await asyncio.sleep(3600)


@pytest.mark.parametrize(
  ("fault", "kind"),
  [
    (raising, "KeyError"),
    (exiting, "SystemExit"),
    (blocking, "timeout"),
    (sleeping, "timeout"),
    (lambda p, t: math.nan, "nan"),
    (lambda p, t: {"a": 1.0, "b": math.inf}, "nan"),
    (lambda p, t: 1e39, "nan"),  # infinite in float32, in which is learned.
    (lambda p, t: {}, "ValueError"),
  ],
  ids=["raises", "exits", "blocks", "sleeps", "nan", "component_inf", "too_large", "nothing"],
)
def test_a_failing_environment_costs_its_attempt_only_and_is_counted(fault, kind):
  def reward(prompt, text):
    return fault(prompt, text) if text == "1" else 1.0

  engine = ScriptedEngine(lambda r: str(attempt_of(r)))
  limits = AttemptLimits(environment_timeout_s=0.5, max_error_share=0.5)
  groups = run(engine, single_turn(reward), prompts("a", "b"), limits=limits, group_size=3)
  for group in groups:
    assert np.isnan(group.rewards).tolist() == [False, True, False]
    assert group.rollouts[1].text == "1" and group.rollouts[1].reward_components == {}
  assert failures.error_counts(groups) == {f"rollout/errors/{kind}": 2.0}
  assert scored_groups.rollout_metrics(groups)["rollout/failed_share"] == pytest.approx(1 / 3)


def test_a_factory_that_raises_costs_its_attempts_only():
  def factory(prompt):
    if prompt.text == "a":
      raise OSError("no such puzzle")
    return SingleTurn(lambda p, t: 1.0, prompt)

  half = AttemptLimits(max_error_share=0.5)
  groups = run(ScriptedEngine(lambda r: "x"), {"env": factory}, prompts("a", "b"), limits=half)
  assert failures.error_counts(groups) == {"rollout/errors/OSError": 2.0}
  assert groups[1].rewards.tolist() == [1.0, 1.0]


def test_collect_stops_past_the_allowed_share_of_failures_and_says_why():
  engine = ScriptedEngine(lambda r: str(attempt_of(r)))

  def reward(prompt, text):
    return raising(prompt, text) if text == "1" else 1.0

  at_the_limit = AttemptLimits(max_error_share=0.5)
  assert len(run(engine, single_turn(reward), prompts("a"), limits=at_the_limit)) == 1
  message = r"1 of 2 attempts.*0\.4 .rollout.max_error_share.*'KeyError': 1.*nothing here"
  with pytest.raises(failures.TooManyFailures, match=message):
    run(engine, single_turn(reward), prompts("a"), limits=AttemptLimits(max_error_share=0.4))


def test_the_first_failure_of_each_kind_is_in_the_message():
  engine = ScriptedEngine(lambda r: str(attempt_of(r)))

  def reward(prompt, text):
    kinds = {"0": TimeoutError("no answer"), "1": OSError("no sandbox starts")}
    raise kinds.get(text) or TimeoutError("no answer, either")

  with pytest.raises(failures.TooManyFailures) as failure:
    run(engine, single_turn(reward), prompts("a"), group_size=3)
  first, others = str(failure.value).split("prompt: 'a'")
  assert "the first, set:0:0: TimeoutError: no answer" in first and "OSError: " not in first
  assert others.startswith("\nset:0:0: OSError: no sandbox starts") and others.count("set:0:0") == 1


def test_the_message_names_the_row_and_holds_nothing_that_a_terminal_obeys():
  engine = ScriptedEngine(lambda r: "\x1b[2J[red]no")

  def reward(prompt, text):
    raise ValueError(f"{text}\u202e is not a number")

  asked = [dataclasses.replace(each, where="/data/ro\x1b]ws.jsonl:7") for each in prompts("a")]
  with pytest.raises(failures.TooManyFailures) as failure:
    run(engine, single_turn(reward), asked)
  said = str(failure.value)
  assert "the first, set:0:0 (row /data/ro\\x1b]ws.jsonl:7): ValueError: \\x1b[2J[red]no" in said
  assert "\x1b" not in said and "\u202e" not in said and len(said) < 2500
  (group,) = run(engine, single_turn(reward), asked, limits=AttemptLimits(max_error_share=1.0))
  (line, *_) = console.failure_lines([group])
  assert line.endswith("; set:0:0 (env), row /data/ro\\x1b]ws.jsonl:7") and "\x1b" not in line
  records = rollout_log.rollout_records(0, [group], [np.zeros(2)], None, None)
  assert records[0]["row"] == asked[0].where and "in reward: raise" in records[0]["error"]


def test_a_cancelled_call_stays_cancelled_when_its_answer_arrives_at_the_same_time():
  async def body():
    environment = IsolatedEnvironment(
      single_turn(lambda p, t: 1.0)["env"], prompts("a")[0], timeout_s=9.0
    )
    await environment.start()
    step = asyncio.ensure_future(environment.step("x", np.zeros(0, np.int32), FinishReason.STOP))
    await asyncio.sleep(0)  # now the call is made,
    time.sleep(0.2)  # and is answered while this loop is busy.
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
      await step
    await environment.close()

  asyncio.run(body())


def test_environments_are_closed_also_when_the_engine_breaks():
  closed = []

  class Closing(Counting):
    async def close(self):
      closed.append(1)

  class Breaking(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      if self.calls:
        raise OSError("server gone")
      async for generation in super().generate(requests):
        yield generation

  with pytest.raises(OSError, match="server gone"):
    run(
      Breaking(lambda r: "x"), {"env": Closing}, prompts("xyz"), limits=AttemptLimits(max_turns=3)
    )
  assert len(closed) == 2


def test_an_aborted_generation_is_not_scored():
  class Aborting(ScriptedEngine):
    def _generation(self, request):
      import dataclasses

      made = super()._generation(request)
      return dataclasses.replace(made, finish_reason=FinishReason.ABORT)

  groups = run(
    Aborting(lambda r: "x"),
    single_turn(lambda p, t: 1.0),
    prompts("a"),
    limits=AttemptLimits(max_error_share=1.0),
  )
  assert failures.error_counts(groups) == {"rollout/errors/abort": 2.0}


def test_collect_refuses_what_cannot_be_right():
  engine, envs = ScriptedEngine(lambda r: "x"), single_turn(lambda p, t: 1.0)
  with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
    run(engine, envs, prompts("a"), group_size=0)
  with pytest.raises(ValueError, match="repeated: .*set:0:0"):
    run(engine, envs, prompts("a") + prompts("b"))
  with pytest.raises(ValueError, match="'env'.*did you mean 'envs'"):
    run(engine, {"envs": envs["env"]}, prompts("a"))
  assert engine.calls == []


def test_equal_texts_under_two_ids_are_two_groups():
  groups = run(ScriptedEngine(lambda r: "x"), single_turn(lambda p, t: 1.0), prompts("a", "a"))
  assert [g.prompt.prompt_id for g in groups] == ["set:0:0", "set:0:1"]


def test_an_engine_that_leaves_requests_unanswered_is_an_error():
  class Forgetful(ScriptedEngine):
    async def generate(self, requests, *, on_progress=None):
      yield self._generation(requests[0])

  with pytest.raises(RuntimeError, match="left 1 requests unanswered"):
    run(Forgetful(lambda r: "x"), single_turn(lambda p, t: 1.0), prompts("a"))


@pytest.mark.parametrize("role", [None, "user"])
def test_what_an_environment_says_at_great_length_is_not_encoded_whole(role, monkeypatch):
  class Talker(Counting):
    async def step(self, text, completion_ids, finish_reason):
      return StepResult(0.0, done=False, observation="x" * 3_000_000, observation_role=role)

  encoded = []
  encode = ByteTokenizer.encode
  monkeypatch.setattr(ByteTokenizer, "encode", lambda t, s: encoded.append(len(s)) or encode(t, s))
  limits = AttemptLimits(max_turns=2, max_tokens=64)
  groups = run(
    ScriptedEngine(lambda r: "ab"), {"env": Talker}, prompts("xy"), limits=limits, group_size=1
  )
  assert groups[0].rollouts[0].finish_reason is FinishReason.LENGTH
  assert len(groups[0].rollouts[0].completion_ids) == 3
  assert sum(encoded) < 5000
