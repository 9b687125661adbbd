"""Our model and transformers' in float64: logits and the gradients of all parameters.

    python -m tests.models.float64 CASE ...

Both programs say float32 where they want their highest precision, which is float64 here, so this is
a process of its own. It prints an object with `Found` of each case of `families.CASES`. Ours reads
one packed row, in which completions share their prompt; transformers reads each sequence alone.
"""

import json
import sys
import tempfile
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.models import families


class Found(NamedTuple):
  """Distances of one case, relative to the largest number.

  Attributes:
    logits: Distance of the logits.
    gradients: Distance of the gradient of each parameter, by its name in files.
    zeros: Names of parameters whose gradient is 0.
  """

  logits: float
  gradients: dict[str, float]
  zeros: list[str]


class Sequence(NamedTuple):
  """A sequence alone.

  Attributes:
    tokens: Token ids.
    places: Place of each token in the packed row.
    counts: 1 for tokens whose logits count, and 0 for a prompt that counted before.
  """

  tokens: np.ndarray
  places: np.ndarray
  counts: np.ndarray


def packed(vocabulary: int) -> tuple[dict[str, np.ndarray], list[Sequence]]:
  """Returns a row of padding, a prompt with two completions and another sequence, and these."""
  rng = np.random.default_rng(0)
  draw = lambda n: rng.integers(1, vocabulary, n)  # 0 is padding, without gradient in torch.
  prompt, first, second, other = draw(9), draw(16), draw(11), draw(13)
  pad = np.zeros(3, int)
  row = {
    "tokens": np.concatenate([pad, prompt, first, second, other]),
    "positions": np.concatenate(
      [pad, np.arange(9), 9 + np.arange(16), 9 + np.arange(11), np.arange(13)]
    ),
    "segment_ids": np.repeat([0, 1, 2], [3, 36, 13]),
    "branch_ids": np.repeat([0, 0, 1, 2, 0], [3, 9, 16, 11, 13]),
  }
  prefix = 3 + np.arange(9)
  at = lambda start, n: np.concatenate([prefix, start + np.arange(n)])
  sequences = [
    Sequence(np.concatenate([prompt, first]), at(12, 16), np.ones(25)),
    Sequence(np.concatenate([prompt, second]), at(28, 11), np.repeat([0.0, 1.0], [9, 11])),
    Sequence(other, 39 + np.arange(13), np.ones(13)),
  ]
  return row, sequences


def theirs(model, sequences, weights) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
  """Returns transformers' logits of each sequence, and the gradients of all its parameters."""
  found = []
  for each in sequences:
    logits = model(torch.tensor(each.tokens[None])).logits[0]
    assert logits.dtype == torch.float64
    (logits * torch.tensor(weights[each.places] * each.counts[:, None])).sum().backward()
    found.append(logits.detach().numpy())
  return found, {name: weight.grad.numpy() for name, weight in model.named_parameters()}


def ours(loaded, row, weights):
  """Returns our logits of the row, and the gradients of all parameters, by their names in files."""
  from grpo_jax.models import leaves, transformer

  def loss(params):
    inputs = [jnp.asarray(x)[None] for x in row.values()]
    hidden = transformer.hidden_states(params, loaded.config, *inputs)[0]
    head, layout = transformer.head(params, loaded.config)
    logits = hidden @ (head.T if layout == "vd" else head)
    return jnp.sum(logits * weights), logits

  quick = {"xla_backend_optimization_level": 0}
  run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=quick)
  (_, logits), gradients = run(loaded.params)
  named = {}
  for stored in leaves.stored(loaded.config):
    value = gradients
    for name in stored.path:
      value = value[name]
    value = np.asarray(value if stored.layer is None else value[stored.layer])
    named[stored.name] = value.T if stored.leaf.is_kernel else value
  return np.asarray(logits), named


def compared(case: str) -> Found:
  """Returns the distances of a case of `families.CASES`."""
  from grpo_jax.models import loading
  from tests.models import tiny

  family, options = families.CASES[case]
  model = tiny.hf_model(family, **options).double()
  row, sequences = packed(families.SIZES["vocab_size"])
  weights = np.random.default_rng(1).standard_normal((len(row["tokens"]), model.config.vocab_size))
  weights[:3] = 0.0  # of padding.
  logits, gradients = theirs(model, sequences, weights)
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    found, own = ours(loading.load(folder, dtype=np.float64), row, weights)
  assert {*own} == {*gradients}, {*own} ^ {*gradients}
  apart = max(
    tiny.relative_error(found[each.places], wanted)
    for each, wanted in zip(sequences, logits, strict=True)
  )
  distances = {name: tiny.relative_error(own[name], gradients[name]) for name in own}
  return Found(apart, distances, [name for name, x in gradients.items() if not np.abs(x).max() > 0])


def main(cases: list[str]) -> None:
  """Prints the distances of cases."""
  jax.config.update("jax_enable_x64", True)
  jnp.float32 = jnp.float64
  torch.float32 = torch.float = torch.float64
  torch.Tensor.float = torch.Tensor.double
  torch.set_num_threads(1)
  from grpo_jax.models import rotary

  rotary.np = types.SimpleNamespace(**{**vars(np), "float32": np.float64})
  print(json.dumps({case: compared(case)._asdict() for case in cases}))


if __name__ == "__main__":
  main(sys.argv[1:])
