"""API keys (F49): what a file may hold, who passes, and that files change as a whole."""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import threading
from datetime import UTC, datetime

import pytest

from pagewire import keys
from pagewire.errors import ConfigError

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "keys.jsonl"


def test_a_key_passes_by_its_name_and_nothing_else_does(path):
    mine, yours = keys.add(path, "mine", now=NOW), keys.add(path, "yours", now=NOW)
    known = keys.load(path)
    assert [known.check(text) for text in (mine, yours)] == ["mine", "yours"]
    for text in ("", "mine", mine[:-1], mine + " ", mine.upper(), "\ud800", mine + "\0"):
        assert known.check(text) is None
    assert keys.KeySet().check("") is None


def test_the_file_holds_hashes_and_is_private(path):
    key = keys.add(path, "mine", now=NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"name": "mine", "sha256": hashlib.sha256(key.encode()).hexdigest(), "created": "2026-01-31T12:00:00Z"}
    ]
    assert len({keys.add(path, f"k{i}", now=NOW) for i in range(20)}) == 20


def test_every_key_is_compared_whichever_matches(path, monkeypatch):
    made = [keys.add(path, f"k{i}", now=NOW) for i in range(5)]
    known, compared = keys.load(path), []
    compare = hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append(0) or compare(a, b))
    for presented in (made[0], made[4], "wrong"):
        compared.clear()
        known.check(presented)
        assert len(compared) == 5


def test_a_revoked_key_is_refused_at_once(path):
    mine = keys.add(path, "mine", now=NOW)
    live = keys.KeyFile(path)
    assert live.check(mine) == "mine"
    other = keys.add(path, "other", now=NOW)
    keys.revoke(path, "mine")
    assert (live.check(mine), live.check(other)) == (None, "other")
    path.write_text("no key")
    assert live.check(other) is None
    assert "line 1 is no key" in live.problem
    path.unlink()
    assert live.check(other) is None
    mine = keys.add(path, "mine", now=NOW)
    assert live.check(mine) == "mine"
    assert live.problem is None


def test_names_are_unique_and_plain(path):
    keys.add(path, "mine", now=NOW)
    with pytest.raises(ConfigError, match="there is a key 'mine'"):
        keys.add(path, "mine", now=NOW)
    with pytest.raises(ConfigError, match=r"no key .yours..*there are: mine"):
        keys.revoke(path, "yours")
    for name in ("", "a b", "a\n", "-x", "é", "x" * 65):
        with pytest.raises(ConfigError, match="is no name"):
            keys.add(path, name, now=NOW)


GOOD = {"name": "a", "sha256": "0" * 64, "created": ""}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["x"], "line 1 is no key"),
        (["", "[]"], "line 2 is no key"),
        ([json.dumps({**GOOD, "sha256": "0" * 63})], "64 hexadecimal digits"),
        ([json.dumps({**GOOD, "sha256": "é" * 64})], "64 hexadecimal digits"),
        ([json.dumps({**GOOD, "name": "a b"})], "is no name"),
        ([json.dumps({**GOOD, "admin": True})], "unknown field `admin`"),
        ([json.dumps(GOOD), json.dumps(GOOD)], "line 2: there is another key"),
    ],
)
def test_a_damaged_file_names_its_line(tmp_path, lines, says):
    path = tmp_path / "k"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=says) as caught:
        keys.load(path)
    assert str(path) in caught.value.message


def test_a_file_that_others_write_or_that_is_missing_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read.*pagewire keys new"):
        keys.load(path)
    keys.add(path, "mine", now=NOW)
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="others may write"):
        keys.load(path)
    path.chmod(0o644)  # as a mounted secret is
    assert len(keys.load(path)) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        keys.load(tmp_path)


def test_keys_made_at_one_time_are_all_kept(path):
    made = {}
    threads = [
        threading.Thread(target=lambda i=i: made.update({f"k{i}": keys.add(path, f"k{i}", now=NOW)})) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = keys.load(path)
    assert {known.check(key): key for key in made.values()} == made
    assert [file.name for file in path.parent.iterdir()] == ["keys.jsonl"]
