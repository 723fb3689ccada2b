"""Builds the clients in other languages, in folders that are kept: what has not changed is not built again."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from pathlib import Path

import pytest
import zmq

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


async def cpp_client() -> tuple[Path, list[str]]:
    """(a folder with its tests, built, and `installed` in it; what CMake must be told to find its libraries)."""
    if shutil.which("cmake") is None or shutil.which("g++") is None:
        pytest.skip("cmake and g++ are not installed")
    source, folder = ROOT / "clients" / "cpp", CACHE / "cpp"
    folder.mkdir(parents=True, exist_ok=True)
    found = [] if _has_headers() else await _fetched(CACHE / "debian")
    wanted = digest(source) + " ".join(found)
    if not is_done(folder / ".built", wanted):
        shutil.rmtree(folder / "installed", ignore_errors=True)
        await run(
            "cmake", "-S", source, "-B", folder, "-DPAGEWIRE_TESTS=ON", "-DPAGEWIRE_EXAMPLE=OFF", *found,
            f"-DCMAKE_INSTALL_PREFIX={folder / 'installed'}", cwd=folder,
        )  # fmt: skip
        out = await run("cmake", "--build", folder, "-j2", "--target", "install", cwd=folder)
        assert "warning:" not in out, out
        (folder / ".built").write_text(wanted)
    return folder, [*found, f"-DCMAKE_PREFIX_PATH={folder / 'installed'}"]


def _has_headers() -> bool:
    folder = Path("/usr/include")
    return all((folder / name).exists() for name in ("zmq.hpp", "zmq.h", "msgpack/unpack.hpp"))


async def _fetched(folder: Path) -> list[str]:
    """The headers from Debian's packages, unpacked where nobody needs to be root; the library is pyzmq's own."""

    # What pyzmq was built with, under a name of its own.
    libraries = sorted((Path(zmq.__file__).parents[1] / "pyzmq.libs").glob("libzmq*.so*"))
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None or not libraries:
        pytest.skip("cppzmq-dev, libmsgpack-cxx-dev and libzmq3-dev are not installed")
    include = folder / "root" / "usr" / "include"
    if not (folder / ".done").exists():
        state = folder / "state"
        for path in (state / "lists" / "partial", state / "cache" / "archives" / "partial"):
            path.mkdir(parents=True, exist_ok=True)
        (state / "status").touch()
        options = (
            "-qq", "-o", f"Dir::State={state}", "-o", f"Dir::State::lists={state / 'lists'}", "-o",
            f"Dir::State::status={state / 'status'}", "-o", f"Dir::Cache={state / 'cache'}", "-o", "APT::Sandbox::User=",
        )  # fmt: skip
        try:
            await run("apt-get", *options, "update", cwd=folder, timeout_s=50)
            packages = ("cppzmq-dev", "libmsgpack-cxx-dev", "libzmq3-dev")
            await run("apt-get", *options, "download", *packages, cwd=folder, timeout_s=30)
            for package in folder.glob("*.deb"):
                await run("dpkg", "-x", package, folder / "root", cwd=folder)
        except (ProgramError, TimeoutError) as failed:
            pytest.skip(f"what the C++ client needs cannot be had: {str(failed)[-300:]}")
        shutil.rmtree(state)
        (folder / ".done").touch()
    return [
        f"-DPAGEWIRE_ZMQ_INCLUDE={include}", f"-DPAGEWIRE_ZMQ_C_INCLUDE={include}",
        f"-DPAGEWIRE_MSGPACK_INCLUDE={include}", f"-DPAGEWIRE_ZMQ_LIBRARY={libraries[0]}",
    ]  # fmt: skip
