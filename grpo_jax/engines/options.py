"""The options of engines, of sampling and of a teacher."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.engines import prompt_scoring
from grpo_jax.engines.sglang_options import SGLangOptions
from grpo_jax.rl.options import DistillationOptions
from grpo_jax.values import checked
from grpo_jax.values.options import option, section

LOGPROBS = ("full", "truncated")
CACHE_DTYPES = ("bfloat16", "int8")
_SIZE = checked.whole(low=1)
USUAL_ROWS = 64  # completions sampled at the same time where memory does not decide.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """What samples completions."""

  name: str = option(
    "jax_sampler", '"jax_sampler", "sglang", or the dotted path of a module of your own'
  )
  max_rows: int | None = option(
    None,
    "completions sampled at the same time, per server; None: as many of a step's as memory holds"
    " (on a CPU, and with servers, 64)",
    checked.whole(low=1, none=True),
  )
  devices: tuple[int, ...] | None = option(
    None,
    "devices of the embedded sampler, by number: (6, 7); the mesh has the others. None: it"
    " samples on the devices of the mesh",
    checked.several(checked.whole(low=0), least=1, none=True),
  )
  cache_dtype: str | None = option(
    None,
    'dtype of the embedded sampler\'s keys and values: "bfloat16", "int8" with a scale for each'
    " token and head; None: model.compute_dtype",
    checked.choice(CACHE_DTYPES, none=True),
  )
  cache_gib: float | None = option(
    None,
    "GiB of each device for keys and values of what the embedded sampler samples; if completions"
    " need more, the youngest wait. None: what memory leaves (on a CPU any number)",
    checked.number(above=0, none=True),
  )
  proof_tokens: int | None = option(
    None,
    "tokens of a step's completions by which the engine is proven to sample from the new weights;"
    " 0: it is not. None: 4096 with servers; 0 with the embedded sampler, which copies the"
    " trainer's own arrays",
    checked.whole(low=0, none=True),
  )
  options: Mapping[str, Any] = option({}, "further arguments of an engine of your own")
  sglang: SGLangOptions = section(SGLangOptions, "SGLang servers: docs/sglang.md")


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
  """How completions are sampled."""

  max_tokens: int = option(
    512, "longest completion of one turn; at the limit it is truncated", checked.whole(low=1)
  )
  temperature: float = option(
    1.0, "divides the logits, in sampling and in training", checked.number(low=0)
  )
  top_k: int = option(0, "sample from the k most likely tokens; 0: from all", checked.whole(low=0))
  top_p: float = option(
    1.0,
    "sample from the most likely tokens with this total probability",
    checked.number(above=0, high=1),
  )
  min_p: float = option(
    0.0,
    "drop tokens less likely than this share of the most likely one",
    checked.number(low=0, high=1),
  )
  stop_strings: tuple[str, ...] = option(
    (), "strings that end a completion", checked.several(checked.nonempty())
  )
  logprobs: str = option(
    "full",
    'distribution that is trained if top_k, top_p or min_p is on: "full": softmax over the'
    ' whole vocabulary; "truncated": the one that is sampled. docs/sampler.md',
    checked.choice(LOGPROBS),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions(DistillationOptions):
  """A model whose logprobs of the sampled tokens become advantages: the section `teacher`."""

  path: str | None = option(
    None,
    "teacher in the trainer: as model.path, or a run: RUN, RUN:STEP, RUN:best; None: not there",
    checked.path(none=True),
  )
  urls: tuple[str, ...] = option((), "teacher at servers: their addresses")
  temperature: float | None = option(
    None,
    "divides the teacher's logits; None: sampling.temperature. Servers score at 1",
    checked.number(above=0, none=True),
  )
  dtype: str | None = option(
    None,
    'dtype of its weights in the trainer\'s memory: "float32", "bfloat16"; None:'
    " model.compute_dtype",
    checked.choice(("float32", "bfloat16"), none=True),
  )
  api: str = option(
    "sglang",
    'kind of servers: "sglang" (http://host:port), "vllm" or "openai" (http://host:port/v1)',
    checked.choice(prompt_scoring.APIS),
  )
  model: str | None = option(None, "name of the model at the servers; vllm and openai need it")
  api_key_env: str | None = option(None, "environment variable with the servers' API key")
  timeout_s: float = option(
    120.0, "limit of one try to have a server score one completion", checked.number(above=0)
  )
  retries: int = option(5, "tries after the first, each at the next server", checked.whole(low=0))
  concurrency: int = option(32, "requests to servers at the same time", _SIZE)
