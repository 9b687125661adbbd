"""What requests may ask of an endpoint: its owner decides, a run that trains or a user. Pure."""

import dataclasses
from typing import Protocol, runtime_checkable

from grpo_jax.engines.base import SamplingParams
from grpo_jax.serving.request_errors import RequestError
from grpo_jax.serving.request_fields import RequestOptions, shown_field


@runtime_checkable
class Terms(Protocol):
  """What requests may ask."""

  def granted(
    self, wanted: RequestOptions, own: SamplingParams, *, prompts: int = 1
  ) -> RequestOptions:
    """Returns the options with which a request is answered.

    Args:
      wanted: Options of the request.
      own: Sampling options of requests that do not say otherwise.
      prompts: Number of its prompts.

    Raises:
      RequestError: The request asks for more than is granted; names the field.
    """
    ...


class RequestDecides:
  """A request's own sampling counts: for trying and evaluating a model."""

  def granted(
    self, wanted: RequestOptions, own: SamplingParams, *, prompts: int = 1
  ) -> RequestOptions:
    """Grants everything; see `Terms.granted`.

    A request that asks for what it would get again (a seed, temperature 0, logprobs of its prompt)
    does not continue the tokens of earlier answers.
    """
    del prompts
    is_greedy = wanted.sampling.get("temperature", own.temperature) == 0
    is_repeatable = is_greedy or wanted.seed is not None or wanted.echoes
    return dataclasses.replace(wanted, is_repeatable=is_repeatable)


class RunDecides:
  """A run samples as its config says, because it trains the distribution that it samples from."""

  def granted(
    self, wanted: RequestOptions, own: SamplingParams, *, prompts: int = 1
  ) -> RequestOptions:
    """Grants what samples as the run does; see `Terms.granted`."""
    for name, value in wanted.sampling.items():
      if value != (its := getattr(own, name)):
        raise _refused(name, value, f"it samples with {name}={its!r}; leave it out")
    if wanted.seed is not None:
      raise _refused("seed", wanted.seed, "it has seeds of its own; leave it out")
    if wanted.choices > 1:
      raise _refused("n", wanted.choices, "ask several times")
    if prompts > 1:
      message = f"{_PLACE} takes one prompt at a time, and `prompt` has {prompts}"
      raise RequestError(message, param="prompt")
    if wanted.echoes:
      raise _refused("echo", True, "it answers with what was sampled")
    if wanted.alternatives:
      name = wanted.alternatives_field
      why = f"it reports the logprobs of sampled tokens only, with {name}=0"
      raise _refused(name, wanted.alternatives, why)
    most = own.max_tokens if wanted.max_tokens is None else min(wanted.max_tokens, own.max_tokens)
    return dataclasses.replace(wanted, max_tokens=most, sampling={})


_PLACE = "the endpoint of a run"


def _refused(name: str, value: object, why: str) -> RequestError:
  message = f"{shown_field(name, value)} is not supported by {_PLACE}: {why}"
  return RequestError(message, param=name)
