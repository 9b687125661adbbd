"""The fields of config.json by which layers differ, read and written as transformers does. Pure."""

from collections.abc import Sequence
from typing import Any

from grpo_jax.models.fields import Fields
from grpo_jax.models.layer_kinds import PLAIN, LayerKind

_KINDS = {"full_attention": False, "sliding_attention": True}
LONGEST = 2**30  # a longer window than any context; differences of positions stay in int32.


def without_windows(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kinds of layers without windows; rejects a config.json that has windows.

  Raises:
    ModelError: The config.json has sliding windows, which transformers lacks in this family.
  """
  if fields.boolean("use_sliding_window", default=False):
    raise fields.wrong("use_sliding_window", "false in this family")
  if any(slides(fields, [False] * count, 1)):
    raise fields.wrong("layer_types", "only full_attention in this family")
  return (PLAIN,) * count


def from_a_layer_on(fields: Fields, count: int) -> tuple[LayerKind, ...]:
  """Returns the kinds of Qwen's layers: layers from `max_window_layers` on have the window.

  `layer_types` overrides this rule.
  """
  length = window(fields, default=4096)
  first = fields.integer("max_window_layers", 28, low=0, high=2**31 - 1)
  by_number = [length is not None and number >= first for number in range(count)]
  found = slides(fields, by_number, length)
  return tuple(LayerKind(length if each else None) for each in found)


def by_window(
  fields: Fields, count: int, *, rope: int = 0, every: int | None = None
) -> tuple[LayerKind, ...]:
  """Returns the kinds of layers of families in which a `sliding_window` that is there is used.

  Args:
    fields: Content of config.json, with the family's default of `sliding_window`.
    count: Number of layers.
    rope: Index of the rotary table of layers with the window.
    every: Period of the layers without a window if `layer_types` is missing; None: there are none.

  Raises:
    ModelError: `layer_types` does not fit, or `use_sliding_window` is false although there is a
      window, which transformers would use and other programs would not.
  """
  length = None
  if "sliding_window" in fields:
    length = fields.integer("sliding_window", low=1, high=LONGEST)
    if not fields.boolean("use_sliding_window", default=True):
      raise fields.wrong("use_sliding_window", "true, where sliding_window is not null")
  has_window = lambda number: every is None or (number + 1) % every != 0
  otherwise = [length is not None and has_window(number) for number in range(count)]
  found = slides(fields, otherwise, length)
  return tuple(LayerKind(length, rope) if each else PLAIN for each in found)


def window(fields: Fields, *, default: int | None) -> int | None:
  """Returns the length of the sliding window; None if `use_sliding_window` is false."""
  if not fields.boolean("use_sliding_window", default=False):
    return None
  if default is None and "sliding_window" not in fields:
    return None
  return fields.integer("sliding_window", default, low=1, high=LONGEST)


def slides(fields: Fields, otherwise: Sequence[bool], length: int | None) -> list[bool]:
  """Returns which layers have a sliding window, from `layer_types` if it is there.

  Args:
    fields: Content of config.json.
    otherwise: Result for every layer if `layer_types` is missing.
    length: Length of the window, or None.

  Raises:
    ModelError: `layer_types` has another kind or length, or sliding layers but there is no window.
  """
  if "layer_types" not in fields:
    return list(otherwise)
  named = fields.strings("layer_types")
  if len(named) != len(otherwise) or not set(named) <= set(_KINDS):
    needed = f"one of {sorted(_KINDS)} for each of {len(otherwise)} layers"
    raise fields.wrong("layer_types", needed)
  found = [_KINDS[name] for name in named]
  if any(found) and length is None:
    needed = "full_attention only, or use_sliding_window=true with a sliding_window"
    raise fields.wrong("layer_types", needed)
  return found


def rotates(fields: Fields, count: int) -> list[bool]:
  """Returns which layers have a rotary embedding, from SmolLM3's fields."""
  given = fields.get("no_rope_layers")
  if given is None:
    every = fields.integer("no_rope_layer_interval", 4, low=1, high=2**31 - 1)
    return [(number + 1) % every != 0 for number in range(count)]
  is_list = isinstance(given, list) and len(given) >= count
  if not is_list or not all(type(each) in (int, bool) and each in (0, 1) for each in given):
    raise fields.wrong("no_rope_layers", f"a 0 or a 1 for each of {count} layers")
  return [bool(each) for each in given[:count]]


def window_to_hf(kinds: Sequence[LayerKind]) -> dict[str, Any]:
  """Returns the fields of config.json that `by_window` reads; raises the same as `to_hf`."""
  found = to_hf(kinds)
  types = ["full_attention"] * len(kinds)
  return {
    "sliding_window": found.get("sliding_window"),
    "layer_types": found.get("layer_types", types),
  }


def to_hf(kinds: Sequence[LayerKind]) -> dict[str, Any]:
  """Returns the fields of config.json that describe the windows of layers.

  Raises:
    ValueError: The layers have windows of different lengths, which config.json cannot describe.
  """
  lengths = {kind.window for kind in kinds if kind.window is not None}
  if not lengths:
    return {"use_sliding_window": False}
  if len(lengths) > 1:
    raise ValueError(f"a config.json has one sliding_window, but the layers have {sorted(lengths)}")
  names = {slides: name for name, slides in _KINDS.items()}
  types = [names[kind.window is not None] for kind in kinds]
  first = types.index("sliding_attention")
  # For programs that read no layer_types; they agree if the windows begin at one layer.
  return {
    "use_sliding_window": True,
    "sliding_window": lengths.pop(),
    "max_window_layers": first,
    "layer_types": types,
  }
