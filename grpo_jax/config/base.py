"""The config that every config begins with. Configs call `get_config` and change a few options.

The options, with their defaults, units and meanings, are in `config/options.py` and in the classes
that it names. They are overridden on the command line: `--config.loss.clip_high=0.28`. Unknown
options are rejected. Durations end in `_s` and are in seconds, shares are between 0 and 1, and
`None` means that an option is off.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference
from ml_collections.config_dict import placeholder

from grpo_jax.config.options import Config
from grpo_jax.values import options


def get_config() -> Any:
  """Returns the defaults: GRPO with the settings of NeMo RL's `grpo_math_1B.yaml`."""
  return _section(Config)


def _section(cls: type, listed: tuple[str, ...] | None = None) -> ConfigDict:
  """Returns the options of a dataclass.

  Args:
    cls: Dataclass with options.
    listed: Options to return, all of them None; None: all options with their defaults.
  """
  made = ConfigDict()
  for name, each in options.declared(cls).items():
    if isinstance(each, options.Section):
      inner = _section(each.cls, each.listed)
      if each.name:
        made[name] = sections = ConfigDict()
        sections[each.name] = inner
      else:
        made[name] = inner
    elif listed is None or name in listed:
      kind, may_be_none = options.type_of(cls, name)
      made[name] = _value(each.default if listed is None else None, kind, may_be_none)
  return made


def _value(default: Any, kind: type, may_be_none: bool) -> Any:
  """Returns a default in the form that lets ml_collections check the type of later values."""
  if default is None:
    return placeholder(kind)
  if may_be_none:
    return FieldReference(default)
  return ConfigDict(dict(default)) if isinstance(default, Mapping) else default
