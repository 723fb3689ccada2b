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
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from pagewire.cli.flags import add_config_flags, add_struct_flags
from pagewire.cli.parser import EXIT_USAGE, Parser, parse
from pagewire.errors import ConfigError, InvalidRequest, ModelError, PagewireError
from pagewire_transport.params import SamplingParams

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT

_COMMANDS: Final = {
    "serve": "serve a model to clients until stopped",
    "generate": "continue a text on a running server",
    "chat": "ask a running server one question, with the model's chat template",
    "info": "what a model file or folder holds",
    "demo": "serve the demo model, stream one answer, say how fast it was",
    "version": "the version of Pagewire",
}

_SAMPLING_HELP: Final = {
    "max_tokens": "tokens to generate at most; default: as many as fit",
    "min_tokens": "no stop is taken before so many tokens",
    "temperature": "0 is greedy",
    "top_k": "only the k likeliest tokens; 0: all",
    "top_p": "only the likeliest tokens that together reach this probability",
    "min_p": "only tokens at least this likely, relative to the likeliest",
    "repetition_penalty": "above 1: tokens of prompt and output become less likely",
    "presence_penalty": "subtracted from the logits of tokens that were generated",
    "frequency_penalty": "subtracted for each time a token was generated",
    "logit_bias": "added to the logit of a token, as ID=BIAS; repeat for more",
    "seed": "repeats the same draw; default: drawn",
    "n": "continuations of the one prompt",
    "stop": "a text that ends the continuation; repeat for more",
    "stop_token_ids": "a token that ends the continuation; repeat for more",
    "ignore_eos": "go on after the model's own end",
}

_NOT_FOR_TERMINALS: Final = ("logprobs", "prompt_logprobs")
"""Columns of numbers beside token ids are for programs: the Python client has them."""


class Command(Protocol):
    """What each module `pagewire.cli.<command>` has."""

    def run(self, namespace: argparse.Namespace) -> int:
        """Do it; the exit code."""
        ...


class _ShowVersion(argparse.Action):
    """Reads the version when it is asked for: the package's metadata takes longer to find than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_version())
        parser.exit()


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the part of each command."""
    top = Parser(prog="pagewire", description="Serve large language models; tokens are streamed over ZeroMQ.")
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="say the version and leave")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    of = {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in _COMMANDS.items()
    }
    of["serve"].add_argument(
        "model", nargs="?", metavar="MODEL", help="a GGUF file or a model folder; default: the demo model"
    )
    add_config_flags(of["serve"])
    for name in ("generate", "chat"):
        of[name].add_argument("prompt", nargs="?", metavar="PROMPT", help="default: what standard input holds")
        of[name].add_argument("--url", help="of the server; default: the newest that this user runs on this machine")
        of[name].add_argument("--stats", action="store_true", help="say on standard error how fast it was")
        add_struct_flags(
            of[name].add_argument_group("sampling"),
            SamplingParams,
            prefix="params",
            helps=_SAMPLING_HELP,
            skip=_NOT_FOR_TERMINALS,
        )
    of["chat"].add_argument("--system", metavar="TEXT", help="a system message to begin with")
    of["info"].add_argument("model", metavar="MODEL", help="a GGUF file or a model folder")
    of["demo"].add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask")
    return top, of


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command `pagewire`."""
    namespace = parse(*parser(), arguments)
    try:
        if namespace.command == "version":
            print(_version())
            return 0
        command = cast("Command", importlib.import_module(f"pagewire.cli.{namespace.command}"))
        return command.run(namespace)
    except PagewireError as error:
        _complain(str(error))
        return EXIT_USAGE if isinstance(error, ModelError | ConfigError | InvalidRequest) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `pagewire generate … | head`: the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _version() -> str:
    return importlib.metadata.version("pagewire")


def _complain(message: str) -> None:
    """One line, whatever the message holds."""
    print("pagewire:", " ".join(message.split()), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
