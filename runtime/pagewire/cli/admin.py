"""`pagewire admin drain|stats|reload [URL]`: what a server's owner does at its admin socket."""

from __future__ import annotations

import argparse
import asyncio
from typing import Final

from pagewire.errors import ConnectionLost, from_code
from pagewire_transport.link import Link
from pagewire_transport.messages import Drain, Error, FromServer, GetStats, Reload, Stats
from pagewire_transport.servers import find_servers

_TIMEOUT_S: Final = 5.0
_MESSAGES: Final[dict[str, type[Drain | GetStats | Reload]]] = {"drain": Drain, "stats": GetStats, "reload": Reload}


def run(namespace: argparse.Namespace) -> int:
    """Ask, and print the answer."""
    answer = asyncio.run(_ask(_admin_url(namespace.url), _MESSAGES[namespace.action]()))
    if isinstance(answer, Error):
        raise from_code(answer.code, answer.message, field=answer.field)
    if isinstance(answer, Stats):
        width = max(map(len, answer.values), default=0)
        for name, value in sorted(answer.values.items()):
            print(f"{name:{width}}  {value:g}")
    else:
        print(getattr(answer, "message", "") or "done")
    return 0


def _admin_url(url: str | None) -> str:
    """The admin socket of the server that is meant: by its address, or by its admin socket's.

    Raises:
        ConnectionLost: no server of this user is there.
    """
    servers = [server for server in find_servers() if server.admin]
    meant = [server for server in servers if url in (None, server.url, server.admin)]
    if meant:
        return meant[0].admin
    if url is not None and url.endswith("/admin.sock"):
        return url
    known = ", ".join(server.url for server in servers) or "none"
    raise ConnectionLost(f"no such server of yours runs on this machine; there are: {known}")


async def _ask(url: str, message: Drain | GetStats | Reload) -> FromServer:
    answered: asyncio.Future[FromServer] = asyncio.get_running_loop().create_future()

    def take(answer: FromServer) -> None:
        if not answered.done():
            answered.set_result(answer)

    link = Link(url, client="pagewire admin", on_message=take, on_lost=lambda error: None)  # noqa: ARG005
    try:
        await link.wait_welcome(_TIMEOUT_S)
        link.send(message)
        return await asyncio.wait_for(answered, _TIMEOUT_S)
    except TimeoutError:
        raise ConnectionLost(f"no answer from {url} after {_TIMEOUT_S:g} s") from None
    finally:
        await link.close()
