"""Models named by their id on a hub of models: `ORG/NAME`, `ORG/NAME:FILE.gguf`, either with `@REVISION` behind.

`huggingface_hub` downloads, resumes and caches; here it is decided what is needed, and said in one line what is wrong.
Its own environment variables count (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`): other programs share its cache.

Of a repository only what is served is fetched: configuration, tokenizer and the safetensors beside them, or one GGUF
file. Without a network, what is in the cache is taken if it is complete.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from pagewire.config import Config
from pagewire.errors import ModelError

_ID: Final = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>[^:@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_TEXT_FILES: Final = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }
)
_INDEX: Final = "model.safetensors.index.json"
_OTHER_LAYOUT: Final = "consolidated"
"""Weights that some repositories hold a second time, in the layout of another program."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on the hub.

    Attributes:
        repo: `ORG/NAME`.
        file: a GGUF file of it; "" where the repository decides.
        revision: branch, tag or commit; "" for the main branch.
    """

    repo: str
    file: str = ""
    revision: str = ""


def parse_hub_id(named: str) -> HubId | None:
    """The id, or None if it has not the shape of one. Says nothing about whether such a model exists."""
    match = _ID.fullmatch(named)
    if match is None or (match["file"] is None and named.endswith((".gguf", ".safetensors", ".json"))):
        return None  # `models/m.gguf` is a path with a mistake in it
    return HubId(match["repo"], match["file"] or "", match["revision"] or "")


def with_local_model(config: Config) -> Config:
    """The same configuration, its model on this machine: downloaded if a hub id names it; named by the id. Blocks.

    Raises:
        ModelError: see `download`.
    """
    named = config.model.path
    hub_id = None if not named or Path(named).expanduser().exists() else parse_hub_id(named)
    if hub_id is None:
        return config
    path = download(hub_id)
    name = config.model.name or (path.stem if path.is_file() else hub_id.repo)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(path), name=name))


def download(hub_id: HubId) -> Path:
    """Make the model's files be on this machine; where they are. Shows bars on a terminal. Blocks.

    Raises:
        ModelError: there is no such model or file, it is not for everybody, it holds nothing that can be served, or
            there is no network and it is not in the cache.
    """
    hub = _library()
    try:
        # Asked first also where the file is named: it says at once that there is no network, where a download tries on.
        info = _asked(hub_id, lambda: hub.HfApi().model_info(hub_id.repo, revision=_revision(hub_id)))
    except _NoNetworkError as error:
        cached = _cached(hub, hub_id)
        if cached is None:
            raise ModelError(error.message) from None
        return cached
    if hub_id.file:
        return Path(_asked(hub_id, lambda: hub.hf_hub_download(hub_id.repo, hub_id.file, revision=_revision(hub_id))))
    wanted = _wanted(hub_id, [file.rfilename for file in info.siblings or ()])
    folder = Path(
        _asked(hub_id, lambda: hub.snapshot_download(hub_id.repo, revision=_revision(hub_id), allow_patterns=wanted))
    )
    return folder / wanted[0] if wanted[0].endswith(".gguf") else folder


def _wanted(hub_id: HubId, files: Sequence[str]) -> list[str]:
    """Which of a repository's files serve it.

    Raises:
        ModelError: none does, or it cannot be said which.
    """
    top = [file for file in files if "/" not in file]
    weights = [file for file in top if file.endswith(".safetensors") and not file.startswith(_OTHER_LAYOUT)]
    if "config.json" in top and weights:
        return sorted([*weights, *(file for file in top if file in _TEXT_FILES)])
    found = sorted(file for file in files if file.endswith(".gguf"))
    if len(found) == 1:
        return found
    if found:
        names = ", ".join(found[:12]) + (f" and {len(found) - 12} more" if len(found) > 12 else "")
        raise ModelError(
            f"{hub_id.repo} holds several GGUF files; name one, as {hub_id.repo}:{found[0]}. It has: {names}"
        )
    raise ModelError(
        f"{hub_id.repo} holds nothing that can be served: no config.json with *.safetensors, and no GGUF file"
    )


def _cached(hub: Any, hub_id: HubId) -> Path | None:
    """What the cache holds of it, if that is complete."""
    if hub_id.file:
        found = hub.try_to_load_from_cache(hub_id.repo, hub_id.file, revision=_revision(hub_id))
        return Path(found) if isinstance(found, str) else None
    for patterns in ([*_TEXT_FILES, "*.safetensors"], ["*.gguf"]):
        try:
            folder = hub.snapshot_download(
                hub_id.repo,
                revision=_revision(hub_id),
                local_files_only=True,
                allow_patterns=patterns,
                ignore_patterns=[f"{_OTHER_LAYOUT}*", "*/*.safetensors"],
            )
        except Exception:  # noqa: BLE001, S112  (not there or not whole, in the library's words)
            continue
        path = _served(hub_id, Path(folder))
        if path is not None:
            return path
    return None


def _served(hub_id: HubId, folder: Path) -> Path | None:
    """The folder, or the only GGUF file in it; None if it cannot be served."""
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        wanted = _wanted(hub_id, files)
    except ModelError:
        return None
    if wanted[0].endswith(".gguf"):
        return folder / wanted[0]
    if _INDEX in wanted:
        try:
            shards = set(msgspec.json.decode((folder / _INDEX).read_bytes(), type=_Index).weight_map.values())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # half of a download
            return None
        if not shards <= set(wanted):
            return None
    return folder


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _NoNetworkError(ModelError):
    """The hub cannot be reached."""


def _asked(hub_id: HubId, ask: Callable[[], _T]) -> _T:
    """What the library answers; its errors in one line each."""
    errors = importlib.import_module("huggingface_hub.errors")
    name = f"{hub_id.repo}:{hub_id.file}" if hub_id.file else hub_id.repo
    try:
        return ask()
    except errors.GatedRepoError:
        raise ModelError(
            f"{hub_id.repo} is not for everybody: accept its terms on the hub, then log in with `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{hub_id.repo} has no revision {hub_id.revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{hub_id.repo} is no file or folder here, and no model on the hub (or a private one: `hf auth login`)"
        ) from None
    except errors.LocalEntryNotFoundError:  # before its base, EntryNotFoundError
        raise _NoNetworkError(
            f"{name} is no file or folder here, and no whole copy is in the cache of downloads; the hub cannot be reached"
        ) from None
    except errors.EntryNotFoundError:
        raise ModelError(f"{hub_id.repo} has no file {hub_id.file or 'of that name'}") from None
    except errors.HFValidationError as error:
        raise ModelError(f"{hub_id.repo} is no id of a model on the hub: {_words(error)}") from None
    except errors.HfHubHTTPError as error:
        raise ModelError(f"the hub does not hand out {name}: {_words(error)}") from None
    except PermissionError as error:
        raise ModelError(f"{name} cannot be stored: {error.strerror}: {error.filename}") from None
    except Exception as error:
        # OfflineModeIsEnabled, and what the HTTP package of its version raises where there is no network: all of them
        # are OSErrors or derive from that package's own base.
        if not isinstance(error, OSError) and not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        if getattr(error, "errno", None) is not None:
            raise ModelError(f"{name} cannot be stored: {error}") from None
        raise _NoNetworkError(
            f"{name} is no file or folder here, no whole copy is in the cache of downloads, and the hub cannot be reached"
            f" ({_words(error)})"
        ) from None


def _library() -> Any:
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise ModelError("models are downloaded with huggingface_hub: pip install 'pagewire[serve]'") from None
    utils = importlib.import_module("huggingface_hub.utils")
    utils.logging.set_verbosity_error()  # what matters is in our errors
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    return hub


def _revision(hub_id: HubId) -> str | None:
    return hub_id.revision or None


def _words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
