"""Rendering in a process of its own: within limits of time and memory, whatever the template does (F51)."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pagewire.errors import InternalError, InvalidRequest, ModelError
from pagewire.text.chat_renderer import ChatRenderer
from pagewire_transport.messages import ChatMessage

CHAT = [{"role": "user", "content": "hello"}]
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{{ extra }}{{ bos_token }}"


@pytest.fixture
def make():
    made = []

    def renderer(source, variables=None):
        made.append(ChatRenderer(source, variables or {}, max_cpu_seconds=0.5))
        return made[-1]

    yield renderer
    for one in made:
        one.close()


def test_renders(make):
    renderer = make(ECHO, {"bos_token": "<s>"})
    assert renderer.render(CHAT, {"extra": 7}) == "user:hello;7<s>"
    assert renderer.render([ChatMessage(role="system", content="é\n日\u2028\x00")], {}) == "system:é\n日\u2028\x00;<s>"
    assert renderer.render(CHAT, {"bos_token": ""}) == "user:hello;"


def test_a_lone_surrogate_comes_through_for_the_tokenizer_to_refuse(make):
    assert make(ECHO).render([{"role": "user", "content": "\ud800"}], {}) == "user:\ud800;"


@pytest.mark.parametrize(
    ("messages", "variables", "field"),
    [
        ([], {}, "messages"),
        ((), {}, "messages"),
        ([{"role": "user", "content": object()}], {}, "messages"),
        (CHAT, {"messages": 1}, "template_kwargs.messages"),
        (CHAT, {"tools": None}, "template_kwargs.tools"),
        (CHAT, {"x": float("nan")}, "template_kwargs"),
    ],
)
def test_bad_input_is_refused_by_field(make, messages, variables, field):
    renderer = make(ECHO)
    with pytest.raises(InvalidRequest) as caught:
        renderer.render(messages, variables)
    assert caught.value.field == field
    assert renderer.render(CHAT, {}) == "user:hello;"


def test_a_refusal_travels_and_the_process_stays(make):
    renderer = make("{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}ok")
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="refuses: one at a time") as caught:
            renderer.render(CHAT * 2, {})
        assert caught.value.field == "messages"
        assert renderer.render(CHAT, {}) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{% set n = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{{ messages[0].content | center(10**10) }}",
        "{{ '%*d' % (10**9, 1) }}{{ '{:>9999999999}'.format(1) }}",
        "{{ messages[0].content.ljust(10**10) }}",
        "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    ],
)
def test_what_takes_too_much_memory(make, source):
    renderer = make(source)
    with pytest.raises(ModelError, match=r"too (much|long)|more than") as caught:
        renderer.render(CHAT, {})
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(l=messages) %}{% for i in range(70) %}{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l == [n.l[0], 1] or n.l|string }}",
        "{{ (messages|length + 8) ** (messages|length + 99999999) }}",
    ],
)
def test_what_takes_too_long_is_stopped_also_inside_c(make, source):
    renderer = make(source)
    began = time.monotonic()
    with pytest.raises(ModelError, match="too long") as caught:
        renderer.render(CHAT, {})
    assert caught.value.field == "messages"
    assert time.monotonic() - began < 30


def test_other_renders_go_on_after_one_was_stopped(make):
    renderer = make(
        "{% for i in range(messages[0].content|int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}ok"
    )
    with pytest.raises(ModelError, match="too long"):
        renderer.render([{"role": "user", "content": "99999"}], {})
    assert renderer.render([{"role": "user", "content": "1"}], {}) == "ok"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 9999999 ** 99999999 }}"])  # the second is computed by the compiler
def test_a_template_that_cannot_be_compiled_is_tried_once(make, monkeypatch, source):
    renderer = make(source)
    with pytest.raises(ModelError, match=r"no Jinja|too long") as first:
        renderer.start()
    monkeypatch.setattr(sys, "executable", "/no/such/file")
    with pytest.raises(ModelError) as second:
        renderer.render(CHAT, {})
    assert first.value.message == second.value.message


def test_a_process_that_someone_killed_is_replaced(make):
    renderer = make(ECHO)
    renderer.start()
    for _ in range(2):
        process = renderer._worker._process
        process.kill()
        process.wait()
        assert renderer.render(CHAT, {}) == "user:hello;"


@pytest.mark.parametrize("num_bytes", [1, 2**20], ids=["reading hangs", "writing hangs"])
def test_a_process_that_is_stuck_is_replaced(num_bytes):
    """F1: it uses no processor time, so no limit of that ends it."""
    renderer = ChatRenderer(ECHO, {}, max_seconds=3.0)
    renderer.start()
    process = renderer._worker._process
    process.send_signal(signal.SIGSTOP)
    text = "x" * num_bytes
    assert renderer.render([{"role": "user", "content": text}], {}) == f"user:{text};"
    assert process.wait() == -signal.SIGKILL
    renderer.close()


def test_no_process_at_all(make, monkeypatch):
    renderer = make(ECHO)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(InternalError, match="status 1"):
        renderer.render(CHAT, {})
    monkeypatch.setattr(sys, "executable", "/no/such/file")
    with pytest.raises(InternalError, match="No such file"):
        renderer.render(CHAT, {})
    monkeypatch.undo()
    assert renderer.render(CHAT, {}) == "user:hello;"


def test_many_threads(make):
    renderer = make(ECHO)
    with ThreadPoolExecutor(8) as pool:
        chats = [[{"role": "user", "content": f"{i}" * (1 + i * 300)}] for i in range(200)]
        for chat, text in zip(chats, pool.map(lambda chat: renderer.render(chat, {}), chats), strict=True):
            assert text == f"user:{chat[0]['content']};"


def test_a_large_chat(make):
    text = "日本語 text " * 400_000
    assert make(ECHO).render([{"role": "user", "content": text}], {}) == f"user:{text};"


def test_closing_ends_the_process(make):
    renderer = make(ECHO)
    renderer.start()
    process = renderer._worker._process
    renderer.close()
    renderer.close()
    assert process.returncode == 0
    assert renderer.render(CHAT, {}) == "user:hello;"


def test_dropping_the_renderer_ends_the_process():
    renderer = ChatRenderer(ECHO, {})
    renderer.start()
    process = renderer._worker._process
    del renderer
    assert process.returncode == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_the_process_ends_with_its_parent(end):
    """However that happens (F19), also in the middle of an endless render."""
    code = (
        "import sys, threading, time\n"
        "from pagewire.text.chat_renderer import ChatRenderer\n"
        "r = ChatRenderer('{% for i in range(messages[0].content|int) %}{% for j in range(99999) %}{% endfor %}{% endfor %}', {})\n"
        "r.start()\n"
        "print(r._worker._process.pid, flush=True)\n"
        "threading.Thread(target=r.render, args=([{'role': 'user', 'content': '99999'}], {}), daemon=True).start()\n"
        "time.sleep(0.3 if sys.argv[1] == 'None' else 60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(end)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with parent:
        child = int(parent.stdout.readline())
        if end is not None:
            time.sleep(0.2)
            parent.send_signal(end)
        parent.wait(20)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{child}/stat") as stat:
            if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                return  # nobody reaps it here, but it is over
        time.sleep(0.05)
    raise AssertionError


def test_rendering_leaves_the_interpreter_to_others(make):
    renderer = make("{% for i in range(100) %}{% for j in range(9999) %}{% endfor %}{% endfor %}ok")
    renderer.start()
    thread = threading.Thread(target=renderer.render, args=(CHAT, {}))
    ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 10


def test_a_worker_whose_reader_is_gone_ends_without_a_word():
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pagewire.text.template_worker", "1"],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    os.close(reader)
    _, err = process.communicate(b'{"source": "x", "variables": {}}\n', timeout=30)
    assert (process.returncode, err) == (0, b"")
