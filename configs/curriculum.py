"""A curriculum on the quickstart's task: sums of one digit first, then of two.

    python -m grpo_jax.main --config=configs/curriculum.py --workdir=runs/curriculum

`configs/curriculum.py:mixed` draws from both datasets alike, `configs/curriculum.py:hard` from the
hard one alone: what the curriculum is to be compared with. All are evaluated on the hard sums.
"""

from typing import Any

from grpo_jax import configuration

DIGITS = {"easy": 1, "hard": 2}


def dataset(name: str, seed: int) -> dict:
  """Returns a dataset of sums of two numbers, each with that many digits."""
  digits = DIGITS[name]
  args = dict(min_terms=2, max_terms=2, min_digits=digits, max_digits=digits)
  return dict(name=name, task_args=args, task_seed=seed)


def get_config(order: str = "curriculum"):
  """Returns the config of one of three orders: "curriculum", "mixed", "hard"."""
  orders = ("curriculum", "mixed", "hard")
  if order not in orders:
    raise ValueError(f"an order is one of {', '.join(orders)}, got {order!r}")
  config: Any = configuration.load("quickstart").unlock()
  config.data.datasets = [
    dataset(name, seed=1 + 100_000 * number)
    for number, name in enumerate(DIGITS)
    if name == "hard" or order != "hard"
  ]
  if order == "mixed":
    config.data.num_prompts_per_dataloader = 4
  if order == "curriculum":
    config.data.dataloader = "by_success"
    config.data.dataloader_args = dict(threshold=0.5, metric="accuracy", window=2)
  config.evaluation.datasets = [dataset("hard", seed=1_000_003)]
  return config
