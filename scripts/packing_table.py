"""Prints how completions of given lengths are packed: places, pairs, operations and shapes.

    python scripts/packing_table.py
    python scripts/packing_table.py --case=math --row_tokens=1024

No model and no data are read: lengths are drawn from the distribution of each case, and operations
are counted from the sizes of its model (grpo_jax/learn/operations.py). Printed for each step:

    places         rows × their length, padding included
    pairs          pairs that attention computes: those of the tiles that hold any
    of the mask    share of these pairs that the mask allows
    efficiency     tokens / places, counting every copy of a prompt
    each once      tokens / places, counting a prompt once for its group
    operations     of the update, 1e15, and of its parts: layers, attention, head
    unlimited      operations if every step had its own shapes, tailored to it

docs/batching.md has the table and its conclusions.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np

from grpo_jax.batching import packing
from grpo_jax.learn import operations
from grpo_jax.models.config import ModelConfig

SMOLLM2_135M = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_embeddings=True)
QWEN25_1B = ModelConfig("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, tie_embeddings=True)

Draw = Callable[[np.random.Generator], int]


@dataclasses.dataclass(frozen=True)
class Case:
  """Lengths of a workload, and the numbers of a config that plan for them.

  Attributes:
    model: Sizes of the model whose operations are counted.
    load: Largest load of a step.
    microbatch_tokens: Value of `batching.microbatch_tokens`.
    prompt: Function that draws the number of tokens of a prompt.
    completion: Function that draws the number of tokens of a completion.
    live: Share of the groups for which anything is computed.
    steps: Number of steps to draw.
  """

  model: ModelConfig
  load: packing.Load
  microbatch_tokens: int
  prompt: Draw
  completion: Draw
  live: float = 1.0
  steps: int = 20

  def groups(self, rng: np.random.Generator) -> list[packing.Sizes]:
    """Draws the groups of a step."""
    live = [rng.random() < self.live for _ in range(self.load.groups)]
    draw = lambda: tuple(self.completion(rng) for _ in range(self.load.group))
    return [packing.Sizes(self.prompt(rng), draw()) for is_live in live if is_live]


def between(low: int, high: int) -> Draw:
  return lambda rng: int(rng.integers(low, high + 1))


def spread(mean_log: float, deviation: float, low: int, high: int) -> Draw:
  """Draws from a lognormal distribution, cut at both ends."""
  return lambda rng: int(np.clip(rng.lognormal(mean_log, deviation), low, high))


def _small(prompt: int, limit: int, groups: int, microbatch: int, live: float = 1.0) -> Case:
  """Returns a case with prompts of 38 tokens or so, completions of 8: quickstart, benchmark."""
  load = packing.Load(prompt, limit, prompt + limit, 8, groups)
  lengths = between(35, 41), between(limit // 3, limit)
  return Case(SMOLLM2_135M, load, microbatch, *lengths, live)


def _large(prompt: int, limit: int, of_prompt: Draw, of_completion: Draw, steps: int = 4) -> Case:
  """Returns a case with 32 groups of 16, as in configs/math_1b.py."""
  load = packing.Load(prompt, limit, prompt + limit, 16, 32)
  return Case(QWEN25_1B, load, 16384, of_prompt, of_completion, steps=steps)


CASES: dict[str, Case] = {
  "quickstart": _small(512, 24, 8, 512),
  "quickstart, half the groups": _small(512, 24, 8, 512, 0.5),
  "w1": _small(128, 16, 4, 8192),
  "w1, half the groups": _small(128, 16, 4, 8192, 0.5),
  "w2": _small(128, 64, 4, 8192),
  "w2, half the groups": _small(128, 64, 4, 8192, 0.5),
  "at the limits: 512 + 512": _large(512, 512, between(512, 512), between(512, 512), 1),
  "math: 190 + 300": _large(512, 512, between(120, 259), spread(5.65, 0.5, 20, 512)),
  "long: 450 + 2800": _large(700, 8192, between(200, 699), spread(7.8, 0.7, 100, 8192)),
}


@dataclasses.dataclass
class Count:
  """Sums over the steps of a case."""

  places: int = 0
  pairs: int = 0
  mask_pairs: float = 0
  tokens: int = 0
  once: int = 0
  microbatches: int = 0
  layers: float = 0
  attention: float = 0
  head: float = 0
  total: float = 0
  unlimited: float = 0

  def add(self, groups: Sequence[packing.Sizes], packed: Sequence[packing.Packed], case: Case):
    """Adds a step."""
    cost = operations.update_cost(case.model)
    self.once += sum(group.total for group in groups)
    self.microbatches += len(packed)
    attention = packing.attention(groups, packed, cost)
    self.pairs += round(attention / cost.pair)
    self.attention += attention
    self.total += attention
    for one in packed:
      in_layers, in_head = cost.place * one.shape.places, cost.loss_place * one.shape.places
      self.places += one.shape.places
      self.layers += in_layers
      self.head += in_head
      self.total += cost.of(one.shape)
      for piece in (piece for row in one.rows for piece in row):
        prompt, completions = groups[piece.group].prompt, groups[piece.group].completions
        lengths = [completions[i] for i in piece.completions]
        self.tokens += prompt + sum(lengths)
        self.mask_pairs += prompt * (prompt + 1) / 2
        self.mask_pairs += sum(n * prompt + n * (n + 1) / 2 for n in lengths)
    self.unlimited += made_to_measure(groups, case, cost)


def made_to_measure(groups: Sequence[packing.Sizes], case: Case, cost: packing.Cost) -> float:
  """Returns the operations of a step whose shapes are made for it, without padding rows or ends.

  Rows have the cheapest length; the last microbatch has as many rows as it needs.
  """
  longest = max((g.prompt + max(g.completions) for g in groups), default=0)
  if not longest:
    return 0.0
  most = max(longest, case.microbatch_tokens)
  lengths = {-(-longest // 32) * 32} | {most // n // 32 * 32 for n in range(1, 64)}
  found = []
  for length in sorted(n for n in lengths if longest <= n <= most + 31):
    [*rows] = packing.pack(groups, (packing.Shape(1, length, length),), cost=cost)
    row, at_once = cost.row_cost(length, length), max(1, case.microbatch_tokens // length)
    of_rows = len(rows) * row + packing.attention(groups, rows, cost)
    found.append(of_rows + -(-len(rows) // at_once) * cost.microbatch)
  return min(found)


def simulate(case: Case, **options: object) -> tuple[tuple[packing.Shape, ...], Count]:
  """Plans for a case and packs its steps.

  Args:
    case: Lengths and limits.
    options: Arguments of `packing.plan`, such as row_tokens.
  """
  cost = operations.update_cost(case.model)
  settings: dict = {"microbatch_tokens": case.microbatch_tokens, **options}
  shapes = packing.plan(case.load, cost=cost, **settings)
  rng, count = np.random.default_rng(0), Count()
  for _ in range(case.steps):
    groups = case.groups(rng)
    count.add(groups, packing.pack(groups, shapes, cost=cost), case)
  return shapes, count


def line(name: str, case: Case, shapes: Sequence[packing.Shape], count: Count) -> str:
  """Returns a row of the table, in Markdown."""
  steps, per_step = case.steps, 1e15 * case.steps
  cells = [
    name,
    ", ".join(f"{shape.rows} × {shape.row_tokens}" for shape in shapes),
    f"{count.microbatches / steps:.1f}",
    f"{count.places / steps:.0f}",
    f"{count.pairs / steps / 1e6:.2f}",
    f"{count.mask_pairs / count.pairs:.2f}",
    f"{count.tokens / count.places:.3f}",
    f"{count.once / count.places:.3f}",
    f"{count.total / per_step:.4g} = {count.layers / per_step:.3g} +"
    f" {count.attention / per_step:.3g} + {count.head / per_step:.3g}",
    f"{count.unlimited / count.total:.2f}",
  ]
  return f"| {' | '.join(cells)} |"


HEADER = (
  "| case | shapes, rows × length | microbatches | places | pairs, 1e6 | of the mask | efficiency |"
  " each once | operations, 1e15: layers + attention + head | unlimited, share |"
)


def main(arguments: Sequence[str]) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("--case", default="", help="only cases whose name contains this")
  parser.add_argument("--row_tokens", type=int, help="longest row; as in a config")
  parser.add_argument("--row_buckets", type=int, nargs="+", help="the only row lengths")
  parser.add_argument("--rows_multiple", type=int, default=1, help="number of replicas")
  own = parser.parse_args(arguments)
  print(HEADER)
  print("|-" * (HEADER.count("|") - 1) + "|")
  options = {name: value for name, value in vars(own).items() if name != "case" and value}
  for name, case in CASES.items():
    if own.case in name:
      print(line(name, case, *simulate(case, **options)), flush=True)


if __name__ == "__main__":
  main(sys.argv[1:])
