"""An engine that samples from stored weights, for evaluations and the endpoint."""

import contextlib
import dataclasses
import pathlib
from typing import Any

from jax.sharding import Mesh

from grpo_jax import data
from grpo_jax.building import (
  checks,
  kept_programs,
  memory_choices,
  online,
  policy_model,
  stored,
  weights_spec,
)
from grpo_jax.compilation import compiling
from grpo_jax.config import device_options
from grpo_jax.config.options import Config
from grpo_jax.engines.base import Engine
from grpo_jax.learn import adapters, policy
from grpo_jax.run_folder import console, notices


@dataclasses.dataclass(frozen=True)
class OpenedWeights:
  """What is known before any weights are read."""

  weights: stored.StoredWeights
  tokenizer: data.Tokenizer
  mesh: Mesh
  screen: console.TrainingScreen
  compilations: compiling.CompilationMonitor


def open_weights(
  config: Config, weights: stored.StoredWeights, stack: contextlib.ExitStack
) -> OpenedWeights:
  """Checks the config against stored weights, and opens their tokenizer.

  Args:
    config: Config of the engine.
    weights: Weights to sample from.
    stack: Ends what is opened here.

  Raises:
    ConfigError, ModelError: An option or the model cannot be used.
  """
  kept_programs.keep()
  compilations = compiling.CompilationMonitor()
  screen = console.TrainingScreen(note=compilations.note)
  stack.enter_context(notices.on_screen(screen))
  stack.enter_context(compilations.listening())
  mesh = device_options.trainer_mesh(config)
  checks.check_attention(config, mesh, width=weights.model.config.head_dim)
  checks.check_context(config, weights.model)
  tokenizer = policy_model.load_tokenizer(config, weights.directory, adapter=weights.tokenizer)
  return OpenedWeights(weights, tokenizer, mesh, screen, compilations)


def described(weights: stored.StoredWeights, mesh: Mesh) -> Any:
  """Returns shapes, dtypes and shardings of stored weights, as engines take them."""
  model, adapter = weights.config, weights.adapter
  shardings = weights_spec.shardings_of(model, mesh)
  base = weights_spec.described_weights(model, shardings, dtype=weights.dtypes)
  if adapter is None:
    return base
  composition = adapters.composition(model, mesh, adapter.options, seed=0)
  return policy.full_weights(policy.described(base, composition)[0])


def start(
  config: Config,
  opened: OpenedWeights,
  stack: contextlib.ExitStack,
  *,
  folder: pathlib.Path = pathlib.Path(),
  stop: Any,
) -> Engine:
  """Makes the engine, compiles its programs while the weights are read, and gives it the weights.

  Args:
    config: Config of the engine; it may differ from that of `open_weights` in sizes.
    opened: Result of `open_weights`.
    stack: Closes the engine.
    folder: Folder for the logs of servers.
    stop: Flag that becomes true when this is to end.

  Raises:
    Stopped: `stop` has become true.
    ExpectedFailure: What a user can repair: weights, servers.
  """
  weights, like = opened.weights, described(opened.weights, opened.mesh)
  room = memory_choices.room_of(opened.mesh)
  choices = memory_choices.choose_rows(config, weights.config, like, opened.mesh, room=room)
  choices.say()
  mode = online.Online(choices.config)
  engine = mode.make_engine(opened.tokenizer, weights.model, folder, stack)
  with compiling.BackgroundCompiler(mode.engine_jobs(engine, like), opened.compilations) as ahead:
    loaded = stored.load(weights, like=like)
    data.check_vocabulary(opened.tokenizer, weights.config.vocab_size)
    ahead.wait(opened.screen.progress, stop=stop)
  engine.load_weights(loaded.params, version=weights.step or 0)
  return engine
