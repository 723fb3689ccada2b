"""The child's side of its two pipes."""

from __future__ import annotations

import os

import msgspec
import pytest

from pagewire.child import Report, Reporter, decode_report, encode_report, failure, read_config
from pagewire.config import Config, from_mapping
from pagewire.errors import ModelError


def test_the_configuration_survives_the_pipe():
    config = from_mapping({"cache": {"block_size": 32}, "model": {"path": "/m"}})
    out, into = os.pipe()
    os.write(into, msgspec.json.encode(config))
    os.close(into)
    assert read_config(out) == config


@pytest.mark.parametrize("text", [b"", b"{", b'{"scheduler": {"max_rows": 0}}', b'{"scheduler": {"rows": 1}}'])
def test_a_wrong_configuration_is_refused(text):
    out, into = os.pipe()
    os.write(into, text)
    os.close(into)
    with pytest.raises(msgspec.DecodeError):
        read_config(out)


def test_reports_are_lines_and_survive_the_pipe():
    report = Report(event="ready", endpoint="ipc://x", model="m\nn", info={"kv_blocks": 3})
    line = encode_report(report)
    assert line.count(b"\n") == 1
    assert decode_report(line) == report


def test_an_error_of_the_tree_keeps_code_and_field_others_become_internal():
    assert failure(ModelError("no", field="model.path")) == Report(
        event="failed", code="model", message="no", field="model.path"
    )
    assert failure(KeyError("x")).code == "internal"


def test_a_report_to_a_parent_that_is_gone_is_no_error():
    out, into = os.pipe()
    os.close(out)
    Reporter(into).loading("weights")
    os.close(into)


def test_the_configuration_fits_a_pipe():
    """`Child.start` writes it before anybody reads: it must fit the smallest pipe buffer there is."""
    long = from_mapping({"model": {"path": "x" * 4096, "name": "y" * 256}})
    assert len(msgspec.json.encode(long)) < 16_384
    assert isinstance(long, Config)
