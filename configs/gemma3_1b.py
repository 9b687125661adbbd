"""Gemma 3 1b with LoRA on GSM8K, on one chip of 16 GB: a TPU v5e, or a GPU.

    python -m grpo_jax.main --config=configs/gemma3_1b.py --workdir=runs/gemma3_1b

The model is gated: accept its terms on the Hugging Face hub, and set HF_TOKEN. The dataset comes
from the hub, too. On a GPU without bfloat16 units, such as a T4, the base is stored in bfloat16 all
the same, and --config.model.compute_dtype=float32 computes at the same speed without roundings.
google/gemma-3-270m-it is another --config.model.path for the same chip.

By the plan, never checked against a device (`grpo-jax plan --config=gemma3_1b --topology=v5e-1
--no-search`, and t4:1; 2026-11-29, jax 0.10.2, libtpu 0.0.42.1): an update takes 8.7 of the 15.75
GiB of a v5e, sampling 5.5; of the 13.4 GiB that a run takes of a T4 they take 10.3 and 6.4, and in
float32 an update takes 9.0 by arithmetic. A step takes at least 0.8 s on a v5e with solutions of
128 tokens.
"""

from typing import Any

from grpo_jax import configuration


def get_config():
  """Returns the config."""
  config: Any = configuration.load("gsm8k_tpu").unlock()
  config.model.path = "google/gemma-3-1b-it"
  return config
