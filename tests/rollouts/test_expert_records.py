"""The experts of a conversation: which of several records of a token counts."""

import dataclasses

import numpy as np
from scripted_engine import TOKENIZER, ScriptedEngine

from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import Generation, SamplingParams
from grpo_jax.environments.base import StepResult
from grpo_jax.rollouts.expert_records import ExpertRecord
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.types import ExpertShape, FinishReason, Prompt

SHAPE = ExpertShape(layers=2, chosen=1, experts=100)


def generation(prompt: int, completion: int, expert: int) -> Generation:
  """A call in which every token went through one expert; the last one was never read."""
  of_prompt, of_completion = SHAPE.unknown(prompt), SHAPE.unknown(completion)
  of_prompt[:], of_completion[:-1] = expert, expert
  nothing = np.zeros(completion)
  return Generation(
    "", nothing, nothing, nothing, FinishReason.STOP, None, of_prompt, of_completion
  )


def experts(record: ExpertRecord, start: int, stop: int) -> list[int]:
  found = record.of(start, stop)
  assert found is not None and found.dtype == np.int8 and found.shape[1:] == (2, 1)
  assert (found[:, 0] == found[:, 1]).all()
  return found[:, 0, 0].tolist()


def test_the_record_under_which_a_token_was_sampled_counts():
  record = ExpertRecord()
  record.add(generation(3, 2, 7))  # tokens 0 to 4, the last of which is not read.
  assert experts(record, 0, 5) == [7, 7, 7, 7, -1]
  record.add(generation(6, 3, 9))  # one more was written; the next turn reads all of them.
  assert experts(record, 0, 9) == [7, 7, 7, 7, 9, 9, 9, 9, -1]
  assert experts(record, 3, 11) == [7, 9, 9, 9, 9, -1, -1, -1]


def test_the_record_of_a_prompt_is_shared_by_its_attempts():
  one, other, first = ExpertRecord(), ExpertRecord(), generation(3, 2, 7)
  for record in (one, other):
    record.add(first)
  assert one.of(0, 3) is other.of(0, 3) is first.prompt_experts


def test_an_engine_without_records_leaves_none():
  record, nothing = ExpertRecord(), np.zeros(1)
  record.add(Generation("", nothing, nothing, nothing, FinishReason.STOP))
  assert record.of(0, 1) is None


def test_the_type_is_the_smallest_that_holds_all_experts():
  assert [ExpertShape(1, 1, n).dtype for n in (8, 128, 129, 512)] == [
    *(np.int8, np.int8, np.int16, np.int16)
  ]


class RecordingEngine(ScriptedEngine):
  """The expert of every token is its turn times 10 plus the number of its attempt."""

  def _generation(self, request):
    made = super()._generation(request)
    attempt, _, turn = request.request_id.rpartition("#")[2].partition(".")
    expert = 10 * int(turn) + int(attempt)
    like = generation(len(request.prompt_ids), len(made.token_ids), expert)
    return dataclasses.replace(made, prompt_experts=like.prompt_experts, experts=like.experts)


class TwoTurns:
  async def start(self):
    pass

  async def step(self, text, completion_ids, finish_reason):
    self.turn = getattr(self, "turn", 0) + 1
    return StepResult(1.0, done=self.turn == 2, observation="no")

  async def close(self):
    pass


def test_a_group_has_the_experts_of_its_turns():
  prompt = Prompt("set:0", TOKENIZER.encode("asked"), "env")
  (group,) = collect_sync(
    RecordingEngine(lambda _: "ab"),
    {"env": lambda _: TwoTurns()},
    [prompt],
    TOKENIZER,
    group_size=2,
    sampling=SamplingParams(max_tokens=8, stop_ids=(END,)),
    seed=0,
    step=0,
    limits=AttemptLimits(max_turns=2),
  )
  assert group.prompt_experts is not None and (group.prompt_experts == 0).all()
  assert len(group.prompt_experts) == len(prompt.token_ids)
  for number, rollout in enumerate(group.rollouts):
    assert rollout.experts is not None and len(rollout.experts) == len(rollout.completion_ids)
    written = int((~rollout.loss_mask).sum())
    first, later = number, 10 + number
    # The last token of the first turn, and what was written, were read by the second call.
    expected = [first, first, later, *[later] * written, later, later, -1]
    assert rollout.experts[:, 0, 0].tolist() == expected
