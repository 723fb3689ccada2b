"""One HTTP door a test: it is open within milliseconds."""

from __future__ import annotations

import pytest_asyncio
from tests.http.bench import serving


@pytest_asyncio.fixture
async def bench():
    async with serving() as made:
        yield made
        await made.idle()
