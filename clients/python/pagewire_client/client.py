"""The client: one connection to a server, any number of streams over it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from os import PathLike
from typing import Any, Final

from pagewire_client.arguments import chat_source, prompt_size, prompt_source, sampling_params, wishes
from pagewire_client.columns import runs, token_logprobs
from pagewire_client.questions import Questions, listed
from pagewire_client.resumer import RESUME_S, Resumer, packed_counts
from pagewire_client.state import StreamState
from pagewire_client.stream import Stream
from pagewire_transport.codec import convert
from pagewire_transport.curve import ClientCurve
from pagewire_transport.endpoints import is_refused
from pagewire_transport.errors import (
    ConfigError,
    ConnectionLost,
    InvalidRequest,
    PagewireError,
    ProtocolError,
    UnknownStream,
    from_code,
)
from pagewire_transport.link import Link
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Done,
    Error,
    FilePiece,
    Finish,
    Finished,
    FromClient,
    FromServer,
    Generate,
    GetLoad,
    GetStats,
    Load,
    OnLag,
    PromptLogprobs,
    Resume,
    Stats,
    Tokens,
    Welcome,
)
from pagewire_transport.numbers import StreamNumbers
from pagewire_transport.servers import find_url

_log: Final = logging.getLogger("pagewire_client")

_WELCOME_S: Final = 10.0

_OVERHEAD_BYTES: Final = 1024
"""Of a message around its prompt; parameters are counted when it is encoded."""


@asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    timeout_s: float | None = None,
    resume_timeout_s: float = RESUME_S,
    name: str = "pagewire-python",
    server_key: str | None = None,
    key_file: str | PathLike[str] | None = None,
) -> AsyncIterator[Client]:
    """Connect, and say goodbye at the end of the `async with` block.

    Args:
        url: of a gateway or an engine; None: the newest server that this user runs on this machine.
        timeout_s: how long to wait for the server's welcome, also for a server at `url` that comes later, or refuses
            because it is still starting. None: 10 s for one that is there, no time for one whose ipc socket is missing or
            dead, or that refuses.
        resume_timeout_s: how long streams whose connection broke wait to be resumed; 0: they fail at once.
        name: free text for the server's logs.
        server_key: the public key of a server that asks for keys; needs `key_file`.
        key_file: our own keys, made by `pagewire keys curve new`.

    Raises:
        ConnectionLost: nobody answers there in time.
        Unauthorized: the server asks for keys, or our key is not on its list.
        ConfigError: the URL is no endpoint, a key is none, or one of the two is missing.
        PagewireError: the server lets nobody in now.
    """
    curve = _curve(server_key, key_file)
    if url is None:
        url = find_url()
    if timeout_s is None and is_refused(url):
        raise ConnectionLost(f"no server answers at {url}: is it running?")
    client = Client(url, name=name, resume_timeout_s=resume_timeout_s, curve=curve)
    try:
        await client.wait_ready(_WELCOME_S if timeout_s is None else timeout_s, is_patient=timeout_s is not None)
        yield client
    finally:
        await client.close()


def _curve(server_key: str | None, key_file: str | PathLike[str] | None) -> ClientCurve | None:
    if server_key is None and key_file is None:
        return None
    if server_key is None or key_file is None:
        missing, given = ("server_key", "key_file") if server_key is None else ("key_file", "server_key")
        raise ConfigError(f"is missing: a server that asks for keys needs both, and {given} is given", field=missing)
    return ClientCurve.load(server_key, key_file)


class Client:
    """Made on a running loop and used there; see `connect`.

    When the connection breaks, a new one is made, and the open streams go on over it where they were: no token is lost,
    none comes twice. A stream fails with `ConnectionLost` where that takes longer than `resume_timeout_s`, and with
    `UnknownStream` where the server does not have it any more. Other requests are not repeated.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "pagewire-python",
        resume_timeout_s: float = RESUME_S,
        curve: ClientCurve | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, StreamState] = {}
        self._numbers = StreamNumbers()
        self._questions = Questions(self._ask)
        self._info: Welcome | None = None
        self._resumer = Resumer(self._loop, self._streams, resume_timeout_s, self._ask)
        self._link = Link(
            url,
            client=name,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_welcome=self._on_welcome,
            curve=curve,
        )

    @property
    def url(self) -> str:
        """Of the server."""
        return self._link.url

    @property
    def info(self) -> Welcome:
        """Who serves what, under which limits; of the latest connection."""
        info = self._link.welcome or self._info
        if info is None:
            raise ConnectionLost(f"no server has answered at {self.url} yet")
        return info

    @property
    def num_streams(self) -> int:
        """Open streams, those included that were cancelled and are waiting for the server's last word."""
        return len(self._streams)

    async def wait_ready(self, timeout_s: float, *, is_patient: bool = False) -> Welcome:
        """Wait for the server's welcome; `is_patient`: also while it says that it is starting, or full.

        Raises:
            ConnectionLost: it did not come in time.
            PagewireError: the server refused.
        """
        self._info = await self._link.wait_welcome(timeout_s, is_patient=is_patient)
        return self._info

    async def close(self) -> None:
        """Say goodbye: the server cancels what is open. Idempotent."""
        self._resumer.close()
        self._fail_all(ConnectionLost("the client was closed"))
        await self._link.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

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
        """Start a stream; the request is sent at once.

        Args:
            prompt: text (to a gateway), or token ids, which are taken as they are.
            priority: higher runs first.
            namespace: prefix cache entries are shared inside a namespace only.
            echo_text: text is sent beside token ids.
            on_lag: what happens where this process reads more slowly than tokens come. "coalesce": they come later, in fewer
                messages; "pause": nothing more is generated until they were read; "cancel": the stream fails with
                `SlowReader`, and `resume` fetches what was generated.
            params: fields of `SamplingParams`: max_tokens, temperature, seed, n, stop, logprobs, …; and `ttft_ms`, `itl_ms`,
                `deadline_ms`: wanted times to the first token, between tokens, and to the end. What cannot be kept is
                refused at once with `Overloaded`.

        Raises:
            InvalidRequest: an unknown or bad argument; `field` names it.
            ConnectionLost, Overloaded: it cannot be sent.
        """
        rest = {"priority": priority, "namespace": namespace, "echo_text": echo_text, "on_lag": on_lag}
        return self._start(prompt_source(prompt), params, **rest)

    def chat(
        self,
        messages: Sequence[Mapping[str, str] | ChatMessage],
        *,
        priority: int = 0,
        namespace: str = "",
        echo_text: bool = True,
        on_lag: OnLag = "coalesce",
        template_kwargs: Mapping[str, str | int | float | bool | None] | None = None,
        **params: Any,
    ) -> Stream:
        """Start a stream that answers a conversation (gateway only).

        Args:
            messages: turns, each `{"role": …, "content": …}`.
            priority: see `generate`.
            namespace: see `generate`.
            echo_text: see `generate`.
            on_lag: see `generate`.
            template_kwargs: handed to the model's chat template.
            params: see `generate`.

        Raises:
            InvalidRequest: see `generate`.
            ConnectionLost, Overloaded: it cannot be sent.
        """
        rest = {"priority": priority, "namespace": namespace, "echo_text": echo_text, "on_lag": on_lag}
        return self._start(chat_source(messages, template_kwargs), params, **rest)

    def resume(self, request_id: str, resume_key: str, *, received: Sequence[int] = (0,)) -> Stream:
        """Go on with a stream that another client began, perhaps one of a process that crashed.

        Its chunks, and its result, hold what comes from now on.

        Args:
            request_id: of the stream.
            resume_key: likewise.
            received: how many tokens of each choice are there already; the text goes on after theirs.

        Raises:
            InvalidRequest: an argument is none that can be sent.
            ConnectionLost, Overloaded: it cannot be sent.
        """
        counts = list(received)
        fields = {"request_id": request_id, "resume_key": resume_key, "received": packed_counts(counts)}
        number = self._free_number()
        message = convert({"t": "resume", "stream": number, **fields}, Resume)
        state = StreamState(number, len(counts), time.monotonic_ns(), self._send_about, has_logprobs=False)
        for choice, count in zip(state.choices, counts, strict=True):
            choice.first = count
        return self._begin(state, message)

    async def stats(self, timeout_s: float = 5.0) -> dict[str, float]:
        """Counters and gauges of the server.

        Raises:
            ConnectionLost: it did not answer in time.
        """
        answer = await self._questions.ask(GetStats(), timeout_s)
        return answer.values if isinstance(answer, Stats) else {}

    async def load(self, timeout_s: float = 5.0) -> Load:
        """How busy the server is.

        Raises:
            ConnectionLost: it did not answer in time.
        """
        answer = await self._questions.ask(GetLoad(), timeout_s)
        if not isinstance(answer, Load):
            raise ProtocolError("the server answered another question")
        return answer

    async def file(self, name: str, timeout_s: float = 5.0) -> bytes:
        """A file of the server's tokenizer; `info.files` lists them.

        Raises:
            InvalidRequest: there is no such file.
            ConnectionLost: a piece did not come in time.
            ProtocolError: what came is not what was listed.
        """
        return await self._questions.file(listed(self.info.files, name), timeout_s)

    def _ask(self, message: FromClient) -> None:
        self._link.send(message)

    def _start(self, source: dict[str, Any], params: dict[str, Any], **rest: Any) -> Stream:
        asked, params = wishes(params)
        checked = sampling_params(params)
        number = self._free_number()
        message = convert({"t": "generate", "stream": number, "params": checked, **source, **asked, **rest}, Generate)
        self._check_size(message)
        state = StreamState(
            number,
            checked.n,
            time.monotonic_ns(),
            self._send_about,
            has_logprobs=checked.logprobs is not None,
        )
        return self._begin(state, message)

    def _free_number(self) -> int:
        return self._numbers.next(self._streams)

    def _begin(self, state: StreamState, message: Generate | Resume) -> Stream:
        self._link.send(message)
        state.request = message
        self._streams[state.number] = state
        return Stream(state, self._loop)

    def _check_size(self, message: Generate) -> None:
        """The server would cut the connection over a message beyond its limit, and all its streams with it.

        Raises:
            InvalidRequest: it is too large, or its text cannot be sent as UTF-8.
        """
        field, size = prompt_size(message)
        welcome = self._link.welcome
        if welcome is not None and size + _OVERHEAD_BYTES > welcome.max_message_bytes:
            raise InvalidRequest(
                f"has {size} bytes; the server takes messages of {welcome.max_message_bytes}", field=field
            )

    def _send_about(self, message: Cancel | Finish) -> None:
        try:
            self._link.send(message)
        except PagewireError as error:  # no connection, no stream
            state = self._streams.pop(message.stream, None)
            if state is not None:
                state.fail(error)

    # ---- from the server ---------------------------------------------------------------------------------------------

    def _on_message(self, message: FromServer) -> None:
        now_ns = time.monotonic_ns()
        if isinstance(message, Tokens):
            self._on_tokens(message, now_ns)
        elif isinstance(message, Error):
            self._on_error(message)
        elif isinstance(message, Stats | Load | FilePiece):
            self._questions.take(message)
        elif isinstance(message, Accepted | PromptLogprobs | Finished | Done):
            state = self._streams.get(message.stream)
            if state is not None:
                try:
                    self._tell(state, message, now_ns)
                except ProtocolError as error:
                    self._distrust(state, error)

    def _tell(self, state: StreamState, message: Accepted | PromptLogprobs | Finished | Done, now_ns: int) -> None:
        if isinstance(message, Accepted):
            if state.accepted is not None and state.accepted.request_id != message.request_id:
                raise ProtocolError(
                    f"the server went on with {message.request_id}, not with {state.accepted.request_id}"
                )
            state.accepted, state.request, state.until = message, None, None
        elif isinstance(message, PromptLogprobs):
            num = len(message.chosen) // 4
            state.prompt_logprobs = list(
                token_logprobs(message.chosen, message.top_ids, message.top_logprobs, num, message.top)
            )
        elif isinstance(message, Finished):
            state.finish(message)
        else:
            state.end(message, now_ns)
            del self._streams[state.number]

    def _on_tokens(self, message: Tokens, now_ns: int) -> None:
        try:
            for run in runs(message):
                state = self._streams.get(run.stream)
                if state is not None:
                    try:
                        state.add(run, now_ns)
                    except ProtocolError as error:
                        self._distrust(state, error)
        except ProtocolError as error:  # whose tokens these were is not known
            for state in list(self._streams.values()):
                self._distrust(state, error)

    def _on_error(self, message: Error) -> None:
        error = from_code(
            message.code,
            message.message,
            field=message.field,
            retry_after_ms=message.retry_after_ms,
            predicted_ttft_ms=message.predicted_ttft_ms,
        )
        if message.stream is not None:
            state = self._streams.get(message.stream)
            if state is not None and self._resumer.tries_again(state, error):
                return
            self._streams.pop(message.stream, None)
            if state is not None:
                if error.field is not None and error.field.startswith("params."):
                    error.field = error.field.removeprefix("params.")  # as the caller wrote it
                state.fail(error)
        elif not self._questions.take_refusal(message, error) and not isinstance(
            error, UnknownStream
        ):  # a cancel may cross the stream's own end
            _log.warning("%s: the server refused a message: %s", self.url, error)

    def _distrust(self, state: StreamState, error: ProtocolError) -> None:
        """Its tokens are not complete: better an error than a wrong text."""
        state.cancel()
        self._streams.pop(state.number, None)
        state.fail(error)

    def _on_lost(self, error: PagewireError) -> None:
        self._questions.fail_all(error)
        self._resumer.connection_lost(error)

    def _on_welcome(self, welcome: Welcome) -> None:
        self._info = welcome
        self._resumer.connected()

    def _fail_all(self, error: PagewireError) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for state in streams:
            state.fail(error)
        self._questions.fail_all(error)
