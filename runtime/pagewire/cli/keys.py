"""`pagewire keys …`: the file of API keys that an HTTP server is given; `pagewire keys curve …`: CURVE keys for ZeroMQ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pagewire import keys
from pagewire.errors import ConfigError

_FOLDER: Final = Path("~/.config/pagewire")


def run(namespace: argparse.Namespace) -> int:
    """Do it. A key alone goes to standard output, so that a script can take it from there."""
    if namespace.action == "curve":
        return _curve(namespace.words, namespace.file)
    path = (namespace.file or _FOLDER / "keys.jsonl").expanduser()
    if namespace.action == "list":
        _take(namespace.words, "pagewire keys list")
        made = list(keys.load(path)) if path.exists() else []
        width = max((len(key.name) for key in made), default=0)
        for key in made:
            print(f"{key.name:{width}}  made {key.created or 'some day'}  sha256 {key.sha256[:12]}…")
        if not made:
            print(f"no keys in {path}; `pagewire keys new NAME` makes one", file=sys.stderr)
        return 0
    (name,) = _take(namespace.words, f"pagewire keys {namespace.action}", "NAME")
    if namespace.action == "new":
        print(keys.add(path, name, now=datetime.now(UTC)), flush=True)
        print(f"It is shown this once; {path} holds its hash alone.", file=sys.stderr)
    else:
        keys.revoke(path, name)
        print(f"{name} is revoked", file=sys.stderr)
    return 0


def _curve(words: Sequence[str], file: Path | None) -> int:
    # Imported here: it loads libzmq, which API keys do not need.
    from pagewire import curve_keys  # noqa: PLC0415
    from pagewire_transport.curve import load_allowed  # noqa: PLC0415

    action, rest = (words[0], words[1:]) if words else ("", ())
    allowed = (file or _FOLDER / "curve-allowed.jsonl").expanduser()
    if action == "new":
        (name,) = _take(rest, "pagewire keys curve new", "NAME")
        keys.check_name(name)
        path = (file or _FOLDER / f"curve-{name}.key").expanduser()
        print(curve_keys.make(path, name, now=datetime.now(UTC)).public, flush=True)
        print(f"This is the public key; {path} holds it and the secret one.", file=sys.stderr)
    elif action == "allow":
        name, public = _take(rest, "pagewire keys curve allow", "NAME", "PUBLIC")
        curve_keys.allow(allowed, name, public, now=datetime.now(UTC))
        print(f"{name} is let in", file=sys.stderr)
    elif action == "list":
        _take(rest, "pagewire keys curve list")
        lines = curve_keys.shown(load_allowed(allowed)) if allowed.exists() else []
        print("\n".join(lines), end="\n" if lines else "")
        if not lines:
            print(f"nobody in {allowed}; `pagewire keys curve allow NAME PUBLIC` lets a key in", file=sys.stderr)
    elif action == "revoke":
        (name,) = _take(rest, "pagewire keys curve revoke", "NAME")
        curve_keys.revoke(allowed, name)
        print(f"{name} is revoked", file=sys.stderr)
    else:
        raise ConfigError(f"pagewire keys curve new|allow|list|revoke, not {action or 'nothing'}")
    return 0


def _take(words: Sequence[str], command: str, *names: str) -> Sequence[str]:
    """The words behind a command, as many as it has names for.

    Raises:
        ConfigError: there are more or fewer.
    """
    if len(words) != len(names):
        takes = " ".join([command, *names])
        raise ConfigError(f"`{takes}` takes {len(names) or 'no'} word{'s' * (len(names) != 1)}, and got {len(words)}")
    return words
