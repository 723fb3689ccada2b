"""The plain synchronous face, for offline batches: prompts in, results out, in order.

>>> with LLM("model.gguf") as llm:                                       # doctest: +SKIP
...     for result in llm.generate(["Once upon", "In the beginning"], max_tokens=64):
...         print(result.text)
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from pagewire.config import Config
from pagewire.errors import EngineFailed, InvalidRequest, PagewireError
from pagewire.local.engine import Engine
from pagewire_client.result import Result
from pagewire_client.stream import Stream
from pagewire_transport.messages import ChatMessage

_T = TypeVar("_T")

_ITEM: Final = re.compile(r"^(prompt_ids|prompt|messages)(?![a-z_])")
"""How a request's field names what one item of a batch gave; `prompt_logprobs` is a parameter of all."""

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, str] | ChatMessage]


class LLM:
    """An engine with an event loop of its own, in a thread. May be called from any thread, also from several.

    Args:
        model: a GGUF file or a folder in Hugging Face layout.
        config: a whole configuration.
        options: see `Engine`.

    Raises:
        ModelError: the model cannot be served.
        ConfigError: an unknown option or a bad value; `field` names it.
    """

    def __init__(self, model: str | Path | None = None, *, config: Config | None = None, **options: Any) -> None:
        self._engine = Engine(model, config=config, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire", daemon=True)
        self._thread.start()
        try:
            self._run(self._engine.start())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompts: Prompt | Iterable[Prompt], **params: Any) -> list[Result]:
        """Continue every prompt; the results, in the order of the prompts.

        Prompts run together in batches; as many are handed to the engine as keep it full, so that a hundred thousand
        of them need no queue of that length.

        Args:
            prompts: texts or lists of token ids; a single one gives a list with one result.
            params: what `Engine.generate` takes: max_tokens, temperature, seed, …

        Raises:
            PagewireError: the first prompt that fails ends the call, and what else runs for it; where the prompt is at
                fault, `field` is `prompts[index]`.
        """
        items = _as_prompts(prompts)
        return self._run(self._results(self._engine.generate, items, params, "prompts"))

    def chat(self, conversations: Conversation | Iterable[Conversation], **params: Any) -> list[Result]:
        """Answer every conversation; the results, in their order.

        Args:
            conversations: lists of turns, each `{"role": …, "content": …}`; a single one gives a list with one result.
            params: what `Engine.chat` takes.

        Raises:
            PagewireError: see `generate`; the field is `conversations[index]`.
        """
        items = _as_conversations(conversations)
        return self._run(self._results(self._engine.chat, items, params, "conversations"))

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the engine."""
        return self._run(self._engine.stats())

    def close(self) -> None:
        """Free the model. Idempotent."""
        if not self._loop.is_closed():
            try:
                self._run(self._engine.close())
            finally:
                self._end_loop()

    # ---- inside ----------------------------------------------------------------------------------------------------

    async def _results(
        self, start: Callable[..., Stream], items: list[Any], params: dict[str, Any], name: str
    ) -> list[Result]:
        scheduler = self._engine.config.scheduler
        num_choices = params.get("n", 1)
        at_once = 2 * scheduler.max_rows
        if isinstance(num_choices, int) and num_choices > 0:
            at_once = max(1, min(at_once, scheduler.max_waiting // num_choices))
        results: list[Result | None] = [None] * len(items)
        rest = iter(enumerate(items))

        async def work() -> None:
            for index, item in rest:
                try:
                    async with start(item, **params) as stream:
                        results[index] = await stream.result()
                except PagewireError as error:
                    if error.field is not None:
                        error.field = _ITEM.sub(f"{name}[{index}]", error.field)
                    raise

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(at_once, len(items))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [result for result in results if result is not None]

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise EngineFailed("this LLM was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while it runs: what it started is cancelled
            future.cancel()
            raise

    def _end_loop(self) -> None:
        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_default_executor()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
        raise InvalidRequest(f"must be texts or lists of token ids, not {type(prompts).__name__}", field="prompts")
    items: list[Any] = list(prompts)
    if items and isinstance(items[0], Integral):  # token ids: one prompt
        return [items]
    return items


def _as_conversations(conversations: Conversation | Iterable[Conversation]) -> list[Conversation]:
    if not isinstance(conversations, Iterable) or isinstance(conversations, str | bytes | Mapping):
        raise InvalidRequest(
            f'must be lists of {{"role": …, "content": …}}, not {type(conversations).__name__}', field="conversations"
        )
    items: list[Any] = list(conversations)
    if items and isinstance(items[0], Mapping | ChatMessage):  # turns: one conversation
        return [items]
    return items
