"""Environments of others: verifiers, NeMo Gym, OpenEnv, MCP servers; and the sliding puzzle.

Configs name them as they name those of the trainer (`module="nemo_gym"`), which finds them by
`grpo_jax.registry.SATELLITES`; docs/third_party_environments.md, docs/tools.md.
"""
