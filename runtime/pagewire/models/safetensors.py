"""Reads a folder in Hugging Face layout: `config.json`, one or more memory-mapped safetensors files, EOS ids."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.errors import ModelError
from pagewire.models import fp8_layouts
from pagewire.models.config import DecoderConfig
from pagewire.models.hf_config import from_hf
from pagewire.models.weights import DecoderWeights, Kinds, Progress, TensorNames, assemble

NAMES: Final = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    lm_head="lm_head.weight",
    attn_norm="model.layers.{}.input_layernorm.weight",
    q="model.layers.{}.self_attn.q_proj.weight",
    k="model.layers.{}.self_attn.k_proj.weight",
    v="model.layers.{}.self_attn.v_proj.weight",
    attn_out="model.layers.{}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{}.post_attention_layernorm.weight",
    gate="model.layers.{}.mlp.gate_proj.weight",
    up="model.layers.{}.mlp.up_proj.weight",
    down="model.layers.{}.mlp.down_proj.weight",
    q_norm="model.layers.{}.self_attn.q_norm.weight",
    k_norm="model.layers.{}.self_attn.k_norm.weight",
    post_attn_norm="",
    post_mlp_norm="",
)
_POST_NORM_NAMES: Final = replace(
    NAMES,
    mlp_norm="model.layers.{}.pre_feedforward_layernorm.weight",
    post_attn_norm="model.layers.{}.post_attention_layernorm.weight",
    post_mlp_norm="model.layers.{}.post_feedforward_layernorm.weight",
)
_INNER_PREFIXES: Final = ("language_model.model.", "model.language_model.")
"""Before the names of a text model inside one that also sees, in older and newer checkpoints."""
_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = ("F64", "F32", "F16", "BF16")
_FP8: Final = "F8_E4M3"


class SafetensorsFolder:
    """The tensors of a folder as a `TensorSource`.

    A file is mapped anew for each tensor: the pages read through one mapping stay part of the process for as long as it
    lives, and would add up to a second copy of the model.

    Raises:
        ModelError: no weights in the folder, a missing shard, a truncated or damaged file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (no mapping)
                    self._where[name] = path
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())

    def shape(self, name: str) -> tuple[int, ...] | None:
        """See `TensorSource`."""
        return self._shapes.get(name)

    def read_into(self, name: str, out: Tensor) -> None:
        """See `TensorSource`."""
        kind, values = self._read(name)
        if kind == _FP8 and out.dtype != torch.float8_e4m3fn:
            values = fp8_layouts.widen(name, values.to(out.device), self._scales(name))
        elif kind not in (*_DTYPES, _FP8):
            raise ModelError(
                f"{self._folder}: tensor {name} is of type {kind}; supported: {', '.join(_DTYPES)}, {_FP8}"
            )
        out.copy_(values)

    def is_fp8(self, name: str) -> bool:
        """See `TensorSource`."""
        with _opened(self._where[name]) as file:
            return bool(file.get_slice(name).get_dtype() == _FP8)

    def row_scales(self, name: str) -> Tensor | None:
        """See `TensorSource`."""
        if not self.is_fp8(name):
            return None
        return fp8_layouts.row_scales(name, self._shapes[name], self._scales(name))

    def _scales(self, name: str) -> Tensor:
        """Those beside a tensor in E4M3."""
        found = next((s for s in fp8_layouts.scale_names(name) if s in self._where), None)
        if found is None:
            raise ModelError(f"{self._folder}: tensor {name} is of type {_FP8}, but its scale is missing")
        return self._read(found)[1].float()

    def _read(self, name: str) -> tuple[str, Tensor]:
        with _opened(self._where[name]) as file:
            return file.get_slice(name).get_dtype(), file.get_tensor(name)

    def names(self, config: DecoderConfig) -> TensorNames:
        """How its tensors are called."""
        names = _POST_NORM_NAMES if config.post_norms else NAMES
        for prefix in _INNER_PREFIXES:
            if names.embedding.replace("model.", prefix, 1) in self._where:
                inner = {field.name: getattr(names, field.name) for field in fields(names)}
                return TensorNames(**{key: name.replace("model.", prefix, 1) for key, name in inner.items()})
        return names


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; download the model again") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or damaged ({error}); download it again") from None


def load(
    folder: Path, kinds: Kinds, on_progress: Progress | None = None
) -> tuple[DecoderConfig, DecoderWeights, tuple[int, ...]]:
    """Configuration, weights and EOS ids of a folder.

    Raises:
        ModelError: whatever keeps it from being served.
    """
    config, source = read_config(folder), SafetensorsFolder(folder)
    weights = assemble(
        config,
        source,
        source.names(config),
        kinds,
        norm_offset=1.0 if config.architecture.startswith("gemma") else 0.0,
        on_progress=on_progress,
    )
    return config, weights, eos_ids(folder)


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that `config.json` describes."""
    return from_hf(_read_json(folder / "config.json"))


def eos_ids(folder: Path) -> tuple[int, ...]:
    """All EOS ids: those of `generation_config.json` where it has any, else those of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = _read_json(path).get("eos_token_id") if path.exists() else None
        if isinstance(ids, int):
            ids = [ids]
        if ids:
            if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
                raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, not {ids!r}")
            return tuple(dict.fromkeys(ids))
    return ()


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise ModelError(f"{folder} holds no weights; expected {_SINGLE}, {_INDEX} or a GGUF file")
        return shards
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} has no weight_map of file names; download it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        # The index is untrusted: it may not lead out of the folder.
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}; weights must lie in the folder itself")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model folder needs it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold an object, not {type(values).__name__}")
    return values
