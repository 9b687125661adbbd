"""Times Liger-Kernel's fused linear cross-entropy in a process that answers line by line.

Started by linear_logprobs.py with an interpreter that has `liger-kernel` and torch:
  PYTHON peer_liger.py < requests > answers

Each request and each answer is one line of JSON:
  {"do": "prepare", "tokens": N, "width": D, "vocabulary": V, "dtype": …, "pass": …}
      → {"temporary_bytes": …, "peak_bytes": …, "loss": …} or {"why": …}
  {"do": "time", "pass": …, "calls": n} → {"seconds": …}
"""

# pyright: reportMissingImports=false
# Liger-Kernel is installed in a separate environment.

import json
import os
import sys
import time

# Output of libraries, on import or later, must not appear among the answers.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # noqa: E402


class Case:
  """Inputs of one shape on the GPU, and the loss on them."""

  def __init__(self, *, tokens: int, width: int, vocabulary: int, dtype: str):
    generator = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    wanted = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    self.hidden = (normal(tokens, width) * (3.0 / width**0.5)).to(wanted)
    self.head = normal(vocabulary, width).to(wanted)
    self.targets = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    self.loss = LigerFusedLinearCrossEntropyLoss(reduction="sum")

  def run(self, which: str) -> torch.Tensor:
    """Returns the summed loss; with "forward+backward" both gradients are computed and dropped."""
    learned = which == "forward+backward"
    self.hidden.requires_grad_(learned)
    self.head.requires_grad_(learned)
    with torch.set_grad_enabled(learned):
      loss = self.loss(self.head, self.hidden, self.targets)
    if learned:
      loss.backward()
      self.hidden.grad = self.head.grad = None
    return loss.detach()

  def prepare(self, which: str) -> dict[str, float]:
    """Warms up, and returns mean loss and memory of one call."""
    self.run(which)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    inputs = torch.cuda.memory_allocated()
    loss = self.run(which)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    both = (self.hidden, self.head) if which == "forward+backward" else ()
    gradients = sum(x.numel() * x.element_size() for x in both)
    return {
      "temporary_bytes": peak - inputs - gradients,
      "peak_bytes": peak,
      "loss": float(loss) / self.hidden.shape[0],
    }

  def seconds(self, which: str, calls: int) -> float:
    """Returns the time per call, over that many consecutive calls."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
      self.run(which)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def main() -> None:
  """Answers requests until there are no more."""
  case, size = None, None
  for line in sys.stdin:
    request = json.loads(line)
    which = request["pass"]
    if request["do"] == "prepare":
      wanted = {key: request[key] for key in ("tokens", "width", "vocabulary", "dtype")}
      try:
        if wanted != size:
          case, size = None, None
          torch.cuda.empty_cache()
        case, size = case or Case(**wanted), wanted
        answer = case.prepare(which)
      except torch.OutOfMemoryError as error:
        answer = {"why": str(error).splitlines()[0]}
    else:
      assert case is not None, "prepare comes before time"
      answer = {"seconds": case.seconds(which, request["calls"])}
    print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
  main()
