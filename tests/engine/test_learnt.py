"""What the cost model learnt survives a restart, and only where it fits; a bad file is no more than a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json

import msgspec
import pytest

from pagewire.config import Config, EngineConfig, ModelConfig, SchedulerConfig
from pagewire.engine.learnt import Learnt
from pagewire.scheduler.cost_model import StepWork
from pagewire.worker.interface import WorkerShape

SHAPE = WorkerShape(8, 16, 4, 64, 100, (2,), 1024, model_name="tiny", decode_buckets=(1, 2, 4), mixed_buckets=(64,))
WORK = StepWork(0, 0.0, 3, 100)


def config(folder, *, itl_ms: float = 20.0, **model) -> Config:
    return Config(
        model=ModelConfig(device="cpu", **model),
        scheduler=SchedulerConfig(itl_target_ms=itl_ms),
        engine=EngineConfig(state_dir=str(folder)),
    )


async def taught(folder) -> Learnt:
    learnt = Learnt(config(folder), SHAPE)
    for _ in range(50):
        learnt.model.observe(WORK, 123e6)
    task = asyncio.create_task(learnt.keep())
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return learnt


async def test_kept_for_the_same_model_and_card_alone(tmp_path):
    first = await taught(tmp_path)
    again = Learnt(config(tmp_path), SHAPE)
    assert again.model.num_observed == 50
    assert again.model.predict(WORK) == pytest.approx(first.model.predict(WORK))
    assert Learnt(config(tmp_path, dtype="bfloat16"), SHAPE).model.num_observed == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"], "nothing half-written stays"


async def test_without_promises_no_file_is_read_or_written(tmp_path):
    learnt = Learnt(config(tmp_path / "none", itl_ms=0.0), SHAPE)
    learnt.model.observe(WORK, 1e6)
    await learnt.keep()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"[]", b'{"key": 1}', b"\xff\xfe", b'{"cost": {}}', b'{"key":' + b"[" * 9999]
)
async def test_a_bad_file_is_ignored(tmp_path, content):
    learnt = await taught(tmp_path)
    learnt.path.write_bytes(content)
    assert Learnt(config(tmp_path), SHAPE).model.num_observed == 0


@pytest.mark.parametrize("number", [-1, 10**400, 1e308], ids=("negative", "endless", "huge"))
async def test_numbers_that_no_run_can_have_left_are_ignored(tmp_path, number):
    learnt = await taught(tmp_path)
    saved = msgspec.json.decode(learnt.path.read_bytes())
    saved["cost"]["coefficients"][0] = number
    learnt.path.write_bytes(json.dumps(saved).encode())
    assert Learnt(config(tmp_path), SHAPE).model.num_observed == 0


async def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path):
    (tmp_path / "file").write_text("in the way")
    await taught(tmp_path / "file" / "below")
