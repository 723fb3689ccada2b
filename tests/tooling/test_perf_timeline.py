"""The timeline: its figures on steps made by hand, and the whole way on a GPU worker whose card is a CPU."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.worker.gpu_doubles import HostDevice, TorchOps

from pagewire.models.load import load_model
from pagewire.worker.gpu import GpuWorker

PERF = Path(__file__).parents[2] / "perf"
MS = 1e-3


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(PERF))


def load(name):
    return importlib.import_module(name)


def recording(*, slow: int = 12):
    """20 steps of 10 ms on the card; `slow` takes 25, and its reader is collecting garbage when it comes."""
    steplog, figures, processes, workload = (load(n) for n in ("steplog", "timeline_figures", "processes", "workload"))
    steps, times, messages, at = [], [], [], 100.0
    for step in range(20):
        begin, end = at + 1 * MS, at + (25 if step == slow else 10) * MS
        steps.append(
            steplog.StepTimes(
                step, num_decode=4, is_graph=True, plan=(at - 9 * MS, at - 8.9 * MS), forward=(at - 8.8 * MS, at - 8 * MS),
                sample=(at - 8 * MS, at - 7.9 * MS), computed=(begin, end), forward_end=end - 0.5 * MS,
                home=end + 0.1 * MS, seen=end + 0.2 * MS, apply=(end + 0.3 * MS, end + 0.4 * MS),
                deliver=(end + 0.4 * MS, end + 0.6 * MS),
            )
        )  # fmt: skip
        messages.append((end + 0.7 * MS, 4))
        times.append(end + 0.8 * MS + (5 * MS if step == slow else 0))
        at = end
    served = [workload.Served(99.0, 20, list(times), [1] * 20) for _ in range(4)]
    pauses = [(messages[slow][0], 4.5 * MS, 2)]
    answer = processes.Answer(served=served, messages=messages, pauses=pauses)
    return figures.Recording(steps, [], [], [], [answer], times[0], times[-1])


def test_figures_of_steps_made_by_hand(capsys):
    figures, report = load("timeline_figures"), load("report")
    found = recording()
    figures.tell(report.Report("timeline", as_json=True), "case", found)
    told = {row["metric"]: row["value"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert told["steps"] == 19  # the tokens of the first open the window
    assert told["gpu_busy"] == pytest.approx(100 * (18 * 9 + 24) / (18 * 10 + 24))
    assert told["gpu_idle_between_steps_p50"] == pytest.approx(1000, abs=1)
    assert told["gpu_decode_step_p50"] == pytest.approx(9, abs=0.01)
    assert told["gpu_decode_step_max"] == pytest.approx(24, abs=0.01)
    assert told["home_to_seen_p99"] == pytest.approx(100, abs=1)
    assert told["host_p50"] == pytest.approx(100 + 800 + 100 + 100 + 200, abs=1)
    assert told["launched_ahead_p50"] == pytest.approx(7.9, abs=0.01)
    assert told["interval_message_max"] == pytest.approx(25, abs=0.01)
    assert told["itl_max"] == pytest.approx(30, abs=0.01)
    assert told["itl_late_share"] == pytest.approx(100 / 17)
    assert told["gc_max_client_0"] == pytest.approx(4500, abs=1)


def test_the_longest_gap_is_told_with_its_step_and_the_readers_garbage():
    figures = load("timeline_figures")
    found = recording()
    index, (begin, end, client), num_long = figures.by_step(found)[0]
    assert (index, client, num_long) == (12, 0, 4)
    assert end - begin == pytest.approx(30 * MS)
    text = figures.longest_gaps(found)
    assert "gap of 30.00 ms, 4 long ones end with this step" in text
    assert "garbage collection of the client: at 24.90, 4.50 ms, generation 2" in text
    line = next(line for line in text.splitlines()[2:] if line.split()[:2] == ["12", "4+0"])
    assert line.split()[-1] == "30.00"


def test_a_reader_that_lags_by_more_than_a_step_is_told_with_the_right_step():
    figures = load("timeline_figures")
    found = recording()
    messages, served = found.answers[0].messages, found.answers[0].served
    messages[14] = (messages[15][0] + 1 * MS, 4)
    messages[15] = (messages[15][0] + 2 * MS, 4)
    for row in served:
        row.times[14], row.times[15] = messages[14][0] + 0.1 * MS, messages[16][0] + 0.5 * MS
        row.times[16] = row.times[15] + 0.1 * MS
    index, (begin, end, _), _ = figures.by_step(found)[1]  # the one of step 12 is longer
    assert index == 14
    assert end - begin == pytest.approx(21 * MS, abs=0.5 * MS)
    assert figures.message_times(found, 0)[14] == messages[14][0]
    line = next(line for line in figures.longest_gaps(found).splitlines() if line.split()[:2] == ["14", "4+0"])
    assert line.split()[-2:] == [f"{1e3 * (messages[14][0] - begin):.2f}", f"{1e3 * (end - begin):.2f}"]


@pytest.mark.parametrize("lag", [0.0, 12.5])
def test_each_time_finds_its_cause(lag):
    causes = [10.0 * k for k in range(10)]
    times = [at + 1 + (lag if k > 5 else 0) for k, at in enumerate(causes)][2:]
    assert load("timeline_figures").first_index(times, causes) == 2


@pytest.mark.parametrize(("around", "first"), [("middle", 5), ("gap", 7)])
def test_the_picture_shows_ten_steps(around, first):
    root = ET.fromstring(load("timeline_svg").picture(recording(), "a < b", around=around))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == f"a < b: steps {first} to {first + 9}"
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith(f"step {first + 3}, 4 decoding") for title in titles) == 9
    assert sum(title == "client 0, generation 2" for title in titles) == 1
    for node in root.iter("{http://www.w3.org/2000/svg}rect"):
        if node.get("x") is not None:
            assert 0 <= float(node.get("x")) <= float(node.get("x")) + float(node.get("width")) <= 1400


def test_nan_is_told_as_nothing(capsys):
    figures, report = load("timeline_figures"), load("report")
    found = recording()
    for step in found.steps:
        step.computed, step.forward_end, step.home = (math.nan, math.nan), math.nan, math.nan
    figures.tell(report.Report("timeline", as_json=True), "case", found)
    told = {row["metric"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert "itl_p50" in told
    assert not [metric for metric in told if metric.startswith(("gpu_", "home", "interval_gpu"))]


async def test_the_whole_way(tmp_path, capsys):
    timeline, report, workload = load("timeline"), load("report"), load("workload")
    (tmp_path / "config.json").write_text(json.dumps(workload.TINY_LLAMA))
    size = ["--streams", "4", "--steps", "25", "--context", "20", "--step-tokens", "128", "--clients", "2"]
    picture = tmp_path / "steps.svg"
    given = timeline.parse(["--device", "cpu", "--tiny", *size, "--mixed", "--rate", "60", "--svg", str(picture)])
    config = timeline.config_of(tmp_path, given)
    torch.set_num_threads(1)
    worker = GpuWorker(config, load_model(config.model), HostDevice(patience=2), TorchOps)
    plain, mixed = await timeline.measure(given, config, worker, report.Report("timeline", as_json=True), "tiny")
    assert not any(step.num_prefill for step in plain.window)
    assert any(step.num_prefill for step in mixed.window)
    assert len(plain.window) >= 20
    for found in (plain, mixed):
        assert {len(row.times) for answer in found.answers for row in answer.served} == {
            math.ceil(4 * 20 / 124) + 20 + 25
        }
        for step in found.window:
            marks = (*step.plan, *step.forward, *step.sample, step.seen, *step.apply, *step.deliver)
            assert list(marks) == sorted(marks), step  # no NaN among them either
            assert step.computed[0] <= step.forward_end <= step.computed[1]
            assert step.forward[0] <= step.computed[0] <= step.computed[1] <= step.seen
            assert step.is_graph == (step.num_decode + step.num_prefill <= 1024)
        assert found.turns
        assert found.lags
    assert "on_outcome" not in vars(worker)
    assert "launch_forward" not in vars(worker)
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert picture.with_stem("steps-mixed").exists()
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]  # others: the engine's log
    busy = {row["case"]: row["value"] for row in rows if row["metric"] == "gpu_busy"}
    assert set(busy) == {"tiny, 4 decoding", "tiny, 4 decoding + 60 prompts/s"}
    assert all(0 < value <= 100 for value in busy.values())
    assert "longest gaps" in err


def test_a_profile_needs_a_card(capsys):
    with pytest.raises(SystemExit):
        load("timeline").parse(["--profile", "--device", "cpu"])
    assert "--profile" in capsys.readouterr().err
    assert sys.modules["timeline"].parse(["--profile"]).profile
