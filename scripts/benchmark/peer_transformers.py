"""An update by transformers and torch, of the completions of a packed batch, padded.

bfloat16 by autocast over float32 weights; the head is computed for the tokens that are learned
from. scripts/gpu_day.py times it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

# pyright: reportMissingImports=false
# torch is not a requirement.
import numpy as np
import torch


def unpacked(batch: Any) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
  """Returns (prompt, completion, advantages, behavior logprobs) of every completion of a batch."""
  found = []
  for row in range(len(batch.tokens)):
    of = {name: getattr(batch, name)[row] for name in ("tokens", "segment_ids", "branch_ids")}
    for rollout in np.unique(batch.rollout_ids[row][batch.rollout_ids[row] >= 0]):
      mine = batch.rollout_ids[row] == rollout
      segment = of["segment_ids"][mine][0]
      prompt = of["tokens"][(of["segment_ids"] == segment) & (of["branch_ids"] == 0)]
      values = (batch.advantages[row][mine], batch.behavior_logprobs[row][mine])
      found.append((prompt, of["tokens"][mine], *values))
  return found


def step(policy: Any, tx: Any, whole: Sequence[tuple[np.ndarray, ...]], count: int) -> float:
  """Makes one update with −ratio · advantage, a mean over the tokens; returns the loss."""
  total, learned = 0.0, sum(len(completion) for _, completion, *_ in whole)
  for ids, attended, targets, advantages, behavior in _padded(whole, count, policy.device):
    with torch.autocast(policy.device.type, torch.bfloat16):
      hidden = policy.model(input_ids=ids, attention_mask=attended).last_hidden_state
      logits = policy.lm_head(hidden[:, :-1][targets])
    nats = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][targets], reduction="none")
    loss = -(torch.exp(-nats - behavior) * advantages).sum() / learned
    loss.backward()
    total += loss.detach()
  tx.step()
  tx.zero_grad(set_to_none=True)
  return float(total)  # waits for the device.


def _padded(whole: Sequence[tuple[np.ndarray, ...]], count: int, place: Any) -> Iterator[list[Any]]:
  """Yields tensors of up to `count` completions: ids, what is attended, targets, two values."""
  by_length = sorted(whole, key=lambda each: len(each[0]) + len(each[1]))
  for start in range(0, len(by_length), count):
    some = by_length[start : start + count]
    width = max(len(prompt) + len(completion) for prompt, completion, *_ in some)
    ids = np.zeros((len(some), width), np.int64)
    attended, targets = np.zeros_like(ids), np.zeros((len(some), width - 1), bool)
    for row, (prompt, completion, *_) in enumerate(some):
      end = len(prompt) + len(completion)
      ids[row, :end] = np.concatenate([prompt, completion])
      attended[row, :end] = 1
      targets[row, len(prompt) - 1 : end - 1] = True
    values = [np.concatenate([each[i] for each in some]) for i in (2, 3)]
    yield [torch.from_numpy(x).to(place) for x in (ids, attended, targets, *values)]
