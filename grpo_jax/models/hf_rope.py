"""The rotary settings of config.json, read and written as transformers 4.56 and 5 do. Pure.

A family has one table of frequencies, `OneTable`, or a table for each type of layer, `ByType`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields, short
from grpo_jax.models.layer_kinds import LayerKind, Rope, RopeScaling


@dataclasses.dataclass(frozen=True)
class OneTable:
  """The rotary settings of a family with one table of frequencies.

  Attributes:
    theta: Base of the frequencies if config.json has none.
  """

  theta: float = 10000.0

  def read(self, given: Fields, context: int) -> tuple[Rope, ...]:
    """Returns the table.

    As in transformers 5, a `rope_scaling` that is not empty replaces `rope_parameters`. What it
    lacks is taken from the top level.

    Args:
      given: Content of config.json, without defaults.
      context: The model's max_position_embeddings.

    Raises:
      ModelError: The settings are not supported, or contradict each other.
    """
    sections = {name: given.section(name) for name in _SECTIONS}
    if any(isinstance(value, Mapping) for part in sections.values() for value in part.values()):
      raise ModelError(
        f"{given.where}: rope_parameters that differ by layer type are not supported in this family"
      )
    chosen = "rope_scaling" if sections["rope_scaling"] else "rope_parameters"
    found = _table(
      _Places(given.where, at_top=_at_top(given), sections=sections),
      sections[chosen],
      theta=self.theta,
      context=context,
    )
    return (found,)

  def write(self, ropes: tuple[Rope, ...]) -> dict[str, Any]:
    """Returns the fields of config.json for the first table, in both styles."""
    rope = ropes[0]
    return {
      "rope_theta": rope.theta,
      "rope_scaling": _scaling_to_hf(rope.scaling),
      "rope_parameters": _to_hf(rope),
    }


@dataclasses.dataclass(frozen=True)
class ByType:
  """The rotary settings of a family whose layers with a window have a table of their own.

  transformers 5 has both in `rope_parameters`, by the type of layer. In the old style, `rope_theta`
  and `rope_scaling` are those of the layers without a window, and the others are never scaled.

  Attributes:
    theta: Base of the frequencies of layers without a window if config.json has none.
    sliding_theta: The same for layers with a window.
    sliding_name: Field of config.json with the base for layers with a window in the old style;
      None: it is `rope_theta`.
  """

  theta: float
  sliding_theta: float
  sliding_name: str | None = None

  def read(self, given: Fields, context: int) -> tuple[Rope, ...]:
    """Returns the tables of the layers without a window and with one.

    Args:
      given: Content of config.json, without defaults.
      context: The model's max_position_embeddings.

    Raises:
      ModelError: The settings are not supported, or contradict each other.
    """
    scaling, by_type = (given.section(name) for name in _SECTIONS)
    if not set(by_type) <= set(_TYPES):
      needed = f"an object for each of {' and '.join(_TYPES)} in this family, and nothing else"
      raise given.wrong("rope_parameters", needed)
    if any(isinstance(value, Mapping) for value in scaling.values()):
      raise given.wrong("rope_scaling", "the settings of full_attention in this family")
    inner = Fields(by_type, f"{given.where}: rope_parameters")
    full, sliding = (inner.section(name) for name in _TYPES)
    sections = {"rope_scaling": scaling, "rope_parameters": full}
    places = _Places(given.where, _at_top(given), sections)
    first = _table(places, {**full, **scaling}, theta=self.theta, context=context)
    # Without a field for it, transformers 5 does not read this base from the top level.
    own = sliding if self.sliding_name else {"rope_theta": self.sliding_theta, **sliding}
    at_top = {"rope_theta": given.get(self.sliding_name or "rope_theta")}
    places = _Places(given.where, at_top, {"rope_parameters": sliding})
    return first, _table(places, own, theta=self.sliding_theta, context=context)

  def write(self, ropes: tuple[Rope, ...]) -> dict[str, Any]:
    """Returns the fields of config.json for both tables, in both styles if the old one has them."""
    full, sliding = ropes[0], ropes[-1]
    parameters = {"full_attention": _to_hf(full), "sliding_attention": _to_hf(sliding)}
    written: dict[str, Any] = {"rope_parameters": parameters}
    if sliding.scaling is not None or (self.sliding_name is None and full.theta != sliding.theta):
      return written
    if self.sliding_name is not None:
      written[self.sliding_name] = sliding.theta
    return {
      **written,
      "rope_theta": full.theta,
      "rope_scaling": _scaling_to_hf(full.scaling),
    }


def without_copies(
  ropes: tuple[Rope, ...], kinds: tuple[LayerKind, ...]
) -> tuple[tuple[Rope, ...], tuple[LayerKind, ...]]:
  """Returns tables that differ from each other, and the kinds of layers that refer to these."""
  unique = tuple(dict.fromkeys(ropes))
  at = [unique.index(rope) for rope in ropes]
  table = lambda kind: None if kind.rope is None else at[kind.rope]
  return unique, tuple(dataclasses.replace(kind, rope=table(kind)) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class _Places:
  """The places of a config.json that may describe one table."""

  where: str  # for errors.
  at_top: dict[str, Any]
  sections: dict[str, dict[str, Any]]


def _at_top(given: Fields) -> dict[str, Any]:
  return {name: given.get(name) for name in _AT_TOP}


def _table(places: _Places, chosen: Mapping[str, Any], *, theta: float, context: int) -> Rope:
  """Returns the table that a section describes.

  Args:
    places: All places that may describe it.
    chosen: Section that is used; what it lacks is taken from the top level.
    theta: Base of the frequencies if there is none.
    context: The model's max_position_embeddings.
  """
  own = {name: value for name, value in chosen.items() if value is not None}
  rope = Fields({**places.at_top, **own}, f"{places.where}: rope_parameters (or rope_scaling)")
  theta = rope.number("rope_theta", theta, above=0.0)
  kind = rope.string("rope_type") or rope.string("type") or "default"
  if kind not in _KINDS:
    raise ModelError(
      f"{places.where}: rope type {short(kind)} is not supported; supported are {sorted(_KINDS)}"
    )
  needed, optional = _KINDS[kind]
  missing = [name for name in needed if name not in rope]
  if missing:
    raise ModelError(f"{places.where}: rope type {kind!r} needs {missing}")
  used = {"rope_type": kind, "type": kind, "rope_theta": theta}
  used |= {name: rope.get(name) for name in (*needed, *optional)}
  if kind == "dynamic":  # transformers has it so; other programs read the field.
    used["original_max_position_embeddings"] = context
  _refuse_contradictions(used, places)
  return Rope(theta, _scaling(kind, rope, theta, context))


def _refuse_contradictions(used: Mapping[str, Any], places: _Places) -> None:
  """Raises ModelError if a place of a config.json differs from what is used: other programs,
  or other versions of transformers, may read that place."""
  parts = {"at the top level": places.at_top}
  for name, section in places.sections.items():
    # The scaling of a model card was added to a config.json of transformers 5.
    is_added_to = name == "rope_parameters" and section.get("rope_type") == "default"
    is_scaled = used["rope_type"] != "default"
    ignored = {"rope_type"} if is_added_to and is_scaled else set()
    parts[f"in {name}"] = {key: value for key, value in section.items() if key not in ignored}
  for place, values in parts.items():
    if values.get("partial_rotary_factor") not in (None, 1):
      found = short(values["partial_rotary_factor"])
      raise ModelError(f"{places.where}: partial_rotary_factor must be 1, got {found}")
    for name, value in values.items():
      if name in used and value is not None and value != used[name]:
        raise ModelError(
          f"{places.where}: {name} is {short(value)} {place} and {short(used[name])} otherwise;"
          " rope_scaling (which replaces rope_parameters), rope_parameters and the top level must"
          " agree"
        )


def _scaling(kind: str, rope: Fields, theta: float, context: int) -> RopeScaling | None:
  """Returns the scaling of a kind from its settings, with what they imply."""
  if kind == "default":
    return None
  if kind == "dynamic":
    factor = rope.number("factor", above=0.0)
    return RopeScaling(kind, factor, original_max_position_embeddings=context)
  if kind == "linear":
    return RopeScaling(kind, rope.number("factor", above=0.0))
  original = rope.integer("original_max_position_embeddings", low=1, high=2**31 - 1)
  if kind == "longrope":
    factor = rope.number("factor", context / original, above=0.0)
    return RopeScaling(
      kind,
      factor,
      original_max_position_embeddings=original,
      attention_factor=rope.number(
        "attention_factor", _attention_of_longrope(factor, original), above=0.0
      ),
      short_factor=rope.numbers("short_factor", above=0.0),
      long_factor=rope.numbers("long_factor", above=0.0),
    )
  factor = rope.number("factor", above=0.0)
  if kind == "yarn":
    if theta <= 1.0:
      raise rope.wrong("rope_theta", "a number above 1 for yarn")
    # transformers counts 0 as missing.
    mscales = [
      rope.number(name, above=0.0) if rope.get(name) else 0.0
      for name in ("mscale", "mscale_all_dim")
    ]
    slow = rope.number("beta_slow", 1.0, above=0.0)
    return RopeScaling(
      kind,
      factor,
      original_max_position_embeddings=original,
      attention_factor=rope.number(
        "attention_factor", _attention_of_yarn(factor, *mscales), above=0.0
      ),
      beta_fast=rope.number("beta_fast", 32.0, above=slow),
      beta_slow=slow,
      truncate=rope.boolean("truncate", default=True),
    )
  low = rope.number("low_freq_factor", above=0.0)
  return RopeScaling(
    kind=kind,
    factor=factor,
    low_freq_factor=low,
    high_freq_factor=rope.number("high_freq_factor", above=low),
    original_max_position_embeddings=original,
  )


def implied_attention_factor(scaling: RopeScaling, context: int) -> float:
  """Returns the factor of cosines and sines of a config.json that gives neither it nor mscales.

  Args:
    scaling: Rotary scaling.
    context: The model's `max_position_embeddings`.
  """
  if scaling.kind == "yarn":
    return _attention_of_yarn(scaling.factor)
  if scaling.kind == "longrope":
    original = scaling.original_max_position_embeddings
    return _attention_of_longrope(context / original, original)
  return 1.0


def _attention_of_yarn(factor: float, mscale: float = 0.0, all_dim: float = 0.0) -> float:
  """Returns yarn's factor of cosines and sines; Peng et al. 2023, equation 22, and DeepSeek's."""
  of = lambda scale: 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
  return of(mscale) / of(all_dim) if mscale and all_dim else of(1.0)


def _attention_of_longrope(factor: float, original: int) -> float:
  """Returns longrope's factor of cosines and sines; Ding et al. 2024, section 3.3."""
  return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
  """Returns a scaling as config.json has it; what is implied is left out."""
  if scaling is None:
    return None
  of = dataclasses.asdict(scaling)
  needed, optional = _KINDS[scaling.kind]
  written = {name: of[name] for name in (*needed, *optional) if name in of}
  if scaling.kind == "yarn":
    if scaling.attention_factor == _attention_of_yarn(scaling.factor):
      del written["attention_factor"]
    if scaling.truncate:
      del written["truncate"]
  as_list = lambda value: list(value) if isinstance(value, tuple) else value
  return {"rope_type": scaling.kind, **{name: as_list(value) for name, value in written.items()}}


def _to_hf(rope: Rope) -> dict[str, Any]:
  """Returns a table as transformers 5 has it in `rope_parameters`."""
  return {**(_scaling_to_hf(rope.scaling) or {"rope_type": "default"}), "rope_theta": rope.theta}


_TYPES = ("full_attention", "sliding_attention")
_SECTIONS = ("rope_scaling", "rope_parameters")

# Rotary settings that a config.json may have outside of rope_parameters and rope_scaling.
_AT_TOP = ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")

_ORIGINAL = "original_max_position_embeddings"

# Kind of rotary scaling → the fields of config.json that it needs, and those that it may have.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
  "default": ((), ()),
  "linear": (("factor",), ()),
  "dynamic": (("factor",), ()),
  "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
  "yarn": (
    ("factor", _ORIGINAL),
    ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
  ),
  "longrope": (("short_factor", "long_factor", _ORIGINAL), ("factor", "attention_factor")),
}
