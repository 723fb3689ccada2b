"""What `simulate` and `plan` have in common: the deployment that their flags describe."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

import msgspec

from pagewire.cli.flags import config_from
from pagewire.cli.model_check import check_model
from pagewire.cli.model_path import model_path
from pagewire.cli.simulation_flags import DEFAULT_ROWS, DEFAULT_STEP_TOKENS
from pagewire.errors import ConfigError, ModelError
from pagewire.models.config import DecoderConfig
from pagewire.simulator.card import CARDS, MODELS, ModelShape
from pagewire.simulator.deployment import Deployment

_MOST_KV_TOKENS: Final = 2**28
"""KV memory of a thousand cards; the books of a larger pool are gigabytes here."""

NOTHING: Final = "–"
"""Where a number does not exist: a percentile of no first tokens, of no gaps."""


def check_above_0(namespace: argparse.Namespace, name: str, most: float) -> None:
    """Raises ConfigError: a number of no use, or one that the virtual clock cannot hold or nobody would wait for."""
    value = getattr(namespace, name)
    if not value > 0:
        raise ConfigError("must be above 0", field=name)
    if value > most:
        raise ConfigError(f"must be at most {most:g}", field=name)


def deployment_from(namespace: argparse.Namespace) -> Deployment:
    """What the flags describe.

    Raises:
        ConfigError, ModelError: it cannot exist.
    """
    given = vars(namespace)
    given.setdefault("scheduler.max_rows", DEFAULT_ROWS)
    given.setdefault("scheduler.max_step_tokens", max(DEFAULT_STEP_TOKENS, given["scheduler.max_rows"]))
    given.setdefault("config", None)
    config = config_from(namespace)
    for name, most in (("kv_tokens", _MOST_KV_TOKENS), ("max_model_len", math.inf)):
        if given[name] != 0:
            check_above_0(namespace, name, most)
    model = model_shape(namespace.model)
    return Deployment(
        model,
        CARDS[namespace.card],
        gpus=namespace.gpus,
        prefill_gpus=namespace.prefill_gpus,
        weights=namespace.weights,
        kv=namespace.kv,
        allocation=namespace.allocation,
        max_model_len=min(namespace.max_model_len or model.max_positions, model.max_positions),
        kv_tokens=namespace.kv_tokens,
        block_size=config.cache.block_size,
        prefix_cache=config.cache.prefix_cache,
        scheduler=msgspec.structs.replace(config.scheduler, max_waiting=max(config.scheduler.max_waiting, 1)),
    )


def model_shape(named: str) -> ModelShape:
    """A named shape, or what a header or a config.json says; weights are not looked at.

    Raises:
        ModelError: there is no such model, or its family is not known.
    """
    if named in MODELS:
        return MODELS[named]
    if named.isalnum() and not Path(named).exists():
        raise ModelError(f"{named} is no file or folder here, and no shape known by name: {', '.join(MODELS)}")
    path = model_path(named)
    has_config = path.is_dir() and (path / "config.json").exists()
    return _shape(check_model(path, "dummy" if has_config or path.name == "config.json" else "auto"), path)


def _shape(config: DecoderConfig, path: Path) -> ModelShape:
    return ModelShape(
        name=path.parent.resolve().name if path.name == "config.json" else path.stem,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_positions=config.max_positions,
        tie_embeddings=config.tie_embeddings,
    )


def describe(deployment: Deployment) -> str:
    """One line: what runs where."""
    cards = f"{deployment.gpus} × {deployment.rates.name.upper()}"
    if deployment.prefill_gpus:
        cards += f" and {deployment.prefill_gpus} that prefill"
    precision = f"{deployment.weights} weights, {deployment.kv} KV, {deployment.allocation}"
    return f"{deployment.model.name} on {cards}, {precision}"
