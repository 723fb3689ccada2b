"""The engine's door over real sockets: streams, refusals, cancels, ends, faults."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest
from tests.server.bench import RawPeer, entries, serve, until
from tests.server.fake_core import VOCAB, FakeCore, logprob, tokens

from pagewire.errors import (
    ConnectionLost,
    Draining,
    InvalidRequest,
    NumericError,
    Overloaded,
    PromptTooLong,
    UnsupportedFeature,
)
from pagewire_client import connect
from pagewire_transport.columns import pack, unpack
from pagewire_transport.messages import (
    Accepted,
    Cancel,
    Done,
    Error,
    Finish,
    Finished,
    Generate,
    Goodbye,
    Ping,
    Pong,
    PromptLogprobs,
    Tokens,
)
from pagewire_transport.params import SamplingParams


async def test_a_stream_from_end_to_end():
    async with serve() as server, connect(server.endpoint) as client:
        assert (client.info.role, client.info.model, client.info.vocab_size) == ("engine", "fake", VOCAB)
        stream = client.generate([1, 2, 3], max_tokens=5, seed=11, priority=2, namespace="t")
        await until(lambda: server.core.live)
        for _ in range(5):
            server.core.step()
        result = await stream.result()
        assert result.token_ids == tokens(11, 5)
        assert (result.finish_reason, result.seed, result.text) == ("length", 11, "")
        assert (result.usage.prompt, result.usage.completion) == (3, 5)
        assert result.timings.server.total_ns >= result.timings.server.first_token_ns >= result.timings.queue_ns >= 0
        request = server.core.requests[0]
        assert (request.priority, request.namespace.tenant, request.prompt_ids.tolist()) == (2, "t", [1, 2, 3])
        assert server.num_streams == client.num_streams == 0


async def test_one_message_a_step_for_all_streams_of_a_connection():
    async with serve() as server:
        with RawPeer(server.endpoint) as one, RawPeer(server.endpoint) as two:
            for peer in (one, two):
                await peer.hello()
            for stream in range(20):  # slots of the two interleave
                for peer in (one, two):
                    await peer.generate(stream, seed=stream + (100 if peer is two else 0), max_tokens=3)
                    assert isinstance(await peer.read(), Accepted)
            for _ in range(3):
                server.core.step()
            for peer, base in ((one, 0), (two, 100)):
                messages = await peer.read_all()
                told = [m for m in messages if isinstance(m, Tokens)]
                assert len(told) == 3
                for index, message in enumerate(told):
                    assert message.counts == message.choices == b""
                    assert sorted(entries(message)) == [
                        (stream, 0, index, tokens(stream + base, 1, index)) for stream in range(20)
                    ]
                assert (
                    sum(isinstance(m, Finished) for m in messages) == sum(isinstance(m, Done) for m in messages) == 20
                )


async def test_several_tokens_a_step():
    """Speculation will bring runs of different lengths: here 3, 3, 1."""
    async with serve() as server, connect(server.endpoint) as client, connect(server.endpoint) as other:
        streams = [c.generate([1], max_tokens=n, seed=n) for n in (7, 4, 1) for c in (client, other)]
        await until(lambda: len(server.core.live) == 6)
        for _ in range(3):
            server.core.step(3)
        assert [(await s.result()).token_ids for s in streams] == [tokens(n, n) for n in (7, 7, 4, 4, 1, 1)]


async def test_choices_of_one_request():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=4, n=3, seed=50)
        await until(lambda: len(server.core.live) == 3)
        first = next(iter(server.core.live.values()))
        server.core.step()
        server.core.finish_at(first, 1)
        for _ in range(3):
            server.core.step()
        result = await stream.result()
        assert [choice.token_ids for choice in result.choices] == [tokens(50, 1), tokens(51, 4), tokens(52, 4)]
        assert [choice.finish_reason for choice in result.choices] == ["stop", "length", "length"]
        assert result.usage.completion == 9


async def test_a_missing_seed_is_drawn_and_told():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=2)
        await until(lambda: server.core.live)
        server.core.step(2)
        result = await stream.result()
        assert result.token_ids == tokens(result.seed, 2)
        assert stream.seed == result.seed == server.core.requests[0].seed


async def test_logprobs_stay_with_their_tokens():
    async with serve() as server, connect(server.endpoint) as client, connect(server.endpoint) as other:
        asked = [
            (c, c.generate([1], max_tokens=3, seed=seed, logprobs=top))
            for seed, top in ((1, None), (2, 0), (3, 2))
            for c in (client, other)
        ]
        await until(lambda: len(server.core.live) == 6)
        for _ in range(3):
            server.core.step()
        for _, stream in asked:
            result = await stream.result()
            top = {1: None, 2: 0, 3: 2}[result.seed]
            if top is None:
                assert result.logprobs is None
                continue
            assert [one.logprob for one in result.logprobs] == [logprob(result.seed, i) for i in range(3)]
            assert [one.top for one in result.logprobs] == [
                tuple((r, logprob(result.seed, i, r)) for r in range(top)) for i in range(3)
            ]


async def test_prompt_logprobs_come_once_and_first():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            await peer.generate(1, max_tokens=1, prompt_logprobs=2, n=2, seed=0)
            await until(lambda: server.core.live)
            server.core.step()
            messages = await peer.read_all()
            assert [type(m) for m in messages[:3]] == [Accepted, PromptLogprobs, Tokens]
            assert sum(isinstance(m, PromptLogprobs) for m in messages) == 1
            assert list(unpack("f", messages[1].chosen)) == [0.0, -1.0]
            assert messages[1].top_ids == pack("I", [0, 1, 0, 1])


async def test_a_prompt_of_one_token_has_no_logprobs_to_wait_for():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=0, prompt_logprobs=0)
        await until(lambda: server.core.live)
        server.core.step()
        result = await stream.result()
        assert (result.prompt_logprobs, result.token_ids, result.finish_reason) == ([], [], "length")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "error", "field"),
    [
        ("text", {}, UnsupportedFeature, "prompt"),
        ([1], {"stop": "x"}, UnsupportedFeature, "stop"),
        ([], {}, InvalidRequest, "prompt_ids"),
        ([VOCAB], {}, InvalidRequest, "prompt_ids[0]"),
        ([1] * 5000, {}, PromptTooLong, "prompt_ids"),
        ([1], {"max_tokens": 2**31 - 1}, InvalidRequest, "max_tokens"),
        ([1], {"stop_token_ids": [VOCAB]}, InvalidRequest, "stop_token_ids[0]"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, InvalidRequest, f"logit_bias[{VOCAB}]"),
    ],
)
async def test_refused_by_name(prompt, params, error, field):
    async with serve() as server, connect(server.endpoint) as client:
        with pytest.raises(error) as caught:
            await client.generate(prompt, **params).result()
        assert caught.value.field == field
        with pytest.raises(UnsupportedFeature):
            await client.chat([{"role": "user", "content": "x"}]).result()
        assert server.num_streams == client.num_streams == 0


async def test_every_bad_request_is_answered_with_its_stream():
    """Also one that does not even decode: its stream must not hang."""
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            for stream, bad in enumerate([{"temperature": -1.0}, {"n": 0}, {"foo": 1}, {"top_p": float("nan")}]):
                peer.send(
                    b"\x01"
                    + msgspec.msgpack.encode({"t": "generate", "stream": stream, "prompt_ids": b"", "params": bad})
                )
                error = await peer.read()
                assert (error.code, error.stream, error.field) == (
                    "invalid_request",
                    stream,
                    f"params.{next(iter(bad))}",
                )
            peer.send(Generate(stream=9, prompt_ids=b"123"))
            error = await peer.read()
            assert (error.code, error.stream, error.field) == ("invalid_request", 9, "prompt_ids")
            peer.send(Generate(stream=9))
            assert (await peer.read()).field == "prompt_ids"


async def test_a_number_in_use_is_refused_and_its_stream_goes_on():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            await peer.generate(1, max_tokens=2, seed=3)
            await peer.read()
            await peer.generate(1, max_tokens=2, seed=4)
            error = await peer.read()
            assert (error.code, error.field, error.stream) == ("invalid_request", "stream", None)
            server.core.step(2)
            assert list(entries(await peer.read())) == [(1, 0, 0, tokens(3, 2))]
            assert [type(m) for m in await peer.read_all()] == [Finished, Done]
            await peer.generate(1, max_tokens=1)  # over: may be used again
            assert isinstance(await peer.read(), Accepted)


async def test_what_is_not_there_cannot_be_cancelled():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            for message in (Cancel(stream=5), Finish(stream=5, at=1)):
                peer.send(message)
                error = await peer.read()
                assert (error.code, error.stream, error.field) == ("unknown_stream", None, "stream")
            await peer.generate(5, max_tokens=3)
            await peer.read()
            peer.send(Finish(stream=5, choice=1, at=1))
            assert ((await peer.read()).field) == "choice"


async def test_caps():
    async with serve(max_streams_per_connection=2, max_connections=2) as server:
        async with connect(server.endpoint) as client, connect(server.endpoint):
            running = [client.generate([1], max_tokens=5) for _ in range(2)]
            with pytest.raises(Overloaded) as caught:
                await client.generate([1]).result()
            assert caught.value.retry_after_ms
            with pytest.raises(Overloaded):
                async with connect(server.endpoint):
                    pass
            server.core.step(5)
            assert len([await stream.result() for stream in running]) == 2
            again = client.generate([1], max_tokens=1)
            await until(lambda: server.core.live)
            server.core.step()
            await again.result()


async def test_the_cores_refusals_travel():
    async with serve() as server, connect(server.endpoint) as client:
        server.core.max_live = 0
        with pytest.raises(Overloaded) as caught:
            await client.generate([1]).result()
        assert caught.value.retry_after_ms == 5


async def test_wanted_times_reach_the_core_and_its_honest_refusal_the_client():
    async with serve() as server, connect(server.endpoint) as client:
        running = client.generate([1], max_tokens=1, ttft_ms=250, itl_ms=12.5, deadline_ms=1e4, namespace="n")
        await until(lambda: server.core.live)
        (request,) = server.core.requests
        assert (request.wishes.ttft_ms, request.wishes.itl_ms, request.wishes.deadline_ms) == (250, 12.5, 1e4)
        assert request.client == "n"
        server.core.step()
        await running.result()
        other = client.generate([1], max_tokens=1)
        await until(lambda: server.core.live)
        assert server.core.requests[-1].client not in ("", "n"), "a client without a namespace has a share, too"
        server.core.step()
        await other.result()
        server.core.refuse = Overloaded("not in time", field="ttft_ms", retry_after_ms=1590, predicted_ttft_ms=1840)
        with pytest.raises(Overloaded) as caught:
            await client.generate([1], ttft_ms=250).result()
        assert (caught.value.field, caught.value.retry_after_ms, caught.value.predicted_ttft_ms) == (
            "ttft_ms",
            1590,
            1840,
        )
        with pytest.raises(InvalidRequest) as refused:
            client.generate([1], itl_ms=-1.0)
        assert refused.value.field == "itl_ms"


async def test_draining_refuses_new_streams_and_ends_open_ones_complete():
    async with serve() as server, connect(server.endpoint) as client:
        running = client.generate([1], max_tokens=3, seed=1)
        await until(lambda: server.core.live)
        server.drain()
        assert not server.is_ready
        with pytest.raises(Draining):
            await client.generate([1]).result()
        server.core.step(3)
        assert (await running.result()).token_ids == tokens(1, 3)


async def test_close_lets_go_out_what_is_ready():
    async with serve() as server, connect(server.endpoint) as client:
        streams = [client.generate([1], max_tokens=3, seed=i) for i in range(100)]
        await until(lambda: len(server.core.live) == 100)
        for sequence in list(server.core.live.values()):
            server.core.fail(sequence, Draining("closing"))
        server.core.report()
        await server.close()
        for stream in streams:
            with pytest.raises(Draining):
                await stream.result()


# ---- ends ------------------------------------------------------------------------------------------------------------


async def test_cancel_is_answered_for_every_choice():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            await peer.generate(1, n=2, seed=0)
            await until(lambda: server.core.live)
            server.core.step()
            peer.send(Cancel(stream=1))
            peer.send(Cancel(stream=1))
            await until(lambda: not server.core.live)
            server.core.report()
            messages = await peer.read_all()
            assert [type(m) for m in messages] == [Accepted, Tokens, Finished, Finished, Done]
            assert {(m.choice, m.reason, m.num_tokens) for m in messages[2:4]} == {
                (0, "cancelled", 1),
                (1, "cancelled", 1),
            }


async def test_finish_cuts_what_was_sent_already():
    async with serve() as server, connect(server.endpoint) as client:
        stream = client.generate([1], max_tokens=50, seed=3)
        await until(lambda: server.core.live)
        server.core.step(10)
        async for chunk in stream:
            assert len(chunk.token_ids) == 10
            stream.finish(4)
            break
        await until(lambda: not server.core.live)
        server.core.report()
        result = await stream.result()
        assert (result.token_ids, result.finish_reason, result.usage.completion) == (tokens(3, 4), "stop", 4)


async def test_a_failed_choice_ends_its_stream_and_no_other():
    """F32's end at the door; neighbours unchanged."""
    async with serve() as server, connect(server.endpoint) as client:
        bad = client.generate([1], max_tokens=5, n=2, seed=1)
        good = client.generate([1], max_tokens=5, seed=9)
        await until(lambda: len(server.core.live) == 3)
        server.core.step()
        server.core.fail(server.core.live[0], NumericError("NaN"))
        server.core.step()
        server.core.step()
        server.core.step(2)
        with pytest.raises(NumericError):
            await bad.result()
        assert (await good.result()).token_ids == tokens(9, 5)
        assert not server.core.live


async def test_slots_are_reused_at_once():
    """A slot is free from the outcome that reports its sequence; the ended one may still have tokens to send."""
    async with serve() as server, connect(server.endpoint) as client:
        for round_ in range(30):
            streams = [client.generate([1], max_tokens=1 + i % 3, seed=round_ * 10 + i) for i in range(5)]
            await until(lambda: len(server.core.live) == 5)
            for _ in range(3):
                server.core.step()
                server.check_invariants()
            for i, stream in enumerate(streams):
                assert (await stream.result()).token_ids == tokens(round_ * 10 + i, 1 + i % 3)
        assert server.core._next_slot <= 5


@pytest.mark.parametrize("how", ["goodbye", "closed", "silent", "hello again"])
async def test_a_lost_clients_streams_are_cancelled(how):
    """F12, F15: whatever the way, its sequences end, at the latest after the grace, and nothing of it stays."""
    async with serve(heartbeat_ms=20, heartbeat_timeout_ms=150, resume_grace_ms=100, replay_timeout_ms=0) as server:
        peer = await RawPeer(server.endpoint, identity=b"me").hello()
        await peer.generate(1, max_tokens=1000, n=2)
        await until(lambda: server.core.live)
        server.core.step()
        if how == "goodbye":
            peer.send(Goodbye())
        elif how == "closed":
            peer.close()
            await asyncio.sleep(0.02)
            server.core.step()  # the next token finds nobody
        elif how == "hello again":
            peer.close()
            peer = await RawPeer(server.endpoint, identity=b"me").hello()
        await until(lambda: not server.core.live)
        server.core.report()
        assert server.num_streams == 0
        server.check_invariants()
        if how == "hello again":
            await peer.generate(1, max_tokens=1, seed=4)
            await until(lambda: server.core.live)
            server.core.step()
            assert [type(m) for m in await peer.read_all()] == [Accepted, Tokens, Finished, Done]
        if how != "closed":
            peer.close()


async def test_a_restarted_server_is_noticed_and_used():
    """F12: open streams fail clearly, the same client goes on with the new server."""
    core = FakeCore()
    async with serve(core) as server:
        url = server.endpoint
        async with connect(url, resume_timeout_s=0.1) as client:
            lost = client.generate([1], max_tokens=100)
            await until(lambda: core.live)
            await server.close()
            with pytest.raises(ConnectionLost):
                await lost.result()
            async with serve(FakeCore(), bind=url) as second:
                stream = client.generate([1], max_tokens=2, seed=5)
                await until(lambda: second.core.live)
                second.core.step(2)
                assert (await stream.result()).token_ids == tokens(5, 2)


# ---- faults of ours --------------------------------------------------------------------------------------------------


async def test_an_exception_in_admission_ends_that_request_only():
    """F7."""
    async with serve() as server, connect(server.endpoint) as client:
        good = client.generate([1], max_tokens=2, seed=1)
        await until(lambda: server.core.live)
        submit, server.core.submit = server.core.submit, lambda request: 1 / 0
        with pytest.raises(Exception, match="ZeroDivisionError") as caught:
            await client.generate([1]).result()
        assert caught.value.code == "internal"
        server.core.submit = submit
        server.core.step(2)
        assert (await good.result()).token_ids == tokens(1, 2)
        assert len(server.faults) == 1


async def test_an_exception_while_sending_ends_that_readers_streams_only(monkeypatch):
    """F7."""
    async with serve() as server, connect(server.endpoint, name="bad") as bad, connect(server.endpoint) as good:
        streams = [c.generate([1], max_tokens=2, seed=1) for c in (bad, good)]
        await until(lambda: len(server.core.live) == 2)
        broken = next(r for c, r in server._readers.items() if c.client == "bad")
        monkeypatch.setattr(
            broken,
            "connection",
            SimpleNamespace(
                is_blocked=False, send_frame=lambda frame: 1 / 0, send=broken.connection.send, client="bad"
            ),
        )
        server.core.step()
        monkeypatch.undo()
        server.core.step()
        with pytest.raises(Exception, match="ZeroDivisionError"):
            await streams[0].result()
        assert (await streams[1].result()).token_ids == tokens(1, 2)


async def test_other_sinks_sequences_are_left_alone():
    """The in-process engine shares the core: slots without a reader here."""
    async with serve() as server, connect(server.endpoint) as client:
        request = server.core.admission.admit([1], SamplingParams(max_tokens=9))
        server.core.submit(request)
        stream = client.generate([1], max_tokens=2, seed=3)
        await until(lambda: len(server.core.live) == 2)
        server.core.step()
        server.core.step()
        assert (await stream.result()).token_ids == tokens(3, 2)


async def test_stats_and_pong():
    async with serve() as server, connect(server.endpoint) as client:
        assert await client.stats() == {"sequences_running": 0.0}
        with RawPeer(server.endpoint) as peer:
            await peer.hello()
            server.core.health.ready, server.core.health.reason = False, "forward of step 7 running for 9.0 s"
            peer.send(Ping(nonce=2**63))
            assert await peer.read() == Pong(nonce=2**63, ready=False, reason="forward of step 7 running for 9.0 s")


async def test_nothing_before_hello():
    async with serve() as server:
        with RawPeer(server.endpoint) as peer:
            await peer.generate(3)
            error = await peer.read()
            assert isinstance(error, Error)
            assert (error.code, error.field, error.stream) == ("protocol", "hello", 3)
            assert not server.core.live
