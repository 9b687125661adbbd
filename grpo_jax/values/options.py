"""Options declared once: fields of a dataclass with a default, a meaning and a kind. Pure.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class FilterOptions:
      min_scored: int = option(1, "drop a group if fewer completions ...", checked.whole(low=0))
      drop_no_signal: bool = option(False, "drop a group if all its rewards are equal")

A kind that says only what the annotation says is left out, as in the second option. The class is a
section of the config: its defaults, its types, its explanations in `--help` and the values that it
accepts all come from here. A field that is declared in another way is not an option.
"""

import collections.abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, TypeVar, cast

from grpo_jax.values import checked

T = TypeVar("T")

_DECLARED = "declared"  # key of a field's metadata.


@dataclasses.dataclass(frozen=True)
class Option:
  """An option of a section.

  Attributes:
    default: Value if a user sets nothing.
    meaning: Explanation in one line, for users.
    kind: Values that it can have.
  """

  default: Any
  meaning: str
  kind: checked.Kind


@dataclasses.dataclass(frozen=True)
class _Undescribed:
  """An option whose kind is that of its annotation, which is read when it is asked for."""

  default: Any
  meaning: str


@dataclasses.dataclass(frozen=True)
class Section:
  """A section within a section.

  Attributes:
    cls: Dataclass of its options.
    meaning: Explanation in one line, for users.
    listed: Options that a config has as None, which means: as in the section that it differs from;
      None: the section has options of its own.
    also: Further options that a config may add to those listed.
    name: Name in an open section of an entry that is there by default; "": not in an open section.
  """

  cls: type
  meaning: str
  listed: tuple[str, ...] | None = None
  also: tuple[str, ...] = ()
  name: str = ""


def option(default: T, meaning: str, kind: checked.Kind | None = None) -> T:
  """Declares a field of a dataclass as an option; None: the kind that its annotation describes."""
  return _field(
    default, _Undescribed(default, meaning) if kind is None else Option(default, meaning, kind)
  )


def section(cls: type[T], meaning: str) -> T:
  """Declares a field of a dataclass as a section with the options of another dataclass."""
  made = dataclasses.field(default_factory=cls, metadata={_DECLARED: Section(cls, meaning)})
  return cast(T, made)


def differences(
  cls: type, meaning: str, listed: tuple[str, ...], also: tuple[str, ...] = ()
) -> Any:
  """Declares a field as the options that differ from another section; None: as it is there.

  Args:
    cls: Dataclass of the other section.
    meaning: Explanation in one line, for users.
    listed: Options that it has.
    also: Further options that a config may add.
  """
  return _field(dict.fromkeys(listed), Section(cls, meaning, listed=listed, also=also))


def named(name: str, cls: type, meaning: str) -> Any:
  """Declares a field as sections that a user names; one of them is there by default.

  Args:
    name: Name of that section.
    cls: Dataclass of its options.
    meaning: Explanation of the field in one line, for users.
  """
  return _field({name: dataclasses.asdict(cls())}, Section(cls, meaning, name=name))


def _field(default: T, declared: Option | _Undescribed | Section) -> T:
  """Returns a dataclass field with the type of its default, as type checkers see it."""
  metadata = {_DECLARED: declared}
  if isinstance(default, Mapping):
    made = dataclasses.field(default_factory=lambda: {**default}, metadata=metadata)
  else:
    made = dataclasses.field(default=default, metadata=metadata)
  return cast(T, made)


@functools.cache
def declared(cls: type) -> Mapping[str, Option | Section]:
  """Returns the options and sections of a dataclass by name, without its other fields."""
  hints = typing.get_type_hints(cls)
  found = {}
  for field in dataclasses.fields(cls):
    each = field.metadata.get(_DECLARED)
    if isinstance(each, _Undescribed):
      each = Option(each.default, each.meaning, _kind(hints[field.name]))
    if each is not None:
      found[field.name] = each
  return found


def _kind(hint: Any) -> checked.Kind:
  """Returns the values that an annotation allows.

  Raises:
    TypeError: The annotation says too little, such as that of a number without a range.
  """
  first, may_be_none = _without_none(hint)
  origin = typing.get_origin(first) or first
  if origin is typing.Literal:
    found = checked.choice(typing.get_args(first))
  elif origin is tuple:
    found = checked.several(_kind(typing.get_args(first)[0]))
  elif origin in _PLAIN:
    found = _PLAIN[origin]()
  else:
    raise TypeError(f"an option of type {hint} needs a kind")
  return checked.optional(found) if may_be_none else found


def _without_none(hint: Any) -> tuple[Any, bool]:
  """Returns the first type of an annotation that is not None, and whether None is another."""
  is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  choices = typing.get_args(hint) if is_union else (hint,)
  return next(each for each in choices if each is not type(None)), type(None) in choices


_PLAIN = {bool: checked.switch, str: checked.text, collections.abc.Mapping: checked.mapping}


def kinds(cls: type) -> dict[str, checked.Kind]:
  """Returns the kind of each option of a dataclass, by name, without those of its sections."""
  return {name: each.kind for name, each in declared(cls).items() if isinstance(each, Option)}


def below(cls: type, path: str = "") -> Iterator[tuple[str, Option]]:
  """Yields every option below a dataclass with its dotted name.

  Options of sections that a user names are not among them; what takes them checks them.
  """
  for name, each in declared(cls).items():
    dotted = f"{path}.{name}" if path else name
    if isinstance(each, Option):
      yield dotted, each
    elif each.listed is not None:
      for last in (*each.listed, *each.also):
        own = declared(each.cls)[last]
        assert isinstance(own, Option)
        yield f"{dotted}.{last}", Option(None, own.meaning, checked.optional(own.kind))
    elif not each.name:
      yield from below(each.cls, dotted)


def meanings(cls: type, path: str = "") -> Iterator[tuple[str, str]]:
  """Yields the meaning of every option and section below a dataclass by dotted name, in order."""
  for name, each in declared(cls).items():
    dotted = f"{path}.{name}" if path else name
    yield dotted, each.meaning
    if isinstance(each, Section):
      inner = f"{dotted}.{each.name}" if each.name else dotted
      for full, of_inner in meanings(each.cls, inner):
        if each.listed is None or full.rpartition(".")[2] in (*each.listed, *each.also):
          yield full, of_inner


def require(made: Any, *, of: str) -> None:
  """Raises one ValueError, "OF: PROBLEM; PROBLEM", unless every option of a dataclass fits.

  Args:
    made: Instance of the dataclass.
    of: Name of its section.
  """
  checked.require(kinds(type(made)), checked.fields_of(made), of=of)


def values(made: Any) -> dict[str, Any]:
  """Returns the options of a dataclass by name, without its other fields."""
  return {name: getattr(made, name) for name in declared(type(made))}


def plain(made: Any) -> dict[str, Any]:
  """Returns a dataclass as dicts and values, as `read` takes them.

  Fields that are not options are left out if they are None.
  """
  found = {}
  known = declared(type(made))
  for field in dataclasses.fields(made):
    each, value = known.get(field.name), getattr(made, field.name)
    if _has_own_options(each):
      found[field.name] = plain(value)
    elif each is not None or value is not None:
      found[field.name] = _copied(value)
  return found


def _copied(value: Any) -> Any:
  """Returns mappings as dicts of their own; other values as they are."""
  return {k: _copied(x) for k, x in value.items()} if isinstance(value, Mapping) else value


def read(cls: type[T], given: Mapping[str, Any]) -> T:
  """Makes a dataclass from values by name; sections are mappings, and what lacks is a default.

  Names that the dataclass does not have are left out. Values are not checked, unless the dataclass
  does so itself.
  """
  found = {}
  known = declared(cls)
  for field in dataclasses.fields(cast(Any, cls)):
    if field.name not in given:
      continue
    each, value = known.get(field.name), given[field.name]
    found[field.name] = read(each.cls, value) if _has_own_options(each) else value
  return cls(**found)


def _has_own_options(each: Option | Section | None) -> TypeGuard[Section]:
  return isinstance(each, Section) and each.listed is None and not each.name


def type_of(cls: type, name: str) -> tuple[type, bool]:
  """Returns the type of a field, and whether it may also be None."""
  first, may_be_none = _without_none(typing.get_type_hints(cls)[name])
  origin = typing.get_origin(first) or first
  return (str if origin is typing.Literal else origin), may_be_none
