"""`pagewire wire-check URL`: does a server keep the protocol? One line a check; exit code 0 if it does."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from pagewire_client import connect
from pagewire_client.wire_check import check_server
from pagewire_transport.curve import ClientCurve


def run(namespace: argparse.Namespace) -> int:
    """Check, and count what failed."""
    times = {"timeout_s": namespace.timeout, "patience_s": namespace.patience}
    return asyncio.run(_check(namespace.url, namespace.server_key, namespace.key_file, times))


async def _check(url: str, server_key: str | None, key_file: Path | None, times: dict[str, float]) -> int:
    async with connect(url, server_key=server_key, key_file=key_file, name="pagewire wire-check"):
        pass  # one complaint, if nobody is there, instead of forty
    curve = ClientCurve.load(server_key, key_file) if server_key is not None and key_file is not None else None
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    async for outcome in check_server(url, curve=curve, **times):
        counts[outcome.verdict] += 1
        print(f"{outcome.verdict:4}  {outcome.name}{': ' if outcome.why else ''}{outcome.why}", flush=True)
    print(f"{counts['ok']} kept, {counts['FAIL']} broken, {counts['skip']} not applicable")
    return 1 if counts["FAIL"] else 0
