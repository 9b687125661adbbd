"""Language models: one transformer, its families, and the files it is read from and written to."""

from grpo_jax.models.loading import Loaded, load

__all__ = ["Loaded", "load"]
