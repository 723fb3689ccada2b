"""`chat` without a question: a conversation through a pipe and on a terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import stat
import sys

import pytest
from tests.cli.echo_server import environment_of, pagewire

from pagewire.cli.conversation import Conversation


def _turns(request):
    return [(turn.role, turn.content) for turn in request.messages]


async def test_each_line_of_a_pipe_is_a_turn_that_knows_the_earlier_ones(served):
    server, _, temporary = served
    lines = "one two\n\nthree\n/reset\nfour\n/system be kind\nfive\n//slash\n/system\nsix\n"
    code, out, err = await pagewire("chat", "-i", "--system", "sys", temporary=temporary, stdin=lines.encode())
    assert (code, out, err) == (0, "one two\nthree\nfour\nfive\n/slash\nsix\n", "")
    assert [_turns(request) for request in server.asked] == [
        [("system", "sys"), ("user", "one two")],
        [("system", "sys"), ("user", "one two"), ("assistant", "one two"), ("user", "three")],
        [("system", "sys"), ("user", "four")],
        [("system", "be kind"), ("user", "five")],
        [("system", "be kind"), ("user", "five"), ("assistant", "five"), ("user", "/slash")],
        [("user", "six")],
    ]


async def test_a_failed_turn_is_forgotten_told_and_1_at_the_end(served):
    server, _, temporary = served
    code, out, err = await pagewire("chat", "-i", temporary=temporary, stdin=b"refuse\nfine")
    assert (code, out, err) == (1, "fine\n", "pagewire: prompt: not this one\n")
    assert _turns(server.asked[1]) == [("user", "fine")]


async def test_commands_that_are_not_known_are_told(served):
    server, _, temporary = served
    code, out, err = await pagewire("chat", "-i", temporary=temporary, stdin=b"/rest\n/wat\n/help\n/exit\nno more\n")
    assert (code, out, server.asked) == (0, "", [])
    assert err.startswith("there is no command /rest; did you mean /reset?\nthere is no command /wat; /help lists them")
    assert "/system TEXT" in err


async def test_a_pipe_without_i_is_one_question(served):
    server, _, temporary = served
    code, out, _ = await pagewire("chat", temporary=temporary, stdin=b"a\n/b\n")
    assert (code, out.split()) == (0, ["a", "/b"])
    assert len(server.asked) == 1


def test_an_answer_that_is_nothing_takes_its_question_back():
    conversation = Conversation("s")
    conversation.ask("a")
    conversation.answer("")
    conversation.ask("b")
    assert conversation.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]


class Terminal:
    """`pagewire chat` on a terminal."""

    def __init__(self, temporary, *arguments):
        self.master, slave = pty.openpty()
        self.seen = ""
        self._temporary, self._slave, self._arguments = temporary, slave, arguments

    async def __aenter__(self):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pagewire.cli.entry", "chat", *self._arguments,
            stdin=self._slave, stdout=self._slave, stderr=self._slave, env=environment_of(self._temporary),
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
        )  # fmt: skip
        os.close(self._slave)
        asyncio.get_running_loop().add_reader(self.master, self._read)
        return self

    def _read(self):
        try:
            self.seen += os.read(self.master, 65536).decode()
        except OSError:  # the other side is closed
            asyncio.get_running_loop().remove_reader(self.master)

    async def __aexit__(self, *_):
        asyncio.get_running_loop().remove_reader(self.master)
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        os.close(self.master)

    def type(self, text):
        os.write(self.master, text.encode())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    async def sees(self, pattern, timeout_s=20):
        async with asyncio.timeout(timeout_s):
            while not (found := re.search(pattern, self.seen, re.DOTALL)):
                assert self.process.returncode is None, self.seen
                await asyncio.sleep(0.01)
        self.seen = self.seen[found.end() :]


async def test_ctrl_c_ends_the_answer_and_not_the_program(served):
    server, _, temporary = served
    async with Terminal(temporary) as terminal:
        await terminal.sees(r"m: /help says what is understood.*> ")
        terminal.type("never ends at all\n")
        await terminal.sees("never ends at all.*never ends at all")  # the echo of the terminal, then the answer
        terminal.interrupt()
        await terminal.sees("> ")
        assert len(server.cancelled) == 1
        terminal.type("next\n")
        await terminal.sees("next.*next.*> ")
        assert _turns(server.asked[1])[1:] == [("assistant", "never ends at all"), ("user", "next")]
        terminal.type("half a line")
        await terminal.sees("half a line")
        terminal.interrupt()
        await terminal.sees("> ")
        terminal.interrupt()
        await terminal.sees("Ctrl-C again or Ctrl-D leaves.*> ")
        terminal.interrupt()
        assert await asyncio.wait_for(terminal.process.wait(), 10) == 130
    assert len(server.asked) == 2


async def test_ctrl_d_leaves_and_lines_are_remembered_privately(served):
    _, _, temporary = served
    for typed in ("remember me\n", "\x1b[A\n"):  # the arrow up
        async with Terminal(temporary, "--stats") as terminal:
            await terminal.sees("> ")
            terminal.type(typed)
            await terminal.sees("remember me.*remember me.*2 tokens from a prompt of 5.*> ")
            terminal.type("\x04")
            assert await asyncio.wait_for(terminal.process.wait(), 10) == 0
    history = temporary / ".local/state/pagewire/chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


async def test_without_a_server_a_conversation_does_not_begin(tmp_path):
    code, _, err = await pagewire("chat", "-i", temporary=tmp_path, stdin=b"x\n")
    assert (code, err.count("\n")) == (1, 1)
    assert "pagewire serve" in err


@pytest.mark.parametrize("arguments", [["new"], ["revoke"], ["list", "x"], ["revoke", "x"], ["new", "a b"]])
async def test_keys_says_what_is_wrong(tmp_path, arguments):
    code, out, err = await pagewire("keys", *arguments, "--file", str(tmp_path / "k" / "keys"), temporary=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)


async def test_keys_are_made_listed_and_revoked(tmp_path):
    code, out, err = await pagewire("keys", "new", "laptop", temporary=tmp_path)
    assert (code, out[:3], out.count("\n")) == (0, "pw_", 1)
    path = tmp_path / ".config/pagewire/keys.jsonl"
    assert str(path) in err
    from pagewire.keys import load

    assert load(path).check(out.strip()) == "laptop"
    code, listed, _ = await pagewire("keys", "list", temporary=tmp_path)
    assert (code, listed.split()[0]) == (0, "laptop")
    assert out.strip() not in listed
    code, _, _ = await pagewire("keys", "revoke", "laptop", temporary=tmp_path)
    assert (code, len(load(path))) == (0, 0)


async def test_curve_keys_are_made_allowed_listed_and_revoked(tmp_path):
    from pagewire_transport.curve import load_allowed, load_key_pair

    code, public, err = await pagewire("keys", "curve", "new", "alice", temporary=tmp_path)
    path = tmp_path / ".config/pagewire/curve-alice.key"
    assert (code, public.strip()) == (0, load_key_pair(path).public)
    assert str(path) in err
    code, _, _ = await pagewire("keys", "curve", "allow", "alice", public.strip(), temporary=tmp_path)
    allowed = tmp_path / ".config/pagewire/curve-allowed.jsonl"
    assert (code, list(load_allowed(allowed))) == (0, [public.strip()])
    code, listed, _ = await pagewire("keys", "curve", "list", temporary=tmp_path)
    assert (code, listed.split()[0], public.strip() in listed) == (0, "alice", True)
    code, _, _ = await pagewire("keys", "curve", "revoke", "alice", temporary=tmp_path)
    assert (code, load_allowed(allowed)) == (0, {})


@pytest.mark.parametrize(
    "words", [[], ["new"], ["allow", "x"], ["allow", "x", "y"], ["list", "x"], ["revoke", "x"], ["burn"]]
)
async def test_curve_says_what_is_wrong(tmp_path, words):
    code, out, err = await pagewire("keys", "curve", *words, "--file", str(tmp_path / "keys"), temporary=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
