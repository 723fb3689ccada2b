"""`/v1/chat/completions` and `/v1/completions`: from a body to streams of the gateway, and back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from pagewire.config import HttpConfig
from pagewire.errors import Cancelled, Unavailable
from pagewire.gateway.gateway import RETRY_AFTER_MS, Gateway
from pagewire.gateway.http import parameters
from pagewire.gateway.http.answers import StreamedAnswer, WholeAnswer
from pagewire.gateway.http.body import Bodies, Caller
from pagewire.gateway.http.connection import HttpConnection
from pagewire.gateway.http.errors import HttpRefusal
from pagewire.gateway.http.meters import Meters, RequestMeter
from pagewire.gateway.http.reader import HttpReader
from pagewire.gateway.http.schema import ChatRequest, CompletionRequest, Sampling
from pagewire.gateway.http.shapes import ChatShape, CompletionShape, Echo, Heading, Shape
from pagewire.gateway.http.tokens import Vocabulary
from pagewire.gateway.preparation import Preparation
from pagewire_transport.columns import unpack
from pagewire_transport.messages import Generate
from pagewire_transport.params import SamplingParams

_EVENT_STREAM: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events
}


def served_model(gateway: Gateway, asked: str | None) -> str:
    """The name of the one model there is.

    Raises:
        Unavailable: the engine has not answered yet.
        HttpRefusal: another one is asked for.
    """
    engine = gateway.engine
    if engine is None:
        raise Unavailable("the server is still starting", retry_after_ms=RETRY_AFTER_MS)
    if asked not in (None, "", engine.model):
        raise HttpRefusal(
            404,
            f"the model {asked!r:.100} is not served here; {engine.model!r} is",
            code="model_not_found",
            param="model",
        )
    return engine.model


class Completions:
    """Both endpoints.

    Args:
        gateway: whose streams answer.
        preparation: makes token ids of prompts that are echoed.
        vocabulary: names of tokens.
        bodies: reads them.
        limits: of requests.
        meters: of the door.
    """

    def __init__(
        self,
        gateway: Gateway,
        preparation: Preparation,
        vocabulary: Vocabulary,
        *,
        bodies: Bodies,
        limits: HttpConfig,
        meters: Meters,
    ) -> None:
        self._gateway = gateway
        self._preparation = preparation
        self._vocabulary = vocabulary
        self._bodies = bodies
        self._limits = limits
        self._meters = meters

    async def chat(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body = await self._bodies.read(request, ChatRequest)
        params = parameters.chat_params(body, self._limits)
        heading = self._heading("chatcmpl-", body, params)
        shape = ChatShape(heading, params.n, self._vocabulary)
        asked = Generate(
            stream=0,
            messages=parameters.chat_messages(body.messages),
            template_kwargs=body.chat_template_kwargs or {},
            params=params,
            priority=body.priority or 0,
            ttft_ms=body.ttft_ms,
            itl_ms=body.itl_ms,
            deadline_ms=body.deadline_ms,
            namespace=caller.namespace,
            resumable=False,
        )
        length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        stream = parameters.check_stream(body)
        return await self._answer(request, caller, heading, shape, [asked], stream=stream, length_field=length)

    async def complete(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = await self._bodies.read(request, CompletionRequest)
        params = parameters.completion_params(body, self._limits)
        heading = self._heading("cmpl-", body, params)
        priority, stream = body.priority or 0, parameters.check_stream(body)
        prompts = parameters.completion_prompts(body.prompt, self._limits, self._gateway.max_model_len)
        echoes: list[Echo | None] = [None] * (len(prompts) * params.n)
        if body.echo:
            for i, prompt in enumerate(prompts):
                prompts[i], echo = await self._echo(prompt)
                echoes[i * params.n : (i + 1) * params.n] = [echo] * params.n
        asked = [
            Generate(
                stream=i,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=prompt if isinstance(prompt, bytes) else None,
                params=params,
                priority=priority,
                ttft_ms=body.ttft_ms,
                itl_ms=body.itl_ms,
                deadline_ms=body.deadline_ms,
                namespace=caller.namespace,
                resumable=False,
            )
            for i, prompt in enumerate(prompts)
        ]
        shape = CompletionShape(heading, echoes, self._vocabulary)
        return await self._answer(request, caller, heading, shape, asked, stream=stream)

    def _heading(self, prefix: str, body: Sampling, params: SamplingParams) -> Heading:
        return Heading(
            id=prefix + secrets.token_hex(12),
            created=int(time.time()),
            model=served_model(self._gateway, body.model),
            has_logprobs=params.logprobs is not None,
            tells_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    async def _echo(self, prompt: str | bytes) -> tuple[bytes, Echo]:
        """The prompt as ids, and as its answer begins: a text as it was sent, ids as they read."""
        if isinstance(prompt, str):
            encoded = await self._preparation.prompt_ids(Generate(stream=0, prompt=prompt))
            return encoded, Echo(list(unpack("I", encoded)), prompt)
        ids = list(unpack("I", prompt))
        return prompt, Echo(ids, self._vocabulary.text(ids))

    async def _answer(
        self,
        request: web.BaseRequest,
        caller: Caller,
        heading: Heading,
        shape: Shape,
        asked: Sequence[Generate],
        *,
        stream: bool,
        length_field: str = "max_tokens",
    ) -> web.StreamResponse:
        n = asked[0].params.n
        meter = RequestMeter(self._meters, len(asked) * n)
        connection = HttpConnection(
            request,
            caller.name,
            patience_s=self._limits.slow_reader_timeout_ms / 1000,
            on_writable=self._gateway.on_writable,
            on_cut=self._meters.slow_readers.add,
        )
        answer = (
            StreamedAnswer(
                shape,
                num_streams=len(asked),
                n=n,
                meter=meter,
                length_field=length_field,
                connection=connection,
                tells_usage=heading.tells_usage,
            )
            if stream
            else WholeAnswer(shape, num_streams=len(asked), n=n, meter=meter, length_field=length_field)
        )
        self._gateway.attach(HttpReader(connection, self._gateway.pace, answer))
        try:
            for one in asked:
                self._gateway.on_message(connection, one)
            await answer.opened
            answer.check()
            if isinstance(answer, StreamedAnswer):
                return await _stream(request, answer, connection, heading)
            await answer.over
            answer.check()
            response = web.Response(
                body=answer.whole(), content_type="application/json", headers={"X-Request-Id": heading.id}
            )
            connection.guard()
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            # Also when the client left, which cancels this task: whatever still runs for it ends (F15).
            connection.close()
            self._gateway.on_lost(connection, Cancelled("the client left"))


async def _stream(
    request: web.BaseRequest, answer: StreamedAnswer, connection: HttpConnection, heading: Heading
) -> web.StreamResponse:
    response = web.StreamResponse(headers={**_EVENT_STREAM, "X-Request-Id": heading.id})
    if request.version >= (1, 1):
        response.enable_chunked_encoding()
    else:
        response.force_close()
    await response.prepare(request)
    connection.begin(response)
    answer.begin()
    await answer.over
    connection.guard()
    await response.write_eof()
    return response
