"""Builds the clients in other languages, in folders that are kept: what has not changed is not built again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "clients"
VECTORS = ROOT / "transport" / "vectors"


class ProgramError(Exception):
    """A program ended with an error; what it wrote."""


async def run(*command: str | Path, cwd: Path, timeout_s: float = 110, **environment: str) -> str:
    """What a program wrote, if it ended well."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=cwd, env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    if process.returncode:
        raise ProgramError(f"{command[0]} ended with {process.returncode}\n{out.decode('utf-8', 'replace')[-6000:]}")
    return out.decode()


def digest(*paths: Path) -> str:
    """Of files, and of all files in folders."""
    files = sorted(file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def is_done(stamp: Path, wanted: str) -> bool:
    return stamp.exists() and stamp.read_text() == wanted


def first_block(readme: Path, language: str) -> str:
    """The first example in a README."""
    return re.search(rf"```{language}\n(.*?)```", readme.read_text(), re.DOTALL)[1]


async def node_client() -> Path:
    """The package, built, with its tests."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    source, folder = ROOT / "clients" / "node", CACHE / "node"
    folder.mkdir(parents=True, exist_ok=True)
    settings = [source / name for name in ("package.json", "package-lock.json", ".npmrc", "tsconfig.json", "README.md")]
    for file in settings:
        shutil.copy(file, folder)
    wanted = digest(*settings[:2])
    if not is_done(folder / ".installed", wanted):
        try:
            await run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0", cwd=folder)
        except ProgramError as failed:
            pytest.skip(f"npm could not install what the Node client needs: {str(failed)[-300:]}")
        (folder / ".installed").write_text(wanted)
    wanted = digest(source / "src", source / "test", *settings)
    if not is_done(folder / ".built", wanted):
        for name in ("src", "test", "dist", "dist-test"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("src", "test"):
            shutil.copytree(source / name, folder / name)
        await run("npm", "run", "build", cwd=folder)
        await run("npx", "tsc", "-p", "test", cwd=folder)
        (folder / ".built").write_text(wanted)
    return folder
