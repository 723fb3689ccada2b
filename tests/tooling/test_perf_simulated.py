"""The simulator beside recorded runs: files are read, loads are those of the real run, and what comes out is near it."""

import importlib
import json
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"


@pytest.fixture
def simulated(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))
    return importlib.import_module("simulated")


def test_a_recorded_run_is_near(simulated):
    runs = list(simulated.real_runs(PERF / "results" / "2026-11-29-serve-h200.json"))
    run = next(run for run in runs if run.label == "closed 64, steps of 384")
    assert (run.max_rows, run.seconds) == (128, 12)
    found = simulated.simulated(run, simulated.H200, simulated.Host(), run.seconds)
    for metric in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "throughput"):
        assert getattr(found, metric) == pytest.approx(run.values[metric], rel=0.12), metric


def test_lines_of_a_run_just_made_are_read(simulated, tmp_path):
    file = tmp_path / "run.jsonl"
    rows = [("8b bf16", "step_tokens", 512.0), ("8b bf16, poisson 20", "requests", 200), ("8b fp8, closed 64", "x", 1)]
    file.write_text("".join(json.dumps({"case": c, "metric": m, "value": v}) + "\n" for c, m, v in rows))
    (run,) = simulated.real_runs(file)
    assert (run.kind, run.amount, run.step_tokens, run.max_rows, run.seconds) == ("poisson", 20.0, 512, 512, 10)


def test_poisson_arrivals_are_those_of_the_clients(simulated):
    workload = importlib.import_module("workload")
    real = list(workload.poisson_requests(workload.chat_lengths(4000), 30, 3.0, simulated.LLAMA_8B.vocab_size))
    ours = list(simulated._poisson(30, 3.0))
    assert [(a.at_ns, a.num_prompt, a.num_output) for a in ours] == [
        (int(r.after * 1e9), len(r.prompt_ids), r.max_tokens) for r in real
    ]
