"""The header of a GGUF file: read as the `gguf` package reads it; damaged ones end in one named error (F46)."""

import struct

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import ModelError
from pagewire.gguf_header import read_header


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int8("a.i8", -3)
    writer.add_uint64("a.u64", 2**40)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "é日👩")
    writer.add_array("a.texts", ["x", "", "▁y"])
    writer.add_array("a.numbers", [1, 2, -3])
    writer.add_array("a.floats", [0.5, -1.5])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values(small):
    pairs = read_header(small).metadata
    assert pairs.pop("general.architecture") == "llama"
    assert pairs == {
        "a.u32": 7,
        "a.i8": -3,
        "a.u64": 2**40,
        "a.f32": 0.5,
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "é日👩",
        "a.texts": ["x", "", "▁y"],
        "a.numbers": [1, 2, -3],
        "a.floats": [0.5, -1.5],
    }


@pytest.mark.model
def test_the_demo_file(demo_file):
    pairs = read_header(demo_file).metadata
    assert len(pairs) == 33
    assert (pairs["general.architecture"], pairs["llama.block_count"]) == ("llama", 30)
    assert len(pairs["tokenizer.ggml.tokens"]) == len(pairs["tokenizer.ggml.token_type"]) == 49152


def test_truncated_at_every_byte(small, tmp_path):
    data, path = small.read_bytes(), tmp_path / "cut.gguf"
    last = data.rindex(struct.pack("<f", -1.5)) + 4
    for size in range(last):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError) as caught:
            read_header(path)
        assert "\n" not in caught.value.message


def header(*pairs, count=None, version=3):
    data = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs) if count is None else count)
    for key, value in pairs:
        data += struct.pack("<Q", len(key)) + key + value
    return data


STRING = struct.pack("<I", 8)
ARRAY = struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(60), "no GGUF"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "little-endian"),
        (header(count=2**63), "truncated"),
        (header((b"k", STRING + struct.pack("<Q", 2**63) + b"x")), "truncated"),
        (header((b"k", ARRAY + struct.pack("<IQ", 4, 2**61))), "truncated"),
        (header((b"k", ARRAY + struct.pack("<IQ", 8, 2**61))), "truncated"),
        (header((b"k", ARRAY + struct.pack("<IQ", 9, 2**61))), "truncated"),
        (header((b"k", ARRAY + struct.pack("<IQ", 9, 1) * 50 + bytes(64))), "too deeply"),
        (header((b"k", struct.pack("<I", 99) + bytes(8))), "unknown type 99"),
        (header((b"k", ARRAY + struct.pack("<IQ", 77, 1) + bytes(8))), "unknown type 77"),
        (header((b"k", STRING + struct.pack("<Q", 2) + b"\xff\xfe")), "UTF-8"),
        (header((b"k", struct.pack("<IB", 0, 1)), (b"k", struct.pack("<IB", 0, 1))), "twice"),
    ],
)
def test_damaged_headers(data, says, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=says) as caught:
        read_header(path)
    assert str(path) in caught.value.message


def test_no_such_file_and_no_file_at_all(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path)


@settings(max_examples=300)
@given(flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_flipped_bytes_end_in_values_or_a_named_error(small, tmp_path_factory, flips):
    data = bytearray(small.read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(data)
    try:
        read_header(path)
    except ModelError as error:
        assert str(path) in error.message  # noqa: PT017
