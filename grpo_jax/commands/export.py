"""`grpo-jax export RUN[:STEP|:best] OUT`: any checkpoint of a run as a Hugging Face folder."""

import shlex
from collections.abc import Sequence

from grpo_jax.building import exporting
from grpo_jax.commands.arguments import Parser
from grpo_jax.files import local_paths
from grpo_jax.run_folder.screen import Screen

USAGE = """\
Writes a checkpoint of a run, finished, stopped or running, as a Hugging Face folder.

  grpo-jax export RUN[:STEP|:best|:latest] OUT [--adapter] [--dtype=DTYPE] [--max-shard-gb=GB]
                  [--base=MODEL]

  RUN      folder of a run. RUN alone is its newest checkpoint, RUN:20 that of step 20, RUN:best the
           one with the best evaluation (checkpoint.best_metric, checkpoint.best_mode). Or a PEFT
           folder with an adapter, such as runs/first/adapter, whose base is named with --base.
  OUT      folder to write; it appears whole or not at all, and nothing is overwritten.
  --adapter  of a run that trains an adapter (LoRA), writes the adapter alone, as a PEFT folder.
           Without it, the adapter is merged with its base.
  --dtype  float32, bfloat16 or float16; without it, the run's export.dtype (float32).
  --max-shard-gb   largest size of a file of weights in GB, or inf for one file; without it, the
           run's export.max_shard_gb (5).
  --base   model that the run began with, if it is elsewhere now: its tokenizer and settings are
           copied, and an adapter is merged with its weights.

No accelerator is needed, and only as much memory as about two tensors take. What is written is what
a run writes to its export/ at the end.

Example:
  grpo-jax export runs/first:best models/first
"""


def main(arguments: Sequence[str]) -> int:
  """Exports; returns the exit code.

  Args:
    arguments: Words after `grpo-jax export`.

  Raises:
    WrongUse, ConfigError: The arguments cannot be understood.
    ExpectedFailure: See `exporting.run`.
  """
  parser = Parser(USAGE)
  parser.add_argument("run", metavar="RUN")
  parser.add_argument("out", metavar="OUT")
  parser.add_argument("--adapter", action="store_true")
  parser.add_argument("--dtype")
  parser.add_argument("--max-shard-gb", type=float, metavar="GB")
  parser.add_argument("--base", metavar="MODEL")
  options = parser.read(arguments)
  screen = Screen()
  with screen.progress("exporting") as advance:
    done = exporting.run(
      options.run,
      local_paths.checked("OUT", options.out),
      dtype=options.dtype,
      max_shard_gb=options.max_shard_gb,
      base=options.base,
      only_adapter=options.adapter,
      on_progress=lambda done, total: advance(),
    )
  folder = str(done.folder)
  mb = done.num_bytes / 1e6
  size = f"{mb:.1f} MB" if mb < 1000 else f"{mb / 1000:.2f} GB"
  files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
  what = "adapter, " if options.adapter else ""
  screen.print(f"{done.weights.label}: {what}{size} of {done.dtype} in {files}: {folder}")
  for line in _uses(folder, is_adapter=options.adapter):
    screen.print(line)
  return 0


def _uses(folder: str, *, is_adapter: bool) -> list[str]:
  """Returns lines that say how to use what was written."""
  if is_adapter:
    return [
      f"  in PEFT: PeftModel.from_pretrained(base_model, {folder!r})",
      f"  to train it further: --config.model.lora.path={shlex.quote(folder)}",
    ]
  return [
    f"  in transformers: AutoModelForCausalLM.from_pretrained({folder!r})",
    f"  in SGLang: python -m sglang.launch_server --model-path {shlex.quote(folder)}",
  ]
