"""An engine that loses new weights in silence: named as `engine.name` of a run."""

from grpo_jax.engines.jax_sampler import JaxSampler


class StaleSampler(JaxSampler):
  """Reports every version that it is given, but keeps the weights of version 1."""

  def load_weights(self, params, *, version):
    super().load_weights(params, version=version)
    if version < 2:
      self._kept = self._weights
    self._weights = self._kept


def make(config, *, decode, compute_dtype, max_rows, source_directory, workdir, num_valid_tokens):
  """Makes the engine."""
  del source_directory, workdir
  return StaleSampler(
    config,
    decode=decode,
    compute_dtype=compute_dtype,
    max_rows=max_rows,
    copy_weights=True,  # the trainer donates its own.
    num_valid_tokens=num_valid_tokens,
  )
