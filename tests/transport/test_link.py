"""The client's side of a door: greetings, and how often it tries to connect."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass, field

import pytest
import zmq
import zmq.asyncio
from tests.server.bench import serve, until
from tests.server.fake_core import tokens

from pagewire_client import connect
from pagewire_transport import link as link_module
from pagewire_transport.backoff import FIRST_S, LONGEST_S, Backoff
from pagewire_transport.codec import decode_client, encode
from pagewire_transport.errors import ConnectionLost, ProtocolError, Unavailable
from pagewire_transport.link import Link
from pagewire_transport.messages import Accepted, Error, Generate, Goodbye, Hello, Welcome

HEARTBEAT_MS = 20
WELCOME = Welcome(
    version=1, role="engine", server="s", model="m", vocab_size=100, max_model_len=100, max_streams=10,
    max_message_bytes=10_000, heartbeat_ms=HEARTBEAT_MS, heartbeat_timeout_ms=5000,
)  # fmt: skip
STARTING = Error(code="unavailable", message="starting", retry_after_ms=1000)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(link_module, "_DEFAULT_HEARTBEAT_MS", HEARTBEAT_MS)


@dataclass
class Told:
    """What a link tells, and the link."""

    link: Link
    welcomes: list[Welcome] = field(default_factory=list)
    lost: list[Exception] = field(default_factory=list)


@contextlib.asynccontextmanager
async def linked(url, **options):
    welcomes, lost = [], []
    link = Link(
        url, client="test", on_message=lambda message: None, on_lost=lost.append, on_welcome=welcomes.append, **options
    )
    try:
        yield Told(link, welcomes, lost)
    finally:
        await link.close()


@contextlib.asynccontextmanager
async def router():
    """A server that says what the test says."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind("tcp://127.0.0.1:*")
        yield socket, socket.last_endpoint.decode()


async def heard(socket, timeout_s=5.0):
    """(who, what) of the next message; None: nothing came."""
    try:
        peer, frame = await asyncio.wait_for(socket.recv_multipart(), timeout_s)
    except TimeoutError:
        return None
    return peer, decode_client(frame)


async def answer(socket, peer, message):
    await socket.send_multipart([peer, encode(message)])


# ---- pauses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "share"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_pauses_double_and_are_drawn_from_their_upper_half(chance, share):
    backoff = Backoff(chance=lambda: chance)
    for _ in range(2):
        pauses = [backoff.next_s() for _ in range(20)]
        assert pauses[:4] == pytest.approx([0, share * FIRST_S, share * 2 * FIRST_S, share * 4 * FIRST_S])
        assert pauses[-1] == share * LONGEST_S
        backoff.reset()
    assert backoff.own_retries_ms() == (round(1000 * FIRST_S * share), round(1000 * LONGEST_S * share))
    assert Backoff(0.01, lambda: 1.0).own_retries_ms()[1] == 10


async def test_a_server_that_hangs_up_at_once_is_not_called_in_a_tight_loop():
    """As a proxy does that has nobody behind it: the connection is there, and is closed before a word."""
    calls = []

    def hang_up(_, writer):
        calls.append(asyncio.get_running_loop().time())
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, linked(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", chance=lambda: 0.0) as told:
        told.link._was_welcomed = True  # otherwise four of these are taken for a refusal of our keys
        await until(lambda: len(calls) == 6, timeout=20)
        gaps = [after - before for before, after in itertools.pairwise(calls)]
        # The first of all was the attempt without a pause.
        assert all(gap >= 0.5 * FIRST_S * 2**i * 0.9 for i, gap in enumerate(gaps)), gaps
        assert told.lost == [], "there was no connection yet that could be lost"


async def test_what_is_sent_before_there_is_a_server_reaches_the_one_that_comes():
    calls = []

    async def first_hang_up(_, writer):
        calls.append(1)
        writer.close()

    server = await asyncio.start_server(first_hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with linked(f"tcp://127.0.0.1:{port}") as told:
        told.link.send(Generate(stream=7, prompt_ids=b"abcd"))
        await until(lambda: len(calls) == 2)
        server.close()
        await server.wait_closed()
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(f"tcp://127.0.0.1:{port}")
            assert isinstance((await heard(socket))[1], Hello)
            assert (await heard(socket))[1].stream == 7


async def test_a_connection_that_was_good_is_replaced_at_once_and_a_bad_one_after_a_pause():
    now_ns = [10**12]
    async with serve() as server, linked(server.endpoint, now_ns=lambda: now_ns[0]) as told:
        for age_s, waits in ((2, False), (0, True), (0, True), (2, False)):
            await until(lambda: told.link.welcome is not None)
            now_ns[0] += age_s * 10**9
            told.link._lost(ConnectionLost("cut by the test"))
            assert (told.link._pause is not None) == waits
        await until(lambda: told.link.welcome is not None)


# ---- greetings -------------------------------------------------------------------------------------------------------


async def test_a_hello_is_said_again_only_when_the_one_before_was_refused():
    async with router() as (socket, url), linked(url) as told:
        peer, first = await heard(socket)
        assert isinstance(first, Hello)
        assert await heard(socket, 5 * HEARTBEAT_MS / 1000) is None
        await answer(socket, peer, STARTING)
        assert isinstance((await heard(socket))[1], Hello)
        assert await heard(socket, 5 * HEARTBEAT_MS / 1000) is None, "it was not refused yet"
        await answer(socket, peer, STARTING)
        assert isinstance((await heard(socket))[1], Hello)
        await answer(socket, peer, WELCOME)
        await until(lambda: told.welcomes)


async def test_a_second_welcome_is_another_connection_as_far_as_streams_go():
    """The server began anew: what was asked after the first is lost."""
    async with router() as (socket, url), linked(url) as told:
        peer, _ = await heard(socket)
        await answer(socket, peer, WELCOME)
        await until(lambda: told.welcomes)
        await answer(socket, peer, WELCOME)
        await until(lambda: told.lost)
        while isinstance((again := await heard(socket))[1], Goodbye | type(None)) or again[0] == peer:
            pass
        assert isinstance(again[1], Hello)
        await answer(socket, again[0], WELCOME)
        await until(lambda: len(told.welcomes) == 2)


async def test_a_stream_that_is_asked_for_while_a_starting_server_is_hardly_reached_is_begun_once():
    """The order of events behind streams with the tokens of one request and the key of another: several greetings are under
    way while the network stalls, and each but the first starts the connection anew, between a request and its repetition.
    """
    gate = asyncio.Event()
    gate.set()
    num_welcomes = 0
    async with serve(heartbeat_ms=HEARTBEAT_MS) as server:
        path = server.endpoint.removeprefix("ipc://")
        welcome = server.welcome

        def greeted():
            nonlocal num_welcomes
            num_welcomes += 1
            if num_welcomes == 1:
                gate.clear()
                raise Unavailable("starting", retry_after_ms=1000)
            return welcome()

        server.welcome = greeted

        async def relay(reader, writer):
            far_reader, far_writer = await asyncio.open_unix_connection(path)

            async def pump(source, target, *, waits):
                with contextlib.suppress(OSError):
                    while data := await source.read(65_536):
                        if waits:
                            await gate.wait()
                        target.write(data)
                target.close()

            await asyncio.gather(pump(reader, far_writer, waits=True), pump(far_reader, writer, waits=False))

        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        stepping = asyncio.create_task(server.core.run(0.001))
        port = proxy.sockets[0].getsockname()[1]
        opening = asyncio.get_running_loop().call_later(10 * HEARTBEAT_MS / 1000, gate.set)
        async with proxy, connect(f"tcp://127.0.0.1:{port}", timeout_s=10) as client:
            results = await asyncio.gather(*(client.generate([1], max_tokens=20, seed=i).result() for i in range(5)))
            assert [result.token_ids for result in results] == [tokens(i, 20) for i in range(5)]
            assert (num_welcomes, len(server.core.requests)) == (2, 5)
        opening.cancel()
        stepping.cancel()


async def test_a_server_that_accepts_another_request_in_a_streams_place_is_not_believed():
    """Better an error than one text made of two."""
    async with router() as (socket, url):
        serving = asyncio.create_task(heard(socket))
        async with asyncio.TaskGroup() as group:

            async def play():
                peer, _ = await serving
                await answer(socket, peer, WELCOME)
                while not isinstance((message := (await heard(socket))[1]), Generate):
                    pass
                accepted = {"stream": message.stream, "seed": 1, "num_prompt_tokens": 1, "max_tokens": 9}
                for name in ("one", "one", "two"):
                    await answer(socket, peer, Accepted(request_id=name, resume_key="key", **accepted))

            group.create_task(play())
            async with connect(url) as client:
                with pytest.raises(ProtocolError, match="went on with two, not with one"):
                    await client.generate([1]).result()
