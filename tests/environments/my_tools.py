"""Tools of a user, for tests: a module whose public functions a model may call."""

import asyncio
import dataclasses
import enum
import json as _json  # what a module imports is not a tool.
import time
from collections.abc import Mapping, Sequence
from typing import (
  Annotated,
  Any,
  Literal,
  NotRequired,  # pydantic needs it on Python 3.11.
)

from typing_extensions import TypedDict


class Unit(enum.Enum):
  CELSIUS = "celsius"
  KELVIN = "kelvin"


@dataclasses.dataclass
class Place:
  name: str
  height: float = 0.0


class Filter(TypedDict):
  word: str
  whole: NotRequired[bool]


def weather(
  place: Place,
  days: int = 1,
  unit: Unit = Unit.CELSIUS,
  how: Literal["short", "long"] = "short",
) -> str:
  """Tells the weather of a place.

  It is always
  fine.

  Args:
    place: Where: a name, and
      its height in metres.
    days (int): Number of days.
    unit: Unit of the temperature.
    how: Length of the text.

  Returns:
    The weather.
  """
  return f"{type(place).__name__} {place.name} {place.height!r} {days!r} {unit} {how}"


async def search(
  words: Sequence[str],
  *,
  filters: Filter | None = None,
  weights: Mapping[str, float] | None = None,
  limit: int | None = None,
  key: int | str = "a",
  pair: tuple[int, str] = (1, "a"),
  anything: Any = None,
  noted: Annotated[bool, "Whether it is noted."] = False,
) -> dict[str, Any]:
  """Searches.

  :param words: Words to search for.
  """
  await asyncio.sleep(0)
  found = {key: value for key, value in locals().items() if key != "words"}
  return {"words": [*words], **_json.loads(_json.dumps(found))}


def sleeps(seconds: float) -> None:
  time.sleep(seconds)


async def waits(seconds: float) -> None:
  await asyncio.sleep(seconds)


def fails(how: str) -> None:
  raise SystemExit(3) if how == "exit" else KeyError(how)


def returns(what: str) -> Any:
  return {
    "text": "ü\nx",
    "surrogate": "\ud800",
    "set": {1},
    "object": Place("x"),
    "nan": float("nan"),
    "long": "x" * 100_000,
    "none": None,
  }[what]


def _hidden(x: int) -> int:
  return x
