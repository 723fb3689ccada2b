"""Benchmarks report figures beside their targets, and the checked-in targets are well formed."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "perf" / "report.py"


def _load():
    spec = importlib.util.spec_from_file_location("perf_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["perf_report"] = module
    spec.loader.exec_module(module)
    return module


perf = _load()


@pytest.fixture
def targets(tmp_path):
    path = tmp_path / "targets.toml"
    path.write_text(
        '[b."a case"]\ntime = { max = 2, unit = "µs" }\nrate = { min = 10, unit = "tok/s" }\nx = { max = 1 }\n'
    )
    return path


def test_checked_in_targets_are_well_formed():
    table = perf.load_targets()
    assert table["radix"]["match, full hit"]["time_p50"] == perf.Target(30.0, is_max=True, unit="µs")
    assert table["goodput"]["8b bf16"]["rate"] == perf.Target(45.0, is_max=False, unit="req/s")


def test_met_follows_the_direction_of_the_target(targets):
    report = perf.Report("b", as_json=False, targets=targets)
    assert report.add("a case", "time", 2.0, "µs") is True
    assert report.add("a case", "time", 2.1, "µs") is False
    assert report.add("a case", "rate", 10, "tok/s") is True
    assert report.add("a case", "rate", 9.9, "tok/s") is False
    assert report.add("a case", "other", 1) is None
    assert report.add("another case", "time", 1) is None
    assert report.add("a case", "time", None, "µs") is None
    assert report.add("a case", "x", float("nan")) is False


def test_a_unit_that_differs_from_the_targets_is_refused(targets):
    with pytest.raises(ValueError, match="µs"):
        perf.Report("b", as_json=False, targets=targets).add("a case", "time", 2.0, "ms")


def test_json_has_one_strict_object_a_line(targets, capsys):
    report = perf.Report("b", as_json=True, targets=targets)
    report.add("a case", "time", 1.5, "µs")
    report.add("a case", "x", float("nan"))
    report.add("new", "count", 3)
    report.finish()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == {
        "bench": "b",
        "case": "a case",
        "metric": "time",
        "value": 1.5,
        "unit": "µs",
        "target": {"max": 2.0},
        "met": True,
    }
    assert rows[1]["value"] is None
    assert rows[1]["met"] is False
    assert rows[2]["target"] is None
    assert rows[2]["met"] is None


def test_table_is_aligned(targets, capsys):
    report = perf.Report("b", as_json=False, targets=targets)
    report.add("a case", "time", 1234.5678, "µs")
    report.add("a case", "rate", 0.012345, "tok/s")
    report.finish()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "b"
    assert lines[4].split() == ["a", "case", "time", "1,235", "µs", "≤", "2", "NO"]
    assert lines[5].split() == ["rate", "0.01235", "tok/s", "≥", "10", "NO"]
    assert lines[4].index("time") == lines[5].index("rate")


@pytest.mark.parametrize("entry", ["{ unit = 's' }", "{ max = 1, min = 2 }", "{ max = 1, unti = 's' }"])
def test_malformed_targets_are_refused(tmp_path, entry):
    path = tmp_path / "targets.toml"
    path.write_text(f"[b.c]\nm = {entry}\n")
    with pytest.raises(ValueError, match=r"b\.c\.m"):
        perf.load_targets(path)
