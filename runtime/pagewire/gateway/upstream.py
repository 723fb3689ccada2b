"""The streams as the engine knows them: under numbers of ours, until it said its last word about each."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import msgspec

from pagewire.errors import PagewireError
from pagewire.gateway.client import Client
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.messages import MAX_STREAM, Cancel, Finish, FromClient, Generate, GetStats


class Upstream:
    """What was asked of the engine and is not answered to the end. All operations are O(1).

    Args:
        send: hands a message to the engine's link, which keeps it if it cannot be sent now, or raises.
    """

    def __init__(self, send: Callable[[FromClient], None]) -> None:
        self._send = send
        self._streams: dict[int, tuple[Client, GatewayStream]] = {}
        self._numbers = itertools.cycle(range(1, MAX_STREAM + 1))

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[tuple[int, GatewayStream]]:
        return ((number, stream) for number, (_, stream) in self._streams.items())

    def __contains__(self, stream: GatewayStream) -> bool:
        return stream.upstream is not None and stream.upstream in self._streams

    def start(self, client: Client, stream: GatewayStream, asked: Generate, prompt_ids: bytes) -> None:
        """Give the stream a number and ask the engine for it, without what is the gateway's to do.

        Raises:
            PagewireError: the link does not take it.
        """
        number = next(number for number in self._numbers if number not in self._streams)
        self._send(
            Generate(
                stream=number,
                prompt_ids=prompt_ids,
                params=msgspec.structs.replace(asked.params, stop=()),
                priority=asked.priority,
                ttft_ms=asked.ttft_ms,
                itl_ms=asked.itl_ms,
                deadline_ms=asked.deadline_ms,
                namespace=asked.namespace,
                client=asked.namespace or client.share,
            )
        )
        stream.upstream = number
        self._streams[number] = (client, stream)

    def get(self, number: int) -> tuple[Client, GatewayStream] | None:
        """Whose stream this is. None: ended, or never ours."""
        return self._streams.get(number)

    def forget(self, number: int | None) -> tuple[Client, GatewayStream] | None:
        """The engine said its last word about the stream; it, if it was known."""
        return self._streams.pop(number, None) if number is not None else None

    def forget_all(self) -> None:
        """The engine is gone."""
        self._streams.clear()

    def cancel(self, stream: GatewayStream) -> None:
        """Ask for the stream's end, if the engine has it."""
        if stream.upstream is not None and stream.upstream in self._streams:
            self._tell(Cancel(stream=stream.upstream))

    def finish(self, stream: GatewayStream, choice: int, at: int) -> None:
        """Cut a choice after `at` tokens, if the engine has the stream."""
        if stream.upstream is not None and stream.upstream in self._streams:
            self._tell(Finish(stream=stream.upstream, choice=choice, at=at))

    def ask_stats(self) -> None:
        """Ask for the engine's counters."""
        self._tell(GetStats())

    def _tell(self, message: Cancel | Finish | GetStats) -> None:
        """A link that is closed or full takes nothing: then the engine is lost, and with it what this is about."""
        with contextlib.suppress(PagewireError):
            self._send(message)
