"""`python -m grpo_jax COMMAND …`: the same as `grpo-jax COMMAND …`."""

from grpo_jax.commands import cli

if __name__ == "__main__":
  cli.console()
