"""Turns of a session: found by their tokens and texts, which are kept once."""

import asyncio
import random

import numpy as np
from made_agents import client_of, served, user
from scripted_engine import ScriptedEngine

from grpo_jax.serving.prefixes import Prefixes
from grpo_jax.serving.turns import TurnIndex

ANSWER = "The sum is 3, and the product is 2."


def test_prefixes_are_found_as_by_comparing_with_all():
  rng = random.Random(0)
  for _ in range(30):
    tree, kept = Prefixes(), []
    for value in range(40):
      if kept and rng.random() < 0.2:
        node, _, gone = kept.pop(rng.randrange(len(kept)))
        tree.remove(node, gone)
      base = rng.choice(kept)[1] if kept and rng.random() < 0.7 else ()
      ids = (*base[: rng.randint(0, len(base))], *(rng.randint(0, 1) for _ in range(3)))
      begun = [each for each in kept if each[1] == ids[: len(each[1])]]
      longest = max((len(each[1]) for each in begun), default=0)
      expected = next((each[2] for each in begun if len(each[1]) == longest), None)
      assert tree.longest(np.asarray(ids, np.int32)) == expected
      after = rng.choice([None, *begun])
      known = 0 if after is None else len(after[1])
      node = tree.add(np.asarray(ids[known:], np.int32), value, after=after and after[0])
      kept.append((node, ids, value))
      assert all(tuple(node.whole.tolist()) == ids for node, ids, _ in kept)


def test_a_conversation_takes_memory_for_its_text_once():
  def size(turns: TurnIndex) -> int:
    todo, numbers = [turns._tokens._root, turns._texts._root], 0
    while todo:
      node = todo.pop()
      numbers += len(node.own)
      todo += node.children.values()
    return numbers

  async def run(fields):
    engine = ScriptedEngine(lambda request: ANSWER)
    async with served(engine, max_tokens=10**6) as (_, session, endpoint):
      async with client_of(endpoint) as post:
        for number in range(20):
          await post(**fields(number))
      return size(session._turns), max(len(turn.token_ids) for turn in session.turns)

  text = "x" * 100
  kept, longest = asyncio.run(run(lambda n: dict(path="completions", prompt=text * (n + 1))))
  sampled = len(ANSWER) + 1
  assert kept <= 2 * longest + 20 * 2 * sampled
  many = lambda n: dict(path="chat/completions", messages=[user(text)] * (n + 1))
  kept, longest = asyncio.run(run(many))
  assert kept <= longest + 20 * (sampled + 20)
