"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from pagewire.errors import InvalidRequest, UnsupportedFeature
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.body import Bodies, Caller
from pagewire.gateway.http.completions import served_model
from pagewire.gateway.http.parameters import chat_messages, check_num_tokens
from pagewire.gateway.http.schema import DetokenizeRequest, TokenizeRequest
from pagewire.gateway.preparation import Preparation
from pagewire.text.text_model import TextModel
from pagewire_transport.columns import unpack
from pagewire_transport.messages import Generate


class Texts:
    """Both endpoints; the shapes are vLLM's.

    Args:
        gateway: says which model is served.
        preparation: encodes, off the loop.
        text: the text side of the model; None: it has none here.
        bodies: reads them.
    """

    def __init__(self, gateway: Gateway, preparation: Preparation, text: TextModel | None, bodies: Bodies) -> None:
        self._gateway = gateway
        self._preparation = preparation
        self._text = text
        self._bodies = bodies

    async def tokenize(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`POST /tokenize`: token ids of a prompt, or of messages as the model reads them."""
        del caller
        body = await self._bodies.read(request, TokenizeRequest)
        served_model(self._gateway, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give exactly one of prompt and messages", field="prompt")
        if body.messages is not None:
            asked = Generate(
                stream=0, messages=chat_messages(body.messages), template_kwargs=body.chat_template_kwargs or {}
            )
            encoded = await self._preparation.prompt_ids(asked)
        elif not body.prompt:
            encoded = b""
        elif body.add_special_tokens:
            encoded = await self._preparation.prompt_ids(Generate(stream=0, prompt=body.prompt))
        else:
            encoded = await self._preparation.plain_ids(body.prompt)
        ids = list(unpack("I", encoded))
        return _json({"count": len(ids), "max_model_len": self._gateway.max_model_len, "tokens": ids})

    async def detokenize(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`POST /detokenize`: the text of token ids, special ones included."""
        del caller
        body = await self._bodies.read(request, DetokenizeRequest)
        served_model(self._gateway, body.model)
        if self._text is None:
            raise UnsupportedFeature("this model has no tokenizer here", field="tokens")
        check_num_tokens(len(body.tokens), self._gateway.max_model_len, "tokens")
        for i, token in enumerate(body.tokens):
            if not 0 <= token < self._text.vocab_size:
                raise InvalidRequest(f"must be from 0 to {self._text.vocab_size - 1}, is {token}", field=f"tokens[{i}]")
        # Off the loop: a tenth of a second for the longest sequence of a common model (F27).
        return _json({"prompt": await asyncio.to_thread(self._text.decode, body.tokens, skip_special=False)})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
