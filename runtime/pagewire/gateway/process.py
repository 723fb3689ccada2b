"""What the gateway process does: load the text side of the model, greet the engine, open the door, drain, leave."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog

from pagewire.child import Report, Reporter, keep_beating
from pagewire.config import Config, ServerConfig
from pagewire.curve_keys import server_curve
from pagewire.errors import ConfigError, EngineLost, ModelError, PagewireError, UnsupportedFeature
from pagewire.event_loop import run_loop, tame_collector
from pagewire.gateway.admin import OwnersDesk
from pagewire.gateway.free_memory import FreeMemory
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.http.server import HttpServer
from pagewire.gateway.preparation import Preparation
from pagewire.text.files import tokenizer_files
from pagewire.text.text_model import TextModel
from pagewire.text.tokenizer import load_text_model
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.curve import ServerCurve
from pagewire_transport.door import Door
from pagewire_transport.endpoints import default_endpoint
from pagewire_transport.files import Files
from pagewire_transport.handler import DoorLimits
from pagewire_transport.link import Link
from pagewire_transport.messages import ChatMessage

_log: Final = structlog.get_logger()

_POLL_S: Final = 0.01
_LAST_WORDS_S: Final = 1.0
"""After the drain deadline: time for the last errors to reach clients that read slowly."""
_STATS_S: Final = 0.5
"""How old the engine's counters in our `stats` may be."""
_LONGEST_PAUSE_S: Final = 0.2
"""Between two attempts to reach the engine: it is on this machine, and everybody's streams wait for it."""
_FRESH_IPC: Final = "ipc://*"
_TAKEN_S: Final = 0.05
"""From the last words to the end of the socket: what a reader has not taken by then beyond its high-water mark, its libzmq drops."""


def run(config: Config, engine_url: str, reporter: Reporter, admin_url: str = "") -> int:
    """Serve until SIGTERM or SIGINT, a second one of which ends the drain; the exit code. `admin_url`: where the owner's door is; "" for none.

    Raises:
        ModelError, ConfigError: the model's text or the address cannot be served.
    """
    reporter.loading("tokenizer")
    text = _load_text(config)
    tame_collector()
    try:
        return run_loop(_serve(config, engine_url, text, reporter, admin_url))
    finally:
        if text is not None and text.chat_renderer is not None:
            text.chat_renderer.close()


def _load_text(config: Config) -> TextModel | None:
    """The text side of the model; None for random weights without a tokenizer, which are served by token ids."""
    try:
        text = load_text_model(config.model.path)
    except ModelError:
        if config.model.load_format == "dummy":
            return None
        raise
    if text.chat_renderer is not None:
        try:
            text.chat_renderer.start()
        except ModelError as error:
            # Prompts can be served; a chat gets this error as its answer (F45).
            _log.warning("chat_template_broken", error=str(error))
    return text


async def _serve(config: Config, engine_url: str, text: TextModel | None, reporter: Reporter, admin_url: str) -> int:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)

    preparation = _preparation(text, lambda: gateway.max_model_len)
    gateway = Gateway(
        config.server,
        to_engine=lambda message: link.send(message),  # noqa: PLW0108  (it is made below)
        engine_moves=lambda: link.is_server_ready,
        engine_halts=lambda: link.unready,
        preparer=preparation,
        text_stream=None if text is None else lambda stops: TextStream(text.byte_table, stops),
    )
    # Open from the start: an address that cannot be had is told at once. Nobody is welcomed before the engine is there.
    curve = server_curve(config.server)
    door = _open_door(
        config.server, gateway, curve, Files({} if text is None else tokenizer_files(config.model.path, text))
    )
    admin: Door | None = None
    try:
        http = await _open_http(config, gateway, preparation, text)
        if admin_url:
            reloads = _reloads(door, curve, http)
            desk = OwnersDesk(config.server, gateway, stop=lambda: reporter.send(Report(event="stop")), reloads=reloads)
            admin = desk.open(admin_url)
    except ConfigError:
        await door.close()
        raise

    def engine_lost(error: PagewireError) -> None:
        if gateway.has_engine:  # before that the link tries on by itself: the engine may still be loading
            _log.error("engine_lost", reason=error.message)
            gateway.engine_lost(EngineLost(f"the engine is lost: {error.message}"))

    link = Link(
        engine_url,
        client="pagewire gateway",
        on_message=gateway.on_engine,
        on_lost=engine_lost,
        on_welcome=gateway.engine_ready,  # also of one that was silent for a while and is back
        longest_pause_s=_LONGEST_PAUSE_S,
    )
    reporter.loading("engine")
    beating = asyncio.create_task(keep_beating(reporter, config.server.heartbeat_ms / 1000), name="beats")
    connecting = asyncio.create_task(link.wait_welcome(config.server.start_timeout_ms / 1000), name="connect")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            return 0
        engine = await connecting
        info: dict[str, str | int | float | bool] = {} if http is None else {"http": http.url}
        _log.info("gateway_ready", endpoint=door.url, model=engine.model, **info)
        reporter.send(Report(event="ready", endpoint=door.url, model=engine.model, info=info))
        await _until(
            stopping, gateway, FreeMemory(lambda: door.num_closed + (http.num_closed if http is not None else 0))
        )
        reporter.send(Report(event="draining", streams=gateway.num_streams))
        await _drain(gateway, config.server.drain_timeout_ms / 1000, hurry)
        return 0
    finally:
        for task in (connecting, stopping, beating):
            task.cancel()
        await asyncio.gather(connecting, stopping, beating, return_exceptions=True)
        if http is not None:
            await http.close()
        preparation.close()
        if admin is not None:
            await admin.close()
        await door.close()
        await link.close()


async def _until(stopping: asyncio.Task[bool], gateway: Gateway, free_memory: FreeMemory) -> None:
    """Wait for the signal; keep the engine's counters fresh, and no memory that is not needed, meanwhile."""
    while not stopping.done():
        gateway.ask_stats()
        free_memory.look()
        await asyncio.wait({stopping}, timeout=_STATS_S)


def _preparation(text: TextModel | None, max_model_len: Callable[[], int]) -> Preparation:
    if text is None:

        def no_text(*_: object) -> list[int]:
            raise UnsupportedFeature("this model has no tokenizer here; send token ids", field="prompt_ids")

        return Preparation(encode=no_text, encode_chat=no_text)

    def encode_chat(messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> list[int]:
        return text.encode_chat([msgspec.structs.asdict(message) for message in messages], template_kwargs=variables)

    return Preparation(
        encode=text.encode,
        encode_chat=encode_chat,
        encode_plain=lambda prompt: text.encode(prompt, add_special=False),
        max_chars=lambda: max_model_len() * text.byte_table.longest,
    )


async def _open_http(
    config: Config, gateway: Gateway, preparation: Preparation, text: TextModel | None
) -> HttpServer | None:
    """Serve HTTP, if that is asked for. Open from the start, as the door: until the engine is there, `/ready` says no."""
    if not config.http.address:
        return None
    server = HttpServer(config.http, gateway=gateway, preparation=preparation, text=text)
    await server.start()
    return server


def _reloads(door: Door, curve: ServerCurve | None, http: HttpServer | None) -> dict[str, Callable[[], int]]:
    """What `reload` reads again."""
    reloads: dict[str, Callable[[], int]] = {}
    if curve is not None:
        allowed = curve.allowed

        def reload_curve() -> int:
            try:
                return allowed.reload()
            finally:
                door.check_keys()

        reloads["CURVE"] = reload_curve
    if http is not None and http.keys is not None:
        reloads["HTTP"] = http.keys.reload
    return reloads


def _open_door(config: ServerConfig, gateway: Gateway, curve: ServerCurve | None, files: Files) -> Door:
    """Listen where the configuration says; by default where clients look first, or at a fresh address if that is taken."""
    limits = DoorLimits(
        max_connections=config.max_connections,
        max_connections_per_key=config.max_connections_per_key,
        max_strangers=config.max_strangers,
        hello_timeout_ms=config.hello_timeout_ms,
        max_message_bytes=config.max_message_bytes,
        heartbeat_ms=config.heartbeat_ms,
        heartbeat_timeout_ms=config.heartbeat_timeout_ms,
        unread_timeout_ms=config.unread_timeout_ms,
    )

    def on_fault(doing: str, error: Exception) -> None:
        _log.error("door_fault", doing=doing, exc_info=error)

    def listen(url: str) -> Door:
        return Door(url, handler=gateway, limits=limits, on_fault=on_fault, curve=curve, files=files)

    if config.bind:
        return listen(config.bind)
    try:
        return listen(default_endpoint())
    except ConfigError:
        return listen(_FRESH_IPC)


async def _drain(gateway: Gateway, seconds: float, hurry: asyncio.Event) -> None:
    """Let open streams end for at most `seconds`, or until `hurry`; tell the others, and wait until it is said."""
    gateway.drain()
    _log.info("gateway_draining", streams=gateway.num_streams)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    # Polled, at shutdown only: an event would be set at the end of every stream of the server's life.
    while gateway.num_streams and loop.time() < deadline and not hurry.is_set():  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    deadline = min(deadline, loop.time())
    told = gateway.num_streams > 0
    if told:
        gateway.end_draining()
    while gateway.has_news and loop.time() < deadline + _LAST_WORDS_S:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    if told:
        await asyncio.sleep(_TAKEN_S)
