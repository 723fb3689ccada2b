"""An engine in this process: the client's methods, no sockets, no other process.

>>> async with Engine("model.gguf") as engine:                           # doctest: +SKIP
...     async for chunk in engine.generate("Once upon", max_tokens=64):
...         print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import structlog

from pagewire.clock import MonotonicClock
from pagewire.config import Config
from pagewire.engine.core import EngineCore
from pagewire.engine.health import Health
from pagewire.engine.load import load_worker
from pagewire.errors import Cancelled, EngineFailed, InternalError, PagewireError
from pagewire.hub import with_local_model
from pagewire.local.feed import Feed, Feeds
from pagewire.local.options import config_of
from pagewire.local.text_side import Messages, TextSide, prompt_field
from pagewire.request.request import Namespace, Wishes
from pagewire.worker.interface import Worker, WorkerShape
from pagewire_client.arguments import chat_source, prompt_source, sampling_params, wishes
from pagewire_client.state import StreamState
from pagewire_client.stream import Stream
from pagewire_transport.codec import convert
from pagewire_transport.messages import Cancel, Done, Finish, Finished, Generate, OnLag, Timings, Usage

_PARAMS = "params."


class Engine:
    """Serves a model on the running loop; weights are computed with in a thread.

    Args:
        model: a GGUF file, a folder in Hugging Face layout, or a hub id, which is downloaded by `start`.
        config: a whole configuration; its server section matters not here.
        worker: one that is loaded already, instead of what the configuration would load (tests, other devices).
        text: likewise, the text of the model.
        options: single fields of the configuration, by name: `max_rows=8`, `device="cpu"`, `deterministic=True`, …

    Raises:
        ConfigError: an unknown option or a bad value; `field` names it.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: Config | None = None,
        worker: Worker | None = None,
        text: TextSide | None = None,
        **options: Any,
    ) -> None:
        self.config = config_of(model, config, options, needs_model=worker is None)
        self._given_worker = worker
        self._given_text = text
        self._clock = MonotonicClock()
        # A library stays silent unless its user asks for its log: events go to the logger of that name.
        self._log = structlog.wrap_logger(
            logging.getLogger("pagewire"),
            processors=[
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
        )
        self._core: EngineCore | None = None
        self._feeds: Feeds | None = None
        self._text = TextSide(None)
        self._preparing: dict[Feed, asyncio.Task[None]] = {}

    # ---- life ------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            ModelError, ConfigError: it cannot be served.
        """
        assert self._core is None, "started twice"
        if self._given_worker is None:
            self.config = await asyncio.to_thread(with_local_model, self.config)
        loading = asyncio.create_task(self._load_worker(), name="load the worker")
        try:
            self._text = await self._load_text()
            worker = await loading
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            self._text.close()
            raise
        core = EngineCore(worker, config=self.config, clock=self._clock, log=self._log)
        self._feeds = Feeds(core, self._clock, self._log)
        core.sinks.append(self._feeds)
        core.start()
        self._core = core

    async def close(self) -> None:
        """Cancel what is open and free the model. Idempotent."""
        for feed in list(self._preparing):
            self._leave_preparation(feed)
        core, self._core = self._core, None
        if core is not None:
            is_clean = await core.stop()
            self._text.close()
            if not is_clean:
                raise EngineFailed("a step does not end; its thread holds the model until the process ends")

    # ---- requests --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Iterable[int],
        *,
        priority: int = 0,
        namespace: str = "",
        echo_text: bool = True,
        on_lag: OnLag = "coalesce",
        **params: Any,
    ) -> Stream:
        """Start a stream.

        Args:
            prompt: text, or token ids, which are taken as they are.
            priority: higher runs first.
            namespace: prefix cache entries are shared inside a namespace only.
            echo_text: text comes beside token ids.
            on_lag: as the client's; in one process no connection lags, so that none of its values changes anything.
            params: fields of `SamplingParams`: max_tokens, temperature, seed, n, stop, logprobs, …; and `ttft_ms`, `itl_ms`,
                `deadline_ms`: wanted times to the first token, between tokens, and to the end. What cannot be kept is
                refused at once with `Overloaded`.

        Raises:
            InvalidRequest: an unknown or bad argument; `field` names it. What only the model knows to be wrong is
                raised by the stream.
            EngineFailed: the engine is not running.
        """
        rest = {"priority": priority, "namespace": namespace, "echo_text": echo_text, "on_lag": on_lag}
        return self._start(prompt_source(prompt), params, **rest)

    def chat(
        self,
        messages: Messages,
        *,
        priority: int = 0,
        namespace: str = "",
        echo_text: bool = True,
        on_lag: OnLag = "coalesce",
        template_kwargs: Mapping[str, str | int | float | bool | None] | None = None,
        **params: Any,
    ) -> Stream:
        """Start a stream that answers a conversation.

        Args:
            messages: turns, each `{"role": …, "content": …}`.
            priority: see `generate`.
            namespace: see `generate`.
            echo_text: see `generate`.
            on_lag: see `generate`.
            template_kwargs: handed to the model's chat template.
            params: see `generate`.

        Raises:
            InvalidRequest, EngineFailed: see `generate`.
        """
        rest = {"priority": priority, "namespace": namespace, "echo_text": echo_text, "on_lag": on_lag}
        return self._start(chat_source(messages, template_kwargs), params, **rest)

    async def stats(self) -> dict[str, float]:
        """Counters and gauges; see `docs/metrics.md`."""
        return self._running().stats()

    @property
    def health(self) -> Health:
        """Ready or not, and why not."""
        return self._core.health if self._core is not None else Health(ready=False, reason="not running")

    @property
    def shape(self) -> WorkerShape:
        """What was loaded."""
        return self._running().worker.shape

    # ---- inside ----------------------------------------------------------------------------------------------------

    async def _load_worker(self) -> Worker:
        return self._given_worker if self._given_worker is not None else await load_worker(self.config)

    async def _load_text(self) -> TextSide:
        if self._given_text is not None or self._given_worker is not None:
            return self._given_text or TextSide(None)
        return await asyncio.to_thread(TextSide.load, self.config.model)

    def _running(self) -> EngineCore:
        if self._core is None:
            raise EngineFailed("the engine is not running; use it inside `async with`")
        return self._core

    def _start(self, source: dict[str, Any], params: dict[str, Any], **rest: Any) -> Stream:
        self._running()
        asked, params = wishes(params)
        checked = sampling_params(params)
        request = convert({"t": "generate", "stream": 0, "params": checked, **source, **asked, **rest}, Generate)
        texts = self._text.streams(checked, shows_text=request.echo_text)
        now_ns = self._clock.now_ns()
        state = StreamState(
            0, checked.n, now_ns, lambda wish: self._on_wish(feed, wish), has_logprobs=checked.logprobs is not None
        )
        feed = Feed(state, texts, request.echo_text)
        if request.prompt_ids is not None:
            self._submit(feed, request, np.frombuffer(request.prompt_ids, "<u4"), now_ns)
        else:
            self._preparing[feed] = asyncio.create_task(self._prepare(feed, request, now_ns), name="prepare a prompt")
        return Stream(state, asyncio.get_running_loop())

    async def _prepare(self, feed: Feed, request: Generate, now_ns: int) -> None:
        try:
            ids = await self._text.prompt_ids(request, max_tokens=self._running().scheduler.max_len)
        except PagewireError as error:
            feed.state.fail(error)
        except Exception as error:  # noqa: BLE001  (F7: it ends this request, nothing else)
            self._log.exception("prompt_failed")
            feed.state.fail(InternalError(f"{type(error).__name__} while preparing the prompt: {error}"))
        else:
            self._submit(feed, request, np.array(ids, np.int64), now_ns)
        finally:
            self._preparing.pop(feed, None)

    def _submit(self, feed: Feed, request: Generate, prompt_ids: np.ndarray[Any, Any], now_ns: int) -> None:
        """Refusals reach the stream, as from a server."""
        try:
            core = self._running()
            admitted = core.admission.admit(
                prompt_ids,
                msgspec.structs.replace(request.params, stop=()),
                priority=request.priority,
                namespace=Namespace(tenant=request.namespace),
                arrival_ns=now_ns,
                wishes=Wishes(ttft_ms=request.ttft_ms, itl_ms=request.itl_ms, deadline_ms=request.deadline_ms),
                client=request.namespace,
            )
            assert self._feeds is not None
            self._feeds.open(feed, admitted)
        except PagewireError as error:
            if error.field == "prompt_ids":
                error.field = prompt_field(request)
            elif error.field is not None:
                error.field = error.field.removeprefix(_PARAMS)  # as the caller wrote it
            feed.state.fail(error)

    def _on_wish(self, feed: Feed, wish: Cancel | Finish) -> None:
        """The stream's reader wants it ended, or cut."""
        if feed in self._preparing:
            self._leave_preparation(feed)
        elif self._core is None or self._feeds is None:
            feed.state.fail(Cancelled("the engine was closed"))
        elif isinstance(wish, Cancel):
            self._feeds.cancel(feed)
        else:
            self._core.finish_at(feed.sequences[wish.choice], wish.at)

    def _leave_preparation(self, feed: Feed) -> None:
        """Cancelled before the engine had it."""
        self._preparing.pop(feed).cancel()
        for choice in range(len(feed.texts)):
            feed.state.finish(Finished(stream=0, choice=choice, reason="cancelled", num_tokens=0))
        nothing = Timings(queue_ns=0, first_token_ns=0, total_ns=0)
        feed.state.end(
            Done(stream=0, seed=0, usage=Usage(prompt=0, completion=0), timings=nothing), self._clock.now_ns()
        )
