"""The chat load: drawn and accounted for as agreed, whatever the number of clients; and the whole way with a tiny model."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
VOCAB = 128_256


@pytest.fixture
def workload(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("workload")


@pytest.fixture
def clients(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("clients")


def gist(request):
    return sum(request.prompt_ids), len(request.prompt_ids), request.max_tokens


def test_lengths_and_prompts_are_those_that_others_were_measured_with(workload):
    lengths = workload.chat_lengths(4000)
    assert lengths[:4] == [(191, 203), (371, 189), (635, 86), (269, 103)]
    assert [sum(column) for column in zip(*lengths, strict=True)] == [1_174_797, 930_931]
    assert [gist(r) for r in itertools.islice(workload.chat_requests(lengths, VOCAB), 3)] == [
        (13_409_264, 191, 203),
        (23_308_895, 371, 189),
        (42_052_955, 635, 86),
    ]


def test_arrivals_are_those_that_others_were_measured_with(workload):
    found = list(workload.poisson_requests(workload.chat_lengths(4000), 1000.0, 0.01, VOCAB))
    assert [gist(r) for r in found[:3]] == [
        (13_694_053, 191, 203),
        (22_509_800, 371, 189),
        (41_010_783, 635, 86),
    ]
    after = [request.after for request in found]
    assert after[0] == 0.003124344855143063
    assert [later - after[0] for later in after[1:3]] == pytest.approx([0.0014246571754483739, 0.0022766603560739895])
    assert after[-2] < 0.01 <= after[-1]


@pytest.mark.parametrize("load", [{"kind": "closed", "streams": 5}, {"kind": "poisson", "rate": 20.0}])
def test_parts_of_a_load_are_the_load(clients, load):
    def drawn(parts):
        jobs = [
            clients.Job(endpoint="", vocab_size=500, seconds=1.0, ramp=0.1, part=part, parts=parts, **load)
            for part in range(parts)
        ]
        assert sum(job.own_streams for job in jobs) == load.get("streams", 0)
        return sorted((*gist(request), request.after) for job in jobs for request in clients.draw(job))

    assert drawn(3) == drawn(1)


def test_latencies_are_of_requests_that_start_in_the_window_and_tokens_of_it(workload):
    rows = [
        workload.Served(0.5, 3, [1.0, 1.5, 2.0], [1, 1, 1]),  # starts before, one token comes before
        workload.Served(1.2, 4, [1.4, 1.41, 1.43], [1, 2, 1]),
        workload.Served(1.9, 3, [2.4, 2.9], [1, 1]),  # short; starts inside and ends after
        workload.Served(2.0, 1, [2.1], [1]),  # starts after
    ]
    found = workload.summary(rows, 1.0, 2.0)
    assert found["requests"] == 2
    assert found["short"] == 1
    assert found["throughput"] == 2 + 4
    assert found["ttft_p50"] == pytest.approx(200)
    assert found["ttft_p95"] == pytest.approx(500)
    assert found["itl_p50"] == pytest.approx(20)
    assert found["itl_max"] == pytest.approx(500)
    assert found["tpot_p95"] == pytest.approx(500)
    assert found["within_slo"] == 0
    refused = workload.Served(1.5, 4, error="refused")
    assert workload.summary([refused], 1.0, 2.0)["ttft_p50"] == math.inf
    quick = workload.Served(1.2, 3, [1.4, 1.41, 1.42], [1, 1, 1])
    assert workload.summary([quick, refused], 1.0, 2.0)["within_slo"] == 0.5


async def test_a_closed_loop_keeps_its_streams_open_and_goes_on_after_a_refusal(workload):
    num_open, most, asked = 0, 0, []

    async def generate(_prompt, max_tokens):
        nonlocal num_open, most
        asked.append(max_tokens)
        num_open += 1
        most = max(most, num_open)
        try:
            if len(asked) == 2:
                raise RuntimeError("full")
            for _ in range(2):
                await asyncio.sleep(0.005)
                yield 1
        finally:
            num_open -= 1

    requests = workload.chat_requests([(3, 2)], 100)
    rows = await workload.closed(generate, requests, 3, time.perf_counter() + 0.25)
    assert most == 3
    assert num_open == 0
    assert len(rows) == len(asked) > 30
    assert [row.error for row in rows if row.error] == ["RuntimeError('full')"]
    assert all(row.counts == [1, 1] for row in rows if not row.error)


async def test_arrivals_do_not_wait_for_those_before(workload):
    async def generate(_prompt, _max_tokens):
        await asyncio.sleep(0.05)
        yield 1

    begun = time.perf_counter()
    requests = [workload.Request([1], 1, 0.001 * i) for i in range(20)]
    rows = await workload.opened(generate, iter(requests), begun)
    assert time.perf_counter() - begun < 0.5
    assert [row.start - begun for row in rows] == pytest.approx([request.after for request in requests])


def test_the_whole_way():
    flags = ["--device", "cpu", "--tiny", "--max-rows", "8", "--seconds", "2", "--ramp", "0.2", "--json"]
    command = [sys.executable, str(PERF / "serve.py"), *flags, "--closed", "3", "--poisson", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    for case in ("tiny, closed 3", "tiny, poisson 6"):
        found = {row["metric"]: row["value"] for row in rows if row["case"] == case}
        assert found["requests"] > 0
        assert found["short"] == 0
        assert found["throughput"] > 0
        assert 0 < found["ttft_p50"] <= found["ttft_p95"]
        assert 0 < found["itl_p50"] <= found["itl_p95"] <= found["itl_p99"] <= found["itl_max"]
        assert 0 < found["cpu_client_0"] < 100 > found["cpu_client_1"] > 0
        assert found["cpu_engine"] > found["cpu_engine_loop"] >= 0
        assert found["step_mean"] > 0


async def test_decoding_counts_only_while_all_decode(workload):
    async def generate(prompt, max_tokens):
        assert len(prompt) == 7
        for _ in range(max_tokens):
            await asyncio.sleep(0.01)
            yield 1

    found = await workload.decode_only(generate, 3, 7, 6, 100)
    assert 1 <= found["gaps"] <= 3 * 5
    assert 10 <= found["itl_p50"] <= found["itl_p99"] <= found["itl_max"]
    assert found["step"] == pytest.approx(1e3 * 3 / found["throughput"])
