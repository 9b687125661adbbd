"""The properties in which layers of one model may differ. Pure; no arrays."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Scaling of rotary frequencies for contexts longer than those of pre-training.

  `rotary.frequencies` computes them. Fields that a kind does not use keep their defaults.

  Attributes:
    kind: "linear", "dynamic", "llama3", "yarn" or "longrope".
    factor: Ratio of the longer context to that of pre-training.
    low_freq_factor: Turns in the original context up to which "llama3" divides a frequency.
    high_freq_factor: Turns in the original context from which "llama3" keeps a frequency.
    original_max_position_embeddings: Tokens of the original context.
    attention_factor: Factor of cosines and sines, for "yarn" and "longrope".
    beta_fast: Turns in the original context from which "yarn" keeps a frequency.
    beta_slow: Turns in the original context up to which "yarn" divides a frequency.
    truncate: Whether "yarn" rounds the bounds of its interpolation outwards to whole components.
    short_factor: Divisor of each frequency in the original context, for "longrope".
    long_factor: Divisor of each frequency in a longer context, for "longrope".
  """

  kind: str
  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position_embeddings: int = 8192
  attention_factor: float = 1.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  short_factor: tuple[float, ...] = ()
  long_factor: tuple[float, ...] = ()

  @property
  def longest(self) -> int | None:
    """Longest context in which each position has one angle; None: any.

    Frequencies of "dynamic" and "longrope" change with the length of a sequence as it passes its
    original context. A token's angle would then depend on the tokens after it, so that keys in a
    sampler's cache, prefixes that completions share and packed rows would have other values than
    the same tokens alone. Up to there both are ordinary tables.
    """
    depends_on_length = self.kind in ("dynamic", "longrope")
    return self.original_max_position_embeddings if depends_on_length else None


@dataclasses.dataclass(frozen=True)
class Rope:
  """A table of rotary frequencies."""

  theta: float = 10000.0
  scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True)
class LayerKind:
  """The treatment of token positions in a layer.

  Attributes:
    window: Number of tokens that a token sees, itself included; None: all before it.
    rope: Index of the layer's table in `ModelConfig.ropes`; None: queries and keys are not rotated.
  """

  window: int | None = None
  rope: int | None = 0


PLAIN = LayerKind()
