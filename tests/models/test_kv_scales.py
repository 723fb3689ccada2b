"""Scales of 8-bit KV: what calibration sees, and files that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from pagewire.config import ModelConfig
from pagewire.errors import ConfigError
from pagewire.models import kv_scales
from pagewire.models.calibrate import calibrate
from pagewire.models.load import load_model

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return load_model(ModelConfig(path=str(folder), load_format="dummy"))


def test_calibration_sees_the_largest_key_and_value(decoder):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, n).astype(np.int32) for n in (40, 3, 90)]
    scales = calibrate(decoder, texts)
    largest = np.zeros((2, 2, 2), np.float32)

    def attend(layer, q, k, v):
        for i, x in enumerate((k, v)):
            largest[i, layer] = np.maximum(largest[i, layer], x.abs().amax(dim=(0, 2)).numpy())
        expanded = [x.repeat_interleave(2, dim=1) for x in (k, v)]
        scores = torch.einsum("thd,shd->hts", q, expanded[0]) / 4
        scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), expanded[1]).reshape(q.shape[0], -1)

    with torch.inference_mode():
        for ids in texts:
            decoder.forward(torch.from_numpy(ids.astype(np.int64)), torch.arange(ids.size), attend)
    np.testing.assert_allclose(scales.k, largest[0] * kv_scales.MARGIN / 448, rtol=1e-4)
    np.testing.assert_allclose(scales.v, largest[1] * kv_scales.MARGIN / 448, rtol=1e-4)


def test_what_is_stored_keeps_three_bits_of_mantissa(decoder):
    scales = calibrate(decoder, [np.arange(100, dtype=np.int32)])
    x = torch.randn(50, 2, 16)
    x = x / x.abs().amax() * torch.from_numpy(scales.v[0])[:, None] * 448 / kv_scales.MARGIN
    scale = torch.from_numpy(scales.v[0])[:, None]
    back = (x / scale).to(torch.float8_e4m3fn).float() * scale
    normal = x.abs() > scale * 2**-6
    assert ((back - x).abs() <= x.abs() / 16 * 1.001)[normal].all()


def test_a_file_comes_back_as_it_was(decoder, tmp_path):
    scales = kv_scales.from_largest(np.array([[3.0, 7.5], [0.0, 1e4]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    scales.save(tmp_path / "scales.json")
    again = kv_scales.load(tmp_path / "scales.json", decoder.config)
    np.testing.assert_array_equal(again.k, scales.k)
    np.testing.assert_array_equal(again.v, scales.v)
    assert again.digest == scales.digest != kv_scales.default(decoder.config).digest
    assert (scales.k > 0).all(), "a head that was always zero has a scale, too"


@pytest.mark.parametrize(("content", "says"), [
    (b"", "no file of KV scales"),
    (b"\xff\xfe", "no file of KV scales"),
    (b"[1, 2]", "no file of KV scales"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1], [1, 1]]}', "no file of KV scales"),
    (b'{"format": "other", "k": [[1, 1], [1, 1]], "v": [[1, 1], [1, 1]]}', "format 'other'"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1]], "v": [[1, 1], [1, 1]]}', "another model"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1], [1]], "v": [[1, 1], [1, 1]]}', "another model"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1], [1, 0]], "v": [[1, 1], [1, 1]]}', "positive"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1], [1, -3]], "v": [[1, 1], [1, 1]]}', "positive"),
    (b'{"format": "pagewire-kv-scales-1", "k": [[1, 1], [1, 1e39]], "v": [[1, 1], [1, 1]]}', "positive"),
])  # fmt: skip
def test_what_is_no_file_of_scales_is_refused(decoder, tmp_path, content, says):
    path = tmp_path / "scales.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        kv_scales.load(path, decoder.config)
    assert caught.value.field == "cache.kv_scales"


def test_a_missing_file_is_named(decoder, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere"):
        kv_scales.load(tmp_path / "nowhere", decoder.config)
