"""`grpo-jax evaluate --config=… --model=…`: accuracy, pass@k and maj@k on held-out prompts."""

import logging
import pathlib
from collections.abc import Sequence

from grpo_jax import interrupts
from grpo_jax.commands.arguments import HelpWanted, WrongUse
from grpo_jax.config import command_line, configuration
from grpo_jax.run_folder import notices
from grpo_jax.values import names

_log = logging.getLogger(__name__)

USAGE = """\
Measures a model, or compares two on the same prompts: accuracy, pass@k, maj@k. Responses that are
recorded are not sampled again: the model ranks them.

  grpo-jax evaluate --config=CONFIG --model=MODEL [--model=MODEL] [--sets=SET,SET,…]
                    [--samples=N] [--prompts=N] [--workdir=FOLDER] [--config.SECTION.FIELD=VALUE …]

  --config   config that has the sampling (evaluation.sampling), the engine and the sets: a file, or
             the name of one that is installed. Without it, that of the run which --model names.
  --model    RUN[:STEP|:best|:latest], a folder, or a name of a model. Twice: the second is compared
             with the first, prompt by prompt.
  --sets     sets in place of the config's, such as aime_2024,math_500,gsm8k,gpqa,mmlu_pro. They are
             read from the Hugging Face hub; gsm8k=FILE reads the same rows from a file. FILE alone
             is a set of your own, with the fields problem and expected_answer; or ranked groups,
             responses with rewards, or rollouts, which are ranked (docs/offline.md).
  --samples  completions of each prompt; without it, evaluation.group_size.
  --prompts  prompts of each set, from its beginning; without it, evaluation.num_prompts for the
             sets of the config, and all prompts of --sets.
  --workdir  folder for the results: metrics.json, every completion, report.html. Without it,
             RUN/evaluated/step_NNNNNN or evaluated/MODEL.
  --base     model that a run began with, if it is elsewhere now.

Numbers are printed with their standard error over prompts and a 95 % bootstrap interval.

Examples:
  grpo-jax evaluate --config=quickstart --model=runs/quickstart:best --prompts=50
  grpo-jax evaluate --config=offline_ranked --model=runs/ranked:best --sets=held_out.json
"""
_FLAGS = ("model", "sets", "samples", "prompts", "workdir", "base")


def main(arguments: Sequence[str]) -> int:
  """Evaluates; returns the exit code.

  Args:
    arguments: Words after `grpo-jax evaluate`.

  Raises:
    HelpWanted, WrongUse, ConfigError: The arguments cannot be understood.
    ExpectedFailure: See `evaluation.run`.
  """
  if {"-h", "--help"} & {*arguments}:
    raise HelpWanted(USAGE)
  own, rest = _split(arguments)
  if not own["model"]:
    raise WrongUse("--model is missing: RUN, RUN:best or the folder of a model (--help)")
  from grpo_jax import evaluation, report  # only now: it takes seconds, and mistakes should not.
  from grpo_jax.building import named_code, stored

  config = None
  if any(word.startswith("--config=") for word in rest):
    config = configuration.typed(command_line.parse(rest).config)
  with notices.for_program(), interrupts.Flag() as stop:
    if config is None and rest:
      reference = stored.parse(own["model"][0])
      if reference.step is None:
        raise WrongUse("--config is missing: it says how a model is evaluated")
      config = named_code.config_to_run(pathlib.Path(reference.place), changes=rest)
    try:
      done = evaluation.run(
        own["model"],
        config=config,
        sets=[name for words in own["sets"] for name in words.split(",") if name],
        samples=_number("samples", own),
        num_prompts=_number("prompts", own),
        workdir=_last("workdir", own),
        base=_last("base", own),
        stop=stop,
      )
    except interrupts.Stopped:
      _log.info("stopped; the completions that were scored are kept")
      return stop.exit_code
  print(done.summary())
  for model in done.models:
    print(f"completions: {report.write(model.folder)} (open it in a browser)")
  print(f"numbers: {done.folder / 'metrics.json'}")
  return 0


def _split(arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
  """Splits the arguments into the command's own flags and those of a config."""
  own: dict[str, list[str]] = {name: [] for name in _FLAGS}
  rest: list[str] = []
  words = iter(arguments)
  for word in words:
    flag, equals, value = word.partition("=")
    name = flag.removeprefix("--")
    if flag.startswith("--") and name in own:
      own[name].append(value if equals else next(words, ""))
      if not own[name][-1]:
        raise WrongUse(f"{flag} needs a value")
    elif flag == "--config":
      rest.append(f"--config={value if equals else next(words, '')}")
    elif flag.startswith(("--config.", "--noconfig.")):
      rest.append(word)
    else:
      near = names.nearest(flag, [f"--{each}" for each in (*_FLAGS, "config", "help")])
      hint = f"; did you mean {near[0]}?" if near else ""
      kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
      raise WrongUse(f"{kind} {flag}{hint} (--help lists the flags)")
  return own, rest


def _last(name: str, own: dict[str, list[str]]) -> str | None:
  if len(own[name]) > 1:
    raise WrongUse(f"--{name} was given {len(own[name])} times")
  return own[name][0] if own[name] else None


def _number(name: str, own: dict[str, list[str]]) -> int | None:
  text = _last(name, own)
  if text is None:
    return None
  if not text.isdecimal() or int(text) < 1:
    raise WrongUse(f"--{name} needs a whole number >= 1, got {text!r}")
  return int(text)
