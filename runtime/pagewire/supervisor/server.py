"""A server: an engine process and a gateway process, started, watched and ended together.

    Server.start ──▶ folder ──▶ engine  (loads the model)      ──▶ both ready ──▶ published
                          └───▶ gateway (loads the tokenizer,  ──┘
                                waits for the engine's welcome)

What can go wrong has one answer each:

- a child fails, dies or hangs while it starts: `start` raises with the reason, inside `start_timeout_ms` (F3);
- a child dies later: `watch` returns with the reason; the gateway is given a moment to tell its clients (F4);
- the parent dies: the children see their report pipe close and leave (F19, `pagewire.child`);
- the address disappears (somebody cleans up the folder of temporary files): nobody can come in any more, `watch` drains
  and returns with the reason;
- shutdown: `drain` lets open streams end inside `drain_timeout_ms`, after that they get a `draining` error (F20).

A dead engine ends the server. Starting it again belongs to a later release; until then whoever runs the server
(systemd, a container runtime) restarts it, told by the exit code.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from pagewire.child import Report
from pagewire.config import Config
from pagewire.errors import EngineFailed
from pagewire.supervisor.child import Child
from pagewire.supervisor.rendezvous import ServerFolder
from pagewire_transport.endpoints import ipc_path
from pagewire_transport.servers import ServerRecord

ENGINE_MODULE: Final = "pagewire.engine.main"
GATEWAY_MODULE: Final = "pagewire.gateway.main"

_INNER_EXTRA_BYTES: Final = 65_536
"""Of a message to the engine, for what is not the prompt."""

_FAREWELL_S: Final = 2.0
"""After the drain deadline: time to send the last errors and leave; and for the gateway to report a dead engine."""

_TIDY_S: Final = 0.3
"""Before a gateway is killed: time to remove its socket, which takes milliseconds."""

_LOOK_S: Final = 2.0
"""How often it is seen whether the address is still there."""


class Server:
    """One server. `async with Server(config) as server:` starts it; `server.url` is where clients connect.

    Args:
        config: of the whole server. `server.bind` empty: the gateway takes the default ipc endpoint, or a fresh one.
        engine_module, gateway_module: what the children run; tests put theirs here.
        base: where the private folder is made; by default the user's private folder.
        on_draining: told, once `drain` began, how many streams are open.
    """

    def __init__(
        self,
        config: Config,
        *,
        engine_module: str = ENGINE_MODULE,
        gateway_module: str = GATEWAY_MODULE,
        base: Path | None = None,
        on_draining: Callable[[int], None] = lambda num_streams: None,  # noqa: ARG005
    ) -> None:
        self.config = config
        self.url = ""
        self.model = ""
        self.info: dict[str, str | int | float | bool] = {}
        """What the engine told about itself when it became ready."""
        self._modules = {"engine": engine_module, "gateway": gateway_module}
        self._base = base
        self._on_draining = on_draining
        self._folder: ServerFolder | None = None
        self._socket: tuple[int, int] | None = None
        self._engine: Child | None = None
        self._gateway: Child | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.drain()
        finally:
            await self.close()

    async def start(self) -> None:
        """Start both children and wait until both are ready.

        Raises:
            PagewireError: why it did not get ready; nothing is left running.
        """
        try:
            self._folder = ServerFolder.create(self._base)
            engine, gateway = await self._start_children(self._folder)
        except BaseException:
            await self.close()
            raise
        self.url, self.model, self.info = gateway.endpoint, engine.model or gateway.model, engine.info
        self._socket = _identity(self.url)
        self._folder.publish(ServerRecord(url=self.url, model=self.model, pid=os.getpid(), started=time.time()))

    async def watch(self) -> str:
        """Wait until a child ends by itself, or the address disappears; says which and why.

        The gateway has had time to tell its clients, or to let their streams end.
        """
        engine, gateway = self._children()
        ends = {asyncio.ensure_future(child.ended()): child for child in (engine, gateway)}
        try:
            while True:
                done, _ = await asyncio.wait(ends, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    break
                if self._socket is not None and _identity(self.url) != self._socket:
                    await self.drain()
                    return f"the socket at {self.url} was removed or replaced, so that no client can come in any more"
        finally:
            for end in ends:
                end.cancel()
        dead = ends[done.pop()]
        if dead is engine:
            gateway.terminate()
            await _within(_FAREWELL_S, gateway.ended())
        return f"the {dead.name} {dead.reason}"

    async def drain(self) -> None:
        """Refuse new streams, let the open ones end or be told, and stop. Returns inside one deadline."""
        engine, gateway = self._children()
        gateway.terminate()
        await _within(self.config.server.drain_timeout_ms / 1000 + _FAREWELL_S, gateway.ended())
        engine.terminate()
        await _within(_FAREWELL_S, engine.ended())

    async def close(self) -> None:
        """End everything at once and remove the folder. Idempotent, in every state."""
        if self._gateway is not None:  # a moment to take its socket away; what is left is swept at the next start
            self._gateway.terminate()
            await _within(_TIDY_S, self._gateway.ended())
        for child in (self._gateway, self._engine):
            if child is not None:
                await child.close()
        if self._folder is not None:
            self._folder.close()

    def _children(self) -> tuple[Child, Child]:
        assert self._engine is not None, "start first"
        assert self._gateway is not None, "start first"
        return self._engine, self._gateway

    async def _start_children(self, folder: ServerFolder) -> tuple[Report, Report]:
        server = self.config.server
        behind = folder.endpoint("engine")
        streams = max(
            server.max_streams_per_connection, self.config.scheduler.max_waiting + self.config.scheduler.max_rows
        )  # the gateway is one connection to the engine, and carries the streams of all clients
        # A text's token ids may take four times its bytes.
        size = 4 * server.max_message_bytes + _INNER_EXTRA_BYTES
        inner = msgspec.structs.replace(
            self.config,
            server=msgspec.structs.replace(
                server, bind=behind, max_streams_per_connection=streams, max_message_bytes=size
            ),
        )
        self._engine = await Child.start("engine", self._modules["engine"], inner)
        self._gateway = await Child.start("gateway", self._modules["gateway"], self.config, ("--engine", behind))
        self._gateway.on_draining = self._on_draining
        try:
            async with asyncio.timeout(server.start_timeout_ms / 1000):
                return await self._both_ready()
        except TimeoutError:
            late = self._gateway if self._engine.is_ready else self._engine
            raise EngineFailed(
                f"the {late.name} was not ready after {server.start_timeout_ms / 1000:g} s, at: {late.stage}",
                field="server.start_timeout_ms",
            ) from None

    async def _both_ready(self) -> tuple[Report, Report]:
        engine, gateway = self._children()
        ready: asyncio.Future[Any] = asyncio.gather(engine.ready(), gateway.ready())
        ends: dict[asyncio.Future[Any], Child] = {
            asyncio.ensure_future(child.ended()): child for child in (engine, gateway)
        }
        try:
            await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                # A child that ended before it was ready says why through `ready`, a moment later. One that had been
                # ready and died is the other case: its partner would wait for it in vain.
                await asyncio.wait({ready}, timeout=1.0)
                if not ready.done():
                    dead = next(child for end, child in ends.items() if end.done())
                    raise EngineFailed(f"the {dead.name} {dead.reason} while the server was starting")
            first, second = await ready
            return first, second
        finally:
            ready.cancel()
            for end in ends:
                end.cancel()
            await asyncio.gather(ready, *ends, return_exceptions=True)


def _identity(url: str) -> tuple[int, int] | None:
    """Which file an ipc endpoint is; None if there is none, or it is no ipc."""
    try:
        status = os.stat(ipc_path(url))  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino


async def _within(seconds: float, waited: Awaitable[object]) -> None:
    """Wait for at most `seconds`; too late is no error here, `close` follows."""
    try:
        await asyncio.wait_for(waited, seconds)
    except TimeoutError:
        return


async def serve(server: Server, *, stop: asyncio.Event, announce: Callable[[Server], None]) -> None:
    """Run `server` until `stop` is set, then drain.

    Raises:
        PagewireError: it did not start, or a child died (`EngineFailed`).
    """
    stopping = asyncio.create_task(stop.wait(), name="stop")
    starting = asyncio.create_task(server.start(), name="start")
    try:
        await asyncio.wait({stopping, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        await starting
        announce(server)
        watching = asyncio.create_task(server.watch(), name="watch")
        try:
            await asyncio.wait({stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise EngineFailed(watching.result())
        finally:
            watching.cancel()
        await server.drain()
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await server.close()
