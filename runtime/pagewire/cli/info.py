"""`pagewire info MODEL`: what a model file or folder holds, read from its header alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pagewire.cli.model_path import model_path
from pagewire.errors import ModelError
from pagewire.text.gguf_metadata import read_gguf_metadata


def run(namespace: argparse.Namespace) -> int:
    """Print one line a fact."""
    path = model_path(namespace.model)
    facts = _folder_facts(path) if path.is_dir() else _gguf_facts(path)
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")
    return 0


def _gguf_facts(path: Path) -> dict[str, str]:
    pairs = read_gguf_metadata(path)
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
    weights = sorted(path.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{path} holds no *.safetensors file; name a folder in Hugging Face layout or a GGUF file")
    config = _json(path / "config.json")
    heads = config.get("num_attention_heads")
    has_template = (path / "chat_template.jinja").exists() or (
        (path / "tokenizer_config.json").exists() and "chat_template" in _json(path / "tokenizer_config.json")
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


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is no JSON object: {error}") from None


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
        facts["KV memory"] = f"{per_token:,} bytes a token in 16 bits"
    return facts


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "unknown"
