"""Environments of verifiers from 0.4 on: tasksets, and the agents that play them (`verifiers.v1`).

An agent's program asks a server of the package, which passes each request on to our endpoint. The
program is the taskset's own, one that the options name, or a loop of turns and tools without a
process of its own (`chat_loop.py`). It runs on this machine unless the options say otherwise.
"""

import asyncio
import contextlib
import importlib
import itertools
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from grpo_environments.verifiers_kinds import chat_loop
from grpo_environments.verifiers_kinds.base import PackageError, VerifiersOptions, package, plain
from grpo_jax.environments.base import Endpoint, StepResult
from grpo_jax.environments.isolation import EnvironmentFailure


def taskset_id(name: str) -> str:
  """Returns the id by which the package finds a taskset; a module in a package gets one."""
  if "." not in name:
    return name
  ident = name.replace(".", "__").lower()
  sys.modules[ident] = importlib.import_module(name)
  return ident


class TasksetTasks:
  """The tasks of a taskset; of one without end, the first ones."""

  def __init__(self, name: str, args: Mapping[str, Any], size: int):
    loaders = package("verifiers.v1.utils.loaders")
    ident = taskset_id(name)
    config = loaders.taskset_config_type(ident).model_validate({**args, "id": ident})
    taskset = loaders.load_taskset(config)
    found = taskset if taskset.bounded else itertools.islice(taskset, size)
    self._tasks = list(found)
    if not self._tasks:
      raise PackageError(f"the taskset {name!r} has no tasks")

  def __len__(self) -> int:
    return len(self._tasks)

  def task(self, number: int) -> Any:
    """Returns a task as the environment takes it."""
    return self._tasks[number]

  def row(self, number: int) -> dict[str, Any]:
    data = self._tasks[number].data
    fields = {"messages": plain(data.prompt, data.system_prompt)}
    answer = getattr(data, "answer", None)
    return fields if answer in (None, "") else {**fields, "expected_answer": str(answer)}


class TasksetEnvironment:
  """Makes attempts with the environment of a taskset."""

  def __init__(
    self, name: str, args: Mapping[str, Any], tasks: TasksetTasks, options: VerifiersOptions
  ):
    loaders = package("verifiers.v1.utils.loaders")
    ident = taskset_id(name)
    raw = {**options.env, "taskset": {**args, "id": ident}, "interception": {"type": "server"}}
    _settle_agents(raw, ident, options)
    self._environment = loaders.load_environment(loaders.resolve_env_config(raw))
    self._tasks = tasks
    self._solved = 1.0 if options.solved_reward is None else options.solved_reward
    self._http: Any = None
    self._end: asyncio.Event | None = None
    self._serving: asyncio.Task[None] | None = None

  async def start(self) -> None:
    clients = package("verifiers.v1.clients.base")
    self._http = clients.build_async_httpx(package("verifiers.v1.clients").EvalClientConfig())
    started = asyncio.get_running_loop().create_future()
    self._end = asyncio.Event()
    self._serving = asyncio.create_task(self._serve(started))
    await started

  async def close(self) -> None:
    if self._end is not None and self._serving is not None:
      self._end.set()
      with contextlib.suppress(asyncio.CancelledError):  # the loop is ending.
        await self._serving
    if self._http is not None:
      await self._http.aclose()

  async def attempt(self, number: int, endpoint: Endpoint) -> StepResult:
    vf = package("verifiers.v1.clients")
    # The name of a variable that does not exist makes the client the attempt's own; see `_client`.
    config = vf.EvalClientConfig(
      base_url=endpoint.base_url, api_key_var=f"GRPO_JAX_{secrets.token_hex(8)}"
    )
    key = config.model_dump_json()
    clients = self._environment._interception.clients
    clients[key] = chat_loop.session_client(endpoint, self._http)
    try:
      context = vf.ModelContext(model=endpoint.model, client=config)
      episode = await self._environment.run_episode(self._tasks.task(number), context)
    finally:
      del clients[key]
    return self._result(episode)

  async def _serve(self, started: "asyncio.Future[None]") -> None:
    """Holds what all attempts share, in one task, as the package's contexts need it."""
    assert self._end is not None
    try:
      async with self._environment.serving():
        started.set_result(None)
        await self._end.wait()
    except Exception as error:
      if started.done():
        raise
      started.set_exception(error)

  def _result(self, episode: Any) -> StepResult:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors and not episode.ok:
      raise EnvironmentFailure(errors[-1].type, errors[-1].message)
    own = [trace for trace in episode.traces if trace.agent.trainable]
    if len(own) != 1:
      raise EnvironmentFailure(
        "episode", f"an episode must have one conversation to learn from, this one has {len(own)}"
      )
    (trace,) = own
    if not episode.ok:
      raise EnvironmentFailure(
        "timeout" if trace.is_timeout else "episode", f"{trace.stop_condition}"
      )
    rewards = {name: float(r.value) for name, r in trace.rewards.items() if r is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    accuracy = float(trace.reward >= self._solved)
    reward = rewards if len(rewards) > 1 else float(trace.reward)
    return StepResult(reward, done=True, metrics={"accuracy": accuracy, **metrics})


def _settle_agents(raw: dict[str, Any], ident: str, options: VerifiersOptions) -> None:
  """Gives every agent of an environment a program and a place where it runs.

  Raises:
    PackageError: Two agents would be the policy.
  """
  loaders = package("verifiers.v1.utils.loaders")
  config = loaders.env_config_type(ident, raw.get("id") or "")
  agent_config = package("verifiers.v1.configs.agent").AgentConfig
  defaults = {
    name: field.default
    for name, field in config.model_fields.items()
    if isinstance(field.default, agent_config)
  }
  policies = []
  for name, default in defaults.items():
    given = dict(raw.get(name) or {})
    given.setdefault("runtime", {"type": "subprocess"})
    if "harness" not in given and default.harness is None:
      given["harness"] = _harness(ident, options)
    if options.max_turns is not None and default.max_turns is None:
      given.setdefault("max_turns", options.max_turns)
    raw[name] = given
    if given.get("client") is None and default.client is None:
      policies.append(name)
  if len(policies) > 1:
    raise PackageError(
      f"the environment has the agents {', '.join(policies)}, but only one can be the policy: give"
      f" the others an endpoint of their own, e.g. env.{policies[-1]}.client.base_url and"
      f" env.{policies[-1]}.model"
    )


def _harness(ident: str, options: VerifiersOptions) -> dict[str, Any]:
  """Returns the program of an agent: that of the options, of the taskset, or our loop."""
  if isinstance(options.harness, str):
    return {"id": options.harness}
  if options.harness is not None:
    return dict(options.harness)
  own = package("verifiers.v1.utils.loaders").default_harness_id(ident)
  return {"id": own if own == ident else chat_loop.harness_id()}
