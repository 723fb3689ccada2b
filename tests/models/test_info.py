"""`pagewire info` says what sets a family apart."""

import argparse

import pytest
from tests.models.families import save_family
from tests.models.gguf_files import write

from pagewire.cli import info


def asked(path, kv_bytes=2**30, tokens=0):
    return argparse.Namespace(model=str(path), kv_bytes=kv_bytes, tokens=tokens)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("llama", ["rope                base 10,000"]),
        (
            "gemma2",
            [
                "window              40 tokens in 2 of 4 layers",
                "further norms       after attention and feed-forward",
                "soft caps           3 of attention, 4 of logits",
            ],
        ),
        (
            "gemma3",
            [
                "window              40 tokens in 6 of 7 layers",
                "rope                base 10,000 and 1,000,000, linear",
                "further norms       queries and keys, after attention and feed-forward",
            ],
        ),
        ("qwen2", ["biases              qkv"]),
        ("smollm3", ["none in 1 layers"]),
    ],
)
def test_info(tmp_path, capsys, family, lines, kind):
    path = tmp_path
    model = save_family(family, tmp_path)
    if kind == "gguf":
        path = tmp_path / "model.gguf"
        write(path, model)
    assert info.run(asked(path)) == 0
    out = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert " ".join(line.split()) in out
    assert ("soft caps" in out) == (family == "gemma2")


def test_capacity_is_counted_in_whole_blocks_beside_the_null_block_and_scales(tmp_path, capsys):
    model = save_family("llama", tmp_path)
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert info.run(asked(tmp_path, kv_bytes=101 * 16 * per_token, tokens=33)) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["KV in bf16"].strip().startswith("1,600 tokens in ")
    assert lines["KV in bf16"].endswith(": 33 streams of 33"), "of three blocks each"
    assert lines["KV in float32"].strip().startswith("784 tokens in "), "half of them, less the null block"
    # Twice the blocks, less the null block, less one that the scales take.
    assert lines["KV in fp8"].strip().startswith("3,200 tokens in ")
    assert lines["KV in fp8"].endswith(": 66 streams of 33")
    assert info.run(asked(tmp_path, kv_bytes=1)) == 0
    assert ": 0 streams" in capsys.readouterr().out
