"""A client process of a benchmark, started by `processes.Clients`: a job on standard input, what it found on standard output."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import uvloop
from processes import Answer, Job, Pauses
from workload import (
    Generate,
    Request,
    Served,
    chat_lengths,
    chat_requests,
    closed,
    opened,
    poisson_requests,
    poisson_seconds,
    serve_one,
)

from pagewire_client import Client, connect

_STOCK = 2400
"""Requests of all parts that are drawn before the start: drawing one takes as long as reading some hundred tokens."""
_LENGTHS = 4000
_BESIDE_TOKENS = 32
"""Output of prompts that come beside decoding streams: few, so that their rows are soon free."""


def generate_by(client: Client, namespace: str) -> Generate:
    """Random sampling, never stopped early."""

    async def generate(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        stream = client.generate(
            prompt, max_tokens=max_tokens, ignore_eos=True, temperature=1.0, echo_text=False, namespace=namespace
        )
        async for chunk in stream:
            if chunk.token_ids:
                yield len(chunk.token_ids)

    return generate


def log_messages(client: Client) -> list[tuple[float, int]]:
    """From now on: when each message with tokens came from the socket, and for how many streams."""
    found: list[tuple[float, int]] = []
    take = client._on_tokens

    def on_tokens(message: Any, now_ns: int) -> None:
        found.append((1e-9 * now_ns, len(message.streams) // 4))
        take(message, now_ns)

    client._on_tokens = on_tokens  # type: ignore[method-assign]
    return found


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - time.perf_counter()))


async def chat(client: Client, job: Job, requests: list[Request], begin: float) -> Answer:
    """Closed loop or Poisson arrivals."""
    generate, answer = generate_by(client, job.namespace), Answer(served=[])
    low, high = begin + job.ramp, begin + job.ramp + job.seconds

    async def watch() -> None:
        await _sleep_until(low)
        cpu, wall = time.process_time(), time.perf_counter()
        before = await client.stats() if job.part == 0 else {}
        await _sleep_until(high)
        answer.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        answer.state = await client.stats() if job.part == 0 else {}
        answer.stats = {name: value - before.get(name, 0.0) for name, value in answer.state.items()}

    await _sleep_until(begin)
    watcher = asyncio.create_task(watch())
    if job.kind == "closed":
        rest = itertools.islice(_closed_requests(job), len(requests), None)
        answer.served = await closed(generate, itertools.chain(requests, rest), job.own_streams, high)
    else:
        answer.served = await opened(generate, iter(requests), begin)
    await watcher
    return answer


def _closed_requests(job: Job) -> itertools.islice[Request]:
    requests = chat_requests(chat_lengths(_LENGTHS, job.seed), job.vocab_size, seed=1 + job.seed)
    return itertools.islice(requests, job.part, None, job.parts)


def draw(job: Job) -> list[Request]:
    """This part's requests, drawn as if there were one part; of a closed loop as many as it may need."""
    if job.kind == "closed":
        return list(itertools.islice(_closed_requests(job), _STOCK // job.parts))
    if job.kind == "poisson":
        seconds = poisson_seconds(job.ramp, job.seconds)
        lengths = chat_lengths(_LENGTHS, job.seed)
        every = poisson_requests(lengths, job.rate, seconds, job.vocab_size, seed=2 + job.seed)
        return list(itertools.islice(every, job.part, None, job.parts))
    rng = random.Random(3)
    prompts = [
        array("I", [rng.randrange(10, job.vocab_size - 10) for _ in range(job.context)]) for _ in range(job.streams)
    ]
    return [Request(prompt, job.max_tokens) for prompt in prompts[job.part :: job.parts]]


async def decode(client: Client, job: Job, requests: list[Request], begin: float) -> Answer:
    """Streams that decode all at once, and prompts beside them."""
    generate, first = generate_by(client, job.namespace), asyncio.Event()
    num_first = 0

    async def noting_first(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
        nonlocal num_first
        is_first = True
        async for count in generate(prompt, max_tokens):
            if is_first:
                is_first = False
                num_first += 1
                if num_first == len(requests):
                    first.set()
            yield count

    async def come_beside(rows: list[Served]) -> None:
        await first.wait()
        begun, tasks = time.perf_counter(), []
        rate = job.rate / job.parts
        try:
            for request in poisson_requests(chat_lengths(_LENGTHS), rate, 1e9, job.vocab_size, seed=20 + job.part):
                await _sleep_until(begun + request.after)
                few = Request(request.prompt_ids, min(request.max_tokens, _BESIDE_TOKENS))
                tasks.append(asyncio.create_task(serve_one(generate, few, begun + request.after)))
        finally:
            rows += [task.result() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()

    answer = Answer(served=[])
    await _sleep_until(begin)
    cpu, wall = time.process_time(), time.perf_counter()
    beside = asyncio.create_task(come_beside(answer.beside)) if job.rate else None
    answer.served = list(await asyncio.gather(*(serve_one(noting_first, request) for request in requests)))
    answer.cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    if beside is not None:
        beside.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beside
    return answer


async def run() -> None:
    """One job."""
    lines = sys.stdin.buffer
    job = msgspec.json.decode(lines.readline(), type=Job)
    requests = draw(job)
    pauses = Pauses()
    async with connect(job.endpoint, timeout_s=30) as client:
        messages = log_messages(client)
        gc.collect()
        gc.freeze()  # the drawn prompts
        gc.callbacks.append(pauses)
        _say(b"true")
        begin = msgspec.json.decode(await asyncio.to_thread(lines.readline), type=float)
        do = decode if job.kind == "decode" else chat
        answer = await do(client, job, requests, begin)
        gc.callbacks.remove(pauses)
        answer.pauses, answer.messages = pauses.found, messages
    _say(msgspec.json.encode(answer))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    uvloop.run(run())
