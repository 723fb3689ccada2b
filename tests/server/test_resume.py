"""Streams that outlive their connections, at the engine's door: nothing is lost, nothing comes twice (F12)."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.bench import RawPeer, entries, serve, until
from tests.server.fake_core import VOCAB, logprob, tokens

from pagewire_transport.columns import pack, unpack
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finished,
    Generate,
    Goodbye,
    Pause,
    PromptLogprobs,
    Replay,
    Resume,
    Tokens,
)
from pagewire_transport.params import SamplingParams


def ids_of(messages, stream=1, choice=0):
    """The tokens of a choice, and the index of the first; they must follow one another."""
    got, first = [], None
    for message in messages:
        if isinstance(message, Tokens):
            for number, which, start, ids in entries(message):
                if (number, which) == (stream, choice):
                    first = start if first is None else first
                    assert start == first + len(got)
                    got += ids
    return first, got


async def begin(server, peer, stream=1, **params):
    """Start a stream; its `accepted`."""
    num = len(server.core.requests)
    await peer.generate(stream, **params)
    await until(lambda: len(server.core.requests) == num + 1)
    accepted = await peer.read()
    assert isinstance(accepted, Accepted)
    assert len(accepted.resume_key) == 32
    return accepted


async def orphaned(server):
    """Until what is sent finds nobody."""
    await until(lambda: server._survivors.num_orphans or not server.core.live or server.core.step())


async def read_until(peer, is_last):
    """Messages up to the first for which `is_last` is true."""
    messages = [await peer.read(10)]
    while not is_last(messages[-1]):
        messages.append(await peer.read(10))
    return messages


async def read_tokens(peer, num, stream=1):
    """Messages until `num` tokens of the stream came."""
    messages = []
    while len(ids_of(messages, stream)[1]) < num:
        messages.append(await peer.read(10))
    return messages


def is_done(message):
    return isinstance(message, Done)


def resume(accepted, received=(), stream=1, **fields):
    return Resume(
        stream=stream,
        request_id=accepted.request_id,
        resume_key=accepted.resume_key,
        received=pack("I", received),
        **fields,
    )


async def test_a_lost_client_goes_on_over_another_connection():
    async with serve() as server:
        with RawPeer(server.endpoint) as first:
            await first.hello()
            accepted = await begin(server, first, seed=5, max_tokens=10)
            for _ in range(4):
                server.core.step()
            assert ids_of(await read_tokens(first, 4)) == (0, tokens(5, 4))
        await orphaned(server)
        server.core.step(6 - next(iter(server.core.live.values())).num_output)
        assert server.core.live
        with RawPeer(server.endpoint) as second:
            await second.hello()
            second.send(resume(accepted, [3], stream=9))
            again = await second.read()
            assert again == Accepted(**{f: getattr(accepted, f) for f in accepted.__struct_fields__} | {"stream": 9})
            assert ids_of(await read_tokens(second, 3, 9), 9) == (3, tokens(5, 3, 3))
            server.core.step(4)
            messages = await read_until(second, is_done)
            assert ids_of(messages, 9) == (6, tokens(5, 4, 6))
            assert [type(m) for m in messages] == [Tokens, Finished, Done]
            assert messages[-1].usage.completion == 10


async def test_a_resume_takes_the_stream_from_a_connection_that_seems_alive():
    async with serve() as server:
        with RawPeer(server.endpoint) as first, RawPeer(server.endpoint) as second:
            await first.hello()
            await second.hello()
            accepted = await begin(server, first, seed=5, max_tokens=10)
            server.core.step(2)
            await first.read()
            second.send(resume(accepted, [0]))
            await second.read()
            told = await first.read()
            assert isinstance(told, Error)
            assert (told.code, told.stream) == ("taken_over", 1)
            server.core.step(8)
            assert ids_of(await read_until(second, is_done)) == (0, tokens(5, 10))
            assert await first.read_all() == []
            first.send(Cancel(stream=1))  # not its any more
            assert (await first.read()).code == "unknown_stream"


async def test_a_request_that_is_repeated_behind_another_hello_is_another_stream():
    """What a client must not do (`Link`): it would have the tokens of one and the key of the other, and can resume neither."""
    async with serve() as server:
        with RawPeer(server.endpoint) as first, RawPeer(server.endpoint) as second:
            await first.hello()
            one = await begin(server, first, seed=5, max_tokens=10)
            server.core.step(4)
            await read_tokens(first, 4)
            await first.hello()
            two = await begin(server, first, seed=5, max_tokens=10)
            await second.hello()
            second.send(resume(two, [4], stream=3))
            told = await second.read()
            assert (told.code, told.field) == ("invalid_request", "received")
            assert told.message == "says 4 tokens of choice 0, which has 0"
            second.send(resume(one, [4], stream=4))
            assert (await second.read()).request_id == one.request_id


async def test_no_grace_passes_while_nobody_is_there_who_could_come_back():
    """A gateway may take longer to start than streams are kept for a client."""
    async with serve(resume_grace_ms=40, replay_timeout_ms=10_000) as server:
        with RawPeer(server.endpoint) as first:
            await first.hello()
            accepted = await begin(server, first, seed=5, max_tokens=10)
        await orphaned(server)
        had = server.core.live
        await asyncio.sleep(0.3)
        assert server.core.live == had
        with RawPeer(server.endpoint) as second, RawPeer(server.endpoint) as third:
            await second.hello()
            second.send(resume(accepted))
            assert isinstance(await second.read(), Accepted)
            second.close()
            await orphaned(server)
            await third.hello()
            await until(lambda: not server.core.live)  # it could have


async def test_not_even_nobody_is_waited_for_for_ever():
    async with serve(resume_grace_ms=40, replay_timeout_ms=80) as server:
        with RawPeer(server.endpoint) as first:
            await first.hello()
            await begin(server, first, seed=5, max_tokens=10)
        await orphaned(server)
        await until(lambda: not server.core.live)


@pytest.mark.parametrize("wrong", ["id", "key", "no key", "expired", "goodbye", "cancelled by drain"])
async def test_a_refusal_does_not_tell_what_is_wrong(wrong):
    async with serve(resume_grace_ms=40 if wrong == "expired" else 10_000) as server:
        with RawPeer(server.endpoint) as first, RawPeer(server.endpoint) as second:
            await first.hello()
            await second.hello()
            accepted = await begin(server, first, seed=5, max_tokens=10)
            asked = {"id": accepted.request_id, "key": accepted.resume_key}
            if wrong == "id":
                asked["id"] = "00000000-9"
            elif wrong == "key":
                asked["key"] = "0" * 32
            elif wrong == "no key":
                asked["key"] = ""
            elif wrong == "goodbye":
                first.send(Goodbye())
                await until(lambda: not server.core.live)
            else:
                first.close()
                await orphaned(server)
                if wrong == "expired":
                    await until(lambda: not server.core.live)
                else:
                    server.drain()
                    assert not server.core.live
            second.send(Resume(stream=1, request_id=asked["id"], resume_key=asked["key"]))
            told = await second.read()
            assert (told.code, told.field, told.stream) == ("unknown_stream", "request_id", 1)
            assert told.message == "there is no such stream here, or its key is another one"


async def test_what_was_told_and_perhaps_lost_is_told_again():
    """The end of a stream is kept, too: `done` may have been on its way when the connection broke."""
    async with serve() as server:
        with RawPeer(server.endpoint) as first:
            await first.hello()
            accepted = await begin(server, first, seed=5, max_tokens=3, n=2)
            server.core.step(3)
            await read_until(first, is_done)
        with RawPeer(server.endpoint) as second:
            await second.hello()
            for _ in range(2):
                second.send(resume(accepted, [3, 1]))
                messages = await read_until(second, is_done)
                assert [type(m) for m in messages] == [Accepted, Tokens, Finished, Finished, Done]
                assert ids_of(messages, choice=1) == (1, tokens(6, 2, 1))
            second.send(Goodbye())
            await until(lambda: accepted.request_id not in server._survivors)


@pytest.mark.parametrize("received", [[11], [0, 0], b"\0"])
async def test_what_cannot_be_received_is_refused_and_harms_nobody(received):
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            accepted = await begin(server, peer, seed=5, max_tokens=20)
            server.core.step(10)
            await peer.read()
            packed = received if isinstance(received, bytes) else pack("I", received)
            peer.send(Resume(stream=2, request_id=accepted.request_id, resume_key=accepted.resume_key, received=packed))
            told = await peer.read()
            assert (told.code, told.field, told.stream) == ("invalid_request", "received", 2)
            server.core.step(10)
            assert ids_of(await read_until(peer, is_done)) == (10, tokens(5, 10, 10))


async def test_log_probabilities_are_served_again_with_their_tokens():
    async with serve() as server:
        with RawPeer(server.endpoint) as first, RawPeer(server.endpoint) as second:
            await first.hello()
            await second.hello()
            accepted = await begin(server, first, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=0)
            for _ in range(4):
                server.core.step()
            await read_tokens(first, 4)
            second.send(resume(accepted, [1]))
            assert isinstance(await second.read(10), Accepted)
            for _ in range(2):
                server.core.step()
            messages = await read_until(second, is_done)
            assert not any(isinstance(m, PromptLogprobs) for m in messages)  # whoever has a token has these
            assert ids_of(messages) == (1, tokens(5, 5, 1))
            columns = [m.logprobs for m in messages if isinstance(m, Tokens)]
            assert [v for c in columns for v in unpack("f", c.chosen)] == [logprob(5, i) for i in range(1, 6)]
            first.send(resume(accepted, [0], stream=7))
            assert any(isinstance(m, PromptLogprobs) for m in await read_until(first, is_done))


async def test_a_pause_ends_with_its_opposite_or_a_resume():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            accepted = await begin(server, peer, seed=5, max_tokens=6, n=2)
            (first, _) = server.core.live.values()
            for go_on in (Pause(stream=1, paused=False), resume(accepted, [0, 0], stream=2)):
                peer.send(Pause(stream=1))
                await until(lambda: first.is_paused)
                before = first.num_output
                server.core.step(2)
                assert first.num_output == before
                peer.send(go_on)
                await until(lambda: not first.is_paused)
                server.core.step(2)
            server.core.step(2)
            assert ids_of(await read_until(peer, is_done), 2) == (0, tokens(5, 6))


async def test_a_recall_gives_back_what_a_gateway_needs():
    async with serve() as server:
        with RawPeer(server.endpoint) as first, RawPeer(server.endpoint) as second:
            await first.hello()
            await second.hello()
            params = SamplingParams(max_tokens=9, seed=5, n=2)
            first.send(Generate(stream=1, prompt_ids=pack("I", [7, 8]), params=params, memo=b"stops"))
            accepted = await first.read()
            assert accepted.memo == b""
            server.core.step(4)
            second.send(resume(accepted, [4, 2], recall=True))
            again = await second.read()
            assert (again.prompt_ids, again.memo) == (pack("I", [7, 8]), b"stops")
            assert again.output_ids == (pack("I", tokens(5, 4)), pack("I", tokens(6, 2)))


async def test_a_replay_goes_on_where_another_engine_was():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            replay = Replay(
                request_id="elsewhere-1", resume_key="a" * 32, output_ids=(pack("I", tokens(5, 3)), pack("I", []))
            )
            asked = Generate(
                stream=1,
                prompt_ids=pack("I", [1, 2]),
                params=SamplingParams(max_tokens=5, seed=5, n=2),
                replay=replay,
            )
            peer.send(asked)
            accepted = await peer.read()
            assert (accepted.request_id, accepted.resume_key) == ("elsewhere-1", "a" * 32)
            server.core.step(2)
            server.core.step(3)
            messages = await read_until(peer, is_done)
            assert ids_of(messages) == (3, tokens(5, 2, 3))
            assert ids_of(messages, choice=1) == (0, tokens(6, 5))
            assert messages[-1].usage.completion == 10
            peer.send(Generate(stream=2, prompt_ids=asked.prompt_ids, params=asked.params, replay=replay))
            told = await peer.read()
            assert (told.code, told.field) == ("invalid_request", "replay.request_id")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"output_ids": ()}, "replay.output_ids"),
        ({"output_ids": (b"123",)}, "replay.output_ids[0]"),
        ({"output_ids": (pack("I", [VOCAB]),)}, "replay.output_ids[0]"),
        ({"output_ids": (pack("I", [1] * 6),)}, "replay.output_ids[0]"),
        ({"request_id": ""}, "replay.request_id"),
        ({"seed": None}, "params.seed"),
    ],
)
async def test_a_replay_that_cannot_be_is_refused_by_name(change, field):
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            seed = change.get("seed", 5)
            given = {"request_id": "x", "resume_key": "k", "output_ids": (b"",)} | change
            given.pop("seed", None)
            params = SamplingParams(max_tokens=5, seed=seed)
            peer.send(Generate(stream=1, prompt_ids=pack("I", [1]), params=params, replay=Replay(**given)))
            told = await peer.read()
            assert (told.code, told.field, told.stream) == ("invalid_request", field, 1)
            assert not server.core.live


async def test_streams_kept_are_bounded():
    async with serve(max_kept_streams=3) as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            accepted = [await begin(server, peer, i, seed=i, max_tokens=100) for i in range(6)]
        await orphaned(server)
        assert server._survivors.num_orphans == len(server.core.live) == 3
        assert all((a.request_id in server._survivors) == (i >= 3) for i, a in enumerate(accepted))


async def test_who_wants_nothing_kept_has_nothing_kept():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            peer.send(Generate(stream=1, prompt_ids=pack("I", [1]), resumable=False))
            assert (await peer.read()).resume_key == ""
        await until(lambda: server.core.step() or not server.core.live)
    async with serve(resume_grace_ms=0) as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            await peer.generate(1)
            assert (await peer.read()).resume_key == ""


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(["cut", "take over", "stay"])), max_size=8)
)
def test_whatever_happens_every_token_comes_once(moves):
    """Steps, cuts and resumes in any order; what the client has and what it is sent join without a gap."""

    async def run():
        async with serve() as server:
            have = [[], []]
            peer = await RawPeer(server.endpoint).hello()
            accepted = await begin(server, peer, seed=5, max_tokens=30, n=2)
            for steps, unread, how in [*moves, (30, 0, "take over")]:
                for _ in range(steps):
                    server.core.step()
                messages = await peer.read_all(0.01)
                messages = messages[: max(0, len(messages) - unread)] if how != "stay" else messages
                for choice in range(2):
                    first, got = ids_of(messages, choice=choice)
                    assert first is None or first == len(have[choice])
                    have[choice] += got
                if how != "stay":
                    if how == "cut":
                        peer.close()
                    other = await RawPeer(server.endpoint).hello()
                    other.send(resume(accepted, [len(h) for h in have]))
                    again = await other.read()
                    assert again == accepted
                    peer.close()
                    peer = other
                server.check_invariants()
            messages = await peer.read_all(0.05)
            for choice in range(2):
                first, got = ids_of(messages, choice=choice)
                assert first is None or first == len(have[choice])
                assert have[choice] + got == tokens(5 + choice, 30)
            assert isinstance(messages[-1], Done)
            peer.close()

    asyncio.run(run())


async def test_a_stream_that_is_forgotten_goes_on_for_its_reader():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            accepted = await begin(server, peer, max_tokens=4, seed=1)
            server._survivors._streams.forget(accepted.request_id)
            server.check_invariants()
            server.core.step(10)
            messages = await read_until(peer, is_done)
            assert ids_of(messages) == (0, tokens(1, 4))
            server.check_invariants()
            assert server.num_streams == 0
