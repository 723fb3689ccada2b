"""Which HTTP framework streams best: server-sent events a second and CPU of an event, at 64 and 256 streams.

Each server runs in a process of its own, on one uvloop, beside a stub that gives one event to every stream a turn. It
uses its framework as documented: a handler a stream that awaits the next event and sends it. `floor` writes the same
chunks to bare asyncio transports from the stub itself, and `aiohttp, own writes` does so once aiohttp sent the response's
head, which is how the gateway streams. CPU is that of the whole process (Granian has threads of its
own) over all events that it sent; the readers are raw sockets in this process, so that their work is not counted.

Needs the packages that were compared: `pip install aiohttp granian starlette uvicorn httptools`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import threading
import time

import uvloop
from report import Report

EVENT = b'data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
SECONDS = 1.5
ROUNDS = 2
SERVERS = (
    "floor",
    "aiohttp",
    "aiohttp, own writes",
    "uvicorn + starlette",
    "uvicorn, raw ASGI",
    "granian, raw ASGI",
    "granian, RSGI",
)


class Stub:
    """Gives an event to every open stream, again and again; counts them, and the process's CPU, between two marks."""

    def __init__(self):
        self.waiters: list[asyncio.Future[bytes]] = []
        self.transports: list[asyncio.Transport] = []
        self.num_events = 0

    def next(self) -> asyncio.Future[bytes]:
        future = asyncio.get_running_loop().create_future()
        self.waiters.append(future)
        return future

    async def run(self, streams: int) -> None:
        while len(self.waiters) + len(self.transports) < streams:
            await asyncio.sleep(0.01)
        await self._turns(0.5)
        before, events, begun = time.process_time(), self.num_events, time.perf_counter()
        await self._turns(SECONDS)
        cpu, wall, num = time.process_time() - before, time.perf_counter() - begun, self.num_events - events
        print(json.dumps({"events": num, "cpu": cpu, "wall": wall}), flush=True)

    async def _turns(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            waiters, self.waiters = self.waiters, []
            for future in waiters:
                if not future.done():
                    future.set_result(EVENT)
            for transport in self.transports:
                if not transport.get_write_buffer_size():
                    transport.write(CHUNK)
                    self.num_events += 1
            await asyncio.sleep(0)


async def serve_floor(stub: Stub, port: int) -> None:
    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            self.transport.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            stub.transports.append(self.transport)

    await asyncio.get_running_loop().create_server(Protocol, "127.0.0.1", port)


async def serve_aiohttp(stub: Stub, port: int, *, own_writes: bool) -> None:
    from aiohttp import web

    async def handle(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if own_writes:
            stub.transports.append(request.transport)
            await asyncio.Event().wait()
        while True:
            await response.write(await stub.next())
            stub.num_events += 1

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()


def raw_asgi(stub: Stub):
    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await send({"type": "http.response.body", "body": await stub.next(), "more_body": True})
            stub.num_events += 1

    return app


async def serve_uvicorn(app, port: int) -> None:
    import uvicorn

    config = uvicorn.Config(app, port=port, log_config=None, access_log=False, lifespan="off", http="httptools")
    serving = asyncio.create_task(uvicorn.Server(config).serve())
    await asyncio.sleep(0.3)
    globals()["_kept"] = serving


def starlette_app(stub: Stub):
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def events():
        while True:
            yield await stub.next()
            stub.num_events += 1

    async def handle(request):
        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/", handle)])


async def serve_granian(app, port: int, interface: str) -> None:
    from granian.server.embed import Server

    server = Server(
        app, address="127.0.0.1", port=port, interface=interface, log_enabled=False, backlog=1024, backpressure=1024
    )
    globals()["_kept"] = asyncio.create_task(server.serve())
    await asyncio.sleep(0.5)


def raw_rsgi(stub: Stub):
    async def app(scope, proto):
        transport = proto.response_stream(200, [("content-type", "text/event-stream")])
        while True:
            await transport.send_bytes(await stub.next())
            stub.num_events += 1

    return app


async def serve(name: str, streams: int, port: int) -> None:
    stub = Stub()
    if name == "floor":
        await serve_floor(stub, port)
    elif name.startswith("aiohttp"):
        await serve_aiohttp(stub, port, own_writes=name != "aiohttp")
    elif name == "uvicorn + starlette":
        await serve_uvicorn(starlette_app(stub), port)
    elif name == "uvicorn, raw ASGI":
        await serve_uvicorn(raw_asgi(stub), port)
    elif name == "granian, raw ASGI":
        from granian.constants import Interfaces

        await serve_granian(raw_asgi(stub), port, Interfaces.ASGINL)
    else:
        from granian.constants import Interfaces

        await serve_granian(raw_rsgi(stub), port, Interfaces.RSGI)
    print("open", flush=True)
    await stub.run(streams)


def read_all(sockets: list[socket.socket], stop: threading.Event) -> None:
    """Empty every socket until told to stop."""
    import selectors

    selector = selectors.DefaultSelector()
    for one in sockets:
        one.setblocking(False)
        selector.register(one, selectors.EVENT_READ)
    buffer = bytearray(1 << 20)
    while not stop.is_set():
        for key, _ in selector.select(0.1):
            try:
                if not key.fileobj.recv_into(buffer):
                    selector.unregister(key.fileobj)
            except OSError:
                selector.unregister(key.fileobj)


def measure(name: str, streams: int) -> dict[str, float]:
    """One run of one server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen(
        [sys.executable, __file__, "--serve", name, str(streams), str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    sockets: list[socket.socket] = []
    stop = threading.Event()
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        for _ in range(streams):
            one = socket.create_connection(("127.0.0.1", port))
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            sockets.append(one)
        reader = threading.Thread(target=read_all, args=(sockets, stop))
        reader.start()
        figures = json.loads(child.stdout.readline())
        stop.set()
        reader.join()
        return figures
    finally:
        stop.set()
        child.kill()
        child.wait()
        for one in sockets:
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--serve", nargs=3, metavar=("NAME", "STREAMS", "PORT"), help=argparse.SUPPRESS)
    Report.arguments(parser)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.serve[0], int(args.serve[1]), int(args.serve[2])))
        return
    report = Report("http_frameworks")
    present = [
        name for name in SERVERS if name == "floor" or importlib.util.find_spec(name.split(",")[0].split(" ")[0])
    ]
    for streams in (64, 256):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in present}
        for _ in range(ROUNDS):  # in turns, since a shared machine's speed changes
            for name in present:
                runs[name].append(measure(name, streams))
        for name in present:
            case = f"{name}, {streams} streams"
            report.add(case, "events_per_s", statistics.median(r["events"] / r["wall"] for r in runs[name]), "1/s")
            report.add(case, "cpu_per_event", statistics.median(r["cpu"] / r["events"] for r in runs[name]) * 1e6, "µs")
    report.finish()


if __name__ == "__main__":
    main()
