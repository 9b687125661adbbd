"""The parts of the day, in order of value. Their limits add up to 25 minutes."""

from typing import Any

from gpu_day_parts.running import Part

MINUTES = 25.0
# A process that has the device to itself allocates its memory at once, as a run does.
_ALONE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}


def _head(name: str, model: str, limit_s: float, width: int, vocabulary: int) -> Part:
  """Returns the part of the LM head at the size of a model."""
  options: dict[str, Any] = {"dtype": "bfloat16", "rounds": 7, "matmul": 8192}
  tiny = {"dtype": "float32", "rounds": 3, "matmul": 128}
  tiny["shape"] = {"tokens": 32, "width": width // 64, "vocabulary": vocabulary // 512}
  return Part(
    name,
    f"linear_logprobs at the size of {model}, in every form",
    "gpu_day_parts.head",
    limit_s,
    {**options, "shape": {"tokens": 16384, "width": width, "vocabulary": vocabulary}},
    tiny,
  )


def _update(row_tokens: int, limit_s: float, lengths: dict[str, int]) -> Part:
  """Returns the part of the update of 1.5B parameters, 16384 places."""
  tiny_lengths = {"prompt": 6, "completions": 3, "shortest": 2, "longest": 8}
  tiny = {"microbatch": [2, row_tokens // 32], "lengths": tiny_lengths, "steps": 2}
  return Part(
    f"update_{row_tokens}",
    f"update of Qwen2.5-1.5B, 16384 places in rows of {row_tokens}",
    "gpu_day_parts.update",
    limit_s,
    {
      "model": "Qwen2.5-1.5B",
      "microbatch": [16384 // row_tokens, row_tokens],
      "lengths": lengths,
      "compute_dtype": "bfloat16",
      "steps": 8,
    },
    {"model": "tiny", "compute_dtype": "bfloat16", **tiny},
    _ALONE,
  )


def _quickstart(name: str, limit_s: float, variants: list[dict[str, Any]]) -> Part:
  """Returns the part of the quickstart in some precisions."""
  tiny = {
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 4,
    "sampling.max_tokens": 4,
    "total_steps": 2,
  }
  return Part(
    f"quickstart_{name}",
    f"five steps of the quickstart, {name}: mismatch of engine and trainer",
    "gpu_day_parts.quickstart",
    limit_s,
    {"variants": variants, "model": "SmolLM2-135M", "overrides": {"total_steps": 5}},
    # Each precision compiles everything: two of them show that it works.
    {"variants": variants[:2], "model": "tiny", "overrides": tiny},
    _ALONE,
  )


_FLOAT32 = [
  {"compute_dtype": "float32", "matmul_precision": precision}
  for precision in ("float32", "tensorfloat32", "default")
]
_BFLOAT16 = [{"compute_dtype": "bfloat16", "matmul_precision": None}]

PARTS = (
  Part(
    "device",
    "device, driver, rates of matrix products and of the memory",
    "gpu_day_parts.device",
    90,
    {
      # 8192³ and 4096³; the MLP of Qwen2.5-1.5B and its head, at 16384 tokens.
      "products": [
        [8192, 8192, 8192],
        [4096, 4096, 4096],
        [16384, 1536, 8960],
        [16384, 1536, 151936],
      ],
      "copied_mib": 2048,
    },
    {"products": [[128, 128, 128], [64, 64, 64]], "copied_mib": 1},
  ),
  Part(
    "tests",
    "the tests of `make test-gpu`",
    "gpu_day_parts.gpu_tests",
    270,
    {"file": "tests/kernels/test_gpu.py"},
    {"file": "tests/kernels/test_gpu.py"},
  ),
  _head("head_1.5b", "Qwen2.5-1.5B", 110, 1536, 151936),
  _head("head_135m", "SmolLM2-135M", 80, 576, 49152),
  _head("head_7b", "Qwen2.5-7B", 90, 3584, 152064),
  _head("head_8b", "Llama-3-8B", 90, 4096, 128256),
  _update(1024, 140, {"prompt": 160, "completions": 8, "shortest": 60, "longest": 340}),
  _update(4096, 150, {"prompt": 160, "completions": 16, "shortest": 60, "longest": 440}),
  Part(
    "decode",
    "a decode step of the embedded sampler, Qwen2.5-1.5B, 64 and 256 rows",
    "gpu_day_parts.sampler",
    180,
    {
      "model": "Qwen2.5-1.5B",
      "compute_dtype": "bfloat16",
      "rows": [64, 256],
      "group": 16,
      "prompt_tokens": 512,
      "tokens": [16, 64],
    },
    {
      "model": "tiny",
      "compute_dtype": "float32",
      "rows": [8],
      "group": 4,
      "prompt_tokens": 8,
      "tokens": [4, 20],
    },
    _ALONE,
  ),
  _quickstart("float32", 140, _FLOAT32),
  _quickstart("bfloat16", 70, _BFLOAT16),
  Part(
    "checkpoint",
    "a checkpoint of Qwen2.5-1.5B: master weights and Adam's state, written and read",
    "gpu_day_parts.checkpoint",
    90,
    {"model": "Qwen2.5-1.5B"},
    {"model": "tiny"},
    _ALONE,
  ),
)
BY_NAME = {part.name: part for part in PARTS}
