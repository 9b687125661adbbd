"""Whether an SGLang server computes sliding windows as the trainer does, by what it reports. Pure.

A query sees `sliding_window` keys, its own included. SGLang's models pass one less to the attention
backends. FlashAttention 3, FlashInfer and torch's add the query's own key again. Triton's decode
steps do not, and lose the oldest key of the window (SGLang 0.5.23, `triton_backend.py`,
`update_sliding_window_buffer`; sgl-project/sglang#32087).
"""

from typing import Any

_BACKENDS = ("attention_backend", "decode_attention_backend")  # of GET /server_info.
_WRONG = "triton"


def refusal(info: Any) -> str | None:
  """Returns why a server cannot sample from a model with sliding windows; None if it can.

  Args:
    info: Answer to GET /server_info.
  """
  if not isinstance(info, dict) or _WRONG not in [info.get(name) for name in _BACKENDS]:
    return None
  return (
    "its attention backend is triton, which leaves the oldest token out of a sliding window when it"
    " decodes (sgl-project/sglang#32087): start it with --attention-backend fa3 or flashinfer"
  )
