"""`pagewire`: parse, run one command, answer with an exit code.

    0    done
    1    it did not work, or no server runs (one line on standard error says why)
    2    wrong usage, or a model that cannot be served: change the command and try again
    130  interrupted

A command's module is imported when the command runs: `pagewire --help` loads neither a socket nor a model library.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from pagewire.cli.command_line import parser, version
from pagewire.cli.parser import EXIT_USAGE, parse
from pagewire.errors import ConfigError, InvalidRequest, ModelError, PagewireError

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT


class Command(Protocol):
    """What each module `pagewire.cli.<command>` has."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `pagewire`."""
    namespace = parse(*parser(), arguments)
    try:
        if namespace.command == "version":
            print(version())
            return 0
        command = cast("Command", importlib.import_module(f"pagewire.cli.{namespace.command.replace('-', '_')}"))
        return command.run(namespace)
    except PagewireError as error:
        _complain(str(error))
        return EXIT_USAGE if isinstance(error, ModelError | ConfigError | InvalidRequest) else EXIT_FAILED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pagewire"):  # a fault of ours
            raise
        _complain(
            f"`pagewire {namespace.command}` needs {error.name}, which is not installed: pip install 'pagewire[serve]'"
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `pagewire generate … | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _complain(message: str) -> None:
    """One line, whatever the message holds."""
    print("pagewire:", " ".join(message.split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
