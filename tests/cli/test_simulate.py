"""`pagewire simulate` and `pagewire plan`: what they print and what they refuse; neither needs weights."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from tests.simulator.small import conversations, mooncake_lines

from pagewire.cli.main import main
from pagewire.cli.simulation_flags import CARD_NAMES, MODEL_NAMES
from pagewire.simulator.card import CARDS, MODELS

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def test_names_are_those_of_the_simulator():
    assert set(MODEL_NAMES) == set(MODELS)
    assert set(CARD_NAMES) == set(CARDS)


def test_a_trace_gives_a_table_and_a_picture(tmp_path, capsys):
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "run.svg"
    trace.write_text(mooncake_lines(conversations()))
    assert main(["simulate", "--trace", str(trace), "--picture", str(picture), "--max-rows", "32"]) == 0
    out, err = capsys.readouterr()
    assert err == f"the picture is {picture}\n"
    assert "8b on 1 × H200" in out
    assert "TTFT p95" in out
    assert "digest of all decisions" in out
    svg = ET.parse(picture).getroot()
    texts = " ".join(svg.itertext())
    for panel in ("TTFT", "ITL", "requests a second", "prefix hits", "KV memory", "preemptions"):
        assert panel in texts
    assert "href" not in picture.read_text().replace("http://www.w3.org/2000/svg", "")


def test_json_says_the_same_twice(capsys):
    arguments = ["simulate", "--poisson", "20", "--seconds", "4", "--seed", "3", "--json"]
    outs = []
    for _ in range(2):
        assert main(arguments) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1]
    found = json.loads(outs[0])
    assert found["summary"]["unfinished"] == 0
    assert found["summary"]["ttft_p95"] > found["summary"]["ttft_p50"] > 0
    assert sum(window["num_ended"] for window in found["windows"]) == found["summary"]["requests"]


def test_plan_reads_a_config_without_weights(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = ["plan", "--model", str(tmp_path), "--context", "512", "--output", "64", "--max-rows", "8"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_token_bytes"] == 2 * 2 * 2 * 16 * 2
    assert [level["streams"] for level in found["levels"]] == [1, 2, 4, 8]
    rates = [level["throughput"] for level in found["levels"]]
    assert rates == sorted(rates)
    assert found["streams_that_fit"] == 8 < found["streams_in_memory"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"8 of 512 tokens: memory holds {found['streams_in_memory']:,}, --max-rows is 8\n" in out
    assert "within the promise" in out
    assert "a prompt alone takes" not in out


def test_what_has_no_number_is_a_dash(capsys):
    assert main(["plan", "--context", "8192", "--output", "2", "--max-rows", "1", "--ttft", "100"]) == 0
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "–: no first token, or none after it, within the measured time\n" in out
    assert re.search(
        r"no number of streams: TTFT p95 < 100 ms and ITL p99 < 12 ms\na prompt alone takes 2\d\d ms: ", out
    )
    assert "--ttft" in out.splitlines()[-1]
    assert main(["simulate", "--closed", "1", "--seconds", "0.01"]) == 0
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_help_has_the_defaults_that_hold(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "--max-rows N sequences running at once (default: 512)" in out
    assert "--max-step-tokens N tokens computed in one step at most (default: 1024)" in out
    assert ("(default: --itl)" in out) == (command == "plan")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "name one load"),
        (["simulate", "--closed", "4", "--poisson", "3"], "name one load"),
        (["simulate", "--closed", "0"], "above 0"),
        (["simulate", "--poisson", "nan"], "above 0"),
        (["simulate", "--closed", "1", "--model", "70b"], "do not fit"),
        (["simulate", "--closed", "1", "--gpus", "3"], "cannot be shared"),
        (["simulate", "--closed", "1", "--max-rows", "9", "--max-step-tokens", "8"], "max_rows"),
        (["simulate", "--closed", "1", "--model", "/nowhere"], "does not exist"),
        (["simulate", "--trace", "/nowhere.csv"], "cannot read"),
        (["simulate", "--closed", "9" * 30], "closed: must be at most 100000"),
        (["simulate", "--closed", "-1"], "above 0"),
        (["simulate", "--closed", "1", "--seconds", "1e308"], "seconds: must be at most 1e+08"),
        (["simulate", "--poisson", "1e308"], "poisson: must be at most 1e+06"),
        (["simulate", "--closed", "1", "--speed", "5e-324"], "speed: must be at least 1e-06"),
        (["simulate", "--trace", "/nowhere.csv", "--requests", "-1"], "requests: must be at least 0"),
        (["simulate", "--closed", "1", "--kv-tokens", "9" * 30], "--kv-tokens: must be at most"),
        (["simulate", "--closed", "1", "--max-model-len", "-1"], "--max-model-len: must be above 0"),
        (["plan", "--ttft", "1e308"], "ttft: must be at most 1e+09"),
        (["plan", "--itl", "inf"], "itl: must be at most 1e+09"),
        (["plan", "--context", "100", "--output", "100"], "100 generated tokens"),
        (["plan", "--model", "9b"], "no shape known by name: 8b"),
        (["plan", "--context", "100000"], "exceed"),
        (["plan", "--context", "40000", "--kv-tokens", "30000"], "hold no"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
