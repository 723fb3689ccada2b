"""`pagewire keys new|list|revoke`: the file of API keys that an HTTP server is given."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime

from pagewire import keys
from pagewire.errors import ConfigError


def run(namespace: argparse.Namespace) -> int:
    """Do it. The key alone goes to standard output, so that a script can take it from there."""
    path = namespace.file.expanduser()
    if namespace.action == "list":
        if namespace.name is not None:
            raise ConfigError(f"`pagewire keys list` takes no name, and got {namespace.name!r}")
        made = list(keys.load(path)) if path.exists() else []
        width = max((len(key.name) for key in made), default=0)
        for key in made:
            print(f"{key.name:{width}}  made {key.created or 'some day'}  sha256 {key.sha256[:12]}…")
        if not made:
            print(f"no keys in {path}; `pagewire keys new NAME` makes one", file=sys.stderr)
        return 0
    if namespace.name is None:
        raise ConfigError(f"which key? pagewire keys {namespace.action} NAME")
    if namespace.action == "new":
        print(keys.add(path, namespace.name, now=datetime.now(UTC)), flush=True)
        print(f"It is shown this once; {path} holds its hash alone.", file=sys.stderr)
    else:
        keys.revoke(path, namespace.name)
        print(f"{namespace.name} is revoked", file=sys.stderr)
    return 0
