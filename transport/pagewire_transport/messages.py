"""Every message of the protocol, version 1. One struct a message, tagged by the field `t`, encoded as a MessagePack map.

A frame is one version byte followed by one message (see `codec`). Integers in packed columns are little-endian.
Requests refuse unknown fields by name; replies tolerate them, so that a newer server can say more.

    client                                   server (gateway or engine)
      │ hello ───────────────────────────────▶ │
      │ ◀─────────────────────────── welcome   │
      │ generate(stream=7) ──────────────────▶ │
      │ ◀──────────────── accepted(stream=7)   │
      │ ◀── tokens(columns of all my streams)  │   at most one a step a connection
      │ ◀──────── finished(stream=7, choice=0) │   one a continuation
      │ ◀──────────────────── done(stream=7)   │   after the last `finished`
      │              ⋮ the connection breaks   │
      │ hello ───────────────────────────────▶ │   on a new connection
      │ resume(stream=1, id, key, received) ─▶ │   answered as `generate`, with the tokens that are not received
      │ ping ─────────────────────▶ ◀─── pong  │
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from pagewire_transport.limits import MAX_MESSAGES, MAX_TEMPLATE_KWARGS, FileInfo, Limits
from pagewire_transport.params import MAX_N, SamplingParams

PROTOCOL_VERSION = 1
MAX_STREAM = 2**32 - 1
MAX_MEMO_BYTES = 32_768
"""Of `memo`: more than the largest parameters take."""
RESERVED_TAGS = frozenset({"kv_offer", "kv_want", "kv_blocks", "kv_taken", "kv_drop"})
"""For moving KV blocks between engines. A server of version 1 refuses them with the code `unsupported`."""

Stream = Annotated[int, msgspec.Meta(ge=0, le=MAX_STREAM)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
FinishReason = Literal["stop", "length", "cancelled", "error"]
ResumeKey = Annotated[str, msgspec.Meta(max_length=64)]
PackedIds = bytes
"""uint32 token ids, little-endian."""
OnLag = Literal["coalesce", "pause", "cancel"]


class _FromClient(
    msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Base of what a client may send."""


class _FromServer(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True, kw_only=True):
    """Base of what a server may send."""


# ---- client → server -------------------------------------------------------------------------------------------------


class Hello(_FromClient, tag="hello", frozen=True, kw_only=True):
    """First message of a connection. Until it is answered by `welcome`, anything else is refused."""

    versions: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = (PROTOCOL_VERSION,)
    client: Name = ""
    """Free text for logs: name and version of the client."""


class Generate(_FromClient, tag="generate", frozen=True, kw_only=True):
    """Start a stream. Exactly one of `prompt` (gateway only), `prompt_ids` and `messages` (gateway only)."""

    stream: Stream
    """Chosen by the client, unused so far on this connection."""
    prompt: str | None = None
    prompt_ids: bytes | None = None
    """uint32 token ids, little-endian. Taken as they are: no BOS is added."""
    messages: Annotated[tuple[ChatMessage, ...], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    template_kwargs: Annotated[
        dict[str, str | int | float | bool | None], msgspec.Meta(max_length=MAX_TEMPLATE_KWARGS)
    ] = {}
    params: SamplingParams = SamplingParams()
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Higher runs first."""
    ttft_ms: Milliseconds | None = None
    """Wanted time to the first token. If it cannot be kept, the answer is `overloaded`, at once. Left out: what the server
    promises; 0: whenever."""
    itl_ms: Milliseconds | None = None
    """Wanted time between two tokens, likewise."""
    deadline_ms: Milliseconds | None = None
    """Beyond this time from its arrival the stream ends with the error `deadline`. Left out or 0: never."""
    namespace: Name = ""
    """Prefix cache entries are shared inside a namespace only."""
    client: Name = ""
    """Engine only, for gateways: on whose behalf. Who asks for much has to share fairly with others."""
    echo_text: bool = True
    """Gateway: send text beside token ids. False saves the detokenising where the client does it."""
    on_lag: OnLag = "coalesce"
    """What happens when the client reads more slowly than tokens come. coalesce: it gets them later, in fewer messages.
    pause: nothing more is generated until it has caught up. cancel: the stream ends with `slow_reader`, and what was generated
    can be fetched by `resume`."""
    resumable: bool = True
    """False: the stream ends with its connection, and nothing is kept of it."""
    replay: Replay | None = None
    """Engine only, for gateways: go on with a request that another engine began."""
    memo: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMO_BYTES)] = b""
    """Engine only, for gateways: kept with the stream, not looked at, and given back to whoever resumes it."""


class Replay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request whose engine is lost, as a new engine goes on with it. `params.seed` must be the one that was in use.

    The generated tokens stay generated tokens: they count in indices, usage, `max_tokens`, `min_tokens` and penalties.
    The first token of choice c that is sent has the index len(output_ids[c]). A choice whose tokens are complete ends at
    once.
    """

    request_id: Name
    """The id and the key that the first engine gave; the stream keeps them."""
    resume_key: ResumeKey
    output_ids: Annotated[tuple[PackedIds, ...], msgspec.Meta(max_length=MAX_N)]
    """What was generated so far, one for each of `n`."""


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One turn of a conversation, as chat templates take it."""

    role: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    content: str


class Cancel(_FromClient, tag="cancel", frozen=True, kw_only=True):
    """End a stream; answered by `finished` (reason `cancelled`) for each live choice and `done`."""

    stream: Stream


class Finish(_FromClient, tag="finish", frozen=True, kw_only=True):
    """Cut a choice at token `at`: the first `at` generated tokens stay and count, the rest is dropped.

    Sent by whoever holds the text when it finds a stop string; answered by `finished` (reason `stop`).
    """

    stream: Stream
    choice: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    at: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Resume(_FromClient, tag="resume", frozen=True, kw_only=True):
    """Go on with a stream whose connection broke, or whose client was started anew, over this connection.

    Answered by `accepted` (same id and key), the tokens from `received` on, `finished` for every choice that has ended
    (also where that was told before), and `done`. Nothing is lost, nothing comes twice. A connection that had the stream
    until now, and seems alive, is told the error `taken_over`.

    Refused with `unknown_stream`, field `request_id`, where there is no such stream, where it is no longer kept, and
    where the key is another one: the answer does not tell which.
    """

    stream: Stream
    """Its number from now on; chosen by the client, unused so far on this connection."""
    request_id: Name
    resume_key: ResumeKey
    received: bytes = b""
    """uint32 × choices: how many tokens of each choice the client has, and so the index of the next one that it gets.
    Empty: none of any. The texts of a choice go on after the text that came with these tokens."""
    recall: bool = False
    """Engine only, for gateways: `accepted` also has `prompt_ids`, `output_ids` and `memo`."""


class Pause(_FromClient, tag="pause", frozen=True, kw_only=True):
    """Generate nothing more for a stream for now, or go on with it. What was generated before is still sent. A `resume`
    goes on with it, too.
    """

    stream: Stream
    paused: bool = True


class Ping(_FromClient, tag="ping", frozen=True, kw_only=True):
    """Heartbeat. A connection that sends nothing for the server's `heartbeat_timeout_ms` is taken for lost."""

    nonce: int = 0


class Goodbye(_FromClient, tag="goodbye", frozen=True, kw_only=True):
    """The client leaves; its streams are cancelled at once, and none can be resumed."""


class GetStats(_FromClient, tag="get_stats", frozen=True, kw_only=True):
    """Ask for one `stats` message."""


class GetLoad(_FromClient, tag="get_load", frozen=True, kw_only=True):
    """Ask for one `load` message."""


class GetFile(_FromClient, tag="get_file", frozen=True, kw_only=True):
    """Ask for one `file_piece` of a file that `welcome` lists."""

    name: Name
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0


class Drain(_FromClient, tag="drain", frozen=True, kw_only=True):
    """Admin socket only: refuse new streams, let the open ones end in time, and stop. Answered by `admin_done`."""


class Reload(_FromClient, tag="reload", frozen=True, kw_only=True):
    """Admin socket only: read the files of keys again. Answered by `admin_done`."""


# ---- server → client -------------------------------------------------------------------------------------------------


class Welcome(_FromServer, tag="welcome", frozen=True, kw_only=True):
    """Answer to `hello`: who serves what, under which limits."""

    version: int
    role: Literal["engine", "gateway"]
    server: str
    """Product name and version."""
    model: str
    vocab_size: int
    max_model_len: int
    max_streams: int
    max_message_bytes: int
    heartbeat_ms: int
    heartbeat_timeout_ms: int
    eos_ids: tuple[int, ...] = ()
    versions: tuple[int, ...] = (PROTOCOL_VERSION,)
    """All that the server speaks; `version` is the one of this connection."""
    limits: Limits = Limits()
    files: tuple[FileInfo, ...] = ()
    """The tokenizer's: what a client needs that makes text of token ids itself. See `get_file`."""


class Accepted(_FromServer, tag="accepted", frozen=True, kw_only=True):
    """A `generate` passed every check and is queued; or a `resume` found its stream."""

    stream: int
    request_id: str
    seed: int
    num_prompt_tokens: int
    max_tokens: int
    """What `max_tokens` resolved to."""
    resume_key: str = ""
    """The secret that `resume` takes beside `request_id`: 32 hexadecimal digits. Empty: the stream cannot be resumed."""
    prompt_ids: bytes = b""
    """To a `resume` with `recall`: the prompt."""
    output_ids: tuple[bytes, ...] = ()
    """Likewise: the first `received` tokens of each choice."""
    memo: bytes = b""
    """Likewise: as it was given."""


class LogprobColumns(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Log-probabilities of the tokens of some entries of a `tokens` message, packed.

    For token j of entry `entries[i]`: `chosen` holds one float32; `top_ids` / `top_logprobs` hold `top[i]` pairs.
    `entries` are indices into the message's columns, ascending; their tokens follow one another.
    """

    entries: bytes  # uint32
    top: bytes  # uint8, one an entry
    chosen: bytes  # float32, one a token
    top_ids: bytes = b""  # uint32
    top_logprobs: bytes = b""  # float32


class Tokens(_FromServer, tag="tokens", frozen=True, kw_only=True):
    """What was generated since the last message, for every stream of this connection, in packed columns.

    Entry e is a run of `counts[e]` tokens of choice `choices[e]` of stream `streams[e]`, the first of which has index
    `starts[e]` among the generated tokens. `ids` holds the runs one after another.
    """

    streams: bytes  # uint32 × entries
    starts: bytes  # uint32 × entries
    ids: bytes  # uint32 × sum(counts)
    counts: bytes = b""  # uint16 × entries; empty: all 1
    choices: bytes = b""  # uint16 × entries; empty: all 0
    texts: tuple[str, ...] = ()
    """Gateway: the text that these tokens complete, one an entry; may be empty while a character is incomplete."""
    logprobs: LogprobColumns | None = None


class PromptLogprobs(_FromServer, tag="prompt_logprobs", frozen=True, kw_only=True):
    """Log-probabilities of the prompt's tokens 1 … P−1 given what precedes them; sent once, before the first token."""

    stream: int
    top: int
    chosen: bytes  # float32 × (P − 1)
    top_ids: bytes = b""  # uint32 × (P − 1) × top
    top_logprobs: bytes = b""  # float32 × (P − 1) × top


class Finished(_FromServer, tag="finished", frozen=True, kw_only=True):
    """One choice ended. Every token of it was sent before."""

    stream: int
    choice: int = 0
    reason: FinishReason
    num_tokens: int
    stop: str | int | None = None
    """The stop string or the stop token's id that ended it."""
    text: str = ""
    """Gateway: text that was held back until now."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request; `cached` is the part of the prompt taken from the prefix cache."""

    prompt: int
    completion: int
    cached: int = 0


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured by the engine, nanoseconds since the request arrived there."""

    queue_ns: int
    """Until it was first scheduled."""
    first_token_ns: int
    """Until its first token was known."""
    total_ns: int
    num_preemptions: int = 0


class Done(_FromServer, tag="done", frozen=True, kw_only=True):
    """All choices ended; the stream's number may be used again."""

    stream: int
    seed: int
    usage: Usage
    timings: Timings


class Error(_FromServer, tag="error", frozen=True, kw_only=True):
    """A refusal. With `stream`: that stream is over. Without: the message that could not be honoured was dropped."""

    code: str
    message: str
    stream: int | None = None
    field: str | None = None
    retry_after_ms: int | None = None
    predicted_ttft_ms: int | None = None
    """How long the first token would have taken, where that is why."""


class Pong(_FromServer, tag="pong", frozen=True, kw_only=True):
    """Answer to `ping`."""

    nonce: int = 0
    ready: bool = True
    reason: str = ""
    """Why it is not ready."""


class Stats(_FromServer, tag="stats", frozen=True, kw_only=True):
    """Counters and gauges by name; see `docs/metrics.md`."""

    values: dict[str, float]


class Load(_FromServer, tag="load", frozen=True, kw_only=True):
    """How busy the server is, for whoever spreads requests over several."""

    ready: bool
    running: int
    """Continuations that get tokens."""
    waiting: int
    """Continuations that wait for room, and prompts that wait to be tokenised."""
    kv_blocks: int
    """Blocks of KV memory."""
    kv_blocks_used: int


class FilePiece(_FromServer, tag="file_piece", frozen=True, kw_only=True):
    """Bytes `offset` … of a file, `MAX_FILE_PIECE` at most; none at its end."""

    name: str
    offset: int
    data: bytes
    size: int
    """Of the whole file."""


class AdminDone(_FromServer, tag="admin_done", frozen=True, kw_only=True):
    """A `drain` or `reload` was done, or begun."""

    what: str
    message: str = ""


FromClient = (
    Hello | Generate | Resume | Cancel | Finish | Pause | Ping | Goodbye | GetStats | GetLoad | GetFile | Drain | Reload
)
FromServer = (
    Welcome | Accepted | Tokens | PromptLogprobs | Finished | Done | Error | Pong | Stats | Load | FilePiece | AdminDone
)
