"""The one layer before routing that asks for a key: whatever the path or method, but two that answer yes or no (F49)."""

from __future__ import annotations

import hashlib
from typing import Final

from aiohttp import web

from pagewire.errors import Unauthorized
from pagewire.gateway.http.body import Caller
from pagewire.keys import KeyFile

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""What probes ask, which carry no keys: that the process lives, and that it serves. They tell nothing else."""


class Gate:
    """Lets requests in.

    Args:
        keys: None: everybody is let in, which `HttpServer` allows on the loopback or when told so.
    """

    def __init__(self, keys: KeyFile | None) -> None:
        self._keys = keys

    def caller(self, request: web.BaseRequest) -> Caller:
        """Who asks, by `Authorization: Bearer KEY`.

        Raises:
            Unauthorized: no key, or none of ours.
        """
        if self._keys is None or request.path in OPEN_PATHS:
            return Caller()
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("give an API key: Authorization: Bearer KEY")
        name = self._keys.check(key.strip())
        if name is None:
            raise Unauthorized("this API key is not known here")
        return Caller(name=name, namespace=_namespace(name))


def _namespace(name: str) -> str:
    """Of a key's prefix cache. Not the name itself, which clients of the other door could ask for by accident."""
    return "key-" + hashlib.sha256(name.encode()).hexdigest()[:32]
