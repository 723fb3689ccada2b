"""Checks of streams: what comes in which order, how they end, what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pagewire_client.columns import runs
from pagewire_client.wire_check.check import Bench, Check, CheckError, Peer, SkipCheck
from pagewire_transport.columns import pack
from pagewire_transport.errors import ProtocolError
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Done,
    Error,
    Finish,
    Finished,
    Generate,
    Hello,
    PromptLogprobs,
    Resume,
    Tokens,
    Welcome,
)
from pagewire_transport.params import SamplingParams

_LONG: Final = 100_000
_PROMPT: Final = (1, 2, 3)


@dataclass
class Heard:
    """What came of one stream; `hear` checks the order as it comes."""

    n: int = 1
    has_text: bool = False
    accepted: Accepted | None = None
    prompt_logprobs: PromptLogprobs | None = None
    ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_logprobs: int = 0
    finished: dict[int, Finished] = field(default_factory=dict)
    done: Done | None = None
    error: Error | None = None

    def __post_init__(self) -> None:
        """A list for each choice."""
        self.ids = [[] for _ in range(self.n)]
        self.texts = [""] * self.n


class Ear:
    """Listens to a connection's streams.

    Args:
        peer: the connection.
        streams: what is known of them, by number.
    """

    def __init__(self, peer: Peer, streams: dict[int, Heard]) -> None:
        self._peer = peer
        self.streams = streams

    async def until_over(self) -> None:
        """Until every stream is done, or ended with an error."""
        while any(heard.done is None and heard.error is None for heard in self.streams.values()):
            self._hear(await self._peer.listen())

    async def until_tokens(self, stream: int, num: int) -> None:
        """Until the first choice of a stream has so many."""
        while len(self.streams[stream].ids[0]) < num:
            self._hear(await self._peer.listen())
            if self.streams[stream].done is not None or self.streams[stream].error is not None:
                raise SkipCheck(f"the stream ended before it had {num} tokens")

    def _of(self, number: int, what: str) -> Heard:
        heard = self.streams.get(number)
        if heard is None:
            raise CheckError(f"{what} of the stream {number}, which was not asked for")
        if heard.done is not None or heard.error is not None:
            raise CheckError(f"{what} of the stream {number} after its end")
        return heard

    def _hear(self, message: Any) -> None:
        if isinstance(message, Tokens):
            self._hear_tokens(message)
        elif isinstance(message, Error):
            if message.stream is None:
                raise CheckError(f"an error of no stream: {message}")
            self._of(message.stream, "an error").error = message
        elif isinstance(message, Accepted):
            heard = self._of(message.stream, "an `accepted`")
            if heard.accepted is not None:
                raise CheckError("`accepted` came twice")
            heard.accepted = message
        elif isinstance(message, PromptLogprobs):
            heard = self._of(message.stream, "`prompt_logprobs`")
            if heard.accepted is None or any(heard.ids):
                raise CheckError("`prompt_logprobs` belong between `accepted` and the first token")
            heard.prompt_logprobs = message
        elif isinstance(message, Finished):
            self._hear_finished(message)
        elif isinstance(message, Done):
            heard = self._of(message.stream, "a `done`")
            if len(heard.finished) != heard.n:
                raise CheckError(f"`done` after {len(heard.finished)} of {heard.n} `finished`")
            heard.done = message
        else:
            raise CheckError(f"nobody asked for {message}")

    def _hear_tokens(self, message: Tokens) -> None:
        try:
            entries = list(runs(message))
        except ProtocolError as error:
            raise CheckError(str(error)) from None
        for run in entries:
            heard = self._of(run.stream, "tokens")
            if heard.accepted is None:
                raise CheckError("tokens before `accepted`")
            if run.choice >= heard.n or run.choice in heard.finished:
                raise CheckError(f"tokens of the choice {run.choice}, which there is not, or no more")
            have = len(heard.ids[run.choice])
            if run.start != have:
                raise CheckError(f"a run starts at {run.start}, and {have} tokens came before")
            heard.ids[run.choice] += run.ids
            heard.texts[run.choice] += run.text
            heard.num_logprobs += len(run.logprobs or ())

    def _hear_finished(self, message: Finished) -> None:
        heard = self._of(message.stream, "a `finished`")
        if message.choice >= heard.n or message.choice in heard.finished:
            raise CheckError(f"`finished` of the choice {message.choice}, which there is not, or no more")
        if message.reason != "stop" and message.num_tokens != len(heard.ids[message.choice]):
            raise CheckError(f"`num_tokens` is {message.num_tokens}, {len(heard.ids[message.choice])} came")
        heard.texts[message.choice] += message.text
        heard.finished[message.choice] = message


def _generate(stream: int, **params: Any) -> Generate:
    params.setdefault("ignore_eos", True)
    return Generate(stream=stream, prompt_ids=pack("I", _PROMPT), params=SamplingParams(**params), echo_text=False)


async def _ask(bench: Bench, *asked: Generate) -> tuple[Peer, Ear]:
    peer = await bench.peer()
    for message in asked:
        peer.send(message)
    return peer, Ear(peer, {message.stream: Heard(message.params.n) for message in asked})


def _whole(heard: Heard, num: int) -> None:
    """A stream that came to its length."""
    if heard.error is not None:
        raise CheckError(f"it ended with {heard.error}")
    assert heard.done is not None
    for choice, ids in enumerate(heard.ids):
        if len(ids) != num or heard.finished[choice].reason != "length":
            raise CheckError(f"{num} tokens were asked for; {len(ids)} came, and {heard.finished[choice]}")
    if heard.done.usage.completion != num * heard.n or heard.done.usage.prompt != len(_PROMPT):
        raise CheckError(f"the usage does not count what came: {heard.done.usage}")


async def _one_stream(bench: Bench) -> None:
    _, ear = await _ask(bench, _generate(7, max_tokens=5, seed=11))
    await ear.until_over()
    _whole(ear.streams[7], 5)
    accepted = ear.streams[7].accepted
    if accepted is None or (accepted.seed, accepted.max_tokens, accepted.num_prompt_tokens) != (11, 5, len(_PROMPT)):
        raise CheckError(f"`accepted` does not say what was asked for: {accepted}")


async def _several(bench: Bench) -> None:
    _, ear = await _ask(bench, *(_generate(number, max_tokens=8) for number in (0, 1, 2**31, 2**32 - 1)))
    await ear.until_over()
    for heard in ear.streams.values():
        _whole(heard, 8)


async def _choices(bench: Bench) -> None:
    _, ear = await _ask(bench, _generate(1, max_tokens=4, n=3, seed=5))
    await ear.until_over()
    _whole(ear.streams[1], 4)


async def _number_again(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1, max_tokens=2))
    await ear.until_over()
    peer.send(_generate(1, max_tokens=3))
    again = Ear(peer, {1: Heard()})
    await again.until_over()
    _whole(again.streams[1], 3)


async def _cancel(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1, n=2))
    await ear.until_tokens(1, 1)
    peer.send(Cancel(stream=1))
    await ear.until_over()
    if {finished.reason for finished in ear.streams[1].finished.values()} != {"cancelled"}:
        raise CheckError(f"not every choice was cancelled: {ear.streams[1].finished}")
    peer.send(Cancel(stream=1))
    await peer.expect_error("unknown_stream", field="stream")
    await peer.is_alive()


async def _finish(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1))
    await ear.until_tokens(1, 3)
    peer.send(Finish(stream=1, at=2))
    await ear.until_over()
    finished = ear.streams[1].finished[0]
    if (finished.reason, finished.num_tokens) != ("stop", 2):
        raise CheckError(f"cut at 2, and there came {finished}")


async def _number_in_use(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1))
    await ear.until_tokens(1, 1)
    peer.send(_generate(1, max_tokens=1))
    error = None
    while error is None:
        message = await peer.listen()
        if isinstance(message, Error):
            error = message
        elif not isinstance(message, Tokens):
            raise CheckError(f"an `error` was due, and there came {message}")
        else:
            ear._hear(message)
    if error.stream is not None or error.code != "invalid_request":
        raise CheckError(f"an error of no stream was due, since the open one goes on; there came {error}")
    peer.send(Cancel(stream=1))
    await ear.until_over()


async def _hello_again(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1))
    await ear.until_tokens(1, 1)
    peer.send(Hello())
    while not isinstance(message := await peer.listen(), Welcome):
        if not isinstance(message, Tokens):
            raise CheckError(f"a `welcome` was due, and there came {message}")
    peer.send(Cancel(stream=1))
    await peer.expect_error("unknown_stream", field="stream")


async def _logprobs(bench: Bench) -> None:
    _, ear = await _ask(bench, _generate(1, max_tokens=4, logprobs=2, prompt_logprobs=1), _generate(2, max_tokens=4))
    await ear.until_over()
    asked, other = ear.streams[1], ear.streams[2]
    if asked.error is not None and asked.error.code == "unsupported":
        raise SkipCheck(asked.error.message)
    _whole(asked, 4)
    if (asked.num_logprobs, other.num_logprobs) != (4, 0):
        raise CheckError(f"{asked.num_logprobs} of 4 tokens had some, and {other.num_logprobs} that did not ask")
    prompt = asked.prompt_logprobs
    if prompt is None or len(prompt.chosen) != 4 * (len(_PROMPT) - 1) or len(prompt.top_ids) != len(prompt.chosen):
        raise CheckError(f"those of the prompt are not one a token but the first: {prompt}")


async def _prompts(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    cases: list[tuple[Generate, str, str]] = [
        (Generate(stream=1), "invalid_request", ""),
        (Generate(stream=1, prompt_ids=b""), "invalid_request", "prompt_ids"),
        (Generate(stream=1, prompt_ids=b"\1\0\0"), "invalid_request", "prompt_ids"),
        (Generate(stream=1, prompt_ids=pack("I", [welcome.vocab_size])), "invalid_request", "prompt_ids"),
    ]
    too_long = 4 * (welcome.max_model_len + 1)
    if too_long + 1024 < welcome.max_message_bytes:
        cases.append((Generate(stream=1, prompt_ids=bytes(too_long)), "prompt_too_long", "prompt_ids"))
    for message, code, where in cases:
        peer.send(message)
        error = await peer.expect(Error)
        if (error.code, error.stream) != (code, 1) or not (error.field or "").startswith(where):
            raise CheckError(f"({code}, {where}) was due for {str(message)[:120]}, and there came {error}")
    await peer.is_alive()


async def _text(bench: Bench) -> None:
    peer, welcome = await bench.welcomed()
    asked = (
        Generate(stream=1, prompt="Hello", params=SamplingParams(max_tokens=4, ignore_eos=True)),
        Generate(stream=2, messages=(ChatMessage(role="user", content="Hello"),), params=SamplingParams(max_tokens=4)),
    )
    for message in asked:
        peer.send(message)
    ear = Ear(peer, {1: Heard(), 2: Heard()})
    await ear.until_over()
    errors = [heard.error for heard in ear.streams.values() if heard.error is not None]
    if any(error.code not in ("unsupported", "prompt_too_long") for error in errors):
        raise CheckError(f"text ended with {errors}")
    if welcome.role == "engine" and len(errors) != len(asked):
        raise CheckError("an engine takes token ids only, and says so with `unsupported`")
    if ear.streams[1].error is None and not ear.streams[1].texts[0]:
        raise CheckError("no text came")
    if welcome.role == "gateway" and errors:
        raise SkipCheck(errors[0].message)


async def _resume(bench: Bench) -> None:
    peer, ear = await _ask(bench, _generate(1, max_tokens=40))
    await ear.until_tokens(1, 1)
    accepted = ear.streams[1].accepted
    assert accepted is not None
    if not accepted.resume_key:
        raise SkipCheck("this server resumes nothing: `resume_key` is empty")
    first = list(ear.streams[1].ids[0])
    peer.close()
    other = await bench.peer()
    other.send(Resume(stream=9, request_id=accepted.request_id, resume_key="0" * 32))
    await other.expect_error("unknown_stream", field="request_id", stream=9)
    other.send(Resume(stream=8, request_id=accepted.request_id, resume_key=accepted.resume_key))
    again = Ear(other, {8: Heard()})
    await again.until_over()
    _whole(again.streams[8], 40)
    if again.streams[8].ids[0][: len(first)] != first:
        raise CheckError("the tokens that came again are others")


CHECKS: Final[dict[str, Check]] = {
    "a stream: accepted, tokens, finished, done": _one_stream,
    "several streams over one connection": _several,
    "several choices of one prompt": _choices,
    "a number may be used again": _number_again,
    "cancel ends a stream, once": _cancel,
    "finish cuts a stream": _finish,
    "a number in use is refused and its stream goes on": _number_in_use,
    "hello again ends the streams": _hello_again,
    "log-probabilities go to whom they belong": _logprobs,
    "prompts that cannot be are refused": _prompts,
    "text is a gateway's": _text,
    "a stream is resumed by who has its key": _resume,
}
