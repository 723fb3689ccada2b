"""Renders chats in the template worker, a process of its own."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pagewire.errors import InternalError, InvalidRequest, ModelError, PagewireError, from_code

_RESERVED = ("messages", "tools", "documents")


class ChatRenderer:
    """One chat template and the process that renders it; started at first use, started again if it is lost.

    Thread-safe: renders queue on a lock. One takes some 0.1 ms, so one process suffices for thousands a second.

    Args:
        source: the template, Jinja.
        variables: special tokens by the names that templates use (`bos_token`, …).
        max_cpu_seconds: what one render may take.
        max_seconds: after so long the process is taken for stuck (stopped, swapped out) and killed.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        max_cpu_seconds: float = 2.0,
        max_seconds: float = 20.0,
    ) -> None:
        self.source = source
        self._variables = dict(variables)
        self._max_cpu_seconds = max_cpu_seconds
        self._max_seconds = max_seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._broken: str | None = None  # why it cannot be compiled

    def start(self) -> None:
        """Start the process now, so that the first chat need not wait for it.

        Raises:
            ModelError: the template is broken.
        """
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process. A later render starts it again."""
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def render(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        """The chat as text; blocks.

        Args:
            messages: mappings or structs with `role` and `content`.
            variables: `add_generation_prompt` and what else the template reads.

        Raises:
            InvalidRequest: no messages, a variable of a reserved name, a value that is not plain data, or the template
                refuses the messages.
            ModelError: the template is broken, fails, or takes more time, memory or output than it may.
            InternalError: the process was ended by someone else, or got stuck, twice.
        """
        if not messages:
            raise InvalidRequest("must not be empty", field="messages")
        for name in _RESERVED:
            if name in variables:
                raise InvalidRequest("is set by the server", field=f"template_kwargs.{name}")
        asked = f'{{"messages": {_json(messages, "messages")}, "variables": {_json(variables, "template_kwargs")}}}'
        with self._lock:
            try:
                return self._running().ask(asked)
            except _WorkerLost as lost:
                self._worker = None
                if lost.timed_out:
                    raise _stopped(lost) from None
            try:  # someone else ended it, perhaps long ago: that is no fault of this request
                return self._running().ask(asked)
            except _WorkerLost as lost:
                self._worker = None
                raise _stopped(lost) from None

    def _running(self) -> _Worker:
        if self._broken is not None:
            raise ModelError(self._broken, field="messages")
        if self._worker is None:
            try:
                worker = _Worker(self._max_cpu_seconds, self._max_seconds)
            except OSError as error:
                raise InternalError(f"no process to render chat templates: {error.strerror}; try again") from None
            try:
                worker.ask(_json({"source": self.source, "variables": self._variables}, "messages"))
            except (_WorkerLost, ModelError) as error:
                worker.close()
                refusal = _stopped(error) if isinstance(error, _WorkerLost) else error
                if isinstance(refusal, ModelError):  # compiling it again would fail again
                    self._broken = refusal.message
                raise refusal from None
            self._worker = worker
        return self._worker


class _WorkerLost(Exception):  # noqa: N818  (an event inside this file)
    """The process ended before it answered; `status` as `Popen.returncode`."""

    def __init__(self, status: int | None) -> None:
        super().__init__(status)
        self.status = status
        self.timed_out = status == -signal.SIGPROF


def _stopped(lost: _WorkerLost) -> PagewireError:
    if lost.timed_out:
        return ModelError("the chat template takes too long and was stopped", field="messages")
    return InternalError(f"the process that renders chat templates ended with status {lost.status}; try again")


class _Worker:
    """The process and its pipes."""

    def __init__(self, max_cpu_seconds: float, max_seconds: float) -> None:
        # -P: the current folder must not shadow modules. A session of its own: signals of a terminal are the server's.
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, "-P", "-m", "pagewire.text.template_worker", str(max_cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        self._max_seconds = max_seconds
        # Also runs when the renderer is dropped without `close`, and at interpreter exit.
        self.close = weakref.finalize(self, _end, process)

    def ask(self, line: str) -> str:
        """The text that answers `line`; an error that it answers with is raised."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        # Reading and writing may both block for ever, and threads of the gateway with them: all prompts would wait (F1).
        # A timer costs a thread, 0.05 ms; non-blocking pipes would cost a loop of their own here.
        timer = threading.Timer(self._max_seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self.close()
            raise _WorkerLost(process.returncode)
        reply = json.loads(answer)
        if "text" in reply:
            text: str = reply["text"]
            return text
        raise from_code(reply["code"], reply["message"], field=reply["field"])


def _json(value: object, field: str) -> str:
    try:
        return json.dumps(msgspec.to_builtins(value), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"must be plain data: {error}", field=field) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its input, at which it ends; one that is stuck in a render is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
