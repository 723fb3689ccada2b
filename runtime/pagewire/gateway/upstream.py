"""The streams as the engine knows them: under numbers of ours, until it said its last word about each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec

from pagewire.errors import PagewireError
from pagewire.gateway.asked import request
from pagewire.gateway.stream import GatewayStream
from pagewire_transport.columns import pack
from pagewire_transport.messages import Cancel, Finish, FromClient, GetStats, Pause, Resume
from pagewire_transport.numbers import StreamNumbers


class Upstream:
    """What was asked of the engine and is not answered to the end. All operations are O(1).

    Args:
        send: hands a message to the engine's link, which keeps it if it cannot be sent now, or raises.
    """

    def __init__(self, send: Callable[[FromClient], None]) -> None:
        self._send = send
        self._streams: dict[int, GatewayStream] = {}
        self._numbers = StreamNumbers()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[tuple[int, GatewayStream]]:
        return iter(self._streams.items())

    def __contains__(self, stream: GatewayStream) -> bool:
        return stream.upstream is not None and stream.upstream in self._streams

    def start(self, stream: GatewayStream) -> None:
        """Give the stream a number and ask the engine for it; for the rest of it, where another engine began it.

        Raises:
            PagewireError: the link does not take it.
        """
        assert stream.asked is not None
        number = self._free_number()
        self._send(
            request(
                stream.asked,
                number,
                stream.prompt_ids,
                resumable=stream.resumable,
                accepted=stream.accepted,
                output_ids=tuple(choice.ids.tobytes() for choice in stream.choices),
                has_prompt_logprobs=stream.prompt_logprobs is not None,
            )
        )
        self._add(number, stream)

    def resume(self, stream: GatewayStream) -> None:
        """Ask the engine for a stream that it may still have.

        Raises:
            PagewireError: the link does not take it.
        """
        assert stream.accepted is not None
        number = self._free_number()
        self._send(
            Resume(
                stream=number,
                request_id=stream.accepted.request_id,
                resume_key=stream.accepted.resume_key,
                received=pack("I", [choice.received for choice in stream.choices]),
            )
        )
        self._add(number, stream)

    def recall(self, stream: GatewayStream, message: Resume) -> None:
        """Ask the engine for a stream that another gateway began.

        Raises:
            PagewireError: the link does not take it.
        """
        number = self._free_number()
        self._send(msgspec.structs.replace(message, stream=number, recall=True))
        self._add(number, stream)

    def _free_number(self) -> int:
        return self._numbers.next(self._streams)

    def _add(self, number: int, stream: GatewayStream) -> None:
        stream.upstream = number
        self._streams[number] = stream
        if stream.is_idle:  # since before this engine had it
            self.pause(stream)

    def get(self, number: int) -> GatewayStream | None:
        """The stream. None: ended, or never ours."""
        return self._streams.get(number)

    def forget(self, number: int | None) -> GatewayStream | None:
        """The engine said its last word about the stream; it, if it was known."""
        return self._streams.pop(number, None) if number is not None else None

    def release(self, stream: GatewayStream) -> None:
        """Whatever the engine says about it is not wanted; somebody else may go on with it there."""
        if stream.upstream is not None:
            self._streams.pop(stream.upstream, None)
            stream.upstream = None

    def forget_all(self) -> None:
        """The engine is gone."""
        for stream in self._streams.values():
            stream.upstream = None
        self._streams.clear()

    def cancel(self, stream: GatewayStream) -> None:
        """Ask for the stream's end, if the engine has it."""
        if stream.upstream is not None and stream.upstream in self._streams:
            self._tell(Cancel(stream=stream.upstream))

    def pause(self, stream: GatewayStream) -> None:
        """Tell whether anything is to be generated for it now, if the engine has it."""
        if stream.upstream is not None and stream.upstream in self._streams:
            self._tell(Pause(stream=stream.upstream, paused=stream.is_idle))

    def finish(self, stream: GatewayStream, choice: int, at: int) -> None:
        """Cut a choice after `at` tokens, if the engine has the stream."""
        if stream.upstream is not None and stream.upstream in self._streams:
            self._tell(Finish(stream=stream.upstream, choice=choice, at=at))

    def ask_stats(self) -> None:
        """Ask for the engine's counters."""
        self._tell(GetStats())

    def _tell(self, message: Cancel | Finish | Pause | GetStats) -> None:
        """A link that is closed or full takes nothing: then the engine is lost, and with it what this is about."""
        with contextlib.suppress(PagewireError):
            self._send(message)
