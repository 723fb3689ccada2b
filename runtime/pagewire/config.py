"""The one configuration: frozen, strict about unknown keys. Command-line flags are generated from it.

Each section is a frozen struct whose fields carry their limits (`msgspec.Meta`) and their help text
(`Meta(description=…)`). Fields whose name ends with `_bytes` also take sizes as text (`"2GiB"`). No environment variable
changes behaviour.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Final, Literal, get_type_hints

import msgspec

from pagewire.errors import ConfigError
from pagewire.sizes import parse_size

_UNKNOWN: Final = re.compile("Object contains unknown field `(.*)`", re.DOTALL)
_Int = Annotated[int, msgspec.Meta(ge=1)]
_MOST: Final = 2**31 - 1
"""Of a count, and of milliseconds: 24 days."""
_MOST_BYTES: Final = 2**50
_MOST_SEED: Final = 2**63 - 1


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections."""


class ModelConfig(_Section, frozen=True, kw_only=True):
    """Which model, and how it is loaded."""

    path: Annotated[
        str,
        msgspec.Meta(
            description="a GGUF file, a folder in Hugging Face layout, or a hub id: ORG/NAME[:FILE.gguf]",
            extra={"flags": ("--model",)},
        ),
    ] = ""
    name: Annotated[
        str,
        msgspec.Meta(
            description="name told to clients; default: the file's or folder's name",
            extra={"flags": ("--served-model-name",)},
        ),
    ] = ""
    load_format: Annotated[
        Literal["auto", "gguf", "safetensors", "dummy"],
        msgspec.Meta(description="auto: by what the path holds; dummy: random weights for a config.json"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        msgspec.Meta(description="auto: float32 on a CPU, bfloat16 on a GPU"),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "fp8"],
        msgspec.Meta(
            description="of the layers' matrices; auto: as the checkpoint has them; fp8: E4M3, a scale an output channel "
            "and one a token; none: what is in fp8 is widened"
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], msgspec.Meta(description="where it runs")] = "auto"
    max_model_len: Annotated[int, msgspec.Meta(ge=0, description="longest sequence in tokens; 0: the model's own")] = 0


class CacheConfig(_Section, frozen=True, kw_only=True):
    """KV memory."""

    block_size: Annotated[Literal[16, 32, 64], msgspec.Meta(description="tokens in a block")] = 16
    kv_bytes: Annotated[int, msgspec.Meta(ge=0, description="bytes for KV blocks; 0: what suits the machine")] = 0
    gpu_memory_fraction: Annotated[
        float,
        msgspec.Meta(gt=0, le=1, description="of a card's memory that may be used in all, where kv_bytes does not say"),
    ] = 0.9
    kv_dtype: Annotated[
        Literal["auto", "fp8"],
        msgspec.Meta(description="of KV in memory; auto: that of the weights; fp8: E4M3 with scales, on a GPU"),
    ] = "auto"
    kv_scales: Annotated[
        str, msgspec.Meta(description="a file of `pagewire calibrate` with the scales of fp8 KV; default: fixed ones")
    ] = ""
    prefix_cache: Annotated[bool, msgspec.Meta(description="keep and share the KV of common prefixes")] = True


class SchedulerConfig(_Section, frozen=True, kw_only=True):
    """What a step may hold and how long anything may wait."""

    max_rows: Annotated[int, msgspec.Meta(ge=1, le=8192, description="sequences running at once")] = 64
    max_step_tokens: Annotated[int, msgspec.Meta(ge=1, description="tokens computed in one step at most")] = 512
    max_waiting: Annotated[int, msgspec.Meta(ge=1, description="requests queued at most; more are refused")] = 4096
    max_prefix_wait_steps: Annotated[
        int, msgspec.Meta(ge=0, description="steps that a prompt waits for a prefix being computed")
    ] = 512
    max_preemptions: Annotated[
        int, msgspec.Meta(ge=1, description="after so many preemptions a sequence is not chosen again")
    ] = 3
    ttft_target_ms: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=1e7,
            description="promised time to the first token; 0: none. What a queue makes impossible is refused at once",
            extra={"flags": ("--ttft-target",)},
        ),
    ] = 0.0
    itl_target_ms: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=1e6,
            description="promised time between two tokens of a stream; 0: none. Prompts are computed in the time it leaves",
            extra={"flags": ("--itl-target",)},
        ),
    ] = 0.0
    overlap: Annotated[bool, msgspec.Meta(description="plan one step ahead of the worker")] = True
    seed: Annotated[
        int, msgspec.Meta(ge=0, description="seeds the draw of missing request seeds; 0: from the system")
    ] = 0


class EngineConfig(_Section, frozen=True, kw_only=True):
    """The engine loop."""

    deterministic: Annotated[
        bool, msgspec.Meta(description="tokens are bit-identical whatever the batch, cache and chunks; slower")
    ] = False
    threads: Annotated[
        int, msgspec.Meta(ge=0, le=1024, description="compute threads of the CPU worker; 0: all cores")
    ] = 0
    stall_timeout_ms: Annotated[
        int, msgspec.Meta(ge=100, description="a step longer than this turns readiness false")
    ] = 10_000
    decision_log: Annotated[int, msgspec.Meta(ge=1, description="scheduling decisions kept for a stall's dump")] = 1000
    dump_dir: Annotated[
        str, msgspec.Meta(description="where a stall's decisions are written; default: the folder for temporary files")
    ] = ""
    state_dir: Annotated[
        str, msgspec.Meta(description="where what was learnt about the card is kept; default: ~/.cache/pagewire/cost")
    ] = ""
    record: Annotated[
        str, msgspec.Meta(description="a file for all that is decided, prompts included; see `pagewire replay`")
    ] = ""


class ServerConfig(_Section, frozen=True, kw_only=True):
    """Doors and limits."""

    bind: Annotated[str, msgspec.Meta(description="where clients connect; default: ipc in a private directory")] = ""
    curve_key_file: Annotated[
        str, msgspec.Meta(description="file made by `pagewire keys curve new`: ZeroMQ is encrypted, and asks for keys")
    ] = ""
    curve_allow_file: Annotated[
        str, msgspec.Meta(description="file made by `pagewire keys curve allow`: whose keys are let in over ZeroMQ")
    ] = ""
    max_connections: Annotated[int, msgspec.Meta(ge=1, description="connections at most")] = 1024
    max_connections_per_key: Annotated[
        int, msgspec.Meta(ge=1, description="connections of one CURVE key; connections without keys are not counted so")
    ] = 256
    max_strangers: Annotated[
        int,
        msgspec.Meta(
            ge=1, description="connections that have not said hello; beyond it the one that waits longest is cut"
        ),
    ] = 1024
    hello_timeout_ms: Annotated[
        int, msgspec.Meta(ge=100, description="time for a connection's handshake and hello; then it is cut")
    ] = 10_000
    max_streams_per_connection: Annotated[int, msgspec.Meta(ge=1, description="open streams of one connection")] = 4096
    max_streams_per_key: Annotated[
        int, msgspec.Meta(ge=1, description="open streams of one CURVE key, over all its connections")
    ] = 4096
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1024, description="largest message taken")] = 16 * 2**20
    heartbeat_ms: Annotated[int, msgspec.Meta(ge=10, description="how often a client pings")] = 1000
    heartbeat_timeout_ms: Annotated[int, msgspec.Meta(ge=50, description="silence after which a peer is lost")] = 10_000
    max_lag_tokens: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=2**30,
            description="tokens of one continuation that wait for a slow reader, then `on_lag` is applied",
        ),
    ] = 1024
    max_lag_ms: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            description="with `on_lag` cancel, a reader may take nothing for so long while tokens wait; 0: any time",
        ),
    ] = 5_000
    unread_timeout_ms: Annotated[
        int,
        msgspec.Meta(
            ge=0, description="a client that reads nothing for so long, though something waits, is lost; 0: never"
        ),
    ] = 30_000
    resume_grace_ms: Annotated[
        int, msgspec.Meta(ge=0, description="how long streams of a lost client can be resumed; 0: they end with it")
    ] = 30_000
    replay_timeout_ms: Annotated[
        int,
        msgspec.Meta(ge=0, description="how long streams of a lost engine or gateway wait for the next one; 0: not"),
    ] = 60_000
    max_kept_streams: Annotated[
        int, msgspec.Meta(ge=1, description="streams kept for lost clients at most; the oldest goes first")
    ] = 4096
    max_kept_bytes: Annotated[
        int, msgspec.Meta(ge=1024, description="bytes of tokens and log-probabilities kept for lost clients at most")
    ] = 256 * 2**20
    drain_timeout_ms: Annotated[int, msgspec.Meta(ge=0, description="time for open streams at shutdown")] = 10_000
    start_timeout_ms: Annotated[int, msgspec.Meta(ge=100, description="time for the engine to get ready")] = 300_000
    restart_max: Annotated[
        int, msgspec.Meta(ge=0, description="restarts of a part that dies again and again; 0: a death ends the server")
    ] = 5
    restart_backoff_ms: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            description="wait before a restart; doubled while a part dies within 5 s of service, up to 30 s, "
            "and to a quarter of the time for which streams are kept",
        ),
    ] = 500
    stall_restart_ms: Annotated[
        int, msgspec.Meta(ge=0, description="an engine that stalls for so long is ended and restarted; 0: never")
    ] = 20_000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], msgspec.Meta(description="least level that is logged")
    ] = "info"


class HttpConfig(_Section, frozen=True, kw_only=True):
    """The OpenAI-compatible HTTP door."""

    address: Annotated[
        str,
        msgspec.Meta(
            description="HOST:PORT to serve HTTP at; port 0: a free one; default: no HTTP", extra={"flags": ("--http",)}
        ),
    ] = ""
    api_key_file: Annotated[
        str, msgspec.Meta(description="file made by `pagewire keys`; whoever has no key in it is refused")
    ] = ""
    allow_no_keys: Annotated[
        bool, msgspec.Meta(description="serve other machines without asking for keys; behind a proxy that does")
    ] = False
    max_requests: Annotated[int, msgspec.Meta(ge=1, description="HTTP requests answered at once; more get 429")] = 1024
    max_requests_per_key: Annotated[
        int, msgspec.Meta(ge=1, description="HTTP requests of one API key answered at once; more get 429")
    ] = 1024
    max_idle_connections: Annotated[
        int,
        msgspec.Meta(
            ge=1, description="HTTP connections that ask nothing; beyond it the one idle for longest is closed"
        ),
    ] = 1024
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, description="largest body taken")] = 8 * 2**20
    max_header_bytes: Annotated[int, msgspec.Meta(ge=256, description="longest header, and longest first line")] = 8192
    max_headers: Annotated[int, msgspec.Meta(ge=8, description="headers of a request at most")] = 64
    header_timeout_ms: Annotated[
        int, msgspec.Meta(ge=100, description="time for a request's headers, and for the next request of a connection")
    ] = 30_000
    body_timeout_ms: Annotated[int, msgspec.Meta(ge=100, description="time for a request's body")] = 30_000
    slow_reader_timeout_ms: Annotated[
        int, msgspec.Meta(ge=100, description="a connection with a full buffer that reads nothing for so long is cut")
    ] = 30_000
    max_n: Annotated[int, msgspec.Meta(ge=1, le=16, description="continuations (n) of a request")] = 16
    max_stop: Annotated[int, msgspec.Meta(ge=1, le=16, description="stop strings of a request")] = 4
    max_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20, description="alternatives (top_logprobs) of a token")] = 20
    max_prompts: Annotated[int, msgspec.Meta(ge=1, description="prompts of one completion request")] = 128


class Config(_Section, frozen=True, kw_only=True):
    """All of it."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    http: HttpConfig = HttpConfig()


def from_mapping(values: dict[str, object]) -> Config:
    """A configuration from nested plain values (TOML, command line).

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of range; `field` is the dotted key.
    """
    try:
        config = msgspec.convert(_with_sizes(values), Config, strict=True)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        field = where.rstrip("`").lstrip(".").replace("[...]", "")
        unknown = _UNKNOWN.fullmatch(text)
        if unknown is not None:
            near = get_close_matches(unknown[1], _keys(field), 1)
            text = f"unknown key; did you mean {near[0]!r}?" if near else "unknown key"
            field = f"{field}.{unknown[1]}" if field else unknown[1]
        raise ConfigError(text, field=field or None) from None
    _check_largest(config)
    return config


def check_together(config: Config) -> None:
    """What no single setting shows, once file and flags are one: either may complete the other.

    Raises:
        ConfigError: a setting that would count for nothing.
    """
    if config.cache.kv_scales and config.cache.kv_dtype != "fp8":
        raise ConfigError(
            "are scales of KV in FP8, and KV is not: give --kv-dtype fp8 as well, on a GPU", field="cache.kv_scales"
        )


def _check_largest(config: Config) -> None:
    """Bounds of every whole number that has none of its own, so that it fits wherever it goes: ZeroMQ's options, a field
    of `welcome`, a clock, the length of a table.
    """
    for section in msgspec.structs.fields(config):
        for name, value in msgspec.structs.asdict(getattr(config, section.name)).items():
            most = _MOST_BYTES if name.endswith("_bytes") else _MOST_SEED if name == "seed" else _MOST
            if isinstance(value, int) and value > most:
                raise ConfigError(f"Expected `int` <= {most}", field=f"{section.name}.{name}")


def _with_sizes(values: dict[str, object]) -> dict[str, object]:
    """The same values, sizes that are text as numbers."""
    out: dict[str, object] = {}
    for section, fields in values.items():
        if not isinstance(fields, dict):
            out[section] = fields
            continue
        out[section] = numbers = dict(fields)
        for name, value in fields.items():
            if isinstance(value, str) and name.endswith("_bytes"):
                try:
                    numbers[name] = parse_size(value)
                except ValueError as error:
                    raise ConfigError(str(error), field=f"{section}.{name}") from None
    return out


def _keys(section: str) -> list[str]:
    """What a section may hold; "" for the sections themselves."""
    kind = get_type_hints(Config)[section] if section else Config
    return [field.name for field in msgspec.structs.fields(kind)]
