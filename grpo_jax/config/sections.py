"""Sections of a loaded configuration, which explain a mistyped field in one line."""

from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from grpo_jax.config import other_programs, removed
from grpo_jax.config.options import ALSO
from grpo_jax.values import names

# Fields of other programs that are left out on purpose, by dotted name: why.
LEFT_OUT: Mapping[str, str] = {
  "model.lora.dropout": (
    "dropout makes the policy that is trained, the one that sampled and the reference differ by"
    " chance, so that their ratios and the KL are noise; recipes for GRPO set it to 0"
  ),
  "model.lora.use_dora": (
    "DoRA normalises every column of W + A B again, so that an adapter is no longer a difference of"
    " low rank: SGLang cannot serve it, and the base would not be the reference"
  ),
}
_CALLED = {"dora": "use_dora", "lora_dropout": "dropout", "dropout_position": "dropout"}


class Section(ConfigDict):
  """A ConfigDict for notebooks: suggests the nearest field, and is shown as indented text."""

  _path = ""  # dotted path of this section, such as "loss".

  def __getattr__(self, name: str) -> Any:
    """Returns the value of a field.

    Raises:
      AttributeError: The field does not exist; the message names the nearest one.
    """
    if name.startswith("_"):  # Python and IPython ask for many of these.
      raise AttributeError(name)
    if name not in self:
      raise AttributeError(self._explain(name))
    return self[name]

  def __setattr__(self, name: str, value: Any) -> None:
    """Sets an existing field; for any other name raises AttributeError with the nearest field."""
    if not self._takes(name):
      raise AttributeError(self._explain(name))
    super().__setattr__(name, value)

  def __setitem__(self, name: Any, value: Any) -> None:
    """Sets an existing field; for any other name raises KeyError with the nearest field."""
    if not self._takes(name):
      raise KeyError(self._explain(str(name)))
    if isinstance(value, dict):
      value = ConfigDict(value)
    if isinstance(value, ConfigDict):
      value = adopt(value, self._below(str(name)))
      if self.is_locked:
        value.lock()
    if name in self:
      super().__setitem__(name, value)
    else:
      with self.unlocked():
        super().__setitem__(name, value)

  def __repr__(self) -> str:
    """Returns one line per field, with sections indented."""
    return "\n".join(_lines(self, "")) or "{}"

  __str__ = __repr__

  def _takes(self, name: Any) -> bool:
    """Returns whether a field can be set: it is there, is one of ALSO, or nothing is locked."""
    return not self.is_locked or name in self or self._below(str(name)) in ALSO

  def _below(self, name: str) -> str:
    return f"{self._path}.{name}" if self._path else name

  def _explain(self, name: str) -> str:
    if reason := left_out(self._below(name)):
      return reason
    dotted = dict.fromkeys(_dotted(self))
    known = known_in(self, self._path)
    close = names.nearest(name, known, cutoff=0.6)
    close = close or [each for each in dotted if each.rpartition(".")[2] == name][:3]
    close = close or names.nearest(name, dotted, cutoff=0.6)
    near = names.did_you_mean(self._below(each) for each in close)
    hint = other_programs.hint(self._below(name)) or near
    listed = ", ".join(known) or "no field"
    return f"there is no field {self._below(name)!r}{hint}; {self._path or 'it'} has: {listed}"


def known_in(section: ConfigDict, path: str) -> list[str]:
  """Returns the names that a section can have, also those that it does not have by default.

  Args:
    section: Section of a configuration.
    path: Dotted path of the section.
  """
  here = [str(key) for key in section.keys()]
  of_section = [name.rpartition(".") for name in ALSO]
  return here + [name for of, _, name in of_section if of == path and name not in here]


def left_out(name: str) -> str | None:
  """Returns why there is no such field, if it was left out or removed on purpose; otherwise None.

  Args:
    name: Dotted name, such as "model.lora.dropout".
  """
  path, _, last = name.rpartition(".")
  reason = LEFT_OUT.get(f"{path}.{_CALLED.get(last, last)}")
  on_purpose = reason and f"there is no field {name!r}, on purpose: {reason}"
  return on_purpose or removed.explanation(name)


def adopt(config: ConfigDict, path: str = "") -> Section:
  """Makes a ConfigDict and all ConfigDicts below it Sections; keeps fields and references.

  Args:
    config: Configuration, changed in place.
    path: Dotted path from the configuration to it.

  Returns:
    The same object.
  """
  object.__setattr__(config, "__class__", Section)  # a copy would lose the references.
  object.__setattr__(config, "_path", path)
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      adopt(value, f"{path}.{name}" if path else str(name))
  assert isinstance(config, Section)
  return config


def _dotted(section: ConfigDict) -> Iterator[str]:
  for name, value in section.items():
    below = _dotted(value) if isinstance(value, ConfigDict) else ()
    yield from (f"{name}.{each}" for each in below)
    yield str(name)


def _lines(section: ConfigDict, margin: str) -> Iterator[str]:
  for name, value in section.items():
    if isinstance(value, ConfigDict) and len(value):
      yield f"{margin}{name}:"
      yield from _lines(value, f"{margin}  ")
    else:
      yield f"{margin}{name}: {'{}' if isinstance(value, ConfigDict) else repr(value)}"
