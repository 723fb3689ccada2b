"""Byte tables from tokenizers of both kinds, and a clear refusal of others."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from pagewire_client.text.byte_table import byte_table, byte_table_from_file
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.errors import ModelError


def byte_level(tokens):
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(tokens, decoder):
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoder
    return tokenizer


LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIP = decoders.Strip(" ", 1, 0)


def test_byte_level_tokens_are_bytes():
    table = byte_table(byte_level(["Ġthe", "Ã", "©", "Ċ", "plain", "日"]))
    assert table.pieces == (b" the", b"\xc3", b"\xa9", b"\n", b"plain", "日".encode())
    assert table.decode([1, 2]) == "é"
    assert not table.strips_space


def test_added_tokens_stand_for_themselves():
    tokenizer = byte_level(["a"])
    tokenizer.add_tokens([AddedToken("é!", special=False)])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    table = byte_table(tokenizer)
    assert table.decode([1, 2, 0]) == "é!a"
    assert table.decode([2, 0], skip_special=False) == "<s>a"


def test_every_byte_has_its_letter():
    letters = pre_tokenizers.ByteLevel.alphabet()
    table = byte_table(byte_level(sorted(letters)))
    assert sorted(table.pieces) == [bytes([i]) for i in range(256)]
    tokenizer = byte_level(sorted(letters))
    for text in ("é日👩\t\x00\x7f\xa0", "".join(map(chr, range(1, 1000)))):
        ids = tokenizer.encode(text).ids
        assert table.decode(ids) == tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        (decoders.Sequence([*LLAMA, STRIP]), "the the€"),
        (decoders.Sequence(LLAMA), " the the€"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "first")]), "the the€"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "never")]), " the the€"),
    ],
)
def test_sentencepiece_tokens(decoder, text):
    table = byte_table(sentencepiece(["▁the", "<0xE2>", "<0x82>", "<0xAC>"], decoder))
    ids = [0, 0, 1, 2, 3]
    assert table.pieces == (b" the", b"\xe2", b"\x82", b"\xac")
    assert table.decode(ids) == text
    stream = TextStream(table)
    assert "".join(stream.push([i]).text for i in ids) == text


def test_holes_and_padding_are_empty():
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "b": 3}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert byte_table(tokenizer, size=6).pieces == (b"a", b"", b"", b"b", b"", b"")


@pytest.mark.parametrize(
    "decoder",
    [None, decoders.WordPiece(), decoders.CTC(), decoders.Sequence([decoders.Replace("x", "y"), decoders.Fuse()])],
)
def test_other_decoders_are_refused_by_name(decoder):
    tokenizer = sentencepiece(["a"], decoder) if decoder else Tokenizer(BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelError, match="decoder"):
        byte_table(tokenizer)


def test_from_a_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        byte_table_from_file(path)
    path.write_text(json.dumps({"model": 1}))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        byte_table_from_file(path)
    byte_level(["Ġa"]).save(str(path))
    assert byte_table_from_file(path).pieces == (b" a",)
