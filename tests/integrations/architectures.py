"""Tiny random models of many architectures of transformers, by their names."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 80
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ROPE = {"max_position_embeddings": 64, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
SEVERAL = {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ENCODED = {"d_model": 16, "decoder_start_token_id": 1}
BART = {
    **ENCODED, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "init_std": 0.5, "dropout": 0.0,
}  # fmt: skip
T5 = {**ENCODED, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}

# What a configuration needs besides sizes: nothing else differs from one architecture to the next.
CAUSAL: dict[str, dict[str, Any]] = {
    "Apertus": ROPE, "Arcee": ROPE, "BioGpt": {"hidden_dropout_prob": 0.0}, "Bloom": {"n_head": 2, "n_layer": 1},
    "CodeGen": {"n_embd": 16, "num_attention_heads": 4, "rotary_dim": 4, "n_positions": 64},
    "Cohere": {**ROPE, "logit_scale": 3.0}, "Cohere2": {**ROPE, "logit_scale": 3.0},
    "DeepseekV2": {**ROPE, **LATENT, **SEVERAL, "first_k_dense_replace": 1},
    "DeepseekV3": {**ROPE, **LATENT, **SEVERAL, "first_k_dense_replace": 1}, "Ernie4_5": ROPE,
    "Exaone4": {**ROPE, "layer_types": ["full_attention"]}, "Falcon": {}, "Gemma": ROPE,
    "Gemma2": {**ROPE, "final_logit_softcapping": 9.0}, "GPT2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "GPTBigCode": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "GPTJ": {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}, "GPTNeo": {
        "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]], "max_position_embeddings": 64},
    "GPTNeoX": {"max_position_embeddings": 64}, "Glm": ROPE, "Granite": {**ROPE, "logits_scaling": 0.5},
    "GraniteMoe": {**ROPE, **EXPERTS, "logits_scaling": 0.3}, "Helium": ROPE, "HunYuanDenseV1": ROPE, "Llama": ROPE,
    "MiniMax": {**ROPE, **EXPERTS, "layer_types": ["full_attention"]}, "Mistral": ROPE,
    "Mixtral": {**ROPE, **EXPERTS, "output_router_logits": True}, "Mpt": {"d_model": 16, "n_heads": 2, "n_layers": 1},
    "Nemotron": ROPE, "Olmo": ROPE, "Olmo2": ROPE, "Olmoe": {**ROPE, **EXPERTS},
    "OPT": {"ffn_dim": 16, "word_embed_proj_dim": 16, "init_std": 0.5, "dropout": 0.0},
    "Persimmon": ROPE, "Phi": ROPE, "Phi3": ROPE, "Qwen2": ROPE, "Qwen2Moe": {
        **ROPE, **EXPERTS, "shared_expert_intermediate_size": 8}, "Qwen3": ROPE, "Qwen3Moe": {**ROPE, **EXPERTS},
    "SmolLM3": ROPE, "StableLm": ROPE, "Starcoder2": ROPE, "XGLM": {
        "d_model": 16, "ffn_dim": 16, "num_layers": 1, "attention_heads": 2, "init_std": 0.5, "dropout": 0.0},
}  # fmt: skip
ENCODER_DECODER: dict[str, dict[str, Any]] = {"Bart": BART, "Pegasus": BART, "T5": T5, "MT5": T5}


VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "attention_dropout": 0.0,
}  # fmt: skip
IMAGE = 79  # the token that stands for a patch of a picture
NAMES = (*CAUSAL, "Gemma3", *ENCODER_DECODER)


def make(name: str, seed: int = 0, **changed: Any) -> Any:
    """A random model of an architecture, with probabilities far from uniform."""
    options = {**ENCODER_DECODER, **CAUSAL, "Gemma3": ROPE}[name]
    config_class = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    config = config_class(**{**TOKENS, **SIZES, "initializer_range": 0.5, **options, **changed})
    for key, value in vars(config).items():
        if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    ends = ["ForConditionalGeneration"] if name in ENCODER_DECODER else ["ForCausalLM", "LMHeadModel"]
    kind = next(getattr(transformers, name + end) for end in ends if hasattr(transformers, name + end))
    torch.manual_seed(seed)
    return kind(config).train()


def make_with_pictures(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A random model that reads pictures, and a batch of one picture of four patches."""
    text = {"model_type": "gemma" if name == "PaliGemma" else "llama", **TOKENS, **SIZES, **ROPE}
    vision = {"model_type": "clip_vision_model" if name == "Llava" else "siglip_vision_model", **VISION}
    options = {"projection_dim": 16, "hidden_size": 16} if name == "PaliGemma" else {}
    if name == "Llava":
        options = {"vision_feature_layer": -1, "image_seq_length": 4}
    kind, config = getattr(transformers, f"{name}ForConditionalGeneration"), getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    model = kind(config(text_config=text, vision_config=vision, image_token_id=IMAGE, **options)).train()
    tokens = torch.tensor([[IMAGE] * 4 + [5, 6, 7, 8, 9]])
    batch = {
        "input_ids": tokens,
        "pixel_values": torch.randn(1, 3, 8, 8),
        "labels": tokens.masked_fill(tokens == IMAGE, -100),
    }
    if name == "PaliGemma":
        batch["token_type_ids"] = torch.tensor([[0] * 5 + [1] * 4])
    return model, batch
