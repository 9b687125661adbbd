"""Text models inside folders of several modalities: their config.json, their tensors' names. Pure.

Only the text model is read. What is exported is a folder of the text model alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from grpo_jax.models.errors import ModelError
from grpo_jax.models.fields import Fields


@dataclasses.dataclass(frozen=True)
class Around:
  """The part of a model of several modalities that is not its text model.

  Attributes:
    text: Architecture of the text model.
    text_type: Its model_type.
    prefixes: Beginnings of the names of its tensors → those in a folder of the text model.
    others: Beginnings of the names of all other tensors.
    decoder: Module of transformers 5 that holds the layers of the text model.
  """

  text: str
  text_type: str
  prefixes: Mapping[str, str]
  others: tuple[str, ...]
  decoder: str


# By config.json's architectures[0]. Files of transformers up to 4.51 and those that 5 saves differ
# in the order of "model." and the name of the part.
_AROUND = {
  "Gemma3ForConditionalGeneration": Around(
    text="Gemma3ForCausalLM",
    text_type="gemma3_text",
    prefixes={
      "language_model.model.": "model.",
      "language_model.lm_head.": "lm_head.",
      "model.language_model.": "model.",
    },
    others=(
      "vision_tower.",
      "multi_modal_projector.",
      "model.vision_tower.",
      "model.multi_modal_projector.",
    ),
    decoder="model.language_model",
  )
}
ARCHITECTURES = tuple(_AROUND)
_TYPES = {"gemma3": "Gemma3ForConditionalGeneration"}

# Fields of the whole model that hold for its text model, too.
_SHARED = (
  *("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
  *("dtype", "torch_dtype", "transformers_version", "quantization_config"),
)


def text_config(hf: Mapping[str, Any], where: str = "config.json") -> Mapping[str, Any]:
  """Returns the config.json of the text model alone; that of another model unchanged.

  Args:
    hf: Parsed config.json.
    where: Place of the content, for errors.

  Raises:
    ModelError: There is no `text_config`, or it is of another model.
  """
  around = _around(hf, where)
  if around is None:
    return hf
  fields = Fields(hf, where)
  own = fields.section("text_config")
  if own.get("model_type", around.text_type) != around.text_type:
    raise ModelError(
      f"{where}: text_config has model_type {own['model_type']!r}, {around.text_type!r} is needed"
    )
  shared = {name: hf[name] for name in _SHARED if hf.get(name) is not None}
  return {**own, **shared, "architectures": [around.text], "model_type": around.text_type}


def own_name(name: str, hf: Mapping[str, Any]) -> str | None:
  """Returns the name of a tensor in a folder of the text model; None for one of another part."""
  around = _around(hf)
  if around is None:
    return name
  if name.startswith(around.others):
    return None
  for prefix, own in around.prefixes.items():
    if name.startswith(prefix):
      return own + name.removeprefix(prefix)
  return name


def peft_names(hf: Mapping[str, Any]) -> dict[str, str]:
  """Returns the `key_mapping` with which PEFT finds an adapter's kernels in the whole model.

  An adapter is trained, and named, on the text model alone. Without the mapping PEFT 0.21 leaves
  all of it out of the whole model and only warns.

  Args:
    hf: Parsed config.json of the base; one of a text model needs no mapping.
  """
  around = _around(hf)
  return {} if around is None else {"model.layers": f"{around.decoder}.layers"}


def _around(hf: Mapping[str, Any], where: str = "config.json") -> Around | None:
  fields = Fields(hf, where)
  architectures, model_type = fields.strings("architectures"), fields.string("model_type")
  named = architectures[0] if architectures else _TYPES.get(model_type or "")
  return _AROUND.get(named or "")
