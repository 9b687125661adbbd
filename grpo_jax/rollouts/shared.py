"""The work of sampling and grading, split between the processes of a run.

Process p attempts the prompts p, p + N, p + 2N, ... of N processes with its own engine; then every
process receives the groups of all.
"""

import dataclasses
from collections.abc import Callable, Sequence

from grpo_jax import processes
from grpo_jax.groups import group_json
from grpo_jax.types import Prompt, RolloutGroup


def among_processes(
  prompts: Sequence[Prompt],
  attempt: Callable[[Sequence[Prompt]], list[RolloutGroup]],
  *,
  what: str,
) -> list[RolloutGroup]:
  """Attempts prompts on all processes, each of them a share, and returns all groups in order.

  Args:
    prompts: Prompts, the same on all processes.
    attempt: Function from prompts to their groups, in order.
    what: What is done, for messages.

  Raises:
    Exception: What `attempt` raises on this process.
    OtherProcessError: It failed on another process.
    Stopped: The run is asked to end.
  """
  if processes.count() == 1:
    return attempt(prompts)
  own = prompts[processes.index() :: processes.count()]
  groups = processes.together(lambda: attempt(own) if own else [], what=what)
  shares = processes.exchange([group_json.encode(group) for group in groups], what=what)
  records = [shares[i % len(shares)][i // len(shares)] for i in range(len(prompts))]
  return [
    dataclasses.replace(group_json.decode(record), prompt=prompt)
    for record, prompt in zip(records, prompts, strict=True)
  ]
