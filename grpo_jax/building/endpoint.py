"""A stored model behind an OpenAI-compatible endpoint, by the embedded sampler."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import pathlib
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

from grpo_jax import data
from grpo_jax.building import named_code, online, stored, stored_engine
from grpo_jax.config import base as defaults
from grpo_jax.config import batching_options, command_line, configuration, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.config.options import Config
from grpo_jax.engines.given_tokens import GivenTokenScorer
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.engines.options import USUAL_ROWS
from grpo_jax.environments.base import Endpoint
from grpo_jax.errors import ExpectedFailure
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.rollouts.turn_sampling import request_seed
from grpo_jax.serving.policy_server import PolicyServer
from grpo_jax.serving.request_scheduling import ImmediateScheduler
from grpo_jax.serving.session import ServedPolicy, Session
from grpo_jax.serving.terms import RequestDecides

_log = logging.getLogger(__name__)


KEPT_TURNS = 256  # completions whose tokens stay known, to be continued.
_ROWS, _TOKENS, _ANSWER = 8, 4096, 1024  # sizes for a model without a config.


class CannotListen(ExpectedFailure, OSError):
  """The port is taken, or may not be used."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
  """What is served, for the line on the screen."""

  label: str  # of the weights.
  endpoint: Endpoint
  max_tokens: int  # of prompt and completion.


def serve(
  model: str,
  *,
  config: Config | None = None,
  port: int = 0,
  key: str | None = None,
  base: str | None = None,
  on_start: Callable[[Served], None],
  stop: Any,
) -> None:
  """Serves a model until it is asked to stop.

  Args:
    model: RUN[:STEP|:best|:latest], a folder, or a name of a model.
    config: Config with the sampling (that of evaluations) and the sampler's sizes; None: that of
      the run, or the defaults.
    port: Port on 127.0.0.1; 0: any that is free.
    key: API key; None: a new one.
    base: Model that a run began with; see `stored.find`.
    on_start: Function that is called once the endpoint answers.
    stop: Flag that becomes true when the endpoint is to end; see `interrupts.Flag`.

  Raises:
    Stopped: `stop` has become true.
    ConfigError: An option cannot be used.
    CannotListen: The port cannot be used.
    ExpectedFailure: What else a user can repair: a model, a checkpoint.
  """
  _listen(port)
  weights = stored.find(model, base=base)
  given: Config = config_of(model, base=base) if config is None else config
  prepared = _prepared(given, weights)
  with contextlib.ExitStack() as stack:
    policy = _policy(prepared, weights, stack, stop)
    loop = stack.enter_context(LoopThread())
    session = Session(
      policy,
      name="served#0",
      seed=functools.partial(request_seed, prepared.seed, weights.step or 0, weights.label, 0),
      kept_turns=KEPT_TURNS,
    )
    loop.run(_serve(session, weights.label, port, key, on_start), stop=stop)


def _listen(port: int) -> None:
  """Takes a port for a moment: whether it can be taken is known before a model is loaded.

  Raises:
    CannotListen: The port cannot be taken.
  """
  try:
    socket.create_server(("127.0.0.1", port)).close()
  except OSError as error:
    raise CannotListen(f"cannot listen on 127.0.0.1:{port}: {error.strerror}") from error


async def _serve(
  session: Session,
  label: str,
  port: int,
  key: str | None,
  on_start: Callable[[Served], None],
) -> None:
  """Answers until it is cancelled, or the engine fails."""
  server = PolicyServer(model=pathlib.Path(label).name, port=port)
  try:
    try:
      await server.start()
    except (OSError, OverflowError) as error:
      raise CannotListen(f"cannot listen on 127.0.0.1:{port}: {error}") from error
    endpoint = server.open(session, key=key or secrets.token_urlsafe(24))
    on_start(Served(label=label, endpoint=endpoint, max_tokens=session.max_tokens or 0))
    await asyncio.shield(server.failed)
  finally:
    await server.close()


def config_of(model: str, *, base: str | None = None, changes: Sequence[str] = ()) -> Config:
  """Returns the config of a run; of a model, the defaults with sizes that fit most machines.

  Args:
    model: Argument of `serve`.
    base: Argument of `serve`.
    changes: Flags of the command line that change fields.

  Raises:
    ExpectedFailure: There is no such run, or no such model; or a flag cannot be used.
  """
  reference = stored.parse(model)
  if reference.step is not None:
    return named_code.config_to_run(pathlib.Path(reference.place), changes=changes)
  context = stored.find(reference, base=base).config.context
  values = {
    "rollout.max_tokens": min(_TOKENS, context),
    "sampling.max_tokens": _ANSWER,
    "engine.max_rows": _ROWS,
  }
  config = configuration.replaced(defaults.get_config(), values)
  if changes:
    command_line.override(config, changes)
  return configuration.typed(config)


def _prepared(config: Config, weights: stored.StoredWeights) -> Config:
  """Returns the config with the sizes that an endpoint needs: every request has its own prompt."""
  rows = config.engine.max_rows or USUAL_ROWS
  values = {
    **stored.fields(weights),
    "engine.name": "jax_sampler",
    "rollout.conversations": True,
    "rollout.prompts_per_step": rows,
    "rollout.group_size": 1,
    "evaluation.num_prompts": rows,
    "evaluation.group_size": 1,
    "dynamic_sampling.prompts_per_round": None,
  }
  return configuration.replaced(config, values)


def _policy(
  config: Config, weights: stored.StoredWeights, stack: contextlib.ExitStack, stop: Any
) -> ServedPolicy:
  """Reads tokenizer and weights, and compiles the sampler."""
  opened = stored_engine.open_weights(config, weights, stack)
  engine = stored_engine.start(config, opened, stack, stop=stop)
  assert isinstance(engine, JaxSampler)  # `_prepared` says so.
  tokenizer = opened.tokenizer
  try:
    settings = run_options.evaluation_sampling(config)
    sampling = online.sampling_params(settings, tokenizer=tokenizer, model=weights.model)
    sampling = dataclasses.replace(sampling, logprobs="full")  # as those of given tokens.
    longest = batching_options.longest_sequence(config)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  return ServedPolicy(
    scheduler=ImmediateScheduler(engine),
    tokenizer=tokenizer,
    sampling=sampling,
    terms=RequestDecides(),
    max_tokens=longest,
    tool_form=data.tool_form_of(tokenizer),
    scorer=GivenTokenScorer(engine, max_length=longest),
  )
