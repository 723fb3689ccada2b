"""The line of a server that starts: on a terminal alone, and gone when it is over."""

from __future__ import annotations

import asyncio
import io

from pagewire.cli.progress import stages_shown


class Out(io.StringIO):
    def __init__(self, *, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


async def test_a_terminal_sees_what_each_part_does_and_a_clean_line_at_the_end():
    out, stages = Out(is_terminal=True), {"engine": "import", "gateway": "tokenizer"}
    async with stages_shown(lambda: stages, out) as end:
        await asyncio.sleep(0.02)
        assert "0.0 s  engine: import · gateway: tokenizer\r" in out.getvalue()
        stages = {"engine": "weights"}
        async with asyncio.timeout(5):
            while "engine: weights\r" not in out.getvalue():
                await asyncio.sleep(0.01)
        stages = {"engine": "weights 50 %"}
        async with asyncio.timeout(5):
            while "engine: weights ██████████░░░░░░░░░░ 50 %\r" not in out.getvalue():
                await asyncio.sleep(0.01)
        end()
        whole = out.getvalue()
        assert whole.endswith("\r\x1b[2K")
        await asyncio.sleep(0.25)
    assert out.getvalue() == whole


async def test_a_pipe_sees_nothing():
    out = Out(is_terminal=False)
    async with stages_shown(lambda: {"engine": "import"}, out):
        await asyncio.sleep(0.02)
    assert out.getvalue() == ""
