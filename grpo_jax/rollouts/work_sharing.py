"""The work of sampling and grading, split between the processes of a run.

Process p of N attempts the prompts p, p + N, p + 2N, … with its own engine and environments; then
every process receives the groups of all. Neighbours go to different processes, because datasets
and curricula put alike prompts next to each other; the attempts at a prompt stay together, because
they share its keys and values. How long completions become is not known, so the processes may
still end at different times, and the first ones wait.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from grpo_jax import processes
from grpo_jax.groups import group_bytes
from grpo_jax.interrupts import Stopped
from grpo_jax.processes import bulk, digests
from grpo_jax.processes.exchanges import EndedEarly
from grpo_jax.rollouts import failures, rollout
from grpo_jax.rollouts.rollout import AttemptLimits
from grpo_jax.types import Prompt, RolloutGroup

T = TypeVar("T")

_log = logging.getLogger(__name__)

# (prompts, limits, flag that becomes true when the groups are no longer wanted) -> their groups.
Attempt = Callable[[Sequence[Prompt], AttemptLimits, Any], list[RolloutGroup]]


def among_processes(
  prompts: Sequence[Prompt],
  attempt: Attempt,
  *,
  limits: AttemptLimits,
  what: str,
  stop: Any = False,
) -> list[RolloutGroup]:
  """Attempts prompts on all processes, each of them a share, and returns all groups in order.

  If a process fails or is asked to stop, the others end their shares within a second. Whether too
  many attempts have failed is decided over the attempts of all processes, so that it does not
  depend on their number.

  Args:
    prompts: Prompts, the same on all processes; see `compare`.
    attempt: Function that returns the groups of prompts, in order.
    limits: Bounds of the attempts.
    what: Description of the attempts, for messages: "the groups of step 3".
    stop: Flag that becomes true when the groups are no longer wanted; see `interrupts.Flag`.

  Raises:
    Exception: What `attempt` raises on this process.
    OtherProcessError: `attempt` failed on another process.
    Stopped: The run is asked to end, on any process.
    TooManyFailures: More than `limits.max_error_share` of all attempts failed.
    ValueError: Ids of prompts are repeated.
    DamagedError: The groups of another process arrived damaged.
  """
  if processes.count() == 1:
    return attempt(prompts, limits, stop)
  lenient = dataclasses.replace(limits, max_error_share=1.0)
  early = EndedEarly(stop)
  work = lambda: _encoded(prompts, attempt, lenient, early)
  try:
    data = processes.together(work, what=what)
  finally:
    early.forget()
  shares = bulk.exchange_bytes(data, what=what)
  read = lambda: _joined(shares, prompts, limits.max_error_share)
  return processes.together(read, what=f"reading {what}")


def share(items: Sequence[T]) -> Sequence[T]:
  """Returns the part of the items that this process works at."""
  return items[processes.index() :: processes.count()]


def shown() -> str:
  """Returns what progress on the screen is of, if there are several processes."""
  return f" (share of {processes.named()})" if processes.count() > 1 else ""


def compare(prompts: Sequence[Prompt], *, of: str) -> None:
  """Checks that all processes have the same prompts, in the same order.

  Raises:
    DisagreementError: The prompts differ; the message has a digest for each process.
  """
  if processes.count() > 1:
    found = [(each.prompt_id, each.token_ids, each.weight) for each in prompts]
    shown = f"{len(found)} prompts, {digests.of_values(found)}"
    what = f"the number and the digest of the prompts of {of} (ids, tokens and weights)"
    processes.agree(shown, what=what)


def _encoded(
  prompts: Sequence[Prompt], attempt: Attempt, limits: AttemptLimits, early: EndedEarly
) -> bytes:
  """Returns the groups of this process's share; b"" if another process has ended the work."""
  try:
    rollout.check_unique(prompts)
    own = share(prompts)
    groups = attempt(own, limits, early) if own else []
    return group_bytes.encode(groups, own)
  except Stopped:
    if early.is_over:
      return b""  # `together` raises what happened there.
    early.announce()
    raise
  except BaseException:
    early.announce()
    raise


def _joined(
  shares: Sequence[bytes | bytearray], prompts: Sequence[Prompt], max_error_share: float
) -> list[RolloutGroup]:
  """Returns the groups of all processes in the order of their prompts; see `among_processes`."""
  count = len(shares)
  parts = [group_bytes.decode(data, prompts[i::count]) for i, data in enumerate(shares)]
  groups = [parts[i % count][i // count] for i in range(len(prompts))]
  failures.check_failures(groups, max_error_share, where=_failed_where(groups))
  _warn_of_processes(groups, max_error_share)
  return groups


def _failed(groups: Sequence[RolloutGroup]) -> list[tuple[int, int]]:
  """Returns the failed attempts and all attempts of each process."""
  shares = [groups[process :: processes.count()] for process in range(processes.count())]
  outcomes = [failures.outcomes(own) for own in shares]
  return [(sum(each.failed for each in own), len(own)) for own in outcomes]


def _failed_where(groups: Sequence[RolloutGroup]) -> str:
  """Returns how many attempts of each process failed, for a message."""
  parts = [f"{failed} of {all_} of process {p}" for p, (failed, all_) in enumerate(_failed(groups))]
  return ", ".join(parts)


def _warn_of_processes(groups: Sequence[RolloutGroup], max_share: float) -> None:
  """Warns of a process whose failures alone would be too many: its host may be broken."""
  for process, (failed, attempts) in enumerate(_failed(groups)):
    if processes.is_main() and failed > max_share * attempts:
      _log.warning(
        "process %d of %d could not score %d of its %d attempts, more than the share"
        " rollout.max_error_share=%g, which is compared with the attempts of all processes",
        *(process, processes.count(), failed, attempts, max_share),
      )
