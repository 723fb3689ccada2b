"""`pagewire info MODEL`: what a model file or folder holds, and whether it can be served, as far as headers tell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from pagewire.cli.model_check import check_gguf, check_has_weights, check_model, gguf_file, read_json
from pagewire.cli.model_path import model_path
from pagewire.config import CacheConfig
from pagewire.gguf_header import read_header
from pagewire.models.config import DecoderConfig

_BLOCK: Final = CacheConfig().block_size
_SCALE_BYTES: Final = 4


def run(namespace: argparse.Namespace) -> int:
    """Print one line a fact; then whatever would keep `serve` from serving it is raised."""
    path = model_path(namespace.model or "")
    file = gguf_file(path)
    if file is None:
        facts, check = _folder_facts(path if path.is_dir() else path.parent), partial(check_model, path)
    else:
        header = read_header(file)
        facts, check = _gguf_facts(file, header.metadata), partial(check_gguf, file, header)
    try:
        config = check()
        facts |= _decoder_facts(config) | _capacity(config, namespace)
    finally:
        _print(facts)
    return 0


def _capacity(config: DecoderConfig, namespace: argparse.Namespace) -> dict[str, str]:
    """What so many bytes of KV hold, in whole blocks; one of them belongs to nobody."""
    facts = {}
    length = min(namespace.tokens or config.max_positions, config.max_positions)
    for name, itemsize in (("float32", 4), ("bf16", 2), ("fp8", 1)):
        scales = 2 * config.num_layers * config.num_kv_heads * _SCALE_BYTES if itemsize == 1 else 0
        blocks = max(0, namespace.kv_bytes - scales) // config.kv_bytes(_BLOCK, itemsize) - 1
        streams = max(0, blocks) // -(-length // _BLOCK)
        facts[f"KV in {name}"] = (
            f"{max(0, blocks) * _BLOCK:,} tokens in {namespace.kv_bytes / 2**30:g} GiB: {streams:,} streams of {length:,}"
        )
    return facts


def _decoder_facts(config: DecoderConfig) -> dict[str, str]:
    """What sets its family apart; nothing for a plain Llama."""
    facts = {}
    windows = [layer.window for layer in config.layers]
    if any(windows):
        sizes = " or ".join(f"{window:,}" for window in sorted(set(windows) - {0}))
        facts["window"] = f"{sizes} tokens in {sum(map(bool, windows))} of {config.num_layers} layers"
    ropes = {layer.rope for layer in config.layers}
    scaled = sorted({rope.type for rope in ropes if rope is not None} - {"default"})
    bases = sorted({rope.theta for rope in ropes if rope is not None})
    facts["rope"] = ", ".join(["base " + " and ".join(f"{base:,.0f}" for base in bases), *scaled])
    if None in ropes:
        facts["rope"] += f"; none in {sum(layer.rope is None for layer in config.layers)} layers"
    norms = ["queries and keys"] * config.qk_norm + ["after attention and feed-forward"] * config.post_norms
    if norms:
        facts["further norms"] = ", ".join(norms)
    parts = ((config.qkv_bias, "qkv"), (config.attn_out_bias, "attention output"), (config.mlp_bias, "feed-forward"))
    if biases := [name for has_one, name in parts if has_one]:
        facts["biases"] = ", ".join(biases)
    caps = ((config.attn_soft_cap, "attention"), (config.logit_soft_cap, "logits"))
    if capped := [f"{cap:g} of {name}" for cap, name in caps if cap]:
        facts["soft caps"] = ", ".join(capped)
    return facts


def _print(facts: Mapping[str, str]) -> None:
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    sys.stdout.flush()  # a complaint comes after it, also where both go into one file


def _gguf_facts(path: Path, pairs: Mapping[str, Any]) -> dict[str, str]:
    architecture = str(pairs.get("general.architecture", "unknown"))

    def of(key: str) -> Any:
        return pairs.get(f"{architecture}.{key}")

    heads = of("attention.head_count")
    return _facts(
        path,
        format="GGUF",
        name=str(pairs.get("general.name") or path.stem),
        architecture=architecture,
        layers=of("block_count"),
        width=of("embedding_length"),
        heads=heads,
        kv_heads=of("attention.head_count_kv") or heads,
        head_dim=of("attention.key_length"),
        vocabulary=len(pairs.get("tokenizer.ggml.tokens", ())),
        context=of("context_length"),
        has_template="tokenizer.chat_template" in pairs,
        num_bytes=path.stat().st_size,
    )


def _folder_facts(path: Path) -> dict[str, str]:
    weights = check_has_weights(path)
    config = read_json(path / "config.json")
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config
    heads = config.get("num_attention_heads")
    has_template = (path / "chat_template.jinja").exists() or (
        (path / "tokenizer_config.json").exists() and "chat_template" in read_json(path / "tokenizer_config.json")
    )
    return _facts(
        path,
        format=f"safetensors, {len(weights)} file{'s' if len(weights) > 1 else ''}",
        name=path.resolve().name,
        architecture=", ".join(config.get("architectures") or ["unknown"]),
        layers=config.get("num_hidden_layers"),
        width=config.get("hidden_size"),
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim"),
        vocabulary=config.get("vocab_size"),
        context=config.get("max_position_embeddings"),
        has_template=has_template,
        num_bytes=sum(file.stat().st_size for file in weights),
    )


def _facts(  # one keyword a fact, so that the two formats cannot drift apart
    path: Path,
    *,
    format: str,  # noqa: A002
    name: str,
    architecture: str,
    layers: Any,
    width: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    vocabulary: Any,
    context: Any,
    has_template: bool,
    num_bytes: int,
) -> dict[str, str]:
    facts = {
        "name": name,
        "path": str(path),
        "format": format,
        "size": f"{num_bytes / 1e6:,.0f} MB",
        "architecture": architecture,
        "layers": _shown(layers),
        "width": _shown(width),
        "heads": f"{_shown(heads)}, {_shown(kv_heads)} for K and V",
        "vocabulary": _shown(vocabulary),
        "context": f"{_shown(context)} tokens",
        "chat template": "yes" if has_template else "no",
    }
    if all(isinstance(value, int) and value > 0 for value in (layers, width, heads, kv_heads)):
        per_token = 2 * layers * kv_heads * (head_dim or width // heads) * 2
        facts["KV memory"] = f"{per_token:,} bytes a token in 16 bits; a CPU keeps 32: {2 * per_token:,}"
    return facts


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"
