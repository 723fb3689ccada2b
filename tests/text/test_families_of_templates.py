"""Templates in the style of the model families, rendered by us and by `transformers`: the same text, or both refuse."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import InvalidRequest, ModelError
from pagewire.text.template import ChatTemplate

TEMPLATES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OURS = {name: ChatTemplate(source, SPECIAL) for name, source in TEMPLATES.items()}

CONTENT = st.one_of(
    st.text(max_size=20),
    st.text(" \n\t'\"<>&{}%#ä日", max_size=12),
    st.sampled_from(
        ["<think>\nwhy\n</think>\n\nyes", "<tool_response>1</tool_response>", "{{ 7 * 7 }}", "  trimmed  \n"]
    ),
)


def _turn(role):
    return st.builds(lambda content: {"role": role, "content": content}, CONTENT)


CALL = st.builds(
    lambda name, value: {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"x": value}}}],
    },
    st.sampled_from(["add", "naïve"]),
    st.integers() | st.text(max_size=5) | st.none(),
)
ALTERNATING = st.builds(
    lambda system, pairs, last: [*system, *(turn for pair in pairs for turn in pair), *last],
    st.lists(_turn("system"), max_size=1),
    st.lists(st.tuples(_turn("user"), _turn("assistant")), max_size=3),
    st.lists(_turn("user"), min_size=1, max_size=1),
)
ANYTHING = st.lists(
    st.one_of(*map(_turn, ["system", "user", "assistant", "tool", "developer", "end"]), CALL), min_size=1, max_size=5
)
VARIABLES = st.fixed_dictionaries(
    {"add_generation_prompt": st.booleans()},
    optional={"enable_thinking": st.booleans(), "date_string": st.just("1 Jan 2026")},
)


@pytest.fixture(scope="module")
def theirs():
    """A template rendered by `transformers`; None if it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template

    def render(source, messages, variables):
        try:
            rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **SPECIAL, **variables)
        except Exception:
            return None
        return rendered[0]

    return render


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(messages=ALTERNATING | ANYTHING, variables=VARIABLES)
def test_renders_as_transformers_does(theirs, name, messages, variables):
    try:
        ours = OURS[name].render({"messages": messages, **variables})
    except (InvalidRequest, ModelError):
        ours = None
    assert ours == theirs(TEMPLATES[name], messages, variables)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(messages=ALTERNATING)
def test_a_conversation_that_alternates_is_never_refused(name, messages):
    text = OURS[name].render({"messages": messages, "add_generation_prompt": True})
    assert messages[-1]["content"].strip() in text


def test_a_refusal_is_in_the_words_of_the_template():
    messages = [{"role": "assistant", "content": "x"}]
    for name in ("mistral", "gemma"):
        with pytest.raises(InvalidRequest, match="roles must alternate user/assistant") as caught:
            OURS[name].render({"messages": messages})
        assert caught.value.field == "messages"
