"""`generate` and `chat` against a server that the test plays."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from array import array
from pathlib import Path

import pytest

from pagewire.errors import InvalidRequest
from pagewire.supervisor.rendezvous import ServerFolder
from pagewire_transport.door import Door, DoorLimits
from pagewire_transport.messages import Accepted, Done, Error, Finished, Generate, Timings, Tokens, Usage, Welcome
from pagewire_transport.servers import ServerRecord


class EchoServer:
    """Answers with the words of the prompt or of the last turn, one a message."""

    is_ready = True

    def __init__(self):
        self.asked: list[Generate] = []

    def welcome(self):
        return Welcome(
            version=1, role="gateway", server="fake", model="m", vocab_size=9, max_model_len=9, max_streams=9,
            max_message_bytes=2**20, heartbeat_ms=1000, heartbeat_timeout_ms=5000,
        )  # fmt: skip

    def on_message(self, connection, message):
        if not isinstance(message, Generate):
            return
        self.asked.append(message)
        text = message.prompt if message.prompt is not None else message.messages[-1].content
        if text == "refuse":
            raise InvalidRequest("not this one", field="prompt")
        words = re.findall(r"\S+\s*", text)
        number, n = message.stream, message.params.n
        connection.send(Accepted(stream=number, request_id="r", seed=3, num_prompt_tokens=5, max_tokens=9))
        for choice in range(n):
            for start, word in enumerate(words):
                connection.send(
                    Tokens(
                        streams=array("I", [number]).tobytes(),
                        choices=array("H", [choice]).tobytes(),
                        starts=array("I", [start]).tobytes(),
                        ids=array("I", [1]).tobytes(),
                        texts=(word,),
                    )
                )
            if text == "fail half way":
                connection.send(Error(stream=number, code="internal", message="it broke"))
                return
            connection.send(Finished(stream=number, choice=choice, reason="length", num_tokens=len(words)))
        usage = Usage(prompt=5, completion=n * len(words))
        timings = Timings(queue_ns=1, first_token_ns=2, total_ns=3)
        connection.send(Done(stream=number, seed=3, usage=usage, timings=timings))

    def has_stream(self, connection, stream):
        return False

    def on_writable(self, connection):
        pass

    def on_lost(self, connection, reason):
        pass

    def stats(self):
        return {}


@pytest.fixture
async def served():
    """(the server, its URL, the folder for temporary files in which it was published)."""
    temporary = Path(tempfile.mkdtemp(prefix="pw-"))
    private = temporary / f"pagewire-{os.getuid()}"
    private.mkdir(mode=0o700)
    server = EchoServer()
    door = Door(f"ipc://{temporary}/s.sock", handler=server, limits=DoorLimits(), on_fault=lambda doing, error: None)
    folder = ServerFolder.create(private)
    folder.publish(ServerRecord(url=door.url, model="m", pid=os.getpid(), started=1.0))
    yield server, door.url, temporary
    folder.close()
    await door.close()
    shutil.rmtree(temporary, ignore_errors=True)


async def _pagewire(*arguments: str, temporary: Path, stdin: bytes | None = None) -> tuple[int, str, str]:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    environment.pop("XDG_RUNTIME_DIR", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", *arguments, env=environment,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    return process.returncode, out.decode(), err.decode()


async def test_generate_streams_the_continuation_and_tells_the_speed(served):
    server, url, temporary = served
    code, out, err = await _pagewire(
        "generate", "one two three", "--url", url, "--stats", "--temperature", "0", "--stop=x", "--stop=y",
        temporary=temporary,
    )  # fmt: skip
    assert (code, out) == (0, "one two three\n"), err
    assert re.search(r"3 tokens from a prompt of 5 · TTFT \d+ ms · ITL p50 .* tokens/s", err)
    assert (server.asked[0].params.temperature, server.asked[0].params.stop) == (0.0, ("x", "y"))


async def test_the_server_is_found_and_the_prompt_may_come_from_standard_input(served):
    _, _, temporary = served
    code, out, err = await _pagewire("generate", temporary=temporary, stdin="grüß dich\n".encode())
    assert (code, out) == (0, "grüß dich\n"), err


async def test_chat_sends_turns(served):
    server, _, temporary = served
    code, out, err = await _pagewire("chat", "hello", "--system", "be kind", temporary=temporary)
    assert (code, out) == (0, "hello\n"), err
    assert [(turn.role, turn.content) for turn in server.asked[0].messages] == [
        ("system", "be kind"),
        ("user", "hello"),
    ]


async def test_several_continuations_are_told_apart(served):
    _, _, temporary = served
    code, out, _ = await _pagewire("generate", "a b", "--n", "2", temporary=temporary)
    assert (code, out) == (0, "a b\n\n--- 2 ---\na b\n")


async def test_a_refusal_is_one_line_and_2(served):
    _, _, temporary = served
    code, out, err = await _pagewire("generate", "refuse", temporary=temporary)
    assert (code, out, err) == (2, "", "pagewire: prompt: not this one\n")


async def test_a_parameter_out_of_range_is_named(served):
    _, _, temporary = served
    code, _, err = await _pagewire("generate", "x", "--temperature", "-1", temporary=temporary)
    assert code == 2
    assert "temperature" in err
    assert err.count("\n") == 1


async def test_an_error_after_some_text_begins_a_line_of_its_own(served):
    _, _, temporary = served
    code, out, err = await _pagewire("generate", "fail half way", temporary=temporary)
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
    code, out, err = await _pagewire(*arguments, temporary=temporary, stdin=stdin)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(wanted)


async def test_without_a_server_the_message_says_how_to_start_one(tmp_path):
    code, _, err = await _pagewire("generate", "x", temporary=tmp_path)
    assert code == 1
    assert "pagewire serve" in err
    assert err.count("\n") == 1


async def test_a_server_that_is_starting_is_told_from_none(served):
    _, _, temporary = served
    code, _, err = await _pagewire("chat", "x", "--url", f"ipc://{temporary}/nobody.sock", temporary=temporary)
    assert (code, err.count("\n")) == (1, 1)
    assert "no server answers at" in err
    other = temporary / "other" / f"pagewire-{os.getuid()}"
    other.mkdir(mode=0o700, parents=True)
    folder = ServerFolder.create(other)
    code, _, err = await _pagewire("chat", "x", temporary=temporary / "other")
    folder.close()
    assert (code, err.count("\n")) == (1, 1)
    assert "still starting" in err
