"""Agents for the tests of the endpoint, and a client."""

import asyncio
import contextlib
import dataclasses
import json

import aiohttp
import numpy as np
from scripted_engine import TOKENIZER

from grpo_jax.data.byte_tokenizer import END
from grpo_jax.engines.base import SamplingParams
from grpo_jax.environments.base import StepResult
from grpo_jax.rollouts.rollout import AttemptLimits, collect_sync
from grpo_jax.serving.policy_server import PolicyServer
from grpo_jax.serving.request_scheduling import ImmediateScheduler
from grpo_jax.serving.session import ServedPolicy, Session
from grpo_jax.serving.terms import RunDecides
from grpo_jax.types import Prompt

SAMPLING = SamplingParams(max_tokens=128, stop_ids=(END,))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> dict:
  return {"role": "user", "content": text}


@contextlib.asynccontextmanager
async def client_of(endpoint):
  """Yields a function (path, body) -> status, answer."""
  headers = {"Authorization": f"Bearer {endpoint.api_key}"}
  async with aiohttp.ClientSession(headers=headers) as http:

    async def post(path, **body):
      body = {"model": endpoint.model, **body}
      async with http.post(f"{endpoint.base_url}/{path}", json=body) as response:
        return response.status, await response.json()

    yield post


class Agent:
  """An agent made from a coroutine function (post, prompt) -> StepResult."""

  def __init__(self, talk, prompt):
    self.talk = talk
    self.prompt = prompt

  async def start(self):
    pass

  async def run(self, endpoint):
    async with client_of(endpoint) as post:
      return await self.talk(post, self.prompt)

  async def close(self):
    pass


class Agents:
  """Their factory."""

  is_agent = True
  timeout_s = None

  def __init__(self, talk, **fields):
    self.talk = talk
    vars(self).update(fields)

  def __call__(self, prompt):
    return Agent(self.talk, prompt)


def prompts(*texts, **fields) -> list[Prompt]:
  """Prompts of chats with one message."""
  return [
    Prompt(
      f"set:0:{number}",
      TOKENIZER.apply_chat_template([user(text)]),
      "env",
      text=text,
      messages=(user(text),),
      **fields,
    )
    for number, text in enumerate(texts)
  ]


def collected(engine, environments, tasks, **overrides):
  """Returns the groups of a step."""
  if not isinstance(environments, dict):
    environments = {"env": environments}
  limits = AttemptLimits(max_turns=9, max_error_share=1.0)
  settings = dict(group_size=1, sampling=SAMPLING, seed=3, step=5, limits=limits)
  return collect_sync(engine, environments, tasks, TOKENIZER, **(settings | overrides))


def policy_of(engine, **fields) -> ServedPolicy:
  made = ServedPolicy(
    scheduler=ImmediateScheduler(engine),
    tokenizer=TOKENIZER,
    sampling=SAMPLING,
    terms=RunDecides(),
    max_tokens=1024,
    tool_form="hermes",
  )
  return dataclasses.replace(made, **fields)


@contextlib.asynccontextmanager
async def served(engine, **fields):
  """Yields a server, one session and its endpoint."""
  server = PolicyServer(model="policy")
  await server.start()
  session = Session(policy_of(engine, **fields), name="p#0", seed=lambda turn: turn)
  try:
    yield server, session, server.open(session)
  finally:
    await server.close()


def against(engine, talk, **fields):
  """Runs talk(post, session) against a server; returns its result."""

  async def run():
    async with served(engine, **fields) as (_, session, endpoint), client_of(endpoint) as post:
      return await talk(post, session)

  return asyncio.run(run())


def bigrams(seed=0) -> np.ndarray:
  """Logits of a fake engine that writes letters and ends now and then."""
  logits = np.full((TOKENIZER.vocab_size, TOKENIZER.vocab_size), -30.0)
  logits[:, ord("a") : ord("z") + 1] = np.random.default_rng(seed).normal(size=26)
  logits[:, END] = 0.0
  return logits


def said(answer) -> dict:
  """Returns the assistant's message of a chat completion."""
  return answer["choices"][0]["message"]


def call_text(name, **arguments) -> str:
  return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solved(reward=1.0, **metrics) -> StepResult:
  return StepResult(reward, done=True, metrics=metrics)
