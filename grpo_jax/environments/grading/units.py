r"""Separates an answer into its value and its unit, and compares units. Pure, linear.

An answer may leave out the unit of the gold answer, or add one, but may not have another unit:
15 and 15 m/s are right for 15\text{ m/s}; 15 km/h is wrong. A unit is a measure (km, hours,
square feet, °, %, dollars, the base of a number: 1011_2) or a thing that is counted (apples).
Measures must be the same, in any spelling; nothing is converted. Of two things, one may be
described more closely: "3 apples" and "3 red apples" agree, "3 apples" and "3 pears" do not.
"""

import dataclasses
import re

_MAX_WORDS = 8

# Every spelling of a measure; the first is its name.
_SPELLINGS = (
  *("m meter metre", "km kilometer kilometre", "cm centimeter centimetre", "mm millimeter"),
  *("in inch inche", "ft foot feet", "yd yard", "mi mile", "s sec second", "min minute"),
  *("h hr hour", "day", "wk week", "month", "yr year", "g gm gram", "kg kilogram"),
  *("mg milligram", "lb pound", "oz ounce", "ton tonne", "l liter litre", "ml milliliter"),
  *("gal gallon", "pt pint", "qt quart", "acre", "ha hectare", "degree deg", "rad radian"),
  *("dollar usd buck", "cent", "euro eur", "gbp", "rupee inr", "yen", "yuan", "hz hertz"),
  *("n newton", "j joule", "w watt", "kw kilowatt", "pa pascal", "v volt", "amp ampere", "mol"),
  *("unit", "kelvin", "byte", "kb kilobyte", "mb megabyte", "percent"),
  *("kj kilojoule", "kpa kilopascal", "khz kilohertz", "mhz megahertz", "ghz gigahertz"),
  *("megaw megawatt", "megaj megajoule", "megapa megapascal"),
  *("ohm Ω", "cal calorie", "kcal", "kwh", "knot", "decade", "century", "µm μm micron micrometer"),
)
_MEASURES = {word: words.split()[0] for words in _SPELLINGS for word in words.split()}
_LETTERS = set("mshglLNJWV")  # a unit if they are alone behind a number and a blank.
_COMPOUND = {
  **{"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s", "fps": "ft/s"},
  **{"in ": "", "cc": "cm^3", "sqft": "ft^2", "sqm": "m^2", "pm": "afternoon", "am": "morning"},
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_IRREGULAR = {
  **{"c": "celsius", "f": "fahrenheit", "people": "person", "men": "man", "women": "woman"},
  **{"children": "child"},
}
# Words that say nothing about what is counted.
_FILLERS = {
  *("a", "an", "the", "of", "in", "total", "altogether", "each", "all", "exactly", "about", "only"),
  *("approximately", "approx", "roughly", "around", "remaining", "left"),
  *("st", "nd", "rd", "th", "way", "answer", "long", "high", "tall", "wide", "deep", "old", "away"),
  *("for", "on", "with"),
}
# Words behind a number that change its value, or that make the text more than one answer.
_NO_UNITS = {
  *("hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "halve", "third"),
  *("quarter", "fourth", "fifth", "tenth", "hundredth", "thousandth", "lakh", "crore", "bn", "mn"),
  *("mod", "and", "or", "not", "less", "more", "time", "minus", "plus", "negative", "below"),
  *("above", "under", "over", "choose", "factorial", "if", "when", "but", "maybe", "perhaps"),
  *("except", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "gcd", "lcm", "max"),
  *("k", "sqrt", "root", "at", "least", "most", "than", "between", "to", "by", "up", "power"),
  *("double", "twice", "triple", "versus", "into", "is", "are", "wrong", "false", "mil", "mille"),
  *("millon", "millone", "millionen", "milliard", "milliarden", "tausend", "hundert", "dutzend"),
  *("douzaine", "docena", "zillion", "kilo", "mega", "ten", "gros"),
  *("either", "bc", "ad", "unless", "instead", "possibly", "correct", "incorrect", "no"),
}
_TOKEN = re.compile(
  r"\\text\{(?P<text>(?:[^{}]|\{-?\d\})*)\}|(?P<word>[A-Za-zµμΩ]+)|(?P<circle>\^\\circ)|(?P<percent>\\%)"
  r"|(?P<sign>\^\{?-?[1-9]\}?|/|\\cdot|\*|\s+|(?<=[A-Za-z])\.|(?<=[A-Za-z]{2})[23](?![\w.]))"
  r"|(?P<other>\\[A-Za-z]+|.)",
  re.DOTALL,
)
_OF_UNIT = re.compile(
  r"(?P<word>[A-Za-zµμΩ]+)|\^\{?(?P<power>-?[1-9])\}?|(?P<digit>(?<=[A-Za-z])[23])|(?P<over>/)"
  r"|(?P<other>[\d\\{}=+_<>])|.",
  re.DOTALL,
)
_ENDS_VALUE = re.compile(r"(?:[\d)}\]]|\\(?:pi|infty|\})|(?<![A-Za-z])[A-Za-z])$")
_CURRENCIES = {r"\$": "dollar", "€": "euro", "£": "gbp", "¥": "yen", "₹": "rupee"}
_FRONT = re.compile(r"(?P<sign>[-+]?) ?(?P<currency>\\\$|[€£¥₹]|(?:USD|EUR|Rs\.?)(?= ?\d)) ?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)\b")
_BASE = re.compile(r"(?P<digits>-?[0-9A-Z]+)_(?:\{(?P<base>\d{1,2})\}|(?P<digit>\d{1,2}))")
_WORD = re.compile(r"\bin +(?=[A-Za-z])|[A-Za-z]+")  # "in total" is not inches.
_AFTERNOON = re.compile(r"(?i)\b([ap])\. ?m\b\.?")
_MEGA = re.compile("M(?:W|J|V|N|Pa|A|L|g|eV|Ω)")
_SHORT = re.compile(rf"(?P<value>-?\d[\d.]*)(?P<unit>[{''.join(sorted(_LETTERS))}])")


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
  """The unit of a number."""

  measures: frozenset[tuple[str, int]] = frozenset()  # (name, power).
  things: frozenset[str] = frozenset()
  base: int | None = None

  @property
  def is_percent(self) -> bool:
    return ("percent", 1) in self.measures

  def agrees_with(self, gold: "Unit") -> bool:
    """Returns whether an answer of this unit may be right; a missing unit agrees with all."""
    if self.base is not None and self.base != (gold.base or 10):
      return False
    mine, others = (self.measures, self.things), (gold.measures, gold.things)
    if not any(mine) or not any(others):
      return not any(mine) or gold.base is None
    are_nested = self.things <= gold.things or gold.things <= self.things
    return self.measures == gold.measures and are_nested


def split(answer: str, *, is_number: bool = False) -> tuple[str, Unit]:
  """Separates value and unit.

  Args:
    answer: Answer, as `notation.latex` returns it.
    is_number: Whether the gold answer is a number. Only then a letter directly behind a number is
      a unit, if there is one of that name: 15m. Otherwise it is a symbol: 15 times m.

  Returns:
    The value, and its unit. If there is no unit, or it cannot be read, the value is the answer.
  """
  if (based := _BASE.fullmatch(answer)) and (base := _base_of(based)):
    return based["digits"], Unit(base=base)
  value, tail = _without_tail(answer)
  if is_number and not tail and (short := _SHORT.fullmatch(value)):
    value, tail = short["value"], short["unit"]
  if front := _FRONT.match(value):
    currency = front["currency"]
    tail = f"{_CURRENCIES.get(currency) or ('rupee' if currency[0] == 'R' else currency)} {tail}"
    value = front["sign"] + value[front.end() :]
  unit = _unit(tail)
  if unit is None:
    return answer, Unit()
  return value if _TRIGONOMETRY.search(value) else value.replace(r"^\circ", ""), unit


def _base_of(found: re.Match[str]) -> int | None:
  """Returns the base of a number; None for a symbol with a subscript, such as A_1."""
  base = int(found["base"] or found["digit"])
  digits = found["digits"].lstrip("-")
  is_number = any(c.isdigit() for c in digits) or (base > 10 and len(digits) > 1)
  return base if 2 <= base <= 36 and is_number else None


def _without_tail(answer: str) -> tuple[str, str]:
  """Returns what is before the unit, and the unit as plain text."""
  tokens = list(_TOKEN.finditer(answer))
  first = len(tokens)
  while first and tokens[first - 1].lastgroup != "other":
    first -= 1
  for place in range(first, len(tokens)):
    token = tokens[place]
    before = answer[: token.start()]
    if token.lastgroup == "circle" and _TRIGONOMETRY.search(answer):
      return answer, ""
    if not _ENDS_VALUE.search(before[-80:].rstrip()):
      continue
    following = tokens[place + 1][0] if place + 1 < len(tokens) else ""
    if {
      "sign": token[0] == "/" and len(following) > 1 and _stem(following) in _MEASURES,
      "word": _begins_unit(token[0], before[-1:]),
    }.get(token.lastgroup or "", True):
      return before.rstrip(), "".join(map(_plain, tokens[place:]))
  return answer, ""


def _plain(token: re.Match[str]) -> str:
  names = {"text": token["text"], "circle": "degree", "percent": "percent"}
  known = names.get(token.lastgroup or "")
  return f" {known} " if known else token[0].replace(r"\cdot", " ")


def _begins_unit(word: str, before: str) -> bool:
  """Returns whether letters behind a value are a unit, and not symbols."""
  is_known = word.lower() in _COMPOUND or _stem(word) in _MEASURES
  if (len(word) > 1 and is_known) or len(word) > 4 or word in ("st", "nd", "rd", "th", "Ω"):
    return True
  return before == " " and (len(word) > 2 or word in _LETTERS or word.lower() in _POWERS)


def _unit(text: str) -> Unit | None:
  """Reads the text of a unit; None if it is not one."""
  text = _AFTERNOON.sub(r"\1m", text)
  text = _WORD.sub(lambda found: _COMPOUND.get(found[0].lower(), found[0]), text)
  measures: dict[str, int] = {}
  things: set[str] = set()
  power, sign, last, words = 1, 1, "", 0
  for token in _OF_UNIT.finditer(text):
    if token["other"]:
      return None
    if token["over"] or (token["word"] or "").lower() in ("per", "p"):
      sign = -1
    elif (number := token["power"] or token["digit"]) and last:
      measures[last] *= int(number)
    elif word := token["word"]:
      words += 1
      stem = _stem(word)
      is_power = word.lower() in _POWERS_BEHIND
      if stem in _NO_UNITS or word in ("M", "B") or (is_power and not last) or words > _MAX_WORDS:
        return None
      if word.lower() in _POWERS:
        power = _POWERS[word.lower()]
      elif is_power:
        measures[last] *= _POWERS_BEHIND[word.lower()]
      elif stem in _MEASURES:
        last = _MEASURES[stem]
        measures[last] = measures.get(last, 0) + sign * power
        power = 1
      elif stem not in _FILLERS:
        things.add(stem)
  return Unit(frozenset(measures.items()), frozenset(things))


def _stem(word: str) -> str:
  """Returns a word in lower case, in the singular, as far as rules find it."""
  if _MEGA.fullmatch(word):  # 5 MW is not 5 mW.
    return f"mega{word[1:].lower()}"
  word = word.lower()
  word = _IRREGULAR.get(word, word)
  if len(word) > 3 and word.endswith("ies"):
    return f"{word[:-3]}y"
  if len(word) > 4 and word.endswith(("xes", "ches", "shes", "sses")):
    return word[:-2]
  return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
