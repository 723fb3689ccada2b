"""Logging never waits for whoever reads it (F8), and says which process speaks."""

from __future__ import annotations

import io
import threading
import time

import pytest
import structlog

from pagewire import log


@pytest.fixture(autouse=True)
def _reset():
    yield
    structlog.reset_defaults()


class _Blocked(io.StringIO):
    """A terminal that was stopped: `write` waits until it is let go."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def write(self, text):
        self.go.wait(20)
        return super().write(text)


def test_one_line_an_event_with_process_level_and_keys():
    stream = io.StringIO()
    writer = log.configure("gateway", stream=stream)
    structlog.get_logger().info("engine_ready", blocks=3, note="two words")
    structlog.get_logger().debug("hidden")
    writer.close()
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert "level=info process=gateway event=engine_ready blocks=3" in line
    assert 'note="two words"' in line


def test_a_stopped_reader_stops_nobody_and_memory_is_bounded():
    stream = _Blocked()
    writer = log.configure("engine", stream=stream)
    logger = structlog.get_logger()
    before = time.monotonic()
    for number in range(12_000):
        logger.info("event", number=number)
    assert time.monotonic() - before < 10
    assert writer.num_dropped >= 1_900
    stream.go.set()
    writer.close()


def test_an_exception_is_told_in_one_line():
    stream = io.StringIO()
    writer = log.configure("engine", stream=stream)
    try:
        raise RuntimeError("planted")
    except RuntimeError:
        structlog.get_logger().exception("stream_failed")
    writer.close()
    assert stream.getvalue().count("\n") == 1
    assert "planted" in stream.getvalue()
