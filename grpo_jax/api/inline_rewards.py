"""Rewards of the user that have no path to be imported by, such as lambdas and closures.

`rewards.named` sets them as attributes of this module, so that a config can name them by the path
"grpo_jax.api.inline_rewards.NAME" while this process runs.
"""
