"""The process that renders chat templates, apart from the one that serves: `python -m pagewire.text.template_worker SECONDS`.

A template is code from a model's files. One expression is enough to take all memory (`'x' * 10**11`) or to run for
ever in C, where no step counter inside the interpreter sees it. So the kernel sets the limits:

- memory: RLIMIT_AS. Python reports MemoryError, which is answered as an error.
- time: each render arms a timer of its own CPU time whose signal ends the process. Nothing in it can hold that up.
- whoever started it goes away: standard input ends, and so does the process.

Rejected: counting steps with `sys.settrace` (blind to C), bounding each operator, method and filter of Jinja (a long
list, and one forgotten entry is a hole), and a process for each render (0.2 s each).

Protocol, one JSON document a line: first {"source", "variables"}, then {"messages", "variables"} a render;
answers are {"text"} or {"code", "message", "field"}, the first line's too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from pagewire.errors import PagewireError
from pagewire.text.template import ChatTemplate

MAX_BYTES = 2**30


def main() -> None:
    """Serve standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which closes our input
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
    except BrokenPipeError:  # whoever asked is gone; the interpreter would try once more to write what is buffered
        os._exit(0)


def serve(requests: BinaryIO, answers: BinaryIO, max_cpu_seconds: float) -> None:
    """Answer each line of `requests` with a line; the process ends in the middle of one that takes longer."""
    templates: list[ChatTemplate] = []

    def compile_template(asked: dict[str, Any]) -> str:
        templates.append(ChatTemplate(asked["source"], asked["variables"]))
        return ""

    def render(asked: dict[str, Any]) -> str:
        return templates[0].render({**asked["variables"], "messages": asked["messages"]})

    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, max_cpu_seconds)
        answer = _answer(render if templates else compile_template, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer + b"\n")
        answers.flush()


def _answer(act: Callable[[dict[str, Any]], str], line: bytes) -> bytes:
    try:
        return _encoded({"text": act(json.loads(line))})
    except PagewireError as error:
        return _encoded({"code": error.code, "message": error.message, "field": error.field})
    except MemoryError:
        return _encoded({"code": "model", "message": "the chat is too large to render", "field": "messages"})


def _encoded(answer: dict[str, str | None]) -> bytes:
    # Lone surrogates pass: whoever encodes the text refuses them by field.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()
