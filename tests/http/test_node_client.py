"""OpenAI's SDK for JavaScript, unmodified. Needs node and npm, and the npm registry the first time."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "node"
CACHE = Path(__file__).parents[2] / ".cache" / "node"


@pytest.fixture(scope="module")
def sdk():
    """The folder in which the SDK is installed, in the version that `package.json` names."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    wanted = (HERE / "package.json").read_text()
    folder = CACHE / json.loads(wanted)["dependencies"]["openai"]
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text(wanted)
        npm = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0"],
            cwd=folder, capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        if npm.returncode:
            pytest.skip(f"npm could not install openai: {npm.stderr.strip()[-200:]}")
        (folder / "done").touch()
    return folder


async def test_openai_for_javascript(bench, sdk):
    bench.engine.text = "Grüße 🙂"
    bench.engine.pause_s = 0.001
    real = bench.engine.send

    def send(message):
        is_fifth = len(bench.engine.asked) == 2  # the two before were answered; the refused one never came here
        bench.engine.pause_s = None if is_fifth and not hasattr(message, "at") and not bench.engine.told else 0.001
        real(message)

    bench.engine.send = send
    bench.gateway._upstream._send = send
    process = await asyncio.create_subprocess_exec(
        "node", str(HERE / "ask.mjs"), str(sdk), bench.url + "/v1",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    told = json.loads(out)
    assert told == {
        "whole": ["Grüße 🙂", "Grüße 🙂"],
        "logprob": -0.5,
        "streamed": "Grüße 🙂",
        "usage": len("Grüße 🙂".encode()),
        "refused": ["BadRequestError", 400, "temperature", "invalid_request"],
        "late": "APIConnectionTimeoutError",
        "first": "G",
    }
    await bench.idle()
