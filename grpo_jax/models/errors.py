"""The errors of models and their files. Pure."""

from grpo_jax.errors import ExpectedFailure


class ModelError(ExpectedFailure, ValueError):
  """A model cannot be used: the message names the file, what was found and what was needed."""

  exit_code = 2


class MissingModel(ModelError, FileNotFoundError):
  """A model or file does not exist or cannot be downloaded; the message gives all reasons."""


class HubFailure(MissingModel):
  """The Hugging Face hub cannot be reached, or refuses; the only failure with a fallback."""
