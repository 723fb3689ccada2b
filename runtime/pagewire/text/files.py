"""The files of a tokenizer as a client wants them: what its model's folder has, and the bytes of every token."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from pagewire.text.text_model import TextModel

VOCABULARY: Final = "vocabulary.msgpack"
"""`pieces`: the bytes of each token; `special`: ids that text leaves out; `strips_space`. Enough to make text of ids."""

_TEMPLATE: Final = "chat_template.jinja"
_FROM_FOLDER: Final = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", _TEMPLATE)
_LARGEST: Final = 64 * 2**20
"""Of a file that is served; a tokenizer.json has 2 to 35 MiB. They are held in memory."""


def tokenizer_files(path: str | Path, text: TextModel) -> dict[str, bytes]:
    """By name: the vocabulary, for every model; what a model folder has beside it; the chat template, if there is one."""
    table = text.byte_table
    vocabulary = {"pieces": table.pieces, "special": sorted(table.special), "strips_space": table.strips_space}
    files = {VOCABULARY: msgspec.msgpack.encode(vocabulary)}
    folder = Path(path)
    if folder.is_dir():
        for name in _FROM_FOLDER:
            file = folder / name
            try:
                if file.stat().st_size <= _LARGEST:
                    files[name] = file.read_bytes()
            except OSError:  # most folders lack one or two
                continue
    if text.chat_template is not None:
        files.setdefault(_TEMPLATE, text.chat_template.encode())
    return files
