"""`lm-eval` with `local-completions` against a whole server, beside the same harness with `transformers`.

Needs `lm-eval[api]` (the extra `eval`), which brings a hundred packages: where it is missing this is skipped. Takes minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import pytest

from pagewire.cli.model_path import demo_model

MODEL = demo_model()
LICENSE = Path(__file__).parents[2] / "LICENSE"
NUM_DOCS = 24
TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
CONVERT = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, folder = Path(sys.argv[1]), sys.argv[2]
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
plain = AutoModelForCausalLM.from_config(config)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(folder)
"""

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
    pytest.mark.skipif(MODEL is None, reason="the demo model is not installed"),
]


def write_task(folder: Path) -> None:
    """Which words follow? Passages of a text that lies here, and of two elsewhere in it."""
    words = LICENSE.read_text().split()
    with (folder / "data.jsonl").open("w") as file:
        for i in range(NUM_DOCS):
            at = 20 + i * 37
            right, *wrong = ([*words[p : p + 4]] for p in (at + 14, (at + 311) % 1400, (at + 733) % 1400))
            choices = [" " + " ".join(one) for one in wrong]
            choices.insert(i % 3, " " + " ".join(right))
            file.write(json.dumps({"text": " ".join(words[at : at + 14]), "choices": choices, "label": i % 3}) + "\n")
    (folder / "local_text.yaml").write_text(TASK.format(data=folder / "data.jsonl"))


async def run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-3000:]


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path):
    """The URL of a server's HTTP."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewire.cli.main", "serve", str(model), "--http", "127.0.0.1:0", "--bind", f"ipc://{folder}/s",
        "--threads", "1", "--kv-bytes", "64MiB", "--max-rows", "8", "--stall-timeout-ms", "60000",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await process.stdout.readline()
        line = (await process.stdout.readline()).decode()
        assert "HTTP at" in line, line
        yield line.split()[-1]
    finally:
        process.terminate()
        await process.wait()


async def scores(folder: Path, kind: str, arguments: str, *more: str) -> tuple[dict[str, float], list[list[float]]]:
    """The scores, and the log-likelihoods of every choice."""
    await run(
        "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", "local_text", "--include_path", str(folder),
        "--batch_size", "4", "--log_samples", "--output_path", str(folder / kind), *more,
    )  # fmt: skip
    (results,) = (folder / kind).rglob("results*.json")
    (samples,) = (folder / kind).rglob("samples*.jsonl")
    told = json.loads(results.read_text())["results"]["local_text"]
    docs = [json.loads(line) for line in samples.read_text().splitlines()]
    docs.sort(key=lambda doc: doc["doc_id"])
    likelihoods = [[float(answer[0]) for answer in doc["filtered_resps"]] for doc in docs]
    return {name: told[f"{name},none"] for name in ("acc", "acc_norm")}, likelihoods


async def test_scores_are_those_of_transformers(tmp_path):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    pytest.importorskip("datasets", reason="lm-eval's data sets are not installed (the extra `eval`)")
    write_task(tmp_path)
    model = tmp_path / "model"
    await run("-c", CONVERT, str(MODEL), str(model))
    ours_at = tmp_path / "server"
    ours_at.mkdir()
    async with serving(model, ours_at) as url:
        ours, our_likelihoods = await scores(
            tmp_path,
            "local-completions",
            f"model=model,base_url={url}/completions,tokenizer={model},tokenizer_backend=huggingface,"
            "tokenized_requests=True,max_retries=3",
        )
    theirs, their_likelihoods = await scores(tmp_path, "hf", f"pretrained={model},dtype=float32", "--device", "cpu")
    print(f"\nover HTTP {ours}, transformers {theirs}")
    worst = max(
        abs(a - b)
        for mine, other in zip(our_likelihoods, their_likelihoods, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
    print(f"largest difference of a log-likelihood: {worst:.2e}")
    assert len(our_likelihoods) == NUM_DOCS
    for name, value in ours.items():
        assert abs(value - theirs[name]) <= 0.005
    assert worst < 1e-2
