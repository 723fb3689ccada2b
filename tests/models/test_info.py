"""`pagewire info` says what sets a family apart."""

import argparse

import pytest
from tests.models.families import save_family
from tests.models.gguf_files import write

from pagewire.cli import info


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
    assert info.run(argparse.Namespace(model=str(path))) == 0
    out = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert " ".join(line.split()) in out
    assert ("soft caps" in out) == (family == "gemma2")
