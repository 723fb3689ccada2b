"""Which worker is loaded, and what is said where there is none."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pagewire.config import from_mapping
from pagewire.engine.load import load_worker
from pagewire.errors import ConfigError


async def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device") as caught:
        await load_worker(from_mapping({"model": {"device": "cuda"}}))
    assert caught.value.field == "model.device"


@pytest.mark.parametrize("device", ["cuda", "auto"])
async def test_a_gpu_without_triton_is_told_what_to_install(monkeypatch, device):
    find = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    with pytest.raises(ConfigError, match="pip install triton") as caught:
        await load_worker(from_mapping({"model": {"device": device}}))
    assert caught.value.field == "model.device"
