"""Which tokenizer a model path holds."""

from __future__ import annotations

from pathlib import Path

from pagewire.errors import ModelError
from pagewire.gguf_header import read_header
from pagewire.text.gguf_tokenizer import text_model_from_gguf
from pagewire.text.hf_tokenizer import text_model_from_folder
from pagewire.text.panics import panics_as
from pagewire.text.text_model import TextModel


def load_text_model(path: str | Path) -> TextModel:
    """The text side of the model at `path`, a GGUF file or a Hugging Face folder. Reads no weights.

    Raises:
        ModelError: one line that says what is missing or not supported.
    """
    path = Path(path)
    with panics_as(lambda what: ModelError(f"{path}: {what}")):
        if path.is_dir():
            return text_model_from_folder(path)
        return text_model_from_gguf(read_header(path).metadata, str(path))
