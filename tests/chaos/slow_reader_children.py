"""The clients of `slow_readers.py` that are processes of their own: many that read, and one that is stopped.

python slow_reader_children.py normal URL NUM                      gaps between `begin` and `end` on standard input
python slow_reader_children.py stopped URL PROMPTS KINDS TOKENS LOGPROBS    a line for each stream when it is over
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time

import uvloop
import zmq

import pagewire_client
from pagewire.errors import SlowReader

CONNECTIONS = 4
SMALL_BUFFER = 2048  # as in `slow_relay`, which a script cannot import


async def start(role: str, *arguments: str) -> asyncio.subprocess.Process:
    """One of them as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, role, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


async def end(process: asyncio.subprocess.Process) -> None:
    """End it, stopped or not."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.kill()
    await process.wait()


def tell(what: object) -> None:
    print(json.dumps(what), flush=True)


class Gaps:
    """Milliseconds between two messages of a stream."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.num_tokens = 0
        self.begun = 0.0

    def figures(self) -> dict[str, float]:
        """And start anew."""
        values, seconds = sorted(self.values), time.monotonic() - self.begun
        at = {name: values[min(len(values) - 1, int(len(values) * q))] for name, q in (("p50", 0.5), ("p99", 0.99))}
        return {**at, "max": values[-1], "tokens_s": self.num_tokens / seconds}

    def begin(self) -> None:
        self.values, self.num_tokens, self.begun = [], 0, time.monotonic()


async def stream_on(client: pagewire_client.Client, number: int, gaps: Gaps, opened: asyncio.Semaphore) -> None:
    """One stream after another; those of all users end at different times."""
    length = 300 + 37 * number % 400
    while True:
        last = None
        async for chunk in client.generate([1 + number % 90, 5, 6, 7], max_tokens=length, seed=number, ignore_eos=True):
            now = time.monotonic()
            if last is None:
                opened.release()
            else:
                gaps.values.append((now - last) * 1e3)
                gaps.num_tokens += len(chunk.token_ids)
            last = now
        length = 700


async def normal(url: str, num: int) -> None:
    gaps, opened = Gaps(), asyncio.Semaphore(0)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(pagewire_client.connect(url)) for _ in range(CONNECTIONS)]
        users = [asyncio.create_task(stream_on(clients[i % CONNECTIONS], i, gaps, opened)) for i in range(num)]
        for _ in range(num):
            await opened.acquire()
        tell("open")
        while line := await lines.readline():
            if line == b"begin\n":
                gaps.begin()
            else:
                tell(gaps.figures())
        for user in users:
            user.cancel()


async def stopped(url: str, prompts: list[list[int]], kinds: list[str], tokens: int, logprobs: int) -> None:
    """Opens streams, is stopped from outside, and tells how each ended when it can."""
    make = zmq.Context.socket

    def small(self, *arguments, **options):
        """What the kernel keeps for a process that is stopped would otherwise be megabytes."""
        made = make(self, *arguments, **options)
        made.rcvbuf = SMALL_BUFFER
        return made

    zmq.Context.socket = small
    async with pagewire_client.connect(url, resume_timeout_s=60) as client:
        streams = [
            client.generate(prompt, max_tokens=tokens, seed=seed, ignore_eos=True, on_lag=kind, logprobs=logprobs)
            for seed, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
        ]
        results = [asyncio.create_task(ended(client, stream)) for stream in streams]
        while not all(stream.received[0] for stream in streams):
            await asyncio.sleep(0.01)
        tell("open")
        for result in results:
            tell(await result)


async def ended(client: pagewire_client.Client, stream: pagewire_client.Stream) -> dict[str, object]:
    """The tokens, and the reason; of one that was too slow, what was kept is fetched."""
    try:
        result = await stream.result()
    except SlowReader:
        again = client.resume(stream.request_id, stream.resume_key, received=[0])
        return {"reason": "slow_reader", "tokens": (await again.result()).token_ids}
    return {"reason": result.finish_reason, "tokens": result.token_ids}


if __name__ == "__main__":
    role, url, *rest = sys.argv[1:]
    if role == "normal":
        uvloop.run(normal(url, int(rest[0])))
    else:
        asyncio.run(stopped(url, json.loads(rest[0]), json.loads(rest[1]), int(rest[2]), int(rest[3])))
