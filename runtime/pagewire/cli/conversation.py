"""A conversation on a terminal or through a pipe: lines in, answers out, with a memory of both.

Ctrl-C ends the answer and not the program: what came of it stays in the conversation. At the prompt it clears the line;
at an empty one it says how to leave, and the second in a row leaves, as Ctrl-D does at once.

The event loop runs in a thread of its own, because the main thread waits for a line: the connection has to answer the
server's heartbeats meanwhile. Reading lines on the loop was rejected: readline, with its history and its keys, blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

from pagewire.cli.answer import show, speed
from pagewire.cli.complaint import complaint
from pagewire.errors import PagewireError
from pagewire_client import Client, Result

_T = TypeVar("_T")

_PROMPT: Final = "> "
_EXIT_DONE, _EXIT_FAILED, _EXIT_INTERRUPTED = 0, 1, 130
_HISTORY: Final = Path("~/.local/state/pagewire/chat_history")
_HISTORY_LINES: Final = 1000
_SETTLE_S: Final = 1.0

_HELP: Final = """\
/reset         forget what was said; the system message stays
/system TEXT   another system message, and forget what was said; without TEXT: none
/help          this
/exit          leave; so do Ctrl-D, and Ctrl-C twice at an empty prompt
//…            a message that begins with a slash
Ctrl-C ends an answer."""
_COMMANDS: Final = ("/reset", "/system", "/help", "/exit", "/quit")


class Conversation:
    """The turns so far, as the server gets them."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system message and all turns."""
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *self._turns]

    def ask(self, text: str) -> None:
        """The next turn is the user's."""
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """What was answered. Nothing at all takes the question back: templates want turns to alternate."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def reset(self) -> None:
        """Forget every turn."""
        self._turns.clear()


def converse(
    connection: contextlib.AbstractAsyncContextManager[Client],
    conversation: Conversation,
    params: Mapping[str, Any],
    *,
    shows_speed: bool,
) -> int:
    """Answer lines until they end; the exit code: 1 if lines came from a pipe and one of them failed.

    Args:
        connection: to the server, not entered yet.
        conversation: what was said before.
        params: of every answer.
        shows_speed: say after each how fast it was.

    Raises:
        ConnectionLost: nobody answers.
    """
    has_person = sys.stdin.isatty()
    with _loop_thread() as run, contextlib.ExitStack() as stack:
        client = _entered(run, connection, stack)
        if has_person:
            stack.enter_context(_line_history())
            print(f"{client.info.model}: /help says what is understood, Ctrl-D leaves.", file=sys.stderr)
        num_failed = 0
        while True:
            line = _line(has_person=has_person)
            if line is None:
                return _EXIT_FAILED if num_failed and not has_person else _EXIT_DONE
            if line is _LEFT:
                return _EXIT_INTERRUPTED
            if line.startswith("/") and not line.startswith("//"):
                if not _obey(line, conversation):
                    return _EXIT_DONE
            elif line.strip():
                conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
                num_failed += not _turn(run, client, conversation, params, shows_speed=shows_speed)


_LEFT: Final = "\0left"


def _line(*, has_person: bool) -> str | None:
    """The next line; None at the end, `_LEFT` if the person interrupted twice."""
    was_interrupted = False
    while True:
        try:
            if not has_person:
                line = sys.stdin.readline()
                return line.rstrip("\n") if line else None
            return _prompted()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if not has_person or was_interrupted:
                return _LEFT
            if not _had_text():
                was_interrupted = True
                print("Ctrl-C again or Ctrl-D leaves.", file=sys.stderr)


def _prompted() -> str:
    if sys.stdout.isatty():
        return input(_PROMPT)
    print(_PROMPT, end="", file=sys.stderr, flush=True)  # standard output goes elsewhere, and is for answers alone
    return input()


def _had_text() -> bool:
    """Something stood on the line that was interrupted."""
    readline = sys.modules.get("readline")
    return readline is not None and bool(readline.get_line_buffer())


def _obey(line: str, conversation: Conversation) -> bool:
    """Do what a command says; False: leave."""
    command, _, rest = line.strip().partition(" ")
    if command in ("/exit", "/quit"):
        return False
    if command == "/help":
        print(_HELP, file=sys.stderr)
    elif command == "/reset":
        conversation.reset()
    elif command == "/system":
        conversation.system = rest.strip() or None
        conversation.reset()
    else:
        near = get_close_matches(command, _COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them; a message with a slash begins with //"
        print(f"there is no command {command}; {hint}", file=sys.stderr)
    return True


def _turn(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
    client: Client,
    conversation: Conversation,
    params: Mapping[str, Any],
    *,
    shows_speed: bool,
) -> bool:
    """Stream one answer; False if there is none. An interrupted one counts as far as it came."""
    heard = _Heard()
    try:
        result: Result = run(_answer(client, conversation, params, heard))
    except KeyboardInterrupt:
        conversation.answer(heard.text)
        return True
    except PagewireError as error:
        conversation.answer("")
        print("pagewire:", complaint(error), file=sys.stderr)
        return False
    conversation.answer(result.text)
    if shows_speed:
        print(speed(result), file=sys.stderr)
    return True


async def _answer(client: Client, conversation: Conversation, params: Mapping[str, Any], heard: _Heard) -> Result:
    return await show(client.chat(conversation.messages, **params), heard)


class _Heard:
    """Standard output, and what was written to it: an answer that is interrupted gives no result."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def write(self, text: str) -> None:
        self._parts.append(text)
        sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()

    @property
    def text(self) -> str:
        return "".join(self._parts).removesuffix("\n")


@contextlib.contextmanager
def _loop_thread() -> Iterator[Callable[[Coroutine[Any, Any, _T]], _T]]:
    """A running loop in a thread; what is yielded runs a coroutine there and waits. Ctrl-C cancels it and is raised."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pagewire", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, _T]) -> _T:
        ended = threading.Event()

        async def kept() -> _T:
            try:
                return await work
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(kept(), loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            ended.wait(_SETTLE_S)  # it writes its last line, and tells the server
            raise

    try:
        yield run
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _entered(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
    manager: contextlib.AbstractAsyncContextManager[Client],
    stack: contextlib.ExitStack,
) -> Client:
    """Enter an asynchronous context on the loop; it is left there when `stack` is."""

    async def enter() -> Client:
        return await manager.__aenter__()

    async def leave() -> None:
        await manager.__aexit__(None, None, None)

    client: Client = run(enter())
    stack.callback(lambda: run(leave()))
    return client


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Keys of readline, and the lines of earlier conversations behind the arrow; nothing where there is no readline."""
    try:
        import readline  # noqa: PLC0415  (not everywhere, and it changes how `input` reads)
    except ImportError:
        yield
        return
    path = _HISTORY.expanduser()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
