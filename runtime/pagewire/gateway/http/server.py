"""The HTTP door: listens, lets in, routes, tells errors, and watches over connections that do nothing.

    connection ──▶ limits of lines and headers ──▶ key (`auth.Gate`) ──▶ path and method ──▶ endpoint ──▶ gateway

The framework is aiohttp's low-level server, without its router: the gate must come before routing, and a table of a dozen
paths needs none. `docs/decisions/0004-http-framework.md` says why it is aiohttp.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from pagewire.config import HttpConfig
from pagewire.errors import ConfigError, InternalError, Overloaded, PagewireError
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.auth import Gate
from pagewire.gateway.http.body import Bodies, Caller
from pagewire.gateway.http.completions import Completions
from pagewire.gateway.http.errors import HttpRefusal, error_response
from pagewire.gateway.http.framework import Request, Server
from pagewire.gateway.http.idle import IdleConnections
from pagewire.gateway.http.meters import Meters
from pagewire.gateway.http.status import Status
from pagewire.gateway.http.texts import Texts
from pagewire.gateway.http.tokens import Vocabulary
from pagewire.gateway.preparation import Preparation
from pagewire.keys import KeyFile
from pagewire.text.text_model import TextModel
from pagewire_transport.tally import Tally

_log: Final = structlog.get_logger()

_Endpoint = Callable[[web.BaseRequest, Caller], Awaitable[web.StreamResponse]]

_RETRY_AFTER_MS: Final = 1000
_LOOK_S: Final = 0.25
_LAG_S: Final = 0.1
_BACKLOG: Final = 1024
_CLOSE_S: Final = 1.0


class HttpServer:
    """Serves HTTP from the gateway's own loop.

    Args:
        config: where, for whom and under which limits.
        gateway: whose streams answer.
        preparation: makes token ids of prompts.
        text: the text side of the model; None: it has none here.

    Raises:
        ConfigError: the address or the file of keys is no good, or the address is open to others without keys.
    """

    def __init__(
        self, config: HttpConfig, *, gateway: Gateway, preparation: Preparation, text: TextModel | None
    ) -> None:
        self._host, self._port = _address(config)
        self._config = config
        self.keys = KeyFile(config.api_key_file) if config.api_key_file else None
        self._gate = Gate(self.keys, is_local=self.keys is None and not config.allow_no_keys)
        self.meters = Meters()
        vocabulary = Vocabulary(None if text is None else text.byte_table)
        self._bodies = bodies = Bodies(config)
        completions = Completions(gateway, preparation, vocabulary, bodies=bodies, limits=config, meters=self.meters)
        texts = Texts(gateway, preparation, text, bodies)
        status = Status(gateway, self.meters)
        self._routes: dict[str, tuple[str, _Endpoint]] = {
            "/v1/chat/completions": ("POST", completions.chat),
            "/v1/completions": ("POST", completions.complete),
            "/tokenize": ("POST", texts.tokenize),
            "/detokenize": ("POST", texts.detokenize),
            "/v1/models": ("GET", status.models),
            "/health": ("GET", status.health),
            "/ready": ("GET", status.ready),
            "/metrics": ("GET", status.metrics),
            "/openapi.json": ("GET", status.openapi),
        }
        self._model = status.model
        self._idle: IdleConnections[RequestHandler] = IdleConnections(
            config.max_idle_connections, config.header_timeout_ms / 1000
        )
        self._of_key = Tally()
        self.num_closed = 0
        """Connections that came and went since the start."""
        self._server: Server | None = None
        self._runner: web.ServerRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.url = ""

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use, or not one of this machine's.
        """
        config = self._config
        self._server = Server(
            self._handle,
            on_made=self._on_made,
            on_lost=self._on_lost,
            request_factory=self._request,
            handler_cancellation=True,
            keepalive_timeout=config.header_timeout_ms / 1000,
            max_line_size=config.max_header_bytes,
            max_field_size=config.max_header_bytes,
            max_headers=config.max_headers,
            auto_decompress=False,
            access_log=None,
            logger=_silent_logger(),
        )
        self._runner = web.ServerRunner(self._server, handle_signals=False, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=_BACKLOG)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"{config.address} cannot be listened at: {_what_to_do(error)}", field="http.address"
            ) from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._tasks = [
            asyncio.create_task(self._look_after_connections(), name="http connections"),
            asyncio.create_task(self._measure_lag(), name="http loop lag"),
        ]

    async def close(self) -> None:
        """Stop listening and cut what is open. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop = asyncio.get_running_loop()
        size = self._config.max_body_bytes
        return Request(message, payload, protocol, writer, task, loop, client_max_size=size)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever it is."""
        self.meters.num_open += 1
        self._idle.asks(request.protocol)
        try:
            response = await self._answer(request)
        finally:
            self.meters.num_open -= 1
            if request.transport is not None:
                self._idle.rests(request.protocol, asyncio.get_running_loop().time())
        self.meters.responses[response.status] = self.meters.responses.get(response.status, 0) + 1
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            caller = self._gate.caller(request)
            endpoint = self._endpoint(request)
            if (
                request.method != "POST"
            ):  # what only looks is answered under any load, or probes would restart a busy server
                return await endpoint(request, caller)
            self._check_load(caller)
            self._of_key.add(caller.namespace)
            try:
                return await endpoint(request, caller)
            finally:
                self._of_key.remove(caller.namespace)
        except (PagewireError, HttpRefusal) as error:
            return error_response(error)
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client left while it was answered
        except Exception as error:  # noqa: BLE001  (F7: a fault of ours ends this request, never the process)
            _log.error("http_fault", path=request.path[:100], exc_info=error)
            return error_response(InternalError(f"{type(error).__name__} while answering"))

    def _check_load(self, caller: Caller) -> None:
        """Requests whose bodies are still to come have a limit of their own (`Bodies`): they hold up nobody.

        Raises:
            Overloaded: too many are being answered, in all or of this key.
        """
        config = self._config
        if self.meters.num_open - self._bodies.num_reading > config.max_requests:
            raise Overloaded(f"{config.max_requests} requests are being answered", retry_after_ms=_RETRY_AFTER_MS)
        if caller.namespace and self._of_key.of(caller.namespace) >= config.max_requests_per_key:
            raise Overloaded(
                f"{config.max_requests_per_key} requests of this key are being answered", retry_after_ms=_RETRY_AFTER_MS
            )

    def _endpoint(self, request: web.BaseRequest) -> _Endpoint:
        path = request.path
        method, endpoint = self._routes.get(path, ("", self._model))
        if not method:
            if not path.startswith("/v1/models/"):
                raise HttpRefusal(404, f"there is nothing at {path[:100]}", code="not_found")
            method = "GET"
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise HttpRefusal(405, f"{path[:100]} takes {method}", code="method_not_allowed", headers={"Allow": method})
        return endpoint

    async def _look_after_connections(self) -> None:
        """Close connections that have asked nothing for too long, their headers half sent or not begun (F50), and those
        whose clients left unnoticed.
        """
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(_LOOK_S, self._config.header_timeout_ms / 2000))
            gone = [] if self._server is None else self._server.left_unheard()
            for connection in (*self._idle.overdue(loop.time()), *gone):
                _cut(connection)

    def _on_made(self, connection: RequestHandler) -> None:
        self._idle.made(connection, asyncio.get_running_loop().time())
        for other in self._idle.too_many():
            _cut(other)

    def _on_lost(self, connection: RequestHandler) -> None:
        self._idle.gone(connection)
        self.num_closed += 1

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_S
            await asyncio.sleep(_LAG_S)
            self.meters.loop_lag.observe(max(0.0, loop.time() - due))


def _what_to_do(error: OSError) -> str:
    """Why an address cannot be had, and what helps."""
    if error.errno == errno.EADDRINUSE:
        return "another program listens there; stop it, or take another port (port 0: a free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; 127.0.0.1 is for programs of this machine, 0.0.0.0 for all"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not allowed; take a port from 1024 on"
    if isinstance(error, socket.gaierror):
        return "the name is unknown; give an address, for instance 127.0.0.1"
    return error.strerror or str(error)


def _cut(connection: RequestHandler) -> None:
    """Close at once: what its reader did not take is dropped, where an orderly close would wait for it."""
    transport = connection.transport
    connection.force_close()
    if transport is not None:
        transport.abort()


def _silent_logger() -> logging.Logger:
    """For the framework, which logs a traceback for every malformed request: anybody could fill the log with them."""
    logger = logging.getLogger("pagewire.http")
    logger.propagate = False
    logger.handlers = [logging.NullHandler()]
    return logger


def _address(config: HttpConfig) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: there is none, or others can reach it and nobody would be asked for a key.
    """
    host, colon, port = config.address.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError("must be HOST:PORT, for instance 127.0.0.1:8000", field="http.address")
    host = host or "127.0.0.1"
    if not (_is_loopback(host) or config.api_key_file or config.allow_no_keys):
        raise ConfigError(
            f"{host} can be reached from other machines, and no key would be asked for: make one with"
            " `pagewire keys new NAME` and name its file with --api-key-file, or say --allow-no-keys",
            field="http.address",
        )
    return host, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name; who knows what it stands for
