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
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from pagewire.cli.command_line import parser, version
from pagewire.cli.complaint import complaint
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of another encoding shows `?` for what it does not have
        sys.stdout.reconfigure(errors="replace")
    top, commands = parser()
    namespace = parse(top, commands, arguments)
    try:
        return _run(namespace)
    except PagewireError as error:
        field = error.field or ""
        flag = commands[namespace.command].flag_of(field) if field in vars(namespace) else None
        _complain(complaint(error, flag))
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
        _write_no_more()
        return EXIT_FAILED
    except OSError as error:  # what no command foresaw: a full disk under standard output, a folder that is read-only
        _complain(": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None))
        _write_no_more()
        return EXIT_FAILED


def _run(namespace: argparse.Namespace) -> int:
    code = 0
    if namespace.command == "version":
        print(version())
    else:
        command = cast("Command", importlib.import_module(f"pagewire.cli.{namespace.command.replace('-', '_')}"))
        code = command.run(namespace)
    sys.stdout.flush()  # what cannot be written is told of here, not by the interpreter while it ends
    return code


def _write_no_more() -> None:
    """What standard output still holds back would be tried again at the end, and be a traceback then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    """One line, whatever the message holds."""
    print("pagewire:", " ".join(message.split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
