"""No engine: for training from recorded groups, where nothing is sampled."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpo_jax.engines import base


class NoEngine:
  """Accepts no weights and samples nothing; see `base.Engine`."""

  weight_version = -1

  def generate(
    self,
    requests: Sequence[base.GenerationRequest],
    *,
    on_progress: base.OnProgress | None = None,
  ) -> AsyncIterator[base.Generation]:
    """Raises RuntimeError."""
    raise RuntimeError(f"{len(requests)} completions were requested, and there is no engine")

  def load_weights(self, params: Any, *, version: int) -> None:
    """Does nothing."""

  def metrics(self) -> dict[str, float]:
    """Returns an empty dict."""
    return {}

  def release(self) -> None:
    """Does nothing."""

  def close(self) -> None:
    """Does nothing."""
