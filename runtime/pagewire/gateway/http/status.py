"""`/v1/models`, `/health`, `/ready`, `/metrics` and `/openapi.json`."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.body import Caller
from pagewire.gateway.http.completions import served_model
from pagewire.gateway.http.errors import HttpRefusal
from pagewire.gateway.http.meters import Meters
from pagewire.gateway.http.openapi import document
from pagewire.gateway.http.prometheus import exposition


class Status:
    """What a server says about itself."""

    def __init__(self, gateway: Gateway, meters: Meters) -> None:
        self._gateway = gateway
        self._meters = meters
        self._started = int(time.time())

    async def models(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /v1/models`."""
        del request, caller
        return _json({"object": "list", "data": [self._model(served_model(self._gateway, None))]})

    async def model(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /v1/models/NAME`."""
        del caller
        name = served_model(self._gateway, None)
        asked = request.path.removeprefix("/v1/models/")
        if asked != name:
            raise HttpRefusal(
                404, f"the model {asked!r:.100} is not served here", code="model_not_found", param="model"
            )
        return _json(self._model(name))

    async def health(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /health`: this process answers."""
        del request, caller
        return _json({"status": "ok"})

    async def ready(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /ready`: requests are taken and tokens move; else 503 and why not."""
        del request, caller
        if self._gateway.is_ready:
            return _json({"ready": True})
        return _json({"ready": False, "reason": self._gateway.unready}, status=503)

    async def metrics(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /metrics`, as Prometheus reads it."""
        del request, caller
        body, content_type = exposition(self._gateway.stats(), self._meters, served_model(self._gateway, None))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def openapi(self, request: web.BaseRequest, caller: Caller) -> web.StreamResponse:
        """`GET /openapi.json`."""
        del request, caller
        return _json(document())

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "pagewire",
            "max_model_len": self._gateway.max_model_len,
        }


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)
