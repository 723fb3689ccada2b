"""Folders of servers: private, collision-free (F9), found while alive, swept when dead."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import zmq

from pagewire.supervisor.rendezvous import ServerFolder
from pagewire_transport.endpoints import bind, private_folder
from pagewire_transport.servers import ServerRecord, find_servers


def _record(url: str, started: float = 0.0) -> ServerRecord:
    return ServerRecord(url=url, model="m", pid=os.getpid(), started=started)


def test_the_newest_published_server_is_found_first(base):
    old, new, silent = (ServerFolder.create(base) for _ in range(3))
    old.publish(_record("ipc://old", 1.0))
    new.publish(_record("ipc://new", 2.0))
    assert [record.url for record in find_servers(base)] == ["ipc://new", "ipc://old"]
    for folder in (old, new, silent):
        folder.close()
        folder.close()
    assert find_servers(base) == []
    assert list(base.iterdir()) == []


def test_many_servers_at_one_instant_do_not_collide(base):
    """F9, and no start sweeps another's folder away."""
    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            folders = list(pool.map(lambda _: ServerFolder.create(base), range(8)))
        assert len({folder.endpoint("engine") for folder in folders}) == 8
        assert all(folder.path.exists() for folder in folders)
        for folder in folders:
            folder.close()


def test_a_folder_left_by_kill_9_is_not_found_and_is_swept(base):
    code = (
        "import os, sys; from pathlib import Path; from pagewire.supervisor.rendezvous import *\n"
        "folder = ServerFolder.create(Path(sys.argv[1]))\n"
        "folder.publish(ServerRecord(url='ipc://dead', model='m', pid=os.getpid(), started=9.0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(base)], check=False)
    assert len(list(base.iterdir())) == 1
    assert find_servers(base) == []
    folder = ServerFolder.create(base)
    assert list(base.iterdir()) == [folder.path]
    folder.close()


def test_endpoints_fit_into_an_ipc_path(base):
    folder = ServerFolder.create(private_folder())
    assert len(folder.endpoint("engine")) < 107
    folder.close()


def test_sockets_left_by_kill_9_are_swept_and_live_ones_are_not(base):
    code = (
        "import os, sys, zmq; from pagewire_transport.endpoints import bind\n"
        "bind(zmq.Context().socket(zmq.ROUTER), f'ipc://{sys.argv[1]}/dead.sock')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(base)], check=False)
    assert (base / "dead.sock").is_socket()
    ServerFolder.create(base).close()
    assert list(base.iterdir()) == []
    folder = ServerFolder.create(base)
    subprocess.run([sys.executable, "-c", code, str(base)], check=False)
    folder.close()  # it ended its own gateway in a hurry
    assert list(base.iterdir()) == []
    subprocess.run([sys.executable, "-c", code, str(base)], check=False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as live:
        binding = bind(live, f"ipc://{base}/live.sock")
        folder = ServerFolder.create(base)
        assert {path.name for path in base.iterdir()} == {"live.sock", "live.sock.lock", folder.path.name}
        folder.close()
    binding.release()
