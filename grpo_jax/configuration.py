"""Configs in Python: `configuration.load("configs/quickstart.py")`; see config/configuration.py."""

from grpo_jax.config.configuration import ConfigError, load

__all__ = ["ConfigError", "load"]
