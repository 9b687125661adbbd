"""The base config, for `import configs.base`; the options are in `grpo_jax/config/base.py`."""

from grpo_jax.config.base import get_config

__all__ = ["get_config"]
