"""Reward functions of the tests, named by dotted path in their configs."""

import time


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


def broken(prompt: str, completion: str, info) -> float:
  """Fails always."""
  raise LookupError("this reward is broken")


def broken_for_some(prompt: str, completion: str, info) -> float:
  """Fails where the completion is long for its prompt."""
  if len(completion) > 3 + int(info["expected_answer"]) // 2:
    raise LookupError("this reward is broken here")
  return vowels(prompt, completion, info)


def vowels_of_some(prompt: str, completion: str, info) -> float:
  """Gives every third prompt no signal; the others `vowels`."""
  if int(info["expected_answer"]) // 2 % 3 == 0:
    return 0.25
  return vowels(prompt, completion, info)


def vowels_and_brevity(prompt: str, completion: str, info) -> dict[str, float]:
  """Two components that want different things, of which one is larger by far."""
  brevity = 10.0 if len(completion) <= 4 else 0.0
  return {"brevity": brevity, "vowels": vowels(prompt, completion, info)}


def slow_for_some(prompt: str, completion: str, info) -> float:
  """Takes a second and more where the completion is long."""
  if len(completion) > 4:
    time.sleep(1.5)
  return vowels(prompt, completion, info)
