"""`generate` and `chat` against a server that the test plays."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import re
import socket
import sys

import pytest
from tests.cli.echo_server import pagewire

from pagewire.cli import answer
from pagewire.supervisor.rendezvous import ServerFolder


async def test_generate_streams_the_continuation_and_tells_the_speed(served):
    server, url, temporary = served
    code, out, err = await pagewire(
        "generate", "one two three", "--url", url, "--stats", "--temperature", "0", "--stop=x", "--stop=y",
        temporary=temporary,
    )  # fmt: skip
    assert (code, out) == (0, "one two three\n"), err
    assert re.search(r"3 tokens from a prompt of 5 · TTFT \d+ ms · ITL p50 .* tokens/s", err)
    assert (server.asked[0].params.temperature, server.asked[0].params.stop) == (0.0, ("x", "y"))


async def test_the_server_is_found_and_the_prompt_may_come_from_standard_input(served):
    _, _, temporary = served
    code, out, err = await pagewire("generate", temporary=temporary, stdin="grüß dich\n".encode())
    assert (code, out) == (0, "grüß dich\n"), err


async def test_chat_sends_turns(served):
    server, _, temporary = served
    code, out, err = await pagewire("chat", "hello", "--system", "be kind", temporary=temporary)
    assert (code, out) == (0, "hello\n"), err
    assert [(turn.role, turn.content) for turn in server.asked[0].messages] == [
        ("system", "be kind"),
        ("user", "hello"),
    ]


async def test_several_continuations_are_told_apart(served):
    _, _, temporary = served
    code, out, _ = await pagewire("generate", "a b", "--n", "2", temporary=temporary)
    assert (code, out) == (0, "a b\n\n--- 2 ---\na b\n")


async def test_a_refusal_is_one_line_and_2(served):
    _, _, temporary = served
    code, out, err = await pagewire("generate", "refuse", temporary=temporary)
    assert (code, out, err) == (2, "", "pagewire: prompt: not this one\n")


async def test_a_parameter_out_of_range_is_named(served):
    _, _, temporary = served
    code, _, err = await pagewire("generate", "x", "--temperature", "-1", temporary=temporary)
    assert code == 2
    assert "temperature" in err
    assert err.count("\n") == 1


async def test_an_error_after_some_text_begins_a_line_of_its_own(served):
    _, _, temporary = served
    code, out, err = await pagewire("generate", "fail half way", temporary=temporary)
    assert (code, out, err) == (1, "fail half way\n", "pagewire: it broke\n")


@pytest.mark.parametrize(
    ("arguments", "stdin", "wanted"),
    [
        (["generate", b"caf\xe9"], None, "pagewire: prompt: must be text in Unicode"),
        (["chat", b"caf\xe9"], None, "pagewire: messages[0].content: must be text in Unicode"),
        (["generate", "x", b"--stop=\xe9"], None, "pagewire: stop[0]: must be text in Unicode"),
        (["generate"], b"caf\xe9", "pagewire: prompt: "),
    ],
)
async def test_text_that_is_no_utf8_is_2_and_named(served, arguments, stdin, wanted):
    _, _, temporary = served
    code, out, err = await pagewire(*arguments, temporary=temporary, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(wanted)


async def test_a_question_of_nothing_is_refused_before_a_server_is_asked(served):
    _, _, temporary = served
    code, out, err = await pagewire("chat", temporary=temporary, stdin=b" \n")
    assert (code, out, err) == (2, "", "pagewire: prompt: must not be empty\n")


async def test_without_a_server_the_message_says_how_to_start_one(tmp_path):
    code, _, err = await pagewire("generate", "x", temporary=tmp_path)
    assert code == 1
    assert "pagewire serve" in err
    assert err.count("\n") == 1


async def test_a_server_that_is_starting_is_told_from_none(served):
    _, _, temporary = served
    code, _, err = await pagewire("chat", "x", "--url", f"ipc://{temporary}/nobody.sock", temporary=temporary)
    assert (code, err.count("\n")) == (1, 1)
    assert "no server answers at" in err
    other = temporary / "other" / f"pagewire-{os.getuid()}"
    other.mkdir(mode=0o700, parents=True)
    folder = ServerFolder.create(other)
    code, _, err = await pagewire("chat", "x", temporary=temporary / "other")
    folder.close()
    assert (code, err.count("\n")) == (1, 1)
    assert "still starting" in err


class _Terminal(io.StringIO):
    """Says what was written to it as soon as it is."""

    def __init__(self):
        super().__init__()
        self.written = asyncio.Event()

    def isatty(self):
        return True

    def flush(self):
        self.written.set()


async def test_who_waits_at_a_terminal_is_told_for_what(monkeypatch):
    monkeypatch.setattr(answer, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"

        async def connect():
            async with answer.connected(argparse.Namespace(url=url, command="chat", server_key=None, key_file=None)):
                raise AssertionError("nobody answered")

        connecting = asyncio.create_task(connect())
        async with asyncio.timeout(10):
            await terminal.written.wait()
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
    assert terminal.getvalue() == f"waiting for {url} …\n"
