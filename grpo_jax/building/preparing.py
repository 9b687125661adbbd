"""Prepares what a run needs: model, data, environments, mode, programs, weights."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from grpo_jax import data, environments
from grpo_jax.building import (
  adapter,
  agreements,
  checks,
  computation,
  distillation_teacher,
  evaluation_sets,
  groups,
  kept_programs,
  memory_choices,
  online,
  policy_model,
  stored,
)
from grpo_jax.building.training_mode import TrainingMode
from grpo_jax.compilation import compiling
from grpo_jax.config import device_options, modes, run_options
from grpo_jax.config.options import Config
from grpo_jax.engines.base import Engine
from grpo_jax.files.disk import writing
from grpo_jax.models import loading
from grpo_jax.run_folder import console, notices, process_log
from grpo_jax.types import Prompt

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Everything that is known before any weights are loaded."""

  config: Config
  workdir: pathlib.Path
  model: loading.ModelFacts
  mesh: Mesh
  mode: TrainingMode
  opener: data.Opener  # function that opens a dataset.
  tokenizer: data.Tokenizer
  teacher: stored.StoredWeights | None  # in the trainer.
  held_out: dict[str, list[Prompt]]
  remedy: str  # what to do if memory is short for an update.
  has_weights: bool  # whether completions are expected to have weights other than 1.
  environments: environments.Environments
  screen: console.TrainingScreen
  compilations: compiling.CompilationMonitor
  stop: Any

  def prompts(self, position: Mapping[str, Any] | None = None) -> data.PromptStream:
    """Opens the training prompts at a position of the stream; None: at the beginning."""
    return groups.make_prompts(self.config, self.tokenizer, self.opener, position or {})


def mode_of(config: Config) -> TrainingMode:
  """Returns the mode of the config, which makes the parts."""
  if modes.is_offline(config):
    from grpo_jax.building import offline  # imported here, so that online runs do not import it.

    return offline.Offline(config)
  return online.Online(config)


def prepare(
  config: Config, workdir: pathlib.Path, stack: contextlib.ExitStack, stop: Any
) -> Inputs:
  """Finds and checks what the run needs, before any weights are loaded.

  What can be checked without the model comes first: it may have to be downloaded.
  """
  with writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
  kept_programs.keep()
  compilations = compiling.CompilationMonitor()
  screen = console.TrainingScreen(note=compilations.note)
  stack.enter_context(notices.on_screen(screen))
  stack.enter_context(process_log.in_folder(workdir))
  stack.enter_context(compilations.listening())
  agreements.check_start(config)
  mesh = device_options.trainer_mesh(config)
  checks.before_model(config, mesh)
  made = stack.enter_context(groups.make_environments(config))
  evaluation_sets.check_sources(config)
  found = policy_model.find_alike(config)
  config = policy_model.with_fallback(config, found)
  model = loading.read_facts(found.folder)
  checks.check_model(config, mesh, model)
  adapter.check(config, model)
  tokenizer = policy_model.load_tokenizer(config, found.folder)
  config = policy_model.with_template(config)
  adapter.check_prompts(config, tokenizer, found.folder)
  teacher = distillation_teacher.find(config, found.folder, mesh)
  config = groups.with_conversations(config, made)
  choices = memory_choices.choose(
    memory_choices.continued(config, workdir),
    model.config,
    mesh,
    room=memory_choices.room_of(mesh),
    teacher=None if teacher is None else teacher.config,
  )
  choices.say()
  config, mode = choices.config, mode_of(choices.config)
  opener = groups.with_tools(mode.opener, made)
  held_out = evaluation_sets.held_out(config, tokenizer, opener)  # early: finds a wrong file.
  prompts = groups.make_prompts(config, tokenizer, opener, {})
  agreements.check_rows(prompts, held_out)
  if teacher is not None:
    agreements.check_model(teacher.directory, option="teacher.path")
  first = [data.first_prompts(dataset, checks.TRIED) for dataset in prompts.datasets]
  if modes.needs_environments(config):
    sets = [*first, *held_out.values()]
    checks.check_scorable(config, sets, made)
    checks.check_prompts(config, tokenizer, made, sets)
  for prompt in first[0][:1]:
    screen.prompt(prompt)
  return Inputs(
    config=config,
    workdir=workdir,
    model=model,
    mesh=mesh,
    mode=mode,
    opener=opener,
    tokenizer=tokenizer,
    teacher=teacher,
    held_out=held_out,
    remedy=choices.remedy,
    has_weights=checks.has_weights(first),
    environments=made,
    screen=screen,
    compilations=compilations,
    stop=stop,
  )


def load_model(inputs: Inputs, engine: Engine) -> tuple[computation.Computation, loading.Loaded]:
  """Makes the programs of the run, and compiles them while the weights are read."""
  objective = run_options.objective(inputs.config)
  _log.debug("loss: %s", inputs.config.loss)
  num_valid = inputs.tokenizer.vocab_size
  teacher = None if inputs.teacher is None else inputs.teacher.config
  made = computation.make(
    inputs.config,
    inputs.model.config,
    inputs.mesh,
    objective,
    num_valid=num_valid,
    teacher=teacher,
    has_weights=inputs.has_weights,
    remedy=inputs.remedy,
  )
  adapter.log_sizes(made)
  jobs = [*inputs.mode.engine_jobs(engine, made.full), *made.jobs()]
  with compiling.BackgroundCompiler(jobs, inputs.compilations) as ahead:
    model = policy_model.load(inputs.model, made.read)
    data.check_vocabulary(inputs.tokenizer, model.config.vocab_size)
    ahead.wait(inputs.screen.progress, stop=inputs.stop)
  return made, adapter.with_rounding(inputs.config, model)
