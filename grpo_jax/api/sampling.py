"""Answers of a run's weights, before and after training, by the embedded sampler."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from grpo_kernels.attention import Attention

from grpo_jax import data
from grpo_jax.building import kept_programs, policy_model, stored, stored_engine, weights_spec
from grpo_jax.config import configuration, device_options, lora_options, run_options
from grpo_jax.config.configuration import ConfigError
from grpo_jax.data import formats, prompts
from grpo_jax.engines.base import Generation, GenerationRequest, SamplingParams
from grpo_jax.engines.jax_sampler import JaxSampler
from grpo_jax.learn import adapters
from grpo_jax.models import loading, parameter_reading
from grpo_jax.models.fields import Fields
from grpo_jax.rollouts.loop_thread import LoopThread
from grpo_jax.values import options

Messages = Sequence[Mapping[str, Any]]
if TYPE_CHECKING:
  Prompts = str | Messages | Sequence[str | Messages]
else:
  Prompts = Any  # checked here, with a message of our own.


class Sampler:
  """Samples from the checkpoints of a run.

  It keeps its compiled programs (those of the run's own sampler) and the weights that
  answered last.
  """

  def __init__(self, workdir: pathlib.Path, config: configuration.AnyConfig):
    """Makes a sampler; nothing is loaded before it is needed.

    Args:
      workdir: Run folder.
      config: Config of the run.
    """
    self._workdir = workdir
    self._config = configuration.typed(config)
    self._engine: JaxSampler | None = None
    self._loaded: tuple[str, loading.Loaded] | None = None  # label, weights.
    self._tokenizer: data.Tokenizer | None = None

  def load(self, step: int | None, *, before: bool) -> loading.Loaded:
    """Reads the weights of a checkpoint, or the initial weights.

    An adapter and its base are two parts of a kernel; see `models.products.LowRank`.

    Args:
      step: Step of the checkpoint; None: the newest one.
      before: Whether they are the initial weights, those of `model.path` without an adapter.

    Raises:
      NoWeights, WeightsError, ModelError: The weights do not exist, or cannot be read.
    """
    if before:
      found = self._began_with()
    else:
      found = stored.find(
        stored.WeightsReference(str(self._workdir), "latest" if step is None else step)
      )
    if self._loaded is None or self._loaded[0] != found.label:
      self._loaded = None  # never two sets of weights in memory.
      like = stored_engine.described(found, device_options.trainer_mesh(self._config))
      self._loaded = found.label, stored.load(found, like=like)
    return self._loaded[1]

  def params(self) -> Any:
    """Reads all weights of the newest checkpoint as float32 arrays; an adapter is merged.

    Raises:
      NoWeights, WeightsError, ModelError: As for `load`.
    """
    found = stored.find(stored.WeightsReference(str(self._workdir), "latest"))
    if found.adapter is None:
      return self.load(None, before=False).params
    self._loaded = None  # never two sets of weights in memory.
    shardings = weights_spec.shardings_of(found.config, device_options.trainer_mesh(self._config))
    return parameter_reading.read_params(found.tensors, found.config, sharding=lambda _: shardings)

  def sample(
    self,
    asked: Prompts,
    *,
    step: int | None,
    before: bool,
    temperature: float,
    max_tokens: int | None,
    seed: int,
  ) -> Any:
    """Returns answers; see `Run.sample`."""
    if step is not None and before:
      raise ConfigError("give step, or before=True for the initial weights")
    conversations, is_one = _conversations(asked)
    kept_programs.keep()
    model = self.load(step, before=before)
    if self._tokenizer is None:
      self._tokenizer = policy_model.load_tokenizer(self._config, model.directory)
    tokenizer = self._tokenizer
    named = Fields(model.generation, "generation_config.json").ids("eos_token_id")
    try:
      sampling = SamplingParams(
        max_tokens=self._config.sampling.max_tokens if max_tokens is None else max_tokens,
        temperature=temperature,
        stop_ids=tuple(sorted({*tokenizer.stop_ids, *named})),
        stop_strings=tuple(self._config.sampling.stop_strings),
      )
      style = self._style()
      requests = [
        GenerationRequest(
          str(number),
          tokenizer.apply_chat_template(
            formats.ask(each, style) if isinstance(each, str) else each
          ),
          sampling,
          _seed(seed, number),
        )
        for number, each in enumerate(conversations)
      ]
      found = self._generate(model, tokenizer, requests)
    except ValueError as error:
      raise ConfigError(f"sample: {error}") from error
    answers = [tokenizer.decode(found[r.request_id].token_ids, skip_special=True) for r in requests]
    return answers[0] if is_one else answers

  def _generate(
    self,
    model: loading.Loaded,
    tokenizer: data.Tokenizer,
    requests: Sequence[GenerationRequest],
  ) -> dict[str, Generation]:
    """Samples from a model; the engine's copy of the weights is freed afterwards."""
    engine = self._engine = self._engine or self._make_engine(model, tokenizer)
    engine.load_weights(model.params, version=0)
    try:
      with LoopThread() as loop:
        return loop.run(_collect(engine, requests))
    finally:
      engine.release()

  def _make_engine(self, model: loading.Loaded, tokenizer: data.Tokenizer) -> JaxSampler:
    """Makes an engine of the sizes of the run's own, whose compiled programs are kept."""
    section = self._config.model
    return JaxSampler(
      model.config,
      decode=lambda ids: tokenizer.decode(ids, skip_special=False),
      compute_dtype=section.compute_dtype,
      product_dtype=section.product_dtype,
      matmul_precision=section.matmul_precision,
      attention=Attention(section.attention),
      num_valid_tokens=tokenizer.vocab_size,
      unmerged=lora_options.is_unmerged(self._config),
      **run_options.sampler_sizes(self._config),
    )

  def _style(self) -> formats.PromptStyle:
    """Returns how the training data ask a problem."""
    return prompts.style_of(options.values(self._config.data))

  def _began_with(self) -> stored.StoredWeights:
    """Opens the model of `model.path`, rounded as the base of an adapter is."""
    found = stored.find(stored.WeightsReference(self._initial(), None))
    adapter = lora_options.of_stored(self._config)
    if adapter is None:
      return found
    return dataclasses.replace(found, dtypes=adapters.read_dtypes(adapter))

  def _initial(self) -> str:
    model = self._config.model
    taken = model.fallback_taken
    return taken["taken"] if taken else model.path


async def _collect(
  engine: JaxSampler, requests: Sequence[GenerationRequest]
) -> dict[str, Generation]:
  return {each.request_id: each async for each in engine.generate(requests)}


def _conversations(asked: Prompts) -> tuple[list[Any], bool]:
  """Returns problems and conversations, and whether it is only one that is not in a list.

  Raises:
    ConfigError: The value is neither of these.
  """
  wanted = 'a string, a list of messages such as {"role": "user", "content": "..."}, or a list of'
  if isinstance(asked, str):
    return [asked], True
  if isinstance(asked, Sequence) and asked:
    if all(_is_message(each) for each in asked):
      return [list(asked)], True
    if all(isinstance(e, str) or (_is_list(e) and all(map(_is_message, e))) for e in asked):
      return list(asked), False
  raise ConfigError(f"sample: a prompt is {wanted} these; got {asked!r:.80}")


def _is_list(value: Any) -> bool:
  return isinstance(value, list | tuple) and bool(value)


def _is_message(value: Any) -> bool:
  return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _seed(seed: int, number: int) -> int:
  return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])
