"""The short forms of `flood.py` and `churn.py`."""

from __future__ import annotations

import pytest
from tests.chaos import churn, flood
from tests.chaos.rig import FAKE
from tests.cli.test_serve import needs_model


@pytest.mark.soak
@pytest.mark.model
@needs_model
@pytest.mark.parametrize(("door", "kind"), [("tcp", "hello and no more"), ("ipc", "no hello")])
async def test_a_thousand_connections_that_want_nothing_disturb_nobody(door, kind):
    (figures,) = await flood.at_door(door, [kind], 1000, 0.5)
    assert figures["wrong"] == []
    assert figures["peers"]["opened"] == 1000
    assert figures["neighbours"]["streams"] > flood.NEIGHBOURS
    assert figures["newcomers"]["served"] > 0


async def test_a_few_hundred_that_come_and_go_leave_nothing():
    complete, before, after = await churn.run(200, 50, FAKE)
    assert complete == 200
    assert churn.missing(before, after) == []


def test_what_is_missing_is_said():
    held = {
        "engine_fds": 24, "engine_mib": 300.0, "orphans": 0.0, "blocks": 255.0, "blocks_used": 0.0, "blocks_cached": 40.0,
    }  # fmt: skip
    assert churn.missing(held, held) == []
    assert churn.missing(held, {**held, "engine_fds": 27, "engine_mib": 310.0, "blocks_cached": 250.0}) == []
    for name, value in (
        ("engine_fds", 30), ("engine_mib", 400.0), ("orphans", 1.0), ("blocks_used", 1.0), ("blocks_cached", 256.0), ("blocks", 254.0),
    ):  # fmt: skip
        assert len(churn.missing(held, {**held, name: value})) == 1, name
