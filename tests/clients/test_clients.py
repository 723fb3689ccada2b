"""The clients in other languages: built, checked with their own tests against the demo model, run as their READMEs say."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from tests.chaos.rig import REAL, served, temporary_folder
from tests.clients.builds import ROOT, VECTORS, ProgramError, cpp_client, first_block, node_client, run

from pagewire import curve_keys
from pagewire.cli.model_path import demo_model

MODEL = demo_model()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.model,
    pytest.mark.timeout(300),  # the first time programs are built
    pytest.mark.skipif(MODEL is None, reason="the demo model is not installed"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    """The environment in which clients find it."""
    async with served("--kv-bytes", "64MiB", command=REAL, model=str(MODEL)) as made:
        yield {"TMPDIR": str(made.folder), "XDG_RUNTIME_DIR": "", "PAGEWIRE_URL": made.url}
        assert await made.stop() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed():
    """Another one, on the loopback, that asks for keys; its model is a fake."""
    with temporary_folder() as folder:
        now = datetime.now(UTC)
        pair = curve_keys.make(folder / "server.key", "server", now=now)
        ours = curve_keys.make(folder / "alice.key", "alice", now=now)
        curve_keys.allow(folder / "allowed", "alice", ours.public, now=now)
        async with served(
            "--bind", "tcp://127.0.0.1:0", "--curve-key-file", str(folder / "server.key"),
            "--curve-allow-file", str(folder / "allowed"),
        ) as made:  # fmt: skip
            yield {
                "PAGEWIRE_CURVE_URL": made.url,
                "PAGEWIRE_SERVER_KEY": pair.public,
                "PAGEWIRE_KEY_FILE": str(folder / "alice.key"),
            }
            assert await made.stop() == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node():
    return await node_client()


async def test_node_client(server, keyed, node):
    """Vectors, a server that the tests play, and these two."""
    environment = {"PAGEWIRE_VECTORS": str(VECTORS), **server, **keyed}
    out = await run("node", "--test", "--test-timeout=60000", "dist-test/", cwd=node, **environment)
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
    assert re.search(r"\S.*\n(length: 32|stop: \d+) tokens, seed \d+\n$", out, re.DOTALL), out
    with temporary_folder() as nobody, pytest.raises(ProgramError) as ended:
        await run("node", "example.mjs", cwd=project, TMPDIR=str(nobody), XDG_RUNTIME_DIR="")
    assert re.search(r"^node ended with 1\nconnection_lost: no server of yours runs .*\n$", str(ended.value))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cpp():
    return await cpp_client()


async def test_cpp_client(server, keyed, cpp):
    """Vectors, a server that the tests play, and these two."""
    folder, _ = cpp
    environment = {"PAGEWIRE_VECTORS": str(VECTORS), **server, **keyed}
    out = await run(folder / "client-test", cwd=folder, **environment)
    assert " 0 failed" in out
    assert "skipped" not in out


async def test_cpp_readme(server, cpp):
    """A project that finds the installed package, and the example run as it stands."""
    folder, found = cpp
    project, readme = folder / "project", ROOT / "clients" / "cpp" / "README.md"
    project.mkdir(exist_ok=True)
    for name, language in (("CMakeLists.txt", "cmake"), ("example.cpp", "cpp")):
        text = first_block(readme, language)
        if not (project / name).exists() or (project / name).read_text() != text:
            (project / name).write_text(text)
    assert (project / "example.cpp").read_text() == (ROOT / "clients/cpp/example/example.cpp").read_text()
    await run("cmake", "-S", ".", "-B", "build", *found, cwd=project)
    await run("cmake", "--build", "build", cwd=project)
    out = await run(project / "build" / "example", cwd=project, **server)
    assert re.search(r"\S.*\n(length: 32|stop: \d+) tokens, seed \d+\n$", out, re.DOTALL), out
