"""Traces: read exactly, refused with the line's number, prompts equal where the trace says so and nowhere else."""

import numpy as np
import pytest
from tests.simulator.small import conversations, mooncake_lines

from pagewire.errors import ConfigError
from pagewire.simulator.traces import Arrival, ClosedLoop, chat_lengths, own_ids, poisson, read_trace


def test_mooncake_lines_come_back(tmp_path):
    trace = conversations()
    file = tmp_path / "trace.jsonl"
    file.write_text(mooncake_lines(trace))
    read = list(read_trace(file))
    first = min(arrival.at_ns for arrival in trace)
    assert [(a.num_prompt, a.num_output, a.prefix_ids) for a in read] == [
        (a.num_prompt, a.num_output, a.prefix_ids) for a in trace
    ]
    assert [a.at_ns for a in read] == pytest.approx([a.at_ns - first for a in trace], abs=1000)


def test_azure_lines_keep_seven_digits(tmp_path):
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951691,396,109\n2023-11-16 19:15:46.6805900,7,1\n"
    )
    read = list(read_trace(file))
    assert [(a.at_ns, a.num_prompt, a.num_output) for a in read] == [
        (0, 374, 44),
        (4_314_579_100, 396, 109),
        (3_600_000_000_000, 7, 1),
    ]
    assert [a.at_ns for a in read_trace(file, speed=2, max_requests=2)] == [0, 2_157_289_550]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "1 block ids for 600",
        ),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n', "block id"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}\n', "0 prompt"),
        ("t.jsonl", '{"timestamp": 1e308, "input_length": 5, "output_length": 1}\n', "request 1"),
        ("t.jsonl", '{"timestamp": 1e30, "input_length": 5, "output_length": 1}\n', "our era"),
        ("t.csv", f"TIMESTAMP,A,B\n2023-11-16 18:15:46.1,{10**23},1\n", "prompt"),
        ("t.jsonl", "what\n", "request 1"),
        ("t.jsonl", '{"timestamp": 0}\n', "input_length"),
        ("t.csv", "TIMESTAMP,A,B\n2023-11-16 18:15:46.1,1\n", "request 1"),
        ("t.csv", "TIMESTAMP,A,B\nnever,1,2\n", "request 1"),
        ("t.csv", "TIMESTAMP,A,B\n", "no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_trace(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "nothing.jsonl")


def test_prompts_are_equal_where_blocks_are():
    a = Arrival(0, 1, 1500, 5, (7, 8, 9)).prompt_ids()
    b = Arrival(0, 2, 1600, 5, (7, 8, 10, 11)).prompt_ids()
    assert (a[:1024] == b[:1024]).all()
    assert (a[1024:] != b[1024:1500]).all()
    assert a.dtype == np.int32
    assert np.unique(np.concatenate((a, b[1024:]))).size == 1500 + 576


def test_prompts_without_blocks_share_nothing():
    firsts = {int(own_ids(number, 20)[0]) for number in range(1000)}
    assert len(firsts) == 1000


def test_a_closed_loop_keeps_its_streams_open():
    loop = ClosedLoop(chat_lengths(np.random.default_rng(1)), 3, 100)
    assert [loop.take().at_ns for _ in range(3)] == [0, 0, 0]
    assert loop.next_ns() is None
    loop.ended(50)
    assert loop.next_ns() == 50
    loop.take()
    loop.ended(100)
    assert loop.next_ns() is None


def test_poisson_has_its_rate():
    rng = np.random.default_rng(3)
    trace = poisson(chat_lengths(rng), 50, 40, rng)
    assert len(trace) == pytest.approx(2000, rel=0.1)
    assert 230 < np.mean([a.num_prompt for a in trace]) < 350
