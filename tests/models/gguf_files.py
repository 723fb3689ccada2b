"""Writes a small GGUF file from a `transformers` model, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a tensor of a Llama checkpoint."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}"
    return NAMES[name]


def write(
    path: Path,
    model,
    *,
    kind: str = "F32",
    metadata: dict | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
) -> dict[str, np.ndarray]:
    """Write `model`; matrices quantised as `kind`. Metadata set to None is left out; `drop` names tensors to leave out.

    Returns:
        What the matrices are worth after quantisation, by their names in the checkpoint.
    """
    config, worth = model.config, {}
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
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
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if gguf_name(name) in drop or (tied and name == "lm_head.weight"):
            continue
        count = next((n for part, n in heads.items() if part in name), None)
        if count:
            array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(gguf_name(name), array)
            continue
        quantised = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(array, quantised)
        array = gguf.quants.dequantize(packed, quantised)
        if count:
            array = array.reshape(count, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        worth[name] = array
        writer.add_tensor(gguf_name(name), packed, raw_dtype=quantised)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return worth
