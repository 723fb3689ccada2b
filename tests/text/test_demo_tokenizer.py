"""The demo model's token ids equal those of `transformers` on the same file, and decode to the same text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidRequest, PromptTooLong
from pagewire_client.text.text_stream import TextStream

pytestmark = pytest.mark.model

CORPUS = [
    "",
    " ",
    "    ",
    "\t\t\n\n \r\n  x",
    "Once upon a time, in 1999, there were 3.14159 pies; 100000 of them!",
    "a  1 b   22 c\n 333",
    "naïve café — “quotes” … ½ ² Ⅷ ①",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "日本語のテキスト 中文字符 한국어 文字",
    "العربية مع تشكيل: مُحَمَّد ١٢٣",
    "हिन्दी देवनागरी १२३",
    "e\u0301 é \u200b\ufeff\u00a0\u2028",
    "\x00\x01\x02\x7f\x1b[31m",
    "def f(x):\n    return {k: v for k, v in x.items()}  # 'it''s'\n\n\tpass\n",
    "I'm you're they'll we've he'd it's CAN'T",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    " <|im_end|> <|im_end|><|im_end|>x",
    "<|im_start <|im_end| <jupyter_code>x<file_sep>",
    "https://example.com/a?b=c&d=%20#e",
    "x" * 3000,
    " " * 3000,
    "ab " * 2000,
    "\U00010000\ud7ff\ue000\ufffd",
]


@pytest.mark.parametrize("text", CORPUS, ids=range(len(CORPUS)))
def test_corpus(text, demo, demo_reference):
    ids = demo.encode(text)
    assert ids == demo_reference.encode(text)
    assert demo.decode(ids, skip_special=False) == text
    assert demo.decode(ids) == demo_reference.decode(ids, skip_special_tokens=True)


MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # bytes


def covered(text):
    """The vocabulary lacks a few bytes (control characters, planes that Unicode leaves empty); like the original it drops them."""
    return not MISSING & set(text.encode())


SPECIAL = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_"])
NASTY = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.text(" \t\n\r0123456789'sStTlLvVeE", max_size=12),
        st.characters(categories=["Nd", "No", "Nl", "Mn", "So", "Cf", "Zs", "Sk"]),
        SPECIAL,
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(text=NASTY, sizes=st.lists(st.integers(0, 4), max_size=20))
def test_any_text(demo, demo_reference, text, sizes):
    ids = demo.encode(text)
    assert ids == demo_reference.encode(text)
    assert demo.decode(ids, skip_special=False) == (text if covered(text) else demo_reference.decode(ids))
    stream, shown = TextStream(demo.byte_table), ""
    rest = ids
    for size in sizes:
        shown += stream.push(rest[:size]).text
        rest = rest[size:]
    shown += stream.push(rest).text + stream.flush().text
    assert shown == demo_reference.decode(ids, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_any_tokens(demo, demo_reference, ids):
    """Also those that no text has: invalid UTF-8 is replaced alike."""
    assert demo.decode(ids) == demo_reference.decode(ids, skip_special_tokens=True)


def test_every_token_alone(demo, demo_reference):
    for i in range(demo.vocab_size):
        assert demo.decode([i], skip_special=False) == demo_reference.decode([i])


def test_what_the_file_says(demo):
    assert demo.vocab_size == 49152
    assert (demo.bos_id, demo.eos_ids, demo.add_bos) == (1, (2,), False)
    assert demo.byte_table.special == frozenset(range(17))
    assert "<|im_start|>" in demo.chat_template


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\udc80" * 3])
def test_lone_surrogates_are_refused_by_field(demo, text):
    with pytest.raises(InvalidRequest) as caught:
        demo.encode(text)
    assert caught.value.field == "prompt"


def test_encoding_leaves_the_interpreter_to_others(demo):
    """F27: a long prompt in one thread does not stop another (such as an event loop) for the whole encode."""
    import threading
    import time

    text = " ".join(f"word{i * 7919 % 100003}" for i in range(60_000))
    thread = threading.Thread(target=demo.encode, args=(text,))
    ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 10  # one or two where the lock is held throughout


def test_a_text_far_too_long_is_refused_unread(demo):
    longest = demo.byte_table.longest
    assert max(len(demo.encode(text, max_tokens=10**6)) for text in CORPUS) > 1
    fitting = " " * (3 * longest)
    assert demo.encode(fitting, max_tokens=3) == demo.encode(fitting)
    with pytest.raises(PromptTooLong) as caught:
        demo.encode(fitting + " ", max_tokens=3)
    assert caught.value.field == "prompt"
    with pytest.raises(PromptTooLong) as caught:
        demo.encode_chat([{"role": "user", "content": "x" * 2**20}], max_tokens=100)
    assert caught.value.field == "messages"


@given(text=st.text(min_size=1), max_tokens=st.integers(1, 20))
def test_no_text_that_fits_is_refused(demo, text, max_tokens):
    if covered(text) and len(demo.encode(text)) <= max_tokens:
        demo.encode(text, max_tokens=max_tokens)
