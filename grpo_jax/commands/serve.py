"""`grpo-jax serve --model=…`: a stored model behind an OpenAI-compatible endpoint."""

import json
import logging
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_jax import interrupts
from grpo_jax.commands.arguments import Parser, WrongUse
from grpo_jax.config import command_line, configuration
from grpo_jax.http import redaction
from grpo_jax.run_folder import notices

if TYPE_CHECKING:
  from grpo_jax.building.endpoint import Served

_log = logging.getLogger(__name__)

USAGE = """\
Serves a model on this machine as OpenAI's API does, to try and to evaluate it.

  grpo-jax serve --model=MODEL [--port=N] [--key=KEY] [--config=CONFIG]
                 [--config.SECTION.FIELD=VALUE …]

  --model    RUN[:STEP|:best|:latest], a folder, or a name of a model.
  --port     port on 127.0.0.1; without it, any that is free.
  --key      API key of the clients; without it, a new one. The command prints it.
  --config   config with the sampling (sampling, evaluation.sampling) and the sizes
             (rollout.max_tokens, sampling.max_tokens, engine.max_rows): a file, or the name of one
             that is installed. Without it, that of the run, or the defaults with 4096 tokens.
  --base     model that a run began with, if it is elsewhere now.

A request's own temperature, top_p, seed, n … count, unlike in training: docs/serving.md.
Ctrl-C ends it.

Example:
  grpo-jax serve --model=runs/first:best --port=8000 --config.evaluation.sampling.temperature=0
"""


def main(arguments: Sequence[str]) -> int:
  """Serves until Ctrl-C; returns the exit code.

  Args:
    arguments: Words after `grpo-jax serve`.

  Raises:
    HelpWanted, WrongUse, ConfigError: The arguments cannot be understood.
    ExpectedFailure: See `endpoint.serve`.
  """
  own, of_config = _split(arguments)
  parser = Parser(USAGE)
  parser.add_argument("--model", required=True)
  parser.add_argument("--port", type=int, default=0)
  for name in ("--key", "--base", "--config"):
    parser.add_argument(name)
  read = parser.read(own)
  if not 0 <= read.port < 65536:
    raise WrongUse(f"--port needs a number below 65536, got {read.port}")
  if read.key is not None:
    try:
      redaction.check_secret(read.key, "--key")
    except ValueError as error:
      raise WrongUse(str(error)) from error
  from grpo_jax.building import endpoint  # only now: it takes seconds, and mistakes should not.

  config = None
  if read.config is not None:
    config = configuration.typed(command_line.parse([f"--config={read.config}", *of_config]).config)
  with notices.for_program(), interrupts.Flag() as stop:
    if config is None and of_config:
      config = endpoint.config_of(read.model, base=read.base, changes=of_config)
    try:
      endpoint.serve(
        read.model,
        config=config,
        port=read.port,
        key=read.key,
        base=read.base,
        on_start=_announce,
        stop=stop,
      )
    except interrupts.Stopped:
      _log.info("stopped")
  return 0


def _announce(served: "Served") -> None:
  """Prints where the model answers, and how to ask it."""
  there, key, model = served.endpoint.base_url, served.endpoint.api_key, served.endpoint.model
  body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
  words = (f"{there}/chat/completions", "-H", f"Authorization: Bearer {key}", "-d", body)
  print(f"{served.label}, {served.max_tokens} tokens of context; Ctrl-C ends it")
  print(f"base_url: {there}")
  print(f"api_key:  {key}")
  print(f"model:    {model}")
  print("curl", shlex.join(words), flush=True)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Splits the arguments into the command's own and the fields of a config."""
  fields = [word for word in arguments if word.startswith(("--config.", "--noconfig."))]
  return [word for word in arguments if word not in fields], fields
