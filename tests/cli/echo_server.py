"""A server that the tests play, and the command line as a process."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from array import array
from pathlib import Path

from pagewire.errors import InvalidRequest, PagewireError
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finished,
    Generate,
    Timings,
    Tokens,
    Usage,
    Welcome,
)


class EchoServer:
    """Answers with the words of the prompt or of the last turn, one a message."""

    is_ready = True

    def __init__(self):
        self.asked: list[Generate] = []
        self.cancelled: list[int] = []
        self.delay_s = 0.0
        self.refusals: list[PagewireError] = []
        """Of the first requests."""

    def welcome(self):
        return Welcome(
            version=1, role="gateway", server="fake", model="m", vocab_size=9, max_model_len=9, max_streams=9,
            max_message_bytes=2**20, heartbeat_ms=1000, heartbeat_timeout_ms=5000,
        )  # fmt: skip

    def on_message(self, connection, message):
        if isinstance(message, Cancel):
            self.cancelled.append(message.stream)
            connection.send(Finished(stream=message.stream, choice=0, reason="cancelled", num_tokens=1))
            self._send_done(connection, message.stream, 1)
        if not isinstance(message, Generate):
            return
        if self.delay_s:
            asyncio.get_running_loop().call_later(self.delay_s, self._answer, connection, message)
        else:
            self._answer(connection, message)

    def _answer(self, connection, message):
        self.asked.append(message)
        if self.refusals:
            raise self.refusals.pop(0)
        if message.prompt_ids is not None:
            text = "ids " * (len(message.prompt_ids) // 4)
        else:
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
            if text.startswith("never ends"):
                return  # until it is cancelled
            if text == "fail half way":
                connection.send(Error(stream=number, code="internal", message="it broke"))
                return
            connection.send(Finished(stream=number, choice=choice, reason="length", num_tokens=len(words)))
        self._send_done(connection, number, n * len(words))

    def _send_done(self, connection, number, count):
        usage = Usage(prompt=5, completion=count)
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


def environment_of(temporary: Path) -> dict[str, str]:
    """The folder for temporary files is where servers are looked for; the home is where lines are remembered."""
    environment = {**os.environ, "TMPDIR": str(temporary), "HOME": str(temporary)}
    environment.pop("XDG_RUNTIME_DIR", None)
    return environment


async def pagewire(*arguments: str, temporary: Path, stdin: bytes | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", *arguments, env=environment_of(temporary),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(stdin), 30)
    return process.returncode, out.decode(), err.decode()
