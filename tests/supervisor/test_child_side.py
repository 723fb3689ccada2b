"""The child's side of its two pipes."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_weights_are_told_in_percent_and_a_full_pipe_holds_nobody_up():
    out, into = os.pipe()
    reporter = Reporter(into)
    for layer in range(1, 1001):
        reporter.weights(layer / 1000)
    stages = [decode_report(line).stage for line in os.read(out, 65_536).splitlines()]
    assert stages == [*(f"weights {percent} %" for percent in range(100)), "warm-up"]
    for turn in range(100_000):
        reporter.weights(turn % 100 / 100)
    os.close(out)
    os.close(into)


def test_the_configuration_fits_a_pipe():
    """`Child.start` writes it before anybody reads: it must fit the smallest pipe buffer there is."""
    long = from_mapping({"model": {"path": "x" * 4096, "name": "y" * 256}})
    assert len(msgspec.json.encode(long)) < 16_384
    assert isinstance(long, Config)


def test_a_part_may_open_as_many_files_as_the_system_lets_it():
    """In a process of its own: the limit is the process's."""
    code = (
        "import resource; from pagewire.child import allow_many_files\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))\n"
        "allow_many_files()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["engine", "gateway"])
def test_a_system_that_allows_too_few_files_is_told_of(module):
    """Before a socket is made, whose own error would be a traceback."""
    report_out, report_in = os.pipe()
    config_out, config_in = os.pipe()
    os.close(config_in)
    command = [sys.executable, "-m", f"pagewire.{module}.main", "--config-fd", str(config_out)]
    command += ["--report-fd", str(report_in), *(["--engine", "ipc:///nowhere"] if module == "gateway" else [])]
    with os.fdopen(report_out, "rb") as reports:
        done = subprocess.run(
            ["sh", "-c", 'ulimit -n 40 && exec "$@"', "sh", *command], pass_fds=(report_in, config_out), check=False
        )
        os.close(report_in)
        os.close(config_out)
        report = decode_report(reports.readline())
    assert (done.returncode, report.event, report.code) == (2, "failed", "config")
    assert report.message.startswith("the system lets a process open 40 files only")
