"""The errors of checkpoints that a user can repair."""

from grpo_jax.errors import ExpectedFailure


class CheckpointError(ExpectedFailure, RuntimeError):
  """A checkpoint could not be written, or none of those present can be used."""


class OtherStateError(CheckpointError, ValueError):
  """The checkpoints are of another model or optimizer than the run's."""


class FolderError(CheckpointError, FileExistsError):
  """Something else occupies the path of the checkpoints."""
