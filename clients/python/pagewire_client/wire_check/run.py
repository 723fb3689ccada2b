"""All checks against one server, one after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pagewire_client.wire_check import connection_checks, stream_checks
from pagewire_client.wire_check.check import Bench, CheckError, Outcome, SkipCheck
from pagewire_transport.curve import ClientCurve


async def check_server(
    url: str, *, curve: ClientCurve | None = None, timeout_s: float = 5.0, patience_s: float = 3.0
) -> AsyncIterator[Outcome]:
    """Run every check, each over connections of its own.

    Args:
        url: of the server.
        curve: keys, for a server that asks for them.
        timeout_s: for each answer that is due.
        patience_s: how long a check may be silent, to see whether the server notices.

    Raises:
        ConfigError: the URL is no endpoint.
    """
    for name, check in {**connection_checks.CHECKS, **stream_checks.CHECKS}.items():
        bench = Bench(url, curve, timeout_s, patience_s)
        try:
            await check(bench)
            outcome = Outcome(name, "ok")
        except SkipCheck as skip:
            outcome = Outcome(name, "skip", str(skip))
        except CheckError as error:
            outcome = Outcome(name, "FAIL", str(error))
        finally:
            bench.close()
        yield outcome
