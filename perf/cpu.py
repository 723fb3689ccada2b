"""Greedy generation on a CPU beside `transformers`, on the same weights, with the same threads, in one run.

One stream, and 16 streams of equal length against one batched `generate`. Rounds of the two alternate, so that both see
the same machine; `speedup` is the ratio of the medians of tokens a second, prefill included.

    python perf/cpu.py [--model FILE.gguf] [--threads N] [--prompt 64] [--tokens 64] [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from report import Report

from pagewire.cli.model_path import model_path
from pagewire.config import Config, EngineConfig, ModelConfig, SchedulerConfig
from pagewire.step.step import RowJoin, StepPlan
from pagewire.worker.cpu import CpuWorker
from pagewire_transport.params import SamplingParams

STREAMS = (1, 16)


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


async def ours(worker: CpuWorker, prompts: np.ndarray, num_tokens: int, step: int) -> tuple[np.ndarray, int]:
    """Tokens [streams, num_tokens] and the next step's number: one prefill a prompt, then decoding one step ahead."""
    streams, length = prompts.shape
    size = worker.shape.block_size
    num_blocks = -(-(length + num_tokens) // size)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    rows = np.arange(streams, dtype=np.int32)
    epochs = np.full(streams, step, np.int32)
    handles = []

    def launch(plan: StepPlan) -> None:
        worker.launch_forward(plan)
        handles.append(worker.launch_sample(plan))

    launch(
        StepPlan(
            step=step,
            rows=rows,
            starts=np.zeros(streams, np.int32),
            num_tokens=np.full(streams, length, np.int32),
            epochs=epochs,
            num_decode=0,
            token_ids=prompts.ravel().astype(np.int32),
            sample_entries=rows,
            sample_rows=rows,
            sample_epochs=epochs,
            leaves=rows,
            joins=[RowJoin(int(r), step, params, 0, prompts[r].astype(np.int32), int32(), ()) for r in rows],
            block_rows=np.repeat(rows, num_blocks),
            block_cols=np.tile(np.arange(num_blocks, dtype=np.int32), streams),
            block_ids=np.random.default_rng(0).permutation(streams * num_blocks).astype(np.int32) + 1,
        )
    )
    for i in range(1, num_tokens):
        launch(
            StepPlan(
                step=step + i,
                rows=rows,
                starts=np.full(streams, length + i - 1, np.int32),
                num_tokens=np.ones(streams, np.int32),
                epochs=epochs,
                num_decode=streams,
                sample_entries=rows,
                sample_rows=rows,
                sample_epochs=epochs,
            )
        )
    results = [await handle for handle in handles]
    return np.stack([result.token_ids for result in results], axis=1), step + num_tokens


def theirs(model, prompts: np.ndarray, num_tokens: int) -> np.ndarray:
    ids = torch.from_numpy(prompts.astype(np.int64))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[:, ids.shape[1] :].numpy()


async def measure(args, report: Report) -> None:
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = model_path(args.model)
    if args.threads:
        torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    worker = await CpuWorker.load(
        Config(
            model=ModelConfig(path=str(path)),
            engine=EngineConfig(threads=args.threads, deterministic=args.deterministic),
            scheduler=SchedulerConfig(max_rows=max(STREAMS)),
        )
    )
    rng, step = np.random.default_rng(0), 0
    for streams in STREAMS:
        prompts = rng.integers(100, worker.shape.vocab_size, (streams, args.prompt))
        _, step = await ours(worker, prompts, 4, step)
        theirs(model, prompts, 4)
        times = {"ours": [], "theirs": []}
        for _ in range(args.rounds):
            begin = time.perf_counter()
            mine, step = await ours(worker, prompts, args.tokens, step)
            times["ours"].append(time.perf_counter() - begin)
            begin = time.perf_counter()
            reference = theirs(model, prompts, args.tokens)
            times["theirs"].append(time.perf_counter() - begin)
        case = f"{streams} stream{'s' * (streams > 1)}"
        rate = {who: streams * args.tokens / statistics.median(taken) for who, taken in times.items()}
        report.add(case, "rate", rate["ours"], "tok/s")
        report.add(case, "transformers_rate", rate["theirs"], "tok/s")
        report.add(case, "speedup", rate["ours"] / rate["theirs"])
        report.add(case, "same_tokens", 100 * float((mine == reference).mean()), "%")
    await worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a GGUF file; default: the demo model")
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: all cores")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens generated by each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true")
    Report.arguments(parser)
    args = parser.parse_args()
    report = Report("cpu")
    asyncio.run(measure(args, report))
    report.finish()


if __name__ == "__main__":
    main()
