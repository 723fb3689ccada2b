"""What can be written behind `pagewire`: commands, arguments, flags, and the help that shows them."""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import Final

from pagewire.cli.flags import add_config_flags, add_struct_flags
from pagewire.cli.parser import Parser
from pagewire.cli.simulation_flags import add_simulation_flags
from pagewire.sizes import parse_size
from pagewire_transport.params import SamplingParams

MODEL_HELP: Final = "a GGUF file, a model folder, or a hub id (ORG/NAME, ORG/NAME:FILE.gguf)"

_COMMANDS: Final = {
    "serve": "serve a model to clients until stopped",
    "generate": "continue a text on a running server",
    "chat": "talk with a running server, or ask it one question",
    "batch": "answer a file of requests, offline or on a server; resumes where it stopped",
    "calibrate": "scales for KV in FP8, from a text",
    "info": "what a model file or folder holds",
    "keys": "make, list and revoke keys: of an HTTP server's users, and CURVE keys for ZeroMQ",
    "simulate": "a trace or a load on modelled cards: latencies, hits and memory, without a GPU",
    "replay": "a recording of `serve --record`: the same decisions again, or the first that differs",
    "plan": "how many streams a model on given cards holds, and which latencies they see",
    "admin": "drain a running server, see its counters, or let it read its keys again",
    "wire-check": "check whether a server keeps the protocol, one line a check",
    "demo": "serve the demo model, stream one answer, say how fast it was",
    "version": "the version of Pagewire",
}

_EXAMPLES: Final = {
    "": """\
  pagewire serve model.gguf                 then, in another terminal:
  pagewire chat "Why is the sky blue?"
""",
    "serve": """\
  pagewire serve model.gguf
  pagewire serve Qwen/Qwen2.5-0.5B-Instruct --max-model-len 8192 --kv-bytes 2GiB
  pagewire serve --config pagewire.toml     each flag is a key of its section there

exit codes: 0 stopped by SIGTERM · 1 it died, one line says why · 2 wrong usage, or a model that cannot be served
            · 130 Ctrl-C · 129 its terminal was closed
""",
    "generate": """\
  pagewire generate "Once upon a time" --max-tokens 64
  git diff | pagewire generate --temperature 0 --stats
""",
    "chat": """\
  pagewire chat                             a conversation; /help says what it understands
  pagewire chat "Why is the sky blue?"      one question
  pagewire chat --system "Be brief." < question.txt
""",
    "batch": """\
  pagewire batch requests.jsonl --model model.gguf --max-tokens 200
  pagewire batch requests.jsonl --url ipc:///run/user/1000/pagewire/server.sock

each line of FILE is a request; the answers go to FILE.out.jsonl, in the order of the lines once all are there:
  {"prompt": "Once upon", "max_tokens": 20}
  {"id": "q1", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "seed": 7}
  {"prompt_ids": [1, 5, 9]}
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], "max_tokens": 20}}
sampling flags are the defaults of lines that do not say. A line that is wrong is answered with an error that names the
field. Run again after a stop, whatever the reason: what is answered is not asked again.

exit codes: 0 all lines are answered · 1 some lines are errors, or it stopped half way · 2 wrong usage · 130 Ctrl-C
""",
    "simulate": """\
  pagewire simulate --trace conversation.jsonl --model 70b --gpus 8 --weights fp8 --kv fp8 --picture run.svg
  pagewire simulate --closed 64 --max-step-tokens 384
  pagewire simulate --poisson 30 --seconds 120 --model ./my-model --json

a trace is a CSV file with TIMESTAMP,ContextTokens,GeneratedTokens (Azure's), or JSON lines with timestamp (ms), input_length,
output_length and, if prompts share prefixes, hash_ids: one id for each 512 tokens (Mooncake's).
""",
    "replay": """\
  pagewire serve model.gguf --record run.pwrec      the file holds prompts, as token ids
  pagewire replay run.pwrec

exit codes: 0 the same decisions · 1 a decision differs, and which · 2 no recording, or a damaged one
""",
    "plan": """\
  pagewire plan --model 8b --context 8192
  pagewire plan --model ./my-model --gpus 8 --weights fp8 --kv fp8 --context 32768 --output 500 --ttft 2000
""",
    "keys": """\
  pagewire keys new laptop                  shows the key, once
  pagewire keys list
  pagewire keys revoke laptop               counts at once, without a restart

CURVE keys, for a server that other machines reach over ZeroMQ:
  pagewire keys curve new NAME [--file KEYS]          a file with both keys; says the public one
  pagewire keys curve allow NAME 'PUBLIC' [--file L]  lets a public key in; put it in single quotes
  pagewire keys curve list | revoke NAME [--file L]   the allow-list; counts at once
  pagewire serve --bind tcp://0.0.0.0:5570 --curve-key-file KEYS --curve-allow-file L
  pagewire chat --url tcp://HOST:5570 --server-key 'PUBLIC' --key-file KEYS
""",
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

_NOT_OFFLINE: Final = ("server", "http", "scheduler.seed")
"""Of the configuration: what an engine in this process has no use for. `--seed` is that of the requests there."""


class _ShowVersion(argparse.Action):
    """Reads the version when it is asked for: the package's metadata takes longer to find than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(version())
        parser.exit()


def version() -> str:
    """Of the installed package."""
    return importlib.metadata.version("pagewire")


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The whole command line, and the part of each command."""
    top = Parser(
        prog="pagewire",
        description="Serve large language models; tokens are streamed over ZeroMQ.",
        examples=_EXAMPLES[""],
    )
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="say the version and leave")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    of = {
        name: commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", examples=_EXAMPLES.get(name, "")
        )
        for name, text in _COMMANDS.items()
    }
    of["serve"].add_argument("model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; default: the demo model")
    add_config_flags(of["serve"])
    for name in ("generate", "chat"):
        of[name].add_argument("prompt", nargs="?", metavar="PROMPT", help=_PROMPT_HELP[name])
        _add_url(of[name], "of the server; default: the newest that this user runs on this machine")
        of[name].add_argument("--stats", action="store_true", help="say on standard error how fast it was")
        _add_sampling(of[name])
    of["chat"].add_argument("--system", metavar="TEXT", help="a system message to begin with")
    of["chat"].add_argument(
        "--interactive", "-i", action="store_true", help="a conversation also from a pipe: each line is a turn"
    )
    _add_batch(of["batch"])
    of["calibrate"].add_argument("model", metavar="MODEL", help=MODEL_HELP)
    of["calibrate"].add_argument(
        "--text", metavar="FILE", type=Path, required=True, help="a text like those that the model will read"
    )
    of["calibrate"].add_argument(
        "--tokens", metavar="N", type=int, default=20_000, help="of the text, at most (default: 20000)"
    )
    of["calibrate"].add_argument("--out", metavar="FILE", type=Path, help="default: the model's name + .kv-scales.json")
    of["info"].add_argument(
        "model", nargs="?", metavar="MODEL", help=f"{MODEL_HELP}; a hub id is downloaded; default: the demo model"
    )
    of["info"].add_argument("--kv-bytes", type=_size, default=2**30, metavar="SIZE", help="of KV memory; default: 1GiB")
    of["info"].add_argument(
        "--tokens",
        type=int,
        default=0,
        metavar="N",
        help="of a stream, prompt and output; default: the model's context",
    )
    of["demo"].add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask")
    _add_keys(of["keys"])
    of["replay"].add_argument("file", metavar="FILE", type=Path, help="what `serve --record` wrote")
    of["replay"].add_argument("--check", action="store_true", help="check all invariants after each event; slow")
    of["replay"].add_argument("--json", action="store_true", help="one JSON object")
    for name in ("simulate", "plan"):
        add_simulation_flags(of[name], name)
    of["wire-check"].add_argument("url", metavar="URL", help="of the server")
    _add_key_flags(of["wire-check"])
    of["wire-check"].add_argument(
        "--timeout", metavar="SECONDS", type=float, default=5.0, help="for each answer (default: 5)"
    )
    of["wire-check"].add_argument(
        "--patience",
        metavar="SECONDS",
        type=float,
        default=3.0,
        help="silence at most, to see whether it is noticed (default: 3)",
    )
    of["admin"].add_argument("action", choices=("drain", "stats", "reload"), help="what to do")
    of["admin"].add_argument(
        "url", nargs="?", metavar="URL", help="of the server; default: your newest on this machine"
    )
    return top, of


_PROMPT_HELP: Final = {
    "generate": "default: what standard input holds",
    "chat": "one question; default: a conversation, or what standard input holds if that is no terminal",
}


def _add_url(command: Parser, text: str) -> None:
    command.add_argument("--url", help=text)
    _add_key_flags(command)


def _add_key_flags(command: Parser) -> None:
    command.add_argument("--server-key", metavar="PUBLIC", help="public key of a server that asks for CURVE keys")
    command.add_argument("--key-file", metavar="FILE", type=Path, help="our own keys: `pagewire keys curve new`")


def _add_sampling(command: Parser) -> None:
    group = command.add_argument_group("sampling")
    add_struct_flags(group, SamplingParams, prefix="params", helps=_SAMPLING_HELP, skip=_NOT_FOR_TERMINALS)


def _add_batch(command: Parser) -> None:
    command.add_argument("file", metavar="FILE.jsonl", type=Path, help="requests, a JSON object a line")
    command.add_argument("--out", metavar="FILE", type=Path, help="where answers go; default: FILE.out.jsonl")
    _add_url(command, "of a server that answers; default: an engine in this process, with the settings below")
    command.add_argument(
        "--concurrency", metavar="N", type=int, default=0, help="requests at once; 0: what keeps the engine full"
    )
    _add_sampling(command)
    add_config_flags(command, skip=_NOT_OFFLINE)


def _add_keys(command: Parser) -> None:
    command.add_argument("action", choices=("new", "list", "revoke", "curve"), help="what to do; see the examples")
    command.add_argument("words", nargs="*", metavar="NAME", help="of the key, for new and revoke")
    command.add_argument(
        "--file",
        metavar="FILE",
        type=Path,
        help="the file of keys (default: ~/.config/pagewire/keys.jsonl; curve-NAME.key, curve-allowed.jsonl there)",
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
