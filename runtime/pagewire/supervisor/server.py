"""A server: an engine process and a gateway process, started, watched and ended together.

    Server.start ──▶ folder ──▶ engine  (loads the model)      ──▶ both ready ──▶ published
                          └───▶ gateway (loads the tokenizer,  ──┘
                                waits for the engine's welcome)

What can go wrong has one answer each:

- a child fails, dies or hangs while the server starts: `start` raises with the reason, inside `start_timeout_ms` (F3);
- a child dies later, is silent, or stalls without end: it is killed where need be and started again, at the same address,
  while the other lives on (`Part`). Deaths soon after the start wait longer each time, and after more than `restart_max`
  in a row `watch` returns with the reason (F4);
- the parent dies: the children see their report pipe close and leave (F19, `pagewire.child`);
- the address disappears (somebody cleans up the folder of temporary files): nobody can come in any more, `watch` drains
  and returns with the reason;
- shutdown: `drain` lets open streams end inside `drain_timeout_ms`, after that they get a `draining` error (F20).
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
from pagewire.supervisor.liveness import Limits
from pagewire.supervisor.part import Part
from pagewire.supervisor.rendezvous import ServerFolder
from pagewire.supervisor.restarts import Restarts, longest_wait_s
from pagewire_transport.endpoints import ipc_path
from pagewire_transport.servers import ServerRecord

ENGINE_MODULE: Final = "pagewire.engine.main"
GATEWAY_MODULE: Final = "pagewire.gateway.main"

_INNER_EXTRA_BYTES: Final = 65_536
"""Of a message to the engine, for what is not the prompt."""

_FAREWELL_S: Final = 2.0
"""After the drain deadline: time to send the last errors and leave; and for the gateway to report a dead engine."""

_TIDY_S: Final = 0.3
"""Before a gateway is killed: time to tell open streams and to remove its socket, which takes milliseconds."""

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
        self.http_url = ""
        """Where HTTP is served; "" if it is not."""
        self.model = ""
        self.info: dict[str, str | int | float | bool] = {}
        """What the engine told about itself when it became ready."""
        self._modules = {"engine": engine_module, "gateway": gateway_module}
        self._base = base
        self._on_draining = on_draining
        self.on_stop: Callable[[], None] = lambda: None
        """Told that the owner asked at the admin socket to stop; `serve` does."""
        self._folder: ServerFolder | None = None
        self._socket: tuple[int, int] | None = None
        self._socket_pid = 0
        self._behind = self._admin = ""
        self._engine = self._part("engine", self._launch_engine)
        self._gateway = self._part("gateway", self._launch_gateway)

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

    @property
    def stages(self) -> dict[str, str]:
        """What each part does that is not ready yet, by its name: `import`, `weights`, …"""
        parts = (self._engine, self._gateway)
        return {part.name: part.child.stage for part in parts if part.child is not None and not part.child.is_ready}

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
        self.http_url = str(gateway.info.get("http", ""))
        self._socket, self._socket_pid = _identity(self.url), self._children()[1].pid
        record = ServerRecord(url=self.url, admin=self._admin, model=self.model, pid=os.getpid(), started=time.time())
        self._folder.publish(record)

    async def watch(self) -> str:
        """Keep both parts alive; returns why that is over.

        Clients have then been told, or had the time to end their streams.
        """
        reason = await self._kept()
        gateway = self._children()[1]
        gateway.terminate()
        await gateway.ended_within(_FAREWELL_S)
        return reason

    async def _kept(self) -> str:
        keeping = {asyncio.create_task(part.keep(), name=f"the {part.name}") for part in (self._engine, self._gateway)}
        try:
            while True:
                done, _ = await asyncio.wait(keeping, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return done.pop().result()
                if self._has_moved():
                    break
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        await self.drain()
        return f"the socket at {self.url} was removed or replaced, so that no client can come in any more"

    def _has_moved(self) -> bool:
        """A gateway that serves is no longer where clients look for it."""
        gateway = self._gateway.child
        if gateway is None or gateway.returncode is not None or not gateway.is_ready:
            return False
        now = _identity(self.url)
        if gateway.pid != self._socket_pid:  # a gateway that was restarted: its socket is another file
            self._socket, self._socket_pid = now, gateway.pid
        return self._socket is not None and now != self._socket

    async def drain(self) -> None:
        """Refuse new streams, let the open ones end or be told, and stop. Returns inside one deadline."""
        engine, gateway = self._children()
        gateway.terminate()
        if not await gateway.ended_within(self.config.server.drain_timeout_ms / 1000 + _FAREWELL_S):
            gateway.kill()  # or the engine would wait for one that reads nothing, too
        engine.terminate()
        await engine.ended_within(_FAREWELL_S)

    async def close(self) -> None:
        """End everything at once and remove the folder. Idempotent, in every state."""
        gateway = self._gateway.child
        if gateway is not None:  # a moment for its last words and its socket; what is left is swept at the next start
            gateway.terminate()
            await gateway.ended_within(_TIDY_S)
        for child in (gateway, self._engine.child):
            if child is not None:
                await child.close()
        if self._folder is not None:
            self._folder.close()

    def _children(self) -> tuple[Child, Child]:
        assert self._engine.child is not None, "start first"
        assert self._gateway.child is not None, "start first"
        return self._engine.child, self._gateway.child

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _part(self, name: str, launch: Callable[[Report | None], Awaitable[Child]]) -> Part:
        server = self.config.server
        silence_s = server.heartbeat_timeout_ms / 1000
        return Part(
            name,
            launch,
            restarts=Restarts(
                server.restart_max,
                server.restart_backoff_ms / 1000,
                longest_wait_s(server.resume_grace_ms, server.replay_timeout_ms),
            ),
            limits=Limits(
                interval_s=min(server.heartbeat_ms / 1000, silence_s / 4),
                silence_s=silence_s,
                stall_s=server.stall_restart_ms / 1000,
            ),
            start_s=server.start_timeout_ms / 1000,
        )

    async def _launch_engine(self, last: Report | None) -> Child:
        del last  # it listens where it always does
        server = self.config.server
        streams = max(
            server.max_streams_per_connection, self.config.scheduler.max_waiting + self.config.scheduler.max_rows
        )  # the gateway is one connection to the engine, and carries the streams of all clients
        # A text's token ids may take four times its bytes.
        size = 4 * server.max_message_bytes + _INNER_EXTRA_BYTES
        inner = msgspec.structs.replace(
            server,
            bind=self._behind,
            max_streams_per_connection=streams,
            max_message_bytes=size,
            curve_key_file="",  # a socket in our private folder
            curve_allow_file="",
        )
        return await Child.start("engine", self._modules["engine"], msgspec.structs.replace(self.config, server=inner))

    async def _launch_gateway(self, last: Report | None) -> Child:
        """At the address of the one before: clients find it again by themselves."""
        config = self.config
        if last is not None:
            config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, bind=last.endpoint))
            if http := str(last.info.get("http", "")):  # with the port that was taken
                address = http.removeprefix("http://").rstrip("/")
                config = msgspec.structs.replace(config, http=msgspec.structs.replace(config.http, address=address))
        child = await Child.start(
            "gateway", self._modules["gateway"], config, ("--engine", self._behind, "--admin", self._admin)
        )
        child.on_draining = self._on_draining
        child.on_stop = lambda: self.on_stop()  # noqa: PLW0108  (it may be set later)
        return child

    async def _start_children(self, folder: ServerFolder) -> tuple[Report, Report]:
        self._behind, self._admin = folder.endpoint("engine"), folder.endpoint("admin")
        engine = await self._engine.start()
        await self._gateway.start()
        try:
            async with asyncio.timeout(self.config.server.start_timeout_ms / 1000):
                return await self._both_ready()
        except TimeoutError:
            raise (self._gateway if engine.is_ready else self._engine).late() from None

    async def _both_ready(self) -> tuple[Report, Report]:
        ready: asyncio.Future[Any] = asyncio.gather(self._engine.ready(), self._gateway.ready())
        ends: dict[asyncio.Future[Any], Child] = {
            asyncio.ensure_future(child.ended()): child for child in self._children()
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


async def serve(server: Server, *, stop: asyncio.Event, announce: Callable[[Server], None]) -> None:
    """Run `server` until `stop` is set, or its owner asks it to stop; then drain.

    Raises:
        PagewireError: it did not start, or a part died too often (`EngineFailed`).
    """
    server.on_stop = stop.set
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
            await asyncio.gather(watching, return_exceptions=True)  # whom it was starting is known now
        await server.drain()
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await server.close()
