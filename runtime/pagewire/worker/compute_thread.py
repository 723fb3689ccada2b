"""One thread that runs what it is given, in order.

Not a `ThreadPoolExecutor`: the interpreter waits for the threads of one when it ends, so that a step that never ends, or
a model that is still being loaded, would keep the process alive. This one is a daemon.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class ComputeThread:
    """Starts at once.

    Args:
        name: of the thread.
        prepare: called first, in the thread.

    Attributes:
        ended: resolves when the thread has ended. To be awaited rather than joined: a join needs a thread to wait in,
            and the interpreter would wait for that one.
    """

    def __init__(self, name: str, prepare: Callable[[], None]) -> None:
        self._prepare = prepare
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._is_stopping = False
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # from now on nobody can cancel it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Queue `work`.

        Raises:
            RuntimeError: the thread was told to stop.
        """
        if self._is_stopping:
            raise RuntimeError(f"{self._thread.name} takes no more work")
        future: Future[_T] = Future()
        self._queue.put((work, future))
        return future

    def stop(self) -> None:
        """End after what is queued; does not wait. Idempotent."""
        if not self._is_stopping:
            self._is_stopping = True
            self._queue.put(None)

    def _run(self) -> None:
        self._prepare()
        while (item := self._queue.get()) is not None:
            work, future = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  (goes to whoever waits)
                    future.set_exception(error)
            del work, future, item  # a thread that waits holds nothing
        self.ended.set_result(None)
