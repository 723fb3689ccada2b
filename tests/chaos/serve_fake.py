"""`pagewire` with the engine of `fake_engine.py`: `python serve_fake.py serve …`."""

from __future__ import annotations

import functools
import sys

from pagewire.cli import serve
from pagewire.cli.entry import main
from pagewire.supervisor.server import Server

if __name__ == "__main__":
    serve.Server = functools.partial(Server, engine_module="fake_engine")
    sys.exit(main())
