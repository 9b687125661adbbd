"""Architectures that are known and refused: what is missing for each. Pure."""

from collections.abc import Sequence

# What is missing → the architectures, by their names in config.json.
_MISSING: dict[str, tuple[str, ...]] = {
  "layers of a gated delta net, whose state is a matrix for each head and not a list of keys": (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "KimiLinearForCausalLM",
    "OlmoHybridForCausalLM",
  ),
  "state-space layers (Mamba), whose state is not a list of keys": (
    "BambaForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Mamba2ForCausalLM",
    "NemotronHForCausalLM",
    "Zamba2ForCausalLM",
  ),
  "layers of gated short convolutions": ("Lfm2ForCausalLM",),
  "multi-head latent attention, whose keys and values are made of a shared low-rank vector": (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Mistral4ForCausalLM",
  ),
  "compressed and sparse attention": ("DeepseekV4ForCausalLM",),
  "soft caps on the scores of attention and on logits": ("Gemma2ForCausalLM",),
  "alternating updates of several residual streams and embeddings for each layer": (
    "Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration",
  ),
  "embeddings for each layer, layers that share keys and values, and widths of heads that differ": (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
  ),
  "attention sinks, experts with biases and weights in MXFP4": ("GptOssForCausalLM",),
  "attention in chunks, and a router that scales the inputs of experts": (
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
  ),
  "queries that are scaled by their position (llama_4_scaling_beta)": ("Ministral3ForCausalLM",),
  "fused projections (qkv_proj, gate_up_proj) and a partial rotary embedding": ("Phi3ForCausalLM",),
  "a partial rotary embedding of interleaved components, and a fused gate_up_proj": (
    "GlmForCausalLM",
    "Glm4ForCausalLM",
  ),
  "a partial rotary embedding, and a router with sigmoids and a bias": (
    "Glm4MoeForCausalLM",
    "MiniMaxM2ForCausalLM",
  ),
  "a partial rotary embedding, and LayerNorm in place of RMS norms": (
    "NemotronForCausalLM",
    "PhiForCausalLM",
  ),
  "LayerNorm in place of RMS norms": (
    "CohereForCausalLM",
    "Cohere2ForCausalLM",
    "GPT2LMHeadModel",
    "OlmoForCausalLM",
    "Starcoder2ForCausalLM",
  ),
  "an MLP without a gate": ("ApertusForCausalLM", "ArceeForCausalLM"),
  "multipliers of embeddings, residuals, attention and logits": ("GraniteForCausalLM",),
  "a rotary embedding of interleaved components": ("Ernie4_5ForCausalLM",),
  "norms of queries and keys behind the rotary embedding": ("HunYuanDenseV1ForCausalLM",),
  "experts with other names and, in OLMoE, norms of whole queries and keys beside them": (
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
  ),
  "images, and positions of three numbers": (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
  ),
  "images; its text model is not read out of it": ("Mistral3ForConditionalGeneration",),
}

_BY_NAME = {name: missing for missing, names in _MISSING.items() for name in names}
ARCHITECTURES = tuple(_BY_NAME)


def reason(architecture: str | None, supported: Sequence[str]) -> str:
  """Returns why an architecture is refused, as the end of a sentence that names it.

  Args:
    architecture: First of the architectures in config.json, or its model_type.
    supported: Architectures that are supported.
  """
  missing = _BY_NAME.get(architecture or "")
  what = "is not supported" if missing is None else f"is not supported: grpo_jax lacks {missing}"
  return f"{what}; supported are {sorted(supported)}"
