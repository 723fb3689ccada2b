"""`pagewire calibrate MODEL --text FILE`: the scales that keep KV in FP8 closest to what the model computes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

import numpy as np

from pagewire.cli.model_path import model_path
from pagewire.config import ModelConfig
from pagewire.errors import ConfigError
from pagewire.models.calibrate import calibrate
from pagewire.models.load import load_model
from pagewire.text.tokenizer import load_text_model

WINDOW: Final = 2048
"""Tokens that are read at once: keys depend on their position, and a model's largest ones come early."""


def run(namespace: argparse.Namespace) -> int:
    """Read the text, write the file, say what to do with it."""
    path = model_path(namespace.model)
    out: Path = namespace.out or Path(f"{path.stem}.kv-scales.json")
    try:
        text = namespace.text.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {namespace.text}: {error.strerror}", field="text") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{namespace.text} is no text in UTF-8", field="text") from None
    if namespace.tokens < 1:
        raise ConfigError("must be at least 1", field="tokens")
    ids = np.array(load_text_model(path).encode(text, add_special=False)[: namespace.tokens], np.int32)
    if ids.size == 0:
        raise ConfigError(f"{namespace.text} holds no text", field="text")
    decoder = load_model(ModelConfig(path=str(path), device="cpu"))
    window = min(WINDOW, decoder.max_model_len)
    scales = calibrate(decoder, (ids[at : at + window] for at in range(0, ids.size, window)))
    try:
        scales.save(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}", field="out") from None
    print(
        f"{out}: from {ids.size} tokens. Next: pagewire serve {namespace.model} --kv-dtype fp8 --kv-scales {out}",
        file=sys.stderr,
    )
    return 0
