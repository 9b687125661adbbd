"""The types and ranges of the fields of a dataset and of the order of prompts. Pure."""

from collections.abc import Mapping

from grpo_jax.values import checked

# Fields of `prompts.open_dataset`, and `weight`. In an entry of a list None means: not given.
DATASET: Mapping[str, checked.Kind] = {
  "kind": checked.text(),
  "name": checked.text(none=True),
  "path": checked.path(none=True),
  "dataset": checked.text(none=True),
  "subset": checked.text(none=True),
  "split": checked.text(none=True),
  "task": checked.text(none=True),
  "task_args": checked.mapping(),
  "task_seed": checked.whole(),
  "size": checked.whole(low=1),
  "side": checked.choice(("all", "train", "validation")),
  "for_evaluation": checked.switch(),
  "split_validation_size": checked.number(low=0),
  "split_seed": checked.whole(low=0, none=True),
  "repeat": checked.whole(low=1),
  "format": checked.text(),
  "input_key": checked.text(none=True),
  "output_key": checked.text(empty=True, none=True),
  "system_prompt": checked.text(empty=True, none=True),
  "system_prompt_file": checked.path(none=True),
  "prompt_template": checked.text(none=True),
  "prompt_file": checked.path(none=True),
  "environment": checked.text(none=True),
  "tools_key": checked.text(empty=True),
  "allow_control_tokens": checked.switch(),
  "tasks": checked.mapping(),
  "max_prompt_tokens": checked.whole(low=1),
  "overlong": checked.choice(("drop", "zero_weight")),
  "rows_choose_environment": checked.switch(),
  "weight": checked.number(low=0, none=True),
}
# Fields of `data.make` that are not those of a dataset.
ORDER: Mapping[str, checked.Kind] = {
  "on_error": checked.choice(("stop", "skip")),
  "shuffle": checked.switch(),
  "epochs": checked.whole(low=1, none=True),
  "datasets": checked.several(checked.mapping()),
  "num_prompts_per_dataloader": checked.whole(low=1, none=True),
  "dataloader": checked.text(none=True),
  "dataloader_args": checked.mapping(),
}
