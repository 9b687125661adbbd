"""Attempts prompts with an engine and environments, and returns groups of scored attempts.

Token in, token out: what the engine sampled is never decoded and encoded again. The tokens that
an environment writes are part of the completion, with `loss_mask` False.
"""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from grpo_jax.data.tokenizer import Tokenizer
from grpo_jax.engines.base import Generation, OnProgress, SamplingParams
from grpo_jax.environments.base import AnyFactory, EnvironmentFactory, StepResult, as_factory
from grpo_jax.environments.isolation import EnvironmentFailure
from grpo_jax.registry import nearest
from grpo_jax.rollouts import agents, failures
from grpo_jax.rollouts.attempt import Attempt
from grpo_jax.rollouts.loop_thread import LoopThread, closed_after
from grpo_jax.rollouts.options import SCHEDULES, RolloutOptions
from grpo_jax.rollouts.turn_sampling import Generator, TurnSampler
from grpo_jax.types import FinishReason, Prompt, RolloutGroup
from grpo_jax.values import checked, options

Schedule = Literal["rounds", "free"]  # see `RolloutOptions.schedule`.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
  """Bounds of one attempt, and of the share of failures."""

  max_turns: int = RolloutOptions.max_turns
  # Prompt and completion, all turns; None: no bound here.
  max_tokens: int | None = RolloutOptions.max_tokens
  # Limit of one call of an environment.
  environment_timeout_s: float = RolloutOptions.environment_timeout_s
  # Calls of environments at the same time.
  environment_concurrency: int = RolloutOptions.environment_concurrency
  # Limit of an attempt whose environment drives the conversation.
  agent_timeout_s: float = RolloutOptions.agent_timeout_s
  agent_concurrency: int = RolloutOptions.agent_concurrency  # such attempts at the same time.
  # Share of attempts; `collect` raises if more cannot be scored.
  max_error_share: float = RolloutOptions.max_error_share

  def __post_init__(self):
    given = checked.fields_of(self)
    if self.max_tokens is None:
      del given["max_tokens"]
    checked.require(options.kinds(RolloutOptions), given, of="rollout")


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
  """What calls of `groups` that run side by side have together: how much may be done at a time."""

  environment_calls: asyncio.Semaphore
  agents: asyncio.Semaphore

  @classmethod
  def of(cls, limits: AttemptLimits) -> "Slots":
    """Makes the slots that the limits allow."""
    calls, agent_runs = limits.environment_concurrency, limits.agent_concurrency
    return cls(asyncio.Semaphore(calls), asyncio.Semaphore(agent_runs))


@dataclasses.dataclass(frozen=True, slots=True)
class StepPrompt:
  """A prompt and the step that it is for, whenever it is sampled: the seeds depend on both."""

  prompt: Prompt
  step: int


class Finished(NamedTuple):
  """A group whose attempts are all scored."""

  ordinal: int  # place of its prompt among the prompts that were given, from 0.
  group: RolloutGroup  # its attempts are in the order of their numbers.


def groups(
  engine: Generator,
  environments: Mapping[str, AnyFactory],
  prompts: Sequence[StepPrompt],
  tokenizer: Tokenizer,
  *,
  group_size: int,
  sampling: SamplingParams,
  seed: int,
  limits: AttemptLimits | None = None,
  slots: Slots | None = None,
  schedule: Schedule = RolloutOptions.schedule,
  with_greedy: bool = False,
  on_progress: OnProgress | None = None,
) -> AsyncGenerator[Finished, None]:
  """Attempts every prompt `group_size` times and yields each group when its last attempt is scored.

      async with contextlib.aclosing(groups(...)) as finished:
        async for ordinal, group in finished:
          ...

  The first turns of all attempts go to the engine in one call; attempts are scored while others
  are still sampled, and all of that continues while the caller uses a group. Which group comes
  first may depend on timing; what is in it does not, because the seed of a request depends on
  (seed, step of the prompt, prompt id, attempt, turn) only.

  An error of the engine is raised after the groups that were finished before it.

  Closing the iterator, or cancelling its reader, cancels the requests at the engine and the calls
  of environments, closes the environments, and returns when no task is left. A second
  cancellation does not wait for environments to close.

  A failure of an environment ends nothing: its attempt has the reward NaN. An environment that
  hangs fails after `limits.environment_timeout_s`, and its thread is left behind. Too many such
  failures are an error after the last group, so that the message counts them all.

  Args:
    engine: Engine that samples the completions.
    environments: Factories by name; each prompt names its own.
    prompts: Prompts of different ids, each with the step that it is for.
    tokenizer: Tokenizer that decodes for the environments and encodes what they write.
    group_size: Number of attempts at each prompt, at least 1.
    sampling: Sampling options of each turn; `max_tokens` bounds a turn.
    seed: Random seed of the run.
    limits: Bounds; `AttemptLimits()` if None.
    slots: Slots shared with other calls in the same event loop; None: those of `limits`, for this
      call alone.
    schedule: Order in which later turns are sent. "rounds": all of a turn together, so that
      an engine whose numerics depend on the batch repeats itself exactly; "free": each at once.
    with_greedy: Whether each prompt is attempted once more, at temperature 0, for
      `RolloutGroup.greedy`.
    on_progress: Function that the engine calls: (completions done, completions requested, tokens
      sampled), all of one turn.

  Yields:
    Finished groups, in the order in which they finish.

  Raises:
    TooManyFailures: More than `limits.max_error_share` of the attempts failed, not counting
      those at prompts of weight 0.
    ValueError: A prompt names an unknown environment, ids are repeated, there is no such
      schedule, or an agent cannot be greedy; raised at once.
  """
  if group_size < 1:
    raise ValueError(f"group_size must be at least 1, got {group_size}")
  if schedule not in SCHEDULES:
    raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
  check_unique([each.prompt for each in prompts])
  limits = limits or AttemptLimits()
  factories = {p.environment: _factory(environments, p) for p in (each.prompt for each in prompts)}
  agents_named = sorted(name for name, factory in factories.items() if factory.is_agent)
  if with_greedy and agents_named:
    raise ValueError(
      f"environment {agents_named[0]!r} drives its own conversation, so no attempt can be greedy:"
      " use another baseline than 'greedy' (advantages.estimator='remax')"
    )
  attempts = [
    [
      Attempt(
        each.prompt,
        number,
        factories[each.prompt.environment],
        step=each.step,
        is_greedy=number == group_size,
      )
      for number in range(group_size + with_greedy)
    ]
    for each in prompts
  ]
  turns = TurnSampler(engine, tokenizer, sampling, seed, limits.max_tokens, on_progress)
  return _Collector(turns, limits, slots or Slots.of(limits), attempts).groups(schedule)


async def collect(
  engine: Generator,
  environments: Mapping[str, AnyFactory],
  prompts: Sequence[Prompt],
  tokenizer: Tokenizer,
  *,
  step: int,
  **options: Any,
) -> list[RolloutGroup]:
  """Returns all groups of one step, in the order of the prompts.

  Args:
    engine: Argument of `groups`, like all others but `step`.
    environments: Argument of `groups`.
    prompts: Prompts of different ids.
    tokenizer: Argument of `groups`.
    step: Step that the prompts are for.
    **options: Arguments of `groups`: group_size, sampling, seed, limits, schedule, with_greedy,
      on_progress.

  Raises:
    TooManyFailures, ValueError: See `groups`.
  """
  step_prompts = for_step(prompts, step)
  async with contextlib.aclosing(
    groups(engine, environments, step_prompts, tokenizer, **options)
  ) as finished:
    return in_order([each async for each in finished])


def collect_sync(
  *args: Any, stop: Any = False, loop: LoopThread | None = None, **options: Any
) -> list[RolloutGroup]:
  """Calls `collect` from ordinary code, also in a notebook where an event loop already runs.

  Args:
    *args: Arguments of `collect`.
    stop: Flag that becomes true when the groups are no longer wanted; see `interrupts.Flag`.
    loop: Event loop of the run; None: one for this call.
    **options: Arguments of `collect`.

  Raises:
    interrupts.Stopped: `stop` has become true.
  """
  with contextlib.ExitStack() as stack:
    loop = loop or stack.enter_context(LoopThread())
    return loop.run(collect(*args, **options), stop=stop)


def for_step(prompts: Sequence[Prompt], step: int) -> list[StepPrompt]:
  """Returns the prompts, each with its step."""
  return [StepPrompt(prompt, step) for prompt in prompts]


def in_order(finished: Iterable[Finished]) -> list[RolloutGroup]:
  """Returns the groups in the order of their prompts."""
  return [each.group for each in sorted(finished, key=lambda each: each.ordinal)]


def counting(advance: Callable[[int], None]) -> OnProgress:
  """Returns a progress function that calls `advance` with the number of newly done ones."""
  seen = 0

  def report(done: int, total: int, tokens: int) -> None:
    nonlocal seen
    advance(max(done - seen, 0))
    seen = done

  return report


class _Collector:
  """Takes attempts through their turns and yields each group when it is finished."""

  def __init__(
    self,
    turns: TurnSampler,
    limits: AttemptLimits,
    slots: Slots,
    attempts: Sequence[Sequence[Attempt]],
  ):
    """Starts nothing.

    Args:
      turns: Samples turns.
      limits: Bounds of an attempt.
      slots: Bounds of what is done at a time.
      attempts: Attempts of each prompt, in the order of their numbers.
    """
    self._turns = turns
    self._limits = limits
    self._attempts = attempts
    self._ordinals = {each[0].prompt.prompt_id: ordinal for ordinal, each in enumerate(attempts)}
    self._left = [len(each) for each in attempts]  # attempts of each prompt that are not finished.
    self._arrived: asyncio.Queue[Finished | None] = asyncio.Queue()  # None: no more will come.
    self._environment_calls = slots.environment_calls
    self._bounds = agents.Bounds(
      call_timeout_s=limits.environment_timeout_s,
      run_timeout_s=limits.agent_timeout_s,
      concurrency=limits.agent_concurrency,
      slots=slots.agents,
    )

  async def groups(self, schedule: Schedule) -> AsyncGenerator[Finished, None]:
    """Yields the groups as they finish; see the function `groups`."""
    work = asyncio.create_task(self._work(schedule))
    work.add_done_callback(lambda _: self._arrived.put_nowait(None))
    try:
      while (finished := await self._arrived.get()) is not None:
        yield finished
      await work  # raises its error, if there is one.
    finally:
      work.cancel()
      await asyncio.gather(work, return_exceptions=True)
    counting = [failures.outcome_of(each) for each in self._flat() if each.prompt.weight > 0]
    failures.check_outcomes(counting, self._limits.max_error_share)

  async def _work(self, schedule: Schedule) -> None:
    """Takes all attempts to their ends, and closes the environments whatever happens."""
    try:
      self._fail_without_room()
      if schedule == "rounds":
        await self._in_rounds()
        await self._agents(in_rounds=True)
      else:
        await agents.together(self._freely(), self._agents(in_rounds=False))
    finally:
      await asyncio.gather(*(attempt.close() for attempt in self._flat()))

  async def _in_rounds(self) -> None:
    """Takes every turn of all attempts together."""
    while active := self._active():
      await self._turn(active, self._advance)

  async def _freely(self) -> None:
    """Takes each attempt's next turn as soon as it can be taken."""

    async def advance_to_end(attempt: Attempt, generation: Generation) -> None:
      await self._advance(attempt, generation)
      if not attempt.is_done:
        await self._turn([attempt], advance_to_end)

    if active := self._active():
      await self._turn(active, advance_to_end)

  async def _agents(self, *, in_rounds: bool) -> None:
    """Has the agents make their attempts."""
    made = agents.Agents(self._turns, self._bounds, in_rounds=in_rounds, on_done=self._count)
    await made.run([attempt for attempt in self._flat() if attempt.is_agent])

  def _flat(self) -> list[Attempt]:
    return [attempt for members in self._attempts for attempt in members]

  def _active(self) -> list[Attempt]:
    """Returns the attempts whose turns are taken here."""
    return [each for each in self._flat() if not (each.is_done or each.is_agent)]

  def _fail_without_room(self) -> None:
    """Fails the attempts whose prompt leaves no room for an answer."""
    for attempt in self._active():
      if self._turns.room(attempt) < 1:
        tokens = len(attempt.prompt.token_ids)
        reason = f"a prompt of {tokens} tokens leaves no room in {self._limits.max_tokens}"
        attempt.fail(EnvironmentFailure("no_room", reason))
        self._count(attempt)

  def _count(self, attempt: Attempt) -> None:
    """Counts a finished attempt; its group is finished with the last one."""
    ordinal = self._ordinals[attempt.prompt.prompt_id]
    self._left[ordinal] -= 1
    if not self._left[ordinal]:
      members = self._attempts[ordinal]
      if attempt.is_agent:
        agents.settle(members, self._turns.tokenizer)
      rollouts = tuple(e.rollout(self._turns.tokenizer) for e in members if not e.is_greedy)
      greedy = [e.rollout(self._turns.tokenizer) for e in members if e.is_greedy]
      # Of the first attempt that has them: the prompt is computed once in training.
      experts = (e.prompt_experts for e in members if not e.is_greedy)
      experts = next((found for found in experts if found is not None), None)
      group = RolloutGroup(attempt.prompt, rollouts, *greedy, prompt_experts=experts)
      self._arrived.put_nowait(Finished(ordinal, group))

  async def _turn(
    self,
    attempts: Sequence[Attempt],
    advance: Callable[[Attempt, Generation], Coroutine[Any, Any, None]],
  ) -> None:
    """Samples one turn of several attempts, and advances each as its tokens arrive."""
    waiting = {a.request_id: a for a in attempts}
    tasks: list[asyncio.Task[None]] = []
    generations = self._turns.sample(attempts)
    try:
      async with closed_after(generations):
        async for generation in generations:
          if generation.request_id not in waiting:
            raise RuntimeError(f"the engine answered an unknown request {generation.request_id!r}")
          attempt = waiting.pop(generation.request_id)
          tasks.append(asyncio.create_task(advance(attempt, generation)))
      if waiting:
        raise RuntimeError(f"the engine left {len(waiting)} requests unanswered: {[*waiting][:5]}")
      await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

  async def _advance(self, attempt: Attempt, generation: Generation) -> None:
    """Takes one attempt from a turn's tokens to the next turn, or to its end."""
    attempt.add_sampled(generation)
    async with self._environment_calls:
      if generation.finish_reason is FinishReason.ABORT:
        attempt.fail(EnvironmentFailure("abort", "the engine gave up on the request"))
      else:
        timeout_s = self._limits.environment_timeout_s
        result = await attempt.judge(generation, self._turns.tokenizer, timeout_s)
        if result is not None:
          self._continue(attempt, generation, result)
      if attempt.is_done:  # closed at once: an open environment has a thread and three files.
        await attempt.close()
    if attempt.is_done:
      self._count(attempt)

  def _continue(self, attempt: Attempt, generation: Generation, result: StepResult) -> None:
    """Decides whether there is a next turn, and appends the observation if there is."""
    is_cut = generation.finish_reason is FinishReason.LENGTH
    if result.done or is_cut:
      is_conversation = attempt.turn > 0 and not is_cut
      attempt.finish(FinishReason.ENV_DONE if is_conversation else None)
    elif attempt.turn + 1 >= self._limits.max_turns:
      attempt.finish_at_turn_limit()
    else:
      try:
        ids = self._turns.observation_ids(attempt, result, generation)
      except EnvironmentFailure as error:
        attempt.fail(error)
        return
      if self._turns.room(attempt, more=len(ids)) < 1:
        attempt.finish(FinishReason.LENGTH)
      else:
        attempt.add_observation(ids)


def _factory(environments: Mapping[str, AnyFactory], prompt: Prompt) -> EnvironmentFactory:
  if prompt.environment not in environments:
    raise ValueError(
      f"prompt {prompt.prompt_id} names the environment {prompt.environment!r}"
      f"{nearest(prompt.environment, environments)}; there are: {', '.join(environments)}"
    )
  return as_factory(environments[prompt.environment])


def check_unique(prompts: Sequence[Prompt]) -> None:
  """Raises ValueError if ids of prompts are repeated."""
  counts = Counter(p.prompt_id for p in prompts)
  repeated = [name for name, count in counts.items() if count > 1]
  if repeated:
    raise ValueError(f"prompt ids must differ, repeated: {repeated[:5]}")
