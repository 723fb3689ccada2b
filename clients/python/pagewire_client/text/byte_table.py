"""The bytes of every token: all that turning token ids into text needs, and nothing of the encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagewire_transport.errors import ModelError

if TYPE_CHECKING:
    from os import PathLike

    from tokenizers import Tokenizer

_MOST_IDS = 2**22
"""Sixteen times the largest vocabulary that is known; the table has a place for each id, whatever the file says."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class ByteTable:
    """Bytes by token id, shared by every stream of a model.

    Text is defined on bytes: the *whole decode* of a run of tokens is the concatenation of their bytes, decoded as
    UTF-8 with each maximal invalid part replaced by U+FFFD, less one leading space where the tokenizer had put one in
    front of the text. A byte table was preferred to `tokenizers.decoders.DecodeStream`: that one decodes a window of
    tokens anew for every token and gives other text when it is primed with a prompt.

    Attributes:
        pieces: bytes of token i, also of special tokens; empty where a vocabulary has a hole.
        special: ids that text leaves out unless asked for (BOS, EOS, turn markers, …).
        strips_space: the tokenizer begins a text with an extra space (SentencePiece), so decoding takes it away.
        visible: as `pieces`, but empty for special tokens.
        texts: the piece as text where it is whole characters, else None: most tokens are, and then text is a look-up.
        visible_texts: the same for `visible`.
        longest: bytes of the longest piece, so that a text of N bytes has at least N / longest tokens.
    """

    pieces: tuple[bytes, ...]
    special: frozenset[int] = frozenset()
    strips_space: bool = False
    visible: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    texts: tuple[str | None, ...] = field(init=False, repr=False, compare=False)
    visible_texts: tuple[str | None, ...] = field(init=False, repr=False, compare=False)
    longest: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the other columns."""
        special = self.special
        texts = tuple(_whole_text(piece) for piece in self.pieces)
        derived: dict[str, object] = {
            "visible": tuple(b"" if i in special else piece for i, piece in enumerate(self.pieces)),
            "texts": texts,
            "visible_texts": tuple("" if i in special else text for i, text in enumerate(texts)),
            "longest": max(map(len, self.pieces), default=0),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        """Number of ids. Ids at or beyond it (rows that pad an embedding) decode to nothing."""
        return len(self.pieces)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The whole decode of `token_ids`; what a `Detokeniser` gives in parts."""
        table = self.visible if skip_special else self.pieces
        size = len(table)
        data = b"".join([table[i] for i in token_ids if i < size])
        if self.strips_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")


def byte_table_from_file(path: str | PathLike[str]) -> ByteTable:
    """The table of a `tokenizer.json`. Needs the package `tokenizers`.

    Raises:
        ModelError: the file is missing or no tokenizer, or its decoder is of a kind that has no byte table.
    """
    # Imported here: a client that does not detokenise installs without it.
    from tokenizers import Tokenizer  # noqa: PLC0415

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the package raises bare Exception)
        raise ModelError(f"{path} is no readable tokenizer.json: {error}") from None
    return byte_table(tokenizer)


def byte_table(tokenizer: Tokenizer, *, size: int = 0) -> ByteTable:
    """The table of a tokenizer whose decoder is byte-level (GPT-2's alphabet) or SentencePiece's (▁, <0xNN>).

    Args:
        tokenizer: as the package `tokenizers` holds it.
        size: smallest length of the table; 0: up to the highest id.

    Raises:
        ModelError: another kind of decoder, named, or ids beyond any vocabulary.
    """
    vocabulary = tokenizer.get_vocab(
        with_added_tokens=True
    )  # first: `to_str` would go through all ids up to the highest
    num_ids = max(size, 1 + max(vocabulary.values(), default=-1))
    if num_ids > _MOST_IDS:
        raise ModelError(f"the tokenizer has a token with the id {num_ids - 1}; ids below {_MOST_IDS} can be read")
    spec = json.loads(tokenizer.to_str())
    steps = _decoder_steps(spec.get("decoder"))
    added = {entry["id"]: entry for entry in spec.get("added_tokens", ())}
    pieces = [b""] * num_ids
    byte_level = "ByteLevel" in steps
    for token, i in vocabulary.items():
        if byte_level:
            pieces[i] = token.encode() if i in added else _byte_level_bytes(token)
        else:
            pieces[i] = _sentencepiece_bytes(token, steps)
    special = frozenset(i for i, entry in added.items() if entry["special"])
    return ByteTable(tuple(pieces), special, strips_space="Strip" in steps)


def _whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def _decoder_steps(decoder: dict[str, Any] | None) -> dict[str, str]:
    """What the decoder does, by name, with the argument that matters: ByteLevel, or Replace, ByteFallback, Strip."""
    flat = decoder.get("decoders", [decoder]) if decoder else []
    steps: dict[str, str] = {}
    for step in flat:
        kind = step["type"]
        if kind in ("ByteLevel", "ByteFallback", "Fuse"):
            steps[kind] = ""
        elif kind == "Replace" and "String" in step["pattern"] and step["content"] == " ":
            steps["Replace"] = step["pattern"]["String"]
        elif kind == "Strip" and step["content"] == " " and step["start"] == 1 and step["stop"] == 0:
            steps["Strip"] = ""
        elif kind == "Metaspace":
            steps["Replace"] = step["replacement"]
            if step.get("prepend_scheme", "always") != "never":
                steps["Strip"] = ""
        else:
            raise ModelError(f"the tokenizer's decoder has a step {kind!r} that cannot be streamed")
    if not steps.keys() & {"ByteLevel", "Replace"}:
        raise ModelError("the tokenizer's decoder is neither byte-level nor SentencePiece's")
    return steps


def _sentencepiece_bytes(token: str, steps: dict[str, str]) -> bytes:
    if "ByteFallback" in steps and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(match[1])
    return token.replace(steps["Replace"], " ").encode()


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a token spelt in GPT-2's alphabet; a token with any other character stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for 256, 257, … in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
