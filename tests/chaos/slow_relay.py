"""A network that passes one byte a second on, and sockets that hold next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket

SMALL_BUFFER = 2048


def small_socket() -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)  # before connecting: it decides the window
    made.setblocking(False)
    return made


class Relay:
    """Passes on to a port what clients send, and back what comes: one byte a second once it `is_slow`."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.socket()
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = [self._listener]
        self.is_slow = False

    def start(self) -> str:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.setblocking(False)
        self._go(self._accept())
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def _go(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            far = small_socket()
            near.setblocking(False)
            self._sockets += [near, far]
            await loop.sock_connect(far, ("127.0.0.1", self._port))
            self._go(self._pump(near, far, is_back=False))
            self._go(self._pump(far, near, is_back=True))

    async def _pump(self, source: socket.socket, target: socket.socket, *, is_back: bool) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(source, 1 if is_back and self.is_slow else SMALL_BUFFER):
                await loop.sock_sendall(target, data)
                if is_back and self.is_slow:
                    await asyncio.sleep(1.0)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sockets:
            one.close()
