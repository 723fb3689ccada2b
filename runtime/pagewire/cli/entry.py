"""The installed command. It imports as little as can be, so that a Ctrl-C while the rest is imported is no traceback."""

from __future__ import annotations

import sys


def main() -> int:
    """`pagewire.cli.main.main`, and 130 if it is interrupted before it runs."""
    try:
        from pagewire.cli.main import main as run  # noqa: PLC0415

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
