"""Addresses: private unless keyed, never two servers on one, never a stranger's file lost (F9, F10)."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from pagewire_transport import endpoints
from pagewire_transport.endpoints import MAX_IPC_PATH, bind, default_endpoint, parse, private_folder
from pagewire_transport.errors import ConfigError


@pytest.fixture
def router():
    context = zmq.Context()
    made = []

    def make():
        made.append(context.socket(zmq.ROUTER))
        made[-1].linger = 0
        return made[-1]

    yield make
    for one in made:
        one.close()
    context.term()


@pytest.mark.parametrize(
    ("url", "same", "is_private"),
    [
        ("tcp://127.0.0.1:5570", "tcp://127.0.0.1:5570", True),
        ("tcp://localhost:0", "tcp://127.0.0.1:*", True),
        ("tcp://127.9.9.9:*", "tcp://127.9.9.9:*", True),
        ("tcp://[::1]:5", "tcp://[::1]:5", True),
        ("tcp://0.0.0.0:5", "tcp://0.0.0.0:5", False),
        ("tcp://*:5", "tcp://*:5", False),
        ("tcp://[::]:5", "tcp://[::]:5", False),
        ("tcp://10.0.0.1:5", "tcp://10.0.0.1:5", False),
        ("tcp://eth0:5", "tcp://eth0:5", False),
        ("tcp://example.com:5", "tcp://example.com:5", False),
        ("ipc:///run/x.sock", "ipc:///run/x.sock", True),
        ("ipc://*", "ipc://*", True),
    ],
)
def test_parse(url, same, is_private):
    assert (parse(url).url, parse(url).is_private) == (same, is_private)


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "http://127.0.0.1:5", "inproc://x", "ipc://", "ipc://@abstract", "ipc://a\0b", "tcp://", "tcp://127.0.0.1",
        "tcp://:5", "tcp://127.0.0.1:", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:x", "tcp://::1:5",
        "tcp://127.0.0.1:٣",
    ],
)  # fmt: skip
def test_no_endpoint(url):
    with pytest.raises(ConfigError) as caught:
        parse(url, field="bind")
    assert caught.value.field == "bind"


def test_a_path_that_is_too_long_says_so(tmp_path):
    path = "/" + "x" * (MAX_IPC_PATH - 1)
    assert parse(f"ipc://{path}").path == path
    with pytest.raises(ConfigError, match="107"):
        parse(f"ipc://{path}x")
    with pytest.raises(ConfigError, match="107"):
        parse("ipc:///" + "é" * 60)  # bytes count, not characters


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://10.1.2.3:7"])
def test_public_without_keys_is_refused(router, url):
    """F10."""
    with pytest.raises(ConfigError, match="no keys"):
        bind(router(), url)


def test_public_with_keys(router):
    bind(router(), "tcp://0.0.0.0:*", has_keys=True)


def test_a_picked_port_is_reported(router):
    binding = bind(router(), "tcp://localhost:0")
    port = int(binding.url.rpartition(":")[2])
    assert port > 0
    socket.create_connection(("127.0.0.1", port)).close()


def test_many_servers_at_one_instant_never_collide(router):
    """F9: the kernel picks."""
    sockets = [router() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        urls = list(pool.map(lambda one: bind(one, "tcp://127.0.0.1:*").url, sockets))
    assert len(set(urls)) == 8


@pytest.mark.parametrize("url", ["ipc", "tcp"])
def test_two_servers_on_one_address(router, tmp_path, url):
    first = bind(router(), f"ipc://{tmp_path}/s" if url == "ipc" else "tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="in use"):
        bind(router(), first.url)
    if url == "ipc":
        client = socket.socket(socket.AF_UNIX)
        client.connect(f"{tmp_path}/s")  # still the first one's
        client.close()
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


def test_an_address_is_free_again(tmp_path):
    for _ in range(3):
        context = zmq.Context()
        one = context.socket(zmq.ROUTER)
        binding = bind(one, f"ipc://{tmp_path}/s")
        one.close(0)
        context.term()
        binding.release()
        binding.release()
        assert list(tmp_path.iterdir()) == []


def test_what_a_dead_server_left_is_taken_over(router, tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(f"{tmp_path}/s")
    left.close()
    (tmp_path / "s.lock").touch()
    bind(router(), f"ipc://{tmp_path}/s")


def test_a_server_that_takes_no_lock_is_respected(router, tmp_path):
    other = socket.socket(socket.AF_UNIX)
    other.bind(f"{tmp_path}/s")
    other.listen()
    with pytest.raises(ConfigError, match="in use"):
        bind(router(), f"ipc://{tmp_path}/s")
    other.close()


def test_a_file_is_not_overwritten(router, tmp_path):
    (tmp_path / "precious").write_text("data")
    with pytest.raises(ConfigError, match="no socket"):
        bind(router(), f"ipc://{tmp_path}/precious")
    assert (tmp_path / "precious").read_text() == "data"


def test_a_folder_that_is_missing(router, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        bind(router(), f"ipc://{tmp_path}/no/s")


def test_the_private_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(endpoints.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = private_folder()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert default_endpoint().startswith(f"ipc://{folder}/")
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="nobody else"):
        private_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="nobody else"):
        private_folder()


def test_the_sessions_own_folder_is_preferred_if_it_is_private(monkeypatch, tmp_path):
    session = tmp_path / "session"
    session.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    monkeypatch.setattr(endpoints.tempfile, "gettempdir", lambda: str(tmp_path))
    assert private_folder() == session / "pagewire"
    session.chmod(0o755)
    assert private_folder().parent == tmp_path
