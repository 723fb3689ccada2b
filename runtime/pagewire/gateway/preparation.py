"""Prompts become token ids in threads, so that neither a long text nor a slow template holds up streams (F27).

The tokenizer is Rust and lets go of the interpreter lock; templates are Python, and share it in slices. What waits is
bounded: beyond `max_waiting` prompts a request is refused, not queued, and so is a text that no tokens could make short
enough: encoding takes some 250 bytes of memory a token (F50).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pagewire.errors import InvalidRequest, Overloaded, PromptTooLong
from pagewire_transport.messages import ChatMessage, Generate

_RETRY_AFTER_MS = 200


class Preparation:
    """A small pool that prepares prompts.

    Args:
        encode: text → token ids, special tokens added as the model wants them.
        encode_chat: messages and template arguments → token ids.
        encode_plain: as `encode`, without special tokens; None: the same.
        num_threads: prompts prepared at once.
        max_waiting: prompts being prepared or waiting for it.
        max_chars: of text, now; None: no limit.
    """

    def __init__(
        self,
        *,
        encode: Callable[[str], Sequence[int]],
        encode_chat: Callable[[Sequence[ChatMessage], Mapping[str, object]], Sequence[int]],
        encode_plain: Callable[[str], Sequence[int]] | None = None,
        num_threads: int = 2,
        max_waiting: int = 1024,
        max_chars: Callable[[], int] | None = None,
    ) -> None:
        self._encode = encode
        self._encode_chat = encode_chat
        self._encode_plain = encode_plain or encode
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="prepare")
        self._max_waiting = max_waiting
        self._max_chars = max_chars
        self._num_waiting = 0

    async def prompt_ids(self, request: Generate) -> bytes:
        """The prompt of `request` as uint32 ids, little-endian.

        Raises:
            Overloaded: too many prompts wait.
            PromptTooLong: it has more characters than tokens that fit could have.
            InvalidRequest: nothing is left of the prompt, or the template refuses it.
        """
        self._check_length(request)
        return await self._in_thread(lambda: self._prepare(request))

    async def plain_ids(self, text: str) -> bytes:
        """The tokens of `text` alone, as uint32 ids, little-endian.

        Raises:
            Overloaded, PromptTooLong: as `prompt_ids`.
        """
        self._check_length(Generate(stream=0, prompt=text))
        return await self._in_thread(lambda: array("I", self._encode_plain(text)).tobytes())

    async def _in_thread(self, work: Callable[[], bytes]) -> bytes:
        if self._num_waiting >= self._max_waiting:
            raise Overloaded("too many prompts wait to be tokenised", retry_after_ms=_RETRY_AFTER_MS)
        self._num_waiting += 1
        loop = asyncio.get_running_loop()  # before the callback, which runs at once if the thread was quick
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Stop the threads; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, request: Generate) -> None:
        if self._max_chars is None:
            return
        text = [request.prompt] if request.prompt is not None else [turn.content for turn in request.messages or ()]
        num_chars, most = sum(map(len, text)), self._max_chars()
        if num_chars > most:
            field = "prompt" if request.messages is None else "messages"
            raise PromptTooLong(f"has {num_chars} characters; no more than {most} can fit the model", field=field)

    def _leave(self) -> None:
        self._num_waiting -= 1

    def _prepare(self, request: Generate) -> bytes:
        if request.messages is not None:
            ids = self._encode_chat(request.messages, request.template_kwargs)
        else:
            assert request.prompt is not None
            ids = self._encode(request.prompt)
        if not ids:
            field = "prompt" if request.messages is None else "messages"
            raise InvalidRequest("holds nothing that the model could read", field=field)
        return array("I", ids).tobytes()
