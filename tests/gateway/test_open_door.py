"""Where the gateway listens (F9, F10)."""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from pagewire.config import ServerConfig
from pagewire.errors import ConfigError
from pagewire.gateway.process import _open_door
from pagewire_transport.endpoints import default_endpoint
from pagewire_transport.files import Files


async def test_the_default_address_goes_to_the_first_and_others_find_their_own(monkeypatch, short_folder, bench):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    for _ in range(5):
        doors = [_open_door(ServerConfig(), bench.gateway, None, Files()) for _ in range(8)]
        assert doors[0].url == default_endpoint()
        assert len({door.url for door in doors}) == 8
        await asyncio.gather(*(door.close() for door in doors))


async def test_an_address_that_was_asked_for_and_is_taken_is_an_error(short_folder, bench):
    config = ServerConfig(bind=f"ipc://{short_folder}/a.sock")
    door = _open_door(config, bench.gateway, None, Files())
    with pytest.raises(ConfigError, match="in use") as caught:
        _open_door(config, bench.gateway, None, Files())
    assert caught.value.field == "bind"
    await door.close()


async def test_a_public_address_is_refused(bench):
    with pytest.raises(ConfigError, match="other machines"):
        _open_door(ServerConfig(bind="tcp://0.0.0.0:0"), bench.gateway, None, Files())
