"""The errors of models: their files, or the place where they should be. Pure."""

from grpo_jax.errors import ExpectedFailure


class ModelError(ExpectedFailure, ValueError):
  """A model cannot be used: the message names the file, what was found and what was needed."""


class MissingModel(ModelError, FileNotFoundError):
  """There is no such model or file, or it cannot be fetched; the message has all reasons."""


class HubFailure(MissingModel):
  """The Hugging Face hub cannot be reached, or refuses; the only failure with a fallback."""
