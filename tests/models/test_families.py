"""Logits of tiny random models of every family equal those of `transformers`."""

import json

import pytest
import torch
from tests.models.families import FAMILIES, save_family
from tests.models.paged import Paged
from tests.models.test_against_transformers import expected, token_ids

from pagewire.config import ModelConfig
from pagewire.models.load import load_model
from pagewire.worker.cpu_linear import check_place_invariance, pack_weights

LENGTH = 200  # five windows


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A model of `transformers`, and the same loaded by us."""
    folder = tmp_path_factory.mktemp("family")
    model = save_family(request.param, folder)
    decoder = load_model(ModelConfig(path=str(folder)), vector_dtype=torch.float32)
    pack_weights(decoder)
    return model, decoder


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "deterministic"])
def test_logits(pair, exact):
    """In chunks, then token by token."""
    model, decoder = pair
    ids, paged = token_ids(LENGTH), Paged(decoder, exact=exact)
    row = paged.row(LENGTH)
    got = [paged.prefill(row, ids[:-20], sizes=[33, 100, 1])]
    got += [paged.step(decode=[(row, token)])[0] for token in ids[-20:]]
    assert (torch.cat(got) - expected(model, ids)).abs().max() < 1e-4


def test_batch(pair):
    """Rows on both sides of the window decode together, beside a chunk."""
    model, decoder = pair
    paged = Paged(decoder)
    prompts = [token_ids(length + 6, seed) for seed, length in enumerate((3, 30, 39, 41, 64, 150))]
    rows = [paged.row(len(ids)) for ids in prompts]
    long, filling = token_ids(120, 9), paged.row(120)
    got = [[out] for out in paged.step(chunks=[(row, ids[:-6]) for row, ids in zip(rows, prompts, strict=True)])]
    chunks = []
    for i in range(6):
        decode = [(row, ids[i - 6]) for row, ids in zip(rows, prompts, strict=True)]
        *outs, chunk = paged.step(decode=decode, chunks=[(filling, long[20 * i : 20 * i + 20])])
        chunks.append(chunk)
        for mine, out in zip(got, outs, strict=True):
            mine.append(out)
    for ids, mine in zip([*prompts, long], [*got, chunks], strict=True):
        assert (torch.cat(mine) - expected(model, ids)).abs().max() < 1e-4


def test_deterministic(pair):
    """Bit for bit, whatever the chunks."""
    _, decoder = pair
    check_place_invariance(decoder)
    ids, seen = token_ids(LENGTH), []
    for sizes in ([LENGTH], [1, 50], [7]):
        paged = Paged(decoder, exact=True)
        seen.append(paged.prefill(paged.row(LENGTH), ids, sizes=sizes))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_bfloat16(tmp_path):
    """Products are rounded to bfloat16, everything else is not: as close to the exact ones as `transformers` comes."""
    for family in ("llama", "gemma3", "qwen2"):
        model = save_family(family, tmp_path / family)
        decoder = load_model(ModelConfig(path=str(tmp_path / family), dtype="bfloat16"), vector_dtype=torch.float32)
        assert decoder.weights.layers[0].qkv.dtype == torch.bfloat16
        assert decoder.weights.final_norm.dtype == torch.float32
        pack_weights(decoder)
        ids, paged = token_ids(60), Paged(decoder)
        got = paged.prefill(paged.row(60), ids, sizes=[33, 1])
        exact = expected(model, ids)
        theirs = expected(model.to(torch.bfloat16), ids).float()
        assert (got - exact).norm() < 1.2 * (theirs - exact).norm()


class TestConfigurationsAsPublished:
    """Files leave out what was the default of their class, and use older names."""

    def rewritten(self, tmp_path, family, change):
        model = save_family(family, tmp_path)
        path = tmp_path / "config.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(change(values)))
        decoder = load_model(ModelConfig(path=str(tmp_path)))
        paged, ids = Paged(decoder), token_ids(100)
        assert (paged.prefill(paged.row(100), ids) - expected(model, ids)).abs().max() < 1e-4
        return decoder

    def test_gemma3_with_older_names(self, tmp_path):
        def older(values):
            del values["rope_parameters"], values["layer_types"]
            return {
                **values,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 6,
            }

        decoder = self.rewritten(tmp_path, "gemma3", older)
        assert [layer.window for layer in decoder.config.layers] == [40] * 5 + [0, 40]

    @pytest.mark.parametrize("family", ["gemma2", "qwen2, window", "smollm3, window"])
    def test_without_layer_types(self, tmp_path, family):
        self.rewritten(tmp_path, family, lambda values: {k: v for k, v in values.items() if k != "layer_types"})

    def test_text_part_of_a_model_that_sees(self, tmp_path):
        from safetensors.torch import load_file, save_file

        def nested(values):
            text = {k: v for k, v in values.items() if k not in ("architectures", "tie_word_embeddings")}
            return {"model_type": "gemma3", "text_config": text, "vision_config": {"model_type": "siglip_vision_model"}}

        for prefix in ("language_model.model.", "model.language_model."):
            folder = tmp_path / prefix
            model = save_family("gemma3", folder)
            weights = load_file(folder / "model.safetensors")
            renamed = {name.replace("model.", prefix, 1): weight for name, weight in weights.items()}
            save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
            path = folder / "config.json"
            path.write_text(json.dumps(nested(json.loads(path.read_text()))))
            paged, ids = Paged(load_model(ModelConfig(path=str(folder)))), token_ids(60)
            assert (paged.prefill(paged.row(60), ids) - expected(model, ids)).abs().max() < 1e-4


def test_a_window_that_no_sequence_reaches_is_none(tmp_path):
    save_family("mistral", tmp_path)
    assert load_model(ModelConfig(path=str(tmp_path), max_model_len=40)).windows() == [0] * 4
    assert load_model(ModelConfig(path=str(tmp_path), max_model_len=41)).windows() == [40] * 4


def test_norms_that_lie_around_one_stay_wide(tmp_path):
    """Gemma's are 1 + w: in bfloat16 little of w would be left."""
    for family, dtype in (("gemma3", torch.float32), ("llama", torch.bfloat16)):
        save_family(family, tmp_path / family)
        weights = load_model(ModelConfig(path=str(tmp_path / family), dtype="bfloat16")).weights
        assert weights.final_norm.dtype == weights.layers[0].attn_norm.dtype == dtype
