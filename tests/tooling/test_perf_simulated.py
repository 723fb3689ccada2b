"""The simulator beside recorded runs: files are read, loads are those of the real run, what comes out is near it, and what is held
out is not fitted to."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
RESULTS = PERF / "results"


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))


def load(name):
    return importlib.import_module(name)


def test_a_recorded_run_is_near():
    fit, runs = load("fit"), load("recorded").real_runs(RESULTS / "2026-11-29-serve-h200.json")
    run = next(run for run in runs if run.label == "closed 64, steps of 384")
    assert (run.max_rows, run.seconds) == (128, 12)
    found = fit.simulated(run, fit.H200, fit.Host(), run.seconds)
    for metric in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "throughput"):
        assert getattr(found, metric) == pytest.approx(run.values[metric], rel=0.12), metric


def test_a_recorded_run_in_fp8_is_near():
    fit, runs = load("fit"), load("recorded").real_runs(RESULTS / "2026-11-30-serve-2-h200.json", "fp8")
    run = next(run for run in runs if run.label == "fp8, closed 64, steps of 1024, ITL target 12 ms")
    found = fit.simulated(run, fit.H200, fit.Host(), run.seconds)
    for metric in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p99", "throughput"):
        assert getattr(found, metric) == pytest.approx(run.values[metric], rel=0.12), metric


def test_steps_are_those_of_one_precision():
    decode_steps = load("recorded").decode_steps
    bf16, fp8 = (decode_steps(RESULTS / "2026-11-30-decode-2-h200.json", of) for of in ("bf16", "fp8"))
    assert sorted(bf16) == [1, 32, 128, 256, 512]
    assert sorted(fp8) == [1, 128, 512]
    assert all(fp8[streams] < 0.8 * bf16[streams] for streams in fp8)


def test_runs_of_one_file_have_options_of_their_own():
    runs = load("recorded").real_runs(RESULTS / "2026-11-29-serve-2-h200.json")
    assert [(run.label, run.max_rows, run.seconds) for run in runs] == [
        ("closed 64, steps of 352", 64, 15),
        ("closed 512, steps of 1536", 512, 15),
    ]


def lines(tmp_path, rows):
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps({"case": c, "metric": m, "value": v}) + "\n" for c, m, v in rows))
    return file


def test_lines_of_a_run_just_made_are_read(tmp_path):
    rows = [("8b bf16", "step_tokens", 512.0), ("8b bf16, poisson 20", "requests", 200), ("8b fp8, closed 64", "x", 1)]
    (run,) = load("recorded").real_runs(lines(tmp_path, rows))
    (other,) = load("recorded").real_runs(lines(tmp_path, rows), "fp8")
    assert (other.precision, other.kind, other.values) == ("fp8", "closed", {"x": 1})
    assert (run.kind, run.amount, run.step_tokens, run.max_rows, run.seconds) == ("poisson", 20.0, 512, 512, 10)
    assert (run.itl_target, run.seed) == (0, 0)


def test_lines_of_goodput_are_read_with_what_was_promised(tmp_path):
    rows = [("8b bf16", "itl_target", 12.0), ("8b bf16", "ttft_target", 250.0), ("8b bf16", "window", 60.0)]
    rows += [("8b bf16", "step_tokens", 1024.0), ("8b bf16", "ramp", 4.0), ("8b bf16, 45/s, seed 1", "itl_p99", 11.9)]
    rows += [("8b bf16, 45/s", "itl_p99", 11.8), ("8b bf16", "rate", 45)]
    (run,) = load("recorded").real_runs(lines(tmp_path, rows))
    assert (run.kind, run.amount, run.seed, run.seconds, run.ramp) == ("poisson", 45.0, 1, 60.0, 4.0)
    assert (run.itl_target, run.ttft_target, run.step_tokens) == (12.0, 250.0, 1024)
    assert run.label == "poisson 45, steps of 1024, ITL target 12 ms, seed 1"
    fit = load("fit")
    free = fit.simulated(replace(run, itl_target=0.0, ttft_target=0.0), fit.H200, fit.Host(), 2.0)
    kept = fit.simulated(run, fit.H200, fit.Host(), 2.0)
    assert kept.itl_p99 < 12.5 < free.itl_p99


@pytest.mark.parametrize("seed", [0, 1])
def test_poisson_arrivals_are_those_of_the_clients(seed):
    fit, clients, processes = load("fit"), load("clients"), load("processes")
    job = processes.Job(
        kind="poisson", endpoint="", vocab_size=fit.LLAMA_8B.vocab_size, rate=30.0, ramp=0.4, seconds=0.6, seed=seed
    )
    assert [(a.at_ns, a.num_prompt, a.num_output) for a in fit.arrivals(30.0, 3.0, seed)] == [
        (int(r.after * 1e9), len(r.prompt_ids), r.max_tokens) for r in clients.draw(job)
    ]


def test_a_fit_finds_rates_that_it_was_not_told():
    fit = load("fit")
    card = fit.ModelledCard(fit.LLAMA_8B, fit.H200)
    steps = {n: fit.decode_ms(card, n) for n in (1, 16, 128, 256, 512)}
    found, _, left = fit.fit([], steps, (fit.UNFITTED, fit.Host()), fit.ALL_RATES[:7])
    assert fit.loss([], steps, fit.UNFITTED, fit.Host()) > 10 * left
    found_card = fit.ModelledCard(fit.LLAMA_8B, found)
    for n in (64, 384):  # numbers of streams that it did not see
        assert fit.decode_ms(found_card, n) == pytest.approx(fit.decode_ms(card, n), rel=0.03)


def test_a_fit_in_fp8_leaves_the_rates_of_bf16_alone():
    fit = load("fit")
    steps = load("recorded").decode_steps(RESULTS / "2026-11-30-decode-2-h200.json", "fp8")
    start = fit.UNFITTED, fit.Host()
    found, _, left = fit.fit([], steps, start, fit.DECODE_RATES, "fp8")
    assert left == pytest.approx(fit.loss([], steps, found, fit.Host(), "fp8"))
    assert left < 0.5 * fit.loss([], steps, *start, "fp8")
    assert (found.products["bf16"], found.decode["bf16"]) == (start[0].products["bf16"], start[0].decode["bf16"])
    assert (found.products["fp8"], found.decode["fp8"]) != (start[0].products["fp8"], start[0].decode["fp8"])


@pytest.mark.parametrize("same", [True, False])
def test_decode_rates_are_fitted_again_only_to_other_steps(same, monkeypatch, capsys):
    simulated, fitted_to = load("simulated"), []
    runs, decode = RESULTS / "2026-11-30-serve-2-h200.json", RESULTS / "2026-11-30-decode-2-h200.json"

    def fit(runs, steps, start, names=None, precision="bf16"):
        fitted_to.append((len(runs), sorted(steps), names, precision))
        return *start, 0.0

    monkeypatch.setattr(simulated, "fit", fit)
    steps = load("recorded").decode_steps(decode, "fp8")
    simulated.fitted_elsewhere(runs, decode, steps if same else {64: 4.0}, "fp8")
    assert fitted_to[0] == (2, [1, 128, 512], None, "fp8")
    assert fitted_to[1:] == ([] if same else [(0, [64], load("fit").DECODE_RATES, "fp8")])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "says"),
    [(["--fp8"], "no runs in fp8"), (["--hold-out", "closed 65"], "has no 'closed 65', but 'closed 64")],
)
def test_nothing_to_compare_is_a_refusal(flags, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulated.py", *flags])
    with pytest.raises(SystemExit) as ended:
        load("simulated").main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_what_is_held_out_is_not_fitted_to(monkeypatch, tmp_path, capsys):
    simulated, fitted_to = load("simulated"), []
    labels = ["closed 64, steps of 384", "poisson 30, steps of 512"]
    runs = [
        run
        for run in load("recorded").real_runs(simulated._RESULTS / "2026-11-29-serve-h200.json")
        if run.label in labels
    ]
    monkeypatch.setattr(simulated, "real_runs", lambda _path, _precision: iter(runs))

    def fit(runs, steps, start, *, precision):
        assert precision == "bf16"
        fitted_to.append([run.label for run in runs])
        assert steps
        assert start[0] is load("fit").UNFITTED
        return simulated.H200, simulated.Host(), 0.0

    monkeypatch.setattr(simulated, "fit", fit)
    monkeypatch.setattr(sys, "argv", ["simulated.py", "--hold-out", "--json"])
    simulated.main()
    assert fitted_to == [labels[1:], labels[:1]]
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["case"] for row in rows} == {*labels, "against the card, held out"}
    assert next(row["value"] for row in rows if row["metric"] == "percentiles") == 10

    fitted_to.clear()
    monkeypatch.setattr(sys, "argv", ["simulated.py", "--hold-out", labels[1], "--json"])
    simulated.main()
    assert fitted_to == [labels[:1]]
