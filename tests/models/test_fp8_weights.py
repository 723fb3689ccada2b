"""Weights in E4M3: rounded while loading, or stored so, in each layout; and what a CPU makes of them."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.families import save_family
from tests.models.paged import Paged

from pagewire.config import ModelConfig
from pagewire.errors import ModelError
from pagewire.models.load import load_model
from pagewire_kernels import reference

PROJECTIONS = ("qkv", "attn_out", "gate_up", "down")
IDS = [3, 9, 27, 81, 5, 15, 45]


def load(path, **options):
    return load_model(ModelConfig(path=str(path), device="cpu", **options))


def kept(path, **options):
    return load_model(ModelConfig(path=str(path), device="cpu", **options), keeps_fp8=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_family("llama", path)
    return path


def logits(decoder):
    paged = Paged(decoder, num_blocks=8)
    return paged.step(chunks=[(paged.row(len(IDS)), IDS)])[0]


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 40), st.floats(-30, 30))
def test_rounding_keeps_each_row_within_half_a_step(seed, rows, columns, exponent):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    x[0, 0] = 0
    values, scales = reference.quantise_rows(x)
    top = x.abs().amax(1)
    assert (values.float().abs().amax(1)[top > 0] == 448).all()
    back = reference.dequantise_rows(values, scales)
    # Three bits of mantissa, and a smallest step of 2⁻⁹ below 2⁻⁶.
    assert ((back - x).abs() <= x.abs() / 16 * 1.0001 + scales[:, None] * 2**-10 * 1.0001).all()


def test_a_row_of_zeros_stays_one():
    values, scales = reference.quantise_rows(torch.zeros(2, 8))
    assert not values.float().any()
    assert (scales > 0).all()


def test_matrices_are_rounded_by_row_and_all_else_is_left_alone(folder):
    plain, rounded, narrow = load(folder), load(folder, quantization="fp8"), kept(folder, quantization="fp8")
    assert not plain.weights.is_fp8
    assert rounded.weights.is_fp8
    assert torch.equal(plain.weights.embedding, narrow.weights.embedding)
    assert torch.equal(plain.weights.lm_head, narrow.weights.lm_head)
    for a, b, c in zip(plain.weights.layers, rounded.weights.layers, narrow.weights.layers, strict=True):
        for name in PROJECTIONS:
            values, scales = reference.quantise_rows(getattr(a, name))
            assert torch.equal(getattr(c, name).float(), values.float())
            assert torch.equal(getattr(c, name + "_scale"), scales)
            assert torch.equal(getattr(b, name), reference.dequantise_rows(values, scales))
            assert getattr(b, name + "_scale") is None
        assert torch.equal(a.attn_norm, c.attn_norm)


def test_a_product_is_that_of_the_oracle(folder):
    """Both sides are rounded: `project` of rounded tokens and widened weights is y = (x₈ · W₈ᵀ) · s_x · s_w."""
    rounded, narrow = load(folder, quantization="fp8"), kept(folder, quantization="fp8")
    x = torch.randn(5, rounded.config.hidden_size, generator=torch.Generator().manual_seed(1))
    for a, b in zip(rounded.weights.layers, narrow.weights.layers, strict=True):
        got = rounded._product(x, a.gate_up, None)
        torch.testing.assert_close(got, reference.linear_fp8(x, b.gate_up, b.gate_up_scale), rtol=1e-5, atol=1e-5)


def test_logits_are_near_those_of_the_weights_as_they_are(folder):
    exact, rounded = logits(load(folder)), logits(load(folder, quantization="fp8"))
    assert not torch.equal(exact, rounded)
    assert float((rounded - exact).norm() / exact.norm()) < 0.2


def store(folder, path, layout):
    """The checkpoint with its layers' matrices in E4M3, and the values that they stand for."""
    config = json.loads((folder / "config.json").read_text())
    tensors, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        wide = tensor.float()
        if layout == "tensor":
            scale = wide.abs().max() / 448
            each = scale.expand(wide.shape)
        elif layout == "blocks":
            grid = tuple(-(-n // 128) for n in wide.shape)
            scale = 0.001 + 0.001 * torch.rand(grid, generator=torch.Generator().manual_seed(len(name)))
            each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: wide.shape[0], : wide.shape[1]]
        else:
            scale = wide.abs().amax(1, keepdim=True) / 448
            each = scale.expand(wide.shape)
        stored = (wide / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = stored
        tensors[name + ("_scale_inv" if layout == "blocks" else "_scale")] = scale
        meant[name] = stored.float() * each
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if layout == "blocks":
        method["weight_block_size"] = [128, 128]
    if layout == "channel":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
        method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    save_file(tensors, path / "model.safetensors")
    return meant


@pytest.mark.parametrize("layout", ["tensor", "channel", "blocks"])
def test_checkpoints_in_fp8(folder, tmp_path, layout):
    meant = store(folder, tmp_path / "fp8", layout)
    decoder, wide = kept(tmp_path / "fp8"), load(tmp_path / "fp8", quantization="none")
    assert decoder.weights.is_fp8
    assert not wide.weights.is_fp8
    for i, (layer, whole) in enumerate(zip(decoder.weights.layers, wide.weights.layers, strict=True)):
        parts = [meant[f"model.layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        expected = torch.cat(parts)
        torch.testing.assert_close(whole.gate_up, expected, rtol=1e-6, atol=0)
        back = reference.dequantise_rows(layer.gate_up, layer.gate_up_scale)
        if layout == "blocks":  # rounded a second time
            assert float((back - expected).norm() / expected.norm()) < 0.04
        else:
            torch.testing.assert_close(back, expected, rtol=1e-6, atol=0)
    assert torch.isfinite(logits(load(tmp_path / "fp8"))).all()


@pytest.mark.parametrize(
    ("described", "named"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ("fp8", "None"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}},
            "4",
        ),
    ],
)
def test_other_layouts_are_refused_by_name(folder, tmp_path, described, named):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=named):
        load(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "shape", "zero"])
def test_scales_that_do_not_belong_are_refused(folder, tmp_path, fault):
    store(folder, tmp_path / "fp8", "channel")
    path = tmp_path / "fp8" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    scale = tensors.pop(name)
    if fault == "shape":
        tensors[name] = scale[:-1].clone()
    if fault == "zero":
        tensors[name] = scale * 0
    save_file(tensors, path)
    with pytest.raises(ModelError, match="down_proj"):
        load(tmp_path / "fp8")


def test_other_types_of_8_bits_are_refused_by_name(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e5m2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj\.weight is of type F8_E5M2"):
        load(tmp_path)


def test_matrices_that_a_checkpoint_leaves_wide_are_rounded_with_the_others(folder, tmp_path):
    meant = store(folder, tmp_path / "fp8", "channel")
    path, name = tmp_path / "fp8" / "model.safetensors", "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(path)
    tensors[name] = wide = load_file(folder / "model.safetensors")[name]
    del tensors[name + "_scale"]
    save_file(tensors, path)
    layer = kept(tmp_path / "fp8").weights.layers[0]
    assert torch.equal(layer.attn_out.float(), reference.quantise_rows(wide)[0].float())
    back = reference.dequantise_rows(layer.down, layer.down_scale)
    torch.testing.assert_close(back, meant["model.layers.0.mlp.down_proj.weight"], rtol=1e-6, atol=0)
