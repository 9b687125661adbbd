"""A reward from an HTTP server: a judge, a reward model that SGLang serves, or one of your own.

  judge     OpenAI's POST …/chat/completions: a model is asked, and writes the score
  classify  SGLang's POST …/classify (a reward model served with --is-embedding)
  json      POST {"messages", "completion", "info"}, answered by {"reward": number}

A request is retried after a pause if the server hangs, disconnects or is overloaded, but not if
the server rejects it. An attempt without a score fails; see scoring/client.py.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from grpo_jax.environments.base import Environment, EnvironmentFactory, SingleTurn, StepResult
from grpo_jax.environments.scoring import conversation, formats
from grpo_jax.environments.scoring.client import EndpointClient, EndpointRetryPolicy
from grpo_jax.http import addresses
from grpo_jax.models import sources
from grpo_jax.registry import check_arguments, choose
from grpo_jax.types import Prompt


@runtime_checkable
class Format(Protocol):
  """The requests and answers of a kind of server."""

  @property
  def route(self) -> str:
    """Path that is appended to the url."""
    ...

  def body(self, prompt: Prompt, completion: str) -> Mapping[str, Any]:
    """Returns the body of the request."""
    ...

  def read(self, answer: Any) -> float:
    """Returns the score in the answer; raises EndpointUnreadable if there is no score."""
    ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
  """A model that is asked to write a score."""

  model: str
  prompt_template: str = formats.JUDGE_TEMPLATE
  system_prompt: str | None = None
  score_pattern: str = formats.JUDGE_PATTERN
  score_low: float = 0.0
  score_high: float = 10.0
  temperature: float = 0.0
  max_tokens: int = 512
  request: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  route = "/chat/completions"

  def __post_init__(self):
    formats.check_template(self.prompt_template)
    if re.compile(self.score_pattern).groups < 1:
      raise ValueError(f"score_pattern needs a group for the number, got {self.score_pattern!r}")

  def body(self, prompt: Prompt, completion: str) -> Mapping[str, Any]:
    messages = conversation.from_attempt(prompt, completion)
    values = formats.template_values(messages, prompt.info)
    system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
    question = {"role": "user", "content": formats.fill(self.prompt_template, values)}
    return {
      "model": self.model,
      "messages": [*system, question],
      "temperature": self.temperature,
      "max_tokens": self.max_tokens,
      **self.request,
    }

  def read(self, answer: Any) -> float:
    pattern = re.compile(self.score_pattern)
    return formats.judged(answer, pattern, self.score_low, self.score_high)


class Classify:
  """A sequence classifier behind SGLang's native API. Tokens are sent and not text, to which the
  server would add a second beginning-of-sequence token."""

  route = "/classify"

  def __init__(
    self,
    *,
    tokenizer: str,
    chat_template: str | None = None,
    label: int = 0,
    request: Mapping[str, Any] | None = None,
  ):
    self._encoder = conversation.load_encoder(
      sources.resolve(tokenizer), chat_template=chat_template
    )
    self._label = label
    self._request = dict(request or {})

  def body(self, prompt: Prompt, completion: str) -> Mapping[str, Any]:
    ids = self._encoder.encode(conversation.from_attempt(prompt, completion))
    return {"input_ids": ids.tolist(), **self._request}

  def read(self, answer: Any) -> float:
    return formats.classified(answer, self._label)


class OwnServer:
  """A server of the user."""

  route = ""

  def __init__(self, *, request: Mapping[str, Any] | None = None):
    self._request = dict(request or {})

  def body(self, prompt: Prompt, completion: str) -> Mapping[str, Any]:
    own = {
      "messages": list(prompt.messages),
      "prompt": prompt.text,
      "completion": completion,
      "info": dict(prompt.info),
    }
    # Field types that JSON lacks (dates, ...) are sent as strings.
    return {**json.loads(json.dumps(own, default=str)), **self._request}

  def read(self, answer: Any) -> float:
    return formats.rewarded(answer)


class RewardEndpointEnvironments(EnvironmentFactory):
  """Makes the environments, which share the connections."""

  observation_roles = ()

  def __init__(self, client: EndpointClient, asking: Format, *, shift: float, scale: float):
    self._client = client
    self._asking = asking
    self._shift = shift
    self._scale = scale

  def __call__(self, prompt: Prompt) -> Environment:
    return SingleTurn(self._judge, prompt)

  def metrics(self) -> dict[str, float]:
    """Returns the number of calls, tries, retries and failed calls, by kind."""
    return {f"endpoint_{name}": value for name, value in self._client.counts().items()}

  def close(self) -> None:
    """Aborts the calls and closes the connections."""
    self._client.close()

  async def _judge(self, prompt: Prompt, text: str) -> StepResult:
    score = await self._client.post(self._asking.body(prompt, text), self._asking.read)
    return StepResult((score - self._shift) * self._scale, done=True, metrics={"score": score})


def make(
  *,
  url: str,
  format: str = "judge",
  settings: Mapping[str, Any] | None = None,
  api_key_env: str | None = None,
  shift: float = 0.0,
  scale: float = 1.0,
  timeout_s: float = 30.0,
  total_timeout_s: float = 50.0,
  retries: int = 3,
  backoff_s: float = 0.5,
  max_backoff_s: float = 10.0,
  max_failed_calls: int = 16,
  concurrency: int = 32,
) -> RewardEndpointEnvironments:
  """Makes the environment of an endpoint. The first attempt sends the first request.

  Args:
    url: Address of the server: "http://HOST:PORT/v1" for "judge", "http://HOST:PORT" for
      "classify", the complete address for "json".
    format: "judge", "classify" or "json".
    settings: Keyword arguments of the format, i.e. of `Judge`, `Classify` or `OwnServer`;
      `request` adds fields to the body of every request.
    api_key_env: Name of the environment variable with the key, sent as a bearer token; the
      key itself appears in no config, log or error.
    shift: Offset of the reward: reward = (score - shift) * scale.
    scale: Factor of the reward; see shift.
    timeout_s: Longest time of one try, in seconds.
    total_timeout_s: Longest time of one score, with all tries and pauses, in seconds; less than
      `rollout.environment_timeout_s`.
    retries: Number of tries after the first. Retried are calls without a connection, without a
      complete answer in time, with an answer of 429 or 5xx, or without a score; never another 4xx.
    backoff_s: First pause, in seconds; it doubles with each try.
    max_backoff_s: Longest pause, in seconds, even if the server asks for more (Retry-After).
    max_failed_calls: Number of consecutive failed scores after which no more requests are made: all
      later ones fail at once (EndpointGivenUp), and `rollout.max_error_share` stops the run.
    concurrency: Number of simultaneous requests.

  Returns:
    A factory of environments. Metric of an attempt: score (before shift and scale).

  Raises:
    ValueError: The address is invalid, the key is not set, or a setting is unknown.
  """
  patience = EndpointRetryPolicy(
    timeout_s=timeout_s,
    total_timeout_s=total_timeout_s,
    retries=retries,
    backoff_s=backoff_s,
    max_backoff_s=max_backoff_s,
    max_failed_calls=max_failed_calls,
    concurrency=concurrency,
  )
  make_format = choose("format", format, FORMATS)
  check_arguments(f"settings of format {format!r}", make_format, settings or {})
  asking = make_format(**(settings or {}))
  client = EndpointClient(
    addresses.address(url, asking.route), patience, secret=addresses.key(api_key_env)
  )
  return RewardEndpointEnvironments(client, asking, shift=shift, scale=scale)


FORMATS: dict[str, Callable[..., Format]] = {
  "judge": Judge,
  "classify": Classify,
  "json": OwnServer,
}
