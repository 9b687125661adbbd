"""Reward functions of the tests, named by dotted path in their configs."""


def vowels(prompt: str, completion: str, info) -> float:
  """The share of vowels among eight letters: a tiny model learns it in a few steps."""
  del prompt, info
  return sum(letter in "aeiou" for letter in completion[:8]) / 8


def constant(prompt: str, completion: str, info) -> float:
  """Gives no group any signal."""
  del prompt, completion, info
  return 1.0


def variety(prompt: str, completion: str, info) -> float:
  """How many different characters there are: whatever is sampled, groups have signal."""
  del prompt, info
  return float(len(set(completion)))
