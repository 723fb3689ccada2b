"""The clients in other languages: built, checked with their own tests against the demo model, run as their READMEs say."""

from __future__ import annotations

import re

import pytest
import pytest_asyncio
from tests.chaos.rig import REAL, served
from tests.clients.builds import VECTORS, first_block, node_client, run

from pagewire.cli.model_path import demo_model

MODEL = demo_model()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.model,
    pytest.mark.skipif(MODEL is None, reason="the demo model is not installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    """(the environment in which clients find it, and its addresses for their tests)."""
    async with served("--kv-bytes", "64MiB", command=REAL, model=str(MODEL)) as made:
        ready = await made.said("event=engine_ready")
        engine = re.search(r"endpoint=(\S+)", ready)[1]
        yield {
            "TMPDIR": str(made.folder),
            "XDG_RUNTIME_DIR": "",
            "PAGEWIRE_URL": made.url,
            "PAGEWIRE_RESUME_URL": engine,
        }
        assert await made.stop() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node():
    return await node_client()


async def test_node_client(server, node):
    """Vectors, a server that the tests play, and this one."""
    out = await run(
        "node", "--test", "--test-timeout=60000", "dist-test/", cwd=node, PAGEWIRE_VECTORS=str(VECTORS), **server
    )
    assert "# fail 0" in out
    assert "# skipped 0" in out


async def test_node_readme(server, node):
    """Packed, installed in a project, and the example run as it stands."""
    project = node / "project"
    project.mkdir(exist_ok=True)
    await run("npm", "pack", "--ignore-scripts", "--pack-destination", project, cwd=node)
    (project / "package.json").write_text("{}")
    await run(
        "npm", "install", "--prefer-offline", "--ignore-scripts", "--no-audit", "--no-fund",
        "./pagewire-client-0.1.0.tgz", cwd=project,
    )  # fmt: skip
    (project / "example.mjs").write_text(first_block(node / "README.md", "js"))
    out = await run("node", "example.mjs", cwd=project, **server)
    assert re.search(r"\S.*\nlength: 32 tokens, seed \d+\n$|\S.*\nstop: \d+ tokens, seed \d+\n$", out, re.DOTALL), out
