"""The one layer before routing that asks for a key: whatever the path or method, but two that answer yes or no (F49)."""

from __future__ import annotations

import hashlib
import ipaddress
from typing import Final

from aiohttp import web

from pagewire.errors import Unauthorized
from pagewire.gateway.http.body import Caller
from pagewire.gateway.http.errors import HttpRefusal
from pagewire.keys import KeyFile

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""What probes ask, which carry no keys: that the process lives, and that it serves. They tell nothing else."""


class Gate:
    """Lets requests in.

    Args:
        keys: None: everybody is let in, which `HttpServer` allows on the loopback or when told so.
        is_local: only what asks for this machine by its address, or as `localhost`, is let in. A web page that has the
            name of its own host point here is then no neighbour of ours to the browser (DNS rebinding).
    """

    def __init__(self, keys: KeyFile | None, *, is_local: bool = False) -> None:
        self._keys = keys
        self._is_local = is_local

    def caller(self, request: web.BaseRequest) -> Caller:
        """Who asks, by `Authorization: Bearer KEY`.

        Raises:
            Unauthorized: no key, or none of ours.
            HttpRefusal: another host is asked for.
        """
        if self._is_local and not _is_here(request.headers.get("Host", "")):
            raise HttpRefusal(
                403,
                "without keys this server answers to localhost and to addresses: ask for one of them, or start it with"
                " --api-key-file, or behind a proxy with --allow-no-keys",
                code="host_not_allowed",
            )
        if self._keys is None or request.path in OPEN_PATHS:
            return Caller()
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("give an API key: Authorization: Bearer KEY")
        name = self._keys.check(key.strip())
        if name is None:
            raise Unauthorized("this API key is not known here")
        return Caller(name=name, namespace=_namespace(name))


def _is_here(host: str) -> bool:
    """A `Host` header that names no host but an address, or this machine; no browser sends none."""
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _namespace(name: str) -> str:
    """Of a key's prefix cache. Not the name itself, which clients of the other door could ask for by accident."""
    return "key-" + hashlib.sha256(name.encode()).hexdigest()[:32]
