"""Models by their id on the hub, from a stand-in on this machine: what is fetched, what the cache does, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.hub.stand_in import COMMIT, StandIn

from pagewire.hub import HubId, _served, parse_hub_id

FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"bos_token": "a"}',
    "preprocessor_config.json": b"[]",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"a pickle",
    "README.md": b"#",
    "original/model.safetensors": b"and again",
}
SHARDED = {
    **{name: FOLDER[name] for name in ("config.json", "tokenizer.json")},
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    ).encode(),
    "m-1.safetensors": b"1",
    "m-2.safetensors": b"2",
}
REPOS = {
    "org/folder": FOLDER,
    "org/sharded": SHARDED,
    "org/gguf": {"README.md": b"#", "only.gguf": b"GGUF"},
    "org/ggufs": {"a-Q4.gguf": b"GGUF4", "b-Q8.gguf": b"GGUF8"},
    "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
}

CODE = """
import sys
from pagewire.errors import ModelError
from pagewire.hub import download, parse_hub_id
for named in sys.argv[1:]:
    try:
        print(download(parse_hub_id(named)))
    except ModelError as error:
        print("refused:", error)
"""


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": 1}', b"\xff", b'{"weight_map": ' + b"[" * 9999])
def test_an_index_that_is_damaged_is_not_there_as_a_whole(tmp_path, index):
    for name, content in (SHARDED | {"model.safetensors.index.json": index}).items():
        (tmp_path / name).write_bytes(content)
    assert _served(parse_hub_id("org/sharded"), tmp_path) is None


@pytest.fixture(scope="module")
def hub():
    stand_in = StandIn(REPOS, gated=("org/gated",))
    yield stand_in
    stand_in.close()


@pytest.fixture
def fetch(hub, tmp_path):
    """The path of each model, or its refusal; in a process of its own, since the library reads its settings at import."""

    def run(*named: str, **variables: str) -> list[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-c", CODE, *named],
            env={**environment, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, **variables},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert (done.stderr, done.stdout.count("\n")) == ("", len(named))
        return done.stdout.splitlines()

    hub.asked.clear()
    return run


NO_NETWORK = [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}]


@pytest.mark.parametrize(
    ("named", "wanted"),
    [
        ("org/name", HubId("org/name")),
        ("Qwen/Qwen2.5-0.5B_x", HubId("Qwen/Qwen2.5-0.5B_x")),
        ("org/name:a/b-Q4_K_M.gguf", HubId("org/name", "a/b-Q4_K_M.gguf")),
        ("org/name@v1", HubId("org/name", revision="v1")),
        ("org/name:m.gguf@refs/pr/1", HubId("org/name", "m.gguf", "refs/pr/1")),
    ],
)
def test_ids(named, wanted):
    assert parse_hub_id(named) == wanted


@pytest.mark.parametrize(
    "named", ["name", "/a/b", "./a", "../a/b", "a/b/c", "~/m", "models/m.gguf", "a/b:c.bin", "a/", ""]
)
def test_what_has_not_the_shape_of_an_id(named):
    assert parse_hub_id(named) is None


def test_only_what_is_served_is_fetched_and_only_once(hub, fetch):
    (path,) = fetch("org/folder")
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert set(os.listdir(path)) == wanted
    assert sorted(hub.asked) == sorted(wanted)
    assert fetch("org/folder") == [path]
    assert len(hub.asked) == len(wanted)


EVERY_KIND = ("org/folder", "org/sharded", "org/gguf", "org/ggufs:b-Q8.gguf")


@pytest.mark.parametrize("variables", NO_NETWORK)
def test_without_a_network_the_cache_serves_and_what_is_not_there_is_said(fetch, variables):
    for named, said in zip(EVERY_KIND, fetch(*EVERY_KIND, **variables), strict=True):
        assert said.startswith(f"refused: {named} is no file or folder here")
        assert "cache of downloads" in said
        assert "the hub cannot be reached" in said
    paths = fetch(*EVERY_KIND)
    assert all(os.path.exists(path) for path in paths)
    assert fetch(*EVERY_KIND, **variables) == paths


def test_a_copy_that_lacks_a_shard_does_not_count(fetch):
    paths = fetch("org/sharded")
    os.unlink(f"{paths[0]}/m-2.safetensors")
    assert "no whole copy" in fetch("org/sharded", HF_HUB_OFFLINE="1")[0]
    assert fetch("org/sharded") == paths


def test_gguf_files(hub, fetch):
    only, named = fetch("org/gguf", "org/ggufs:b-Q8.gguf")
    assert only.endswith(f"{COMMIT}/only.gguf")
    assert named.endswith("b-Q8.gguf")
    assert hub.asked == ["only.gguf", "b-Q8.gguf"]


REFUSED = {
    "org/none": "org/none is no file or folder here, and no model on the hub",
    "org/none:m.gguf": "org/none is no file or folder here, and no model on the hub",
    "org/gated": "org/gated is not for everybody: accept its terms",
    "org/folder@v9": "org/folder has no revision 'v9'",
    "org/ggufs:c.gguf": "org/ggufs has no file c.gguf",
    "org/ggufs": "holds several GGUF files; name one, as org/ggufs:a-Q4.gguf. It has: a-Q4.gguf, b-Q8.gguf",
    "org/pickle": "org/pickle holds nothing that can be served",
    "org/a--b": "is no id of a model on the hub",
}


def test_what_cannot_be_had_is_said_in_a_line(fetch):
    for said, says in zip(fetch(*REFUSED), REFUSED.values(), strict=True):
        assert said.startswith("refused: ")
        assert says in said
