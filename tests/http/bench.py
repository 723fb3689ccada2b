"""The HTTP door with real sockets, before a gateway whose engine is a script."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
from tests.gateway.bench import BYTES, WELCOME, ids_of, tokens

from pagewire.config import HttpConfig, ServerConfig
from pagewire.errors import PagewireError
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.server import HttpServer
from pagewire.gateway.preparation import Preparation
from pagewire.request.validate import validate
from pagewire.text.text_model import TextModel
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.columns import pack
from pagewire_transport.door import refusal
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Finish,
    Finished,
    Generate,
    LogprobColumns,
    PromptLogprobs,
    Stats,
    Timings,
    Tokens,
    Usage,
)

MODEL = "bytes"
MAX_LEN = WELCOME.max_model_len


class ScriptedEngine:
    """Answers every request with `text`, one token (a byte) a turn of the loop, and checks requests as an engine does.

    The log-probability of the token at index i is −i − 0.5; its alternatives are the ids above it, each 1 less likely.
    """

    def __init__(self):
        self.deliver: Callable[[Any], None] = lambda message: None
        self.text = "Hello, world!"
        self.pause_s: float | None = 0.0
        """Between tokens. None: none ever comes."""
        self.asked: list[Generate] = []
        self.told: list[Cancel | Finish] = []
        self.running: dict[int, asyncio.Task[None]] = {}
        self.logprob = lambda index: -index - 0.5
        self.error: PagewireError | None = None
        """Told at each request, in the place of an answer."""
        self.error_after: int | None = None
        """Tokens before `error`."""

    def send(self, message):
        if isinstance(message, Generate):
            self.asked.append(message)
            self.running[message.stream] = asyncio.get_running_loop().create_task(self._answer(message))
        elif isinstance(message, Cancel):
            self.told.append(message)
            task = self.running.pop(message.stream, None)
            if task is not None:
                task.cancel()
        elif isinstance(message, Finish):
            self.told.append(message)

    async def _answer(self, asked: Generate):
        number, ids = asked.stream, array("I", asked.prompt_ids)
        try:
            params = validate(
                asked.params, vocab_size=256, num_prompt=len(ids), max_model_len=MAX_LEN, stop_allowed=False
            )
            if self.error is not None and self.error_after is None:
                raise self.error
        except PagewireError as error:
            self.running.pop(number, None)
            self.deliver(refusal(error, number))
            return
        self.deliver(
            Accepted(stream=number, request_id="r", seed=1, num_prompt_tokens=len(ids), max_tokens=params.max_tokens)
        )
        if params.prompt_logprobs is not None:
            self.deliver(self._prompt_logprobs(number, ids, params.prompt_logprobs))
        if self.pause_s is None:
            return
        output = ids_of(self.text)[: params.max_tokens]
        for index, token in enumerate(output):
            await asyncio.sleep(self.pause_s)
            if index == self.error_after:
                self.running.pop(number, None)
                self.deliver(refusal(self.error, number))
                return
            for choice in range(params.n):
                self.deliver(self._token(number, choice, index, token, params.logprobs))
        for choice in range(params.n):
            reason = "length" if len(output) == params.max_tokens else "stop"
            self.deliver(Finished(stream=number, choice=choice, reason=reason, num_tokens=len(output)))
        self.running.pop(number, None)
        usage = Usage(prompt=len(ids), completion=len(output) * params.n, cached=0)
        timings = Timings(queue_ns=1_000_000, first_token_ns=2, total_ns=3)
        self.deliver(Done(stream=number, seed=1, usage=usage, timings=timings))

    def _token(self, number, choice, index, token, top) -> Tokens:
        columns = None
        if top is not None:
            chosen = self.logprob(index)
            columns = LogprobColumns(
                entries=pack("I", [0]),
                top=bytes([top]),
                chosen=pack("f", [chosen]),
                top_ids=pack("I", [(token + k) % 256 for k in range(top)]),
                top_logprobs=pack("f", [chosen - k for k in range(top)]),
            )
        return tokens((number, choice, index, [token]), logprobs=columns)

    def _prompt_logprobs(self, number, ids, top) -> PromptLogprobs:
        rest = list(enumerate(ids))[1:]
        return PromptLogprobs(
            stream=number,
            top=top,
            chosen=pack("f", [-float(i) for i, _ in rest]),
            top_ids=pack("I", [(token + k) % 256 for _, token in rest for k in range(top)]),
            top_logprobs=pack("f", [-float(i) - k for i, _ in rest for k in range(top)]),
        )


class HttpBench:
    """A server at `url`, a session to ask it, and the engine behind it."""

    def __init__(self, encode_chat=None, make_text=None, **http):
        self.engine = ScriptedEngine()
        self.make_text = make_text or (lambda stops: TextStream(BYTES, stops))
        self.engine_moves = True
        self.text = TextModel(
            tokenizer=None, byte_table=BYTES, prefix_ids=(), suffix_ids=(), bos_id=None, eos_ids=(), chat_renderer=None
        )
        self.preparation = Preparation(
            encode=ids_of,
            encode_chat=encode_chat
            or (lambda messages, kwargs: ids_of("|".join(f"{one.role}:{one.content}" for one in messages))),
            max_chars=lambda: 4 * MAX_LEN,
        )
        self.gateway = Gateway(
            ServerConfig(),
            to_engine=self.engine.send,
            engine_moves=lambda: self.engine_moves,
            preparer=self.preparation,
            text_stream=lambda stops: self.make_text(stops),  # noqa: PLW0108  (looked up late: tests replace it)
        )
        self.engine.deliver = self.gateway.on_engine
        self.gateway.engine_ready(msgspec.structs.replace(WELCOME, model=MODEL, max_message_bytes=2**24))
        self.gateway.on_engine(Stats(values={"kv_blocks": 10.0, "kv_blocks_used": 4.0, "sequences_running": 2.0}))
        self.config = HttpConfig(**{"address": "127.0.0.1:0", **http})
        self.server = HttpServer(self.config, gateway=self.gateway, preparation=self.preparation, text=self.text)
        self.headers: dict[str, str] = {}
        self.session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self.server.url

    async def post(self, path: str, body: Any = None, **options) -> tuple[int, Any]:
        """Status and decoded body."""
        if body is not None:
            options["json"] = body
        async with self.session.post(self.url + path, **options) as response:
            return response.status, await _decoded(response)

    async def get(self, path: str, **options) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await _decoded(response)

    async def chat(self, text="hi", **fields) -> Any:
        """The answer to a chat that must succeed."""
        status, body = await self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}
        )
        assert status == 200, body
        return body

    async def complete(self, prompt="hi", **fields) -> Any:
        status, body = await self.post("/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, body
        return body

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, decoded; the last is the text `[DONE]` if it ended well."""
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            data = await response.read()
        blocks = data.decode().split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        texts = [block.removeprefix("data: ") for block in blocks]
        return [one if one == "[DONE]" else msgspec.json.decode(one) for one in texts]

    async def idle(self):
        """Wait until nothing runs: no request, no stream, nothing at the engine."""
        async with asyncio.timeout(5):
            while self.engine.running or self.gateway.num_streams or self.server.meters.num_open:
                await asyncio.sleep(0.005)
        self.gateway.check_invariants()
        assert not self.gateway._clients
        assert not len(self.gateway._upstream) or all(isinstance(one, Cancel) for one in self.engine.told)


async def _decoded(response: aiohttp.ClientResponse) -> Any:
    data = await response.read()
    return msgspec.json.decode(data) if response.content_type == "application/json" else data.decode()


@contextlib.asynccontextmanager
async def serving(**options):
    """An open bench; afterwards nothing is left of it."""
    bench = HttpBench(**options)
    await bench.server.start()
    try:
        async with aiohttp.ClientSession() as bench.session:
            yield bench
    finally:
        for task in bench.engine.running.values():
            task.cancel()
        await bench.server.close()
        bench.preparation.close()


def text_of(events: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream, of chats and completions alike."""
    out = ""
    for one in events:
        if one == "[DONE]" or "error" in one:
            continue
        for choice in one["choices"]:
            if choice["index"] == index:
                out += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return out
