"""Options that only the embedded sampler has."""

from collections.abc import Iterator

from grpo_jax.config.options import Config

# The argument of SGLang's servers that comes nearest to each of them.
_OF_SERVERS = {
  "cache_dtype": "--kv-cache-dtype=fp8_e4m3",
  "cache_gib": "--mem-fraction-static=0.8",
}


def problems(config: Config) -> Iterator[str]:
  """Yields the options that are set although another engine samples."""
  engine = config.engine
  for name, argument in _OF_SERVERS.items():
    value = getattr(engine, name)
    if value is not None and engine.name != "jax_sampler":
      yield (
        f"engine.{name}={value!r} is that of the embedded sampler, but engine.name={engine.name!r}:"
        f" set it to None (SGLang: engine.sglang.arguments=({argument!r},))"
      )


def sampled_bytes(config: Config) -> int | None:
  """Returns the bytes of each device for keys and values of sampled tokens; None: any number."""
  return None if config.engine.cache_gib is None else int(config.engine.cache_gib * 2**30)
