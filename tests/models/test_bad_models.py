"""F46: whatever is wrong with a model on disk is one line that says what, never a crash."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.conftest import save
from tests.models.families import FAMILIES, save_family
from tests.models.gguf_files import write

from pagewire.config import ModelConfig
from pagewire.errors import ConfigError, ModelError
from pagewire.gguf_header import read_header
from pagewire.models.load import load_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, model, metadata={"tokenizer.ggml.eos_token_id": 5})
    return path


def refusal(path, **options) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(ModelConfig(path=str(path), **options))
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) > 20
    return message


@pytest.fixture
def folder(tmp_path, tiny_folder):
    """A copy to spoil."""
    return shutil.copytree(tiny_folder, tmp_path / "model")


def spoil(folder, name, **changes):
    values = json.loads((folder / name).read_text())
    values.update(changes)
    (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


class TestPath:
    def test_nothing_named(self):
        assert "does not exist" in refusal("")

    def test_missing(self, tmp_path):
        assert "does not exist" in refusal(tmp_path / "nowhere")

    def test_empty_folder(self, tmp_path):
        assert "holds no model" in refusal(tmp_path)

    def test_configuration_without_weights(self, folder):
        (folder / "model.safetensors").unlink()
        assert "holds no weights" in refusal(folder)

    def test_weights_without_configuration(self, folder):
        (folder / "config.json").unlink()
        assert "config.json is missing" in refusal(folder / "model.safetensors")

    def test_two_gguf_files(self, tmp_path, whole):
        shutil.copy(whole, tmp_path / "a.gguf")
        shutil.copy(whole, tmp_path / "b.gguf")
        assert "a.gguf, b.gguf" in refusal(tmp_path)

    def test_another_kind_of_file(self, tmp_path):
        (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
        assert "no GGUF file" in refusal(tmp_path / "model.bin")

    def test_empty_file(self, tmp_path):
        (tmp_path / "model.gguf").touch()
        assert "is empty" in refusal(tmp_path / "model.gguf")


class TestConfiguration:
    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"model_type": "mamba"}, "'mamba' is not supported; supported: llama"),
            ({"model_type": ...}, "None is not supported"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"attention_bias": True}, "lacks model.layers.0.self_attn.q_proj.bias"),
            ({"mlp_bias": True}, "lacks model.layers.0.mlp.gate_proj.bias"),
            ({"mlp_bias": "no"}, "mlp_bias"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
            ({"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "'longrope' is not supported"),
            ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
            ({"rope_parameters": [1]}, "rope_parameters"),
            ({"hidden_size": ...}, "hidden_size"),
            ({"hidden_size": "big"}, "hidden_size"),
            ({"num_hidden_layers": 0}, "num_layers"),
            ({"num_key_value_heads": 4}, "multiple"),
            ({"head_dim": 15}, "even"),
            ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
            ({"hidden_size": 64}, "has shape"),
            ({"num_hidden_layers": 4}, "lacks model.layers.3"),
        ],
    )
    def test_refused_by_name(self, folder, changes, says):
        spoil(folder, "config.json", **changes)
        assert says in refusal(folder)

    def test_older_names_of_rope_scaling(self, folder):
        spoil(
            folder, "config.json", rope_parameters=..., rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}
        )
        rope = load_model(ModelConfig(path=str(folder))).config.rope
        assert (rope.type, rope.theta, rope.factor) == ("linear", 5e5, 2.0)

    @pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", "[" * 100_000])
    def test_not_json(self, folder, content):
        (folder / "config.json").write_text(content, encoding="latin-1")
        assert "config.json" in refusal(folder)

    def test_longer_than_the_model(self, folder):
        with pytest.raises(ConfigError) as caught:
            load_model(ModelConfig(path=str(folder), max_model_len=1025))
        assert caught.value.field == "model.max_model_len"


class TestEos:
    def test_several_of_the_generation_configuration(self, folder):
        spoil(folder, "generation_config.json", eos_token_id=[7, 9, 7])
        assert load_model(ModelConfig(path=str(folder))).eos_ids == (7, 9)

    def test_else_that_of_the_configuration(self, folder):
        (folder / "generation_config.json").unlink()
        spoil(folder, "config.json", eos_token_id=4)
        assert load_model(ModelConfig(path=str(folder))).eos_ids == (4,)

    @pytest.mark.parametrize("bad", ["</s>", [1, "x"], [-1], {"a": 1}])
    def test_bad(self, folder, bad):
        spoil(folder, "generation_config.json", eos_token_id=bad)
        assert "eos_token_id" in refusal(folder)


class TestSafetensors:
    @pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000, -1])
    def test_truncated(self, folder, keep):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        assert "truncated or damaged" in refusal(folder)

    def test_missing_shard(self, tmp_path, model):
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        shard = sorted(tmp_path.glob("*.safetensors"))[1]
        shard.unlink()
        assert shard.name in refusal(tmp_path)

    @pytest.mark.parametrize("weight_map", [{"a": "../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}, [], None])
    def test_index_that_leads_elsewhere(self, folder, weight_map):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert "index.json" in refusal(folder)


class TestGGUF:
    def test_every_truncation_of_the_header_is_named(self, tmp_path, whole):
        data, path = whole.read_bytes(), tmp_path / "cut.gguf"
        end = min(info.offset for info in read_header(whole).tensors.values())
        for size in [*range(80), *range(80, end, 37), end]:
            path.write_bytes(data[:size])
            refusal(path)

    @pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
    def test_truncated_in_the_data(self, tmp_path, whole, share):
        data = whole.read_bytes()
        (tmp_path / "cut.gguf").write_bytes(data[: int(len(data) * share)])
        assert "truncated" in refusal(tmp_path / "cut.gguf")

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_damaged_header(self, tmp_path_factory, whole, data):
        """Any bytes changed: it loads, or it is refused in one line. Never anything else, and never for long."""
        content = bytearray(whole.read_bytes())
        end = min(info.offset for info in read_header(whole).tensors.values())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.mktemp("damaged") / "model.gguf"
        path.write_bytes(content)
        message = ""
        try:
            load_model(ModelConfig(path=str(path)))
        except ModelError as error:
            message = str(error)
        finally:
            path.unlink()
        assert "\n" not in message

    def test_architecture(self, tmp_path, model):
        write(tmp_path / "model.gguf", model, architecture="rwkv6")
        assert "'rwkv6' is not supported; supported: llama" in refusal(tmp_path / "model.gguf")

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"drop": ("token_embd.weight",)}, "lacks token_embd.weight"),
            ({"drop": ("blk.1.ffn_up.weight", "blk.2.attn_norm.weight")}, "lacks blk.1.ffn_up.weight"),
            ({"metadata": {"block_count": None}}, "block_count"),
            ({"metadata": {"attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon"),
            ({"metadata": {"context_length": "long"}}, "context_length"),
            ({"metadata": {"feed_forward_length": 99}}, "has shape"),
            ({"metadata": {"rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
            ({"metadata": {"rope.dimension_count": 8}}, "rope.dimension_count"),
            ({"metadata": {"expert_count": 8}}, "expert_count"),
        ],
    )
    def test_refused_by_name(self, tmp_path, model, options, says):
        write(tmp_path / "model.gguf", model, **options)
        assert says in refusal(tmp_path / "model.gguf")

    @pytest.mark.parametrize(
        ("name", "says"),
        [("blk.0.attn_q.bias", "lacks blk.0.attn_k.bias"), ("blk.0.attn_norm.bias", "blk.0.attn_norm.bias, which")],
    )
    def test_biases(self, tmp_path, model, name, says):
        bias = model.model.norm.weight.detach().numpy()
        write(tmp_path / "model.gguf", model, extra={name: bias})
        assert says in refusal(tmp_path / "model.gguf")


class TestDummy:
    def test_needs_its_configuration_alone(self, folder):
        (folder / "model.safetensors").unlink()
        one, two = (
            load_model(ModelConfig(path=str(path), load_format="dummy")) for path in (folder, folder / "config.json")
        )
        assert one.weights.layers[2].down.equal(two.weights.layers[2].down)
        assert one.weights.layers[2].down.std() > 0

    def test_without_one(self, tmp_path):
        assert "config.json is missing" in refusal(tmp_path, load_format="dummy")


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([-1, 10**9, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-1, 3), max_size=5),
    st.lists(st.sampled_from(["full_attention", "sliding_attention", "x"]), max_size=5),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "full_attention", "rope_theta"]), st.integers(), max_size=3
    ),
)


@pytest.fixture(scope="module")
def configurations(tmp_path_factory):
    """The content of `config.json` and the weights of each family."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp("whole")
        save_family(family, folders[family])
    return {family: (folder, json.loads((folder / "config.json").read_text())) for family, folder in folders.items()}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_value_in_the_configuration(configurations, data):
    """It loads, or it is refused in one line that is not long; whatever stands there, and however deep."""
    folder, values = configurations[data.draw(st.sampled_from(sorted(configurations)))]
    values = json.loads(json.dumps(values))
    for _ in range(data.draw(st.integers(1, 3))):
        where = values
        key = data.draw(st.sampled_from(sorted(where)))
        while isinstance(where[key], dict) and where[key] and data.draw(st.booleans()):
            where = where[key]
            key = data.draw(st.sampled_from(sorted(where)))
        where[key] = data.draw(ODD)
    (folder / "config.json").write_text(json.dumps(values))
    message = ""
    try:
        decoder = load_model(ModelConfig(path=str(folder)))
        with torch.inference_mode():
            decoder.forward(torch.tensor([1, 2]), torch.tensor([0, 1]), lambda _layer, q, k, v: q.flatten(1))
    except (ModelError, ConfigError) as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 500
