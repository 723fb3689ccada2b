"""Writes a small GGUF file from a `transformers` model, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
PERMUTED = ("llama", "smollm3")


def gguf_name(name: str, names: dict[str, str] = NAMES) -> str:
    """The name that llama.cpp gives a tensor of a checkpoint."""
    name, _, kind = name.rpartition(".")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{names[rest]}.{kind}"
    return f"{names[name]}.{kind}"


def facts(config) -> dict:
    """Metadata that only some families have."""
    values = {}
    if getattr(config, "head_dim", None):
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if config.model_type.startswith("gemma") or config.model_type == "mistral":
        values["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        values["attn_logit_softcapping"] = config.attn_logit_softcapping
        values["final_logit_softcapping"] = config.final_logit_softcapping
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if rope["rope_type"] in ("linear", "yarn"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return {"rope.freq_base": float(rope["rope_theta"]), **values}


def write(
    path: Path,
    model,
    *,
    kind: str = "F32",
    metadata: dict | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str | None = None,
) -> dict[str, np.ndarray]:
    """Write `model`; matrices quantised as `kind`. Metadata set to None is left out; `drop` names tensors to leave out.

    Without an `architecture` it is the model's own.

    Returns:
        What the matrices are worth after quantisation, by their names in the checkpoint.
    """
    config, worth = model.config, {}
    family = ARCHITECTURES.get(config.model_type, config.model_type)
    gemma, names = family.startswith("gemma"), GEMMA_NAMES if family.startswith("gemma") else NAMES
    architecture = architecture or family
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **facts(config),
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        full = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = heads if family in PERMUTED else {}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if gemma and "norm" in name:
            array = array + 1
        if gguf_name(name, names) in drop or (tied and name == "lm_head.weight"):
            continue
        count = next((n for part, n in heads.items() if part in name), None)
        if count:
            inner = array.shape[1:]
            array = array.reshape(count, 2, -1, *inner).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name, names), array)
            continue
        quantised = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(array, quantised)
        array = gguf.quants.dequantize(packed, quantised)
        if count:
            array = array.reshape(count, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        worth[name] = array
        writer.add_tensor(gguf_name(name, names), packed, raw_dtype=quantised)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth
