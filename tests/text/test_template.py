"""Chat templates render as in `transformers`; those that fail say why, by field (F45), and none gets out (F51)."""

import json
import re

import pytest

from pagewire.errors import InvalidRequest, ModelError
from pagewire.text import template as template_module
from pagewire.text.template import ChatTemplate

LLAMA3 = (
    "{{- bos_token }}\n{%- for message in messages %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n"
    "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
QWEN = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, users=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endif %}
    {%- if message.role == 'system' and loop.first %}{% continue %}{% endif %}
    {% generation %}{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}{% endgeneration %}
{%- endfor %}
{{ ns.users }} {{ messages | map(attribute='role') | unique | list | tojson }}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token}}
    {% else %}
        {{ raise_exception('Only user and assistant roles are supported!') }}
    {% endif %}
{% endfor %}"""
TOOLS = """{%- macro show(x) %}[{{ x | tojson(indent=2) }}]{%- endmacro %}
{%- set d = dict(a=1, b=messages[0].content) %}
{%- for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}
{%- for m in messages if m.role != 'system' %}{{ show(m) }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}
{%- if tools %}T{% else %}none{% endif %}{{ missing }}{{ '<>&"' | tojson }}{{ range(3) | join(',') }}
{{ strftime_now('%Y')[:2] }}{{ messages[-1]['content'].split(' ')[0].upper().strip() }}{{ 'x' * 3 }}{{ -7 % 3 }}"""

CHATS = [
    [{"role": "user", "content": "Hi there"}],
    [{"role": "system", "content": "Be <brief> & 'kind'\n"}, {"role": "user", "content": "  naïve 日本 👩‍👩‍👧  "}],
    [
        {"role": "user", "content": "a {{ b }} {% c %}"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "</s>\n\n"},
    ],
    [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}],
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def theirs(source, variables):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = variables.pop("messages")
    rendered, _ = render_jinja_template(conversations=[messages], chat_template=source, **NAMES, **variables)
    return rendered[0]


@pytest.mark.parametrize("source", [LLAMA3, QWEN, MISTRAL, TOOLS], ids=["llama3", "qwen", "mistral", "tools"])
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("extra", [{"add_generation_prompt": True}, {"enable_thinking": False}])
def test_renders_as_transformers(source, chat, extra):
    variables = {"messages": CHATS[chat], "add_generation_prompt": False, **extra}
    ours = ChatTemplate(source, NAMES)
    try:
        expected = theirs(source, dict(variables))
    except Exception as error:
        expected = f"messages: the chat template refuses: {error}"
        with pytest.raises(InvalidRequest, match=re.escape(expected)):
            ours.render(variables)
        assert source is MISTRAL
    else:
        assert ours.render(variables) == expected


def render(source, **variables):
    return ChatTemplate(source, NAMES).render({"messages": CHATS[0], **variables})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ no_such_function('x') }}", "'no_such_function' is undefined"),
        ("{{ messages[0].tool_calls[0] }}", "has no attribute 'tool_calls'"),
        ("{{ 1 + messages[0].content }}", "TypeError: unsupported operand"),
        ("{{ messages[0]['content'].index('zzz') }}", "ValueError: substring not found"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(200000) %}x{% endfor %}", "Range too big"),
        ("{% include 'other' %}", "TypeError: no loader"),
    ],
)
def test_what_fails_says_why(source, says):
    with pytest.raises(ModelError, match=says) as caught:
        render(source)
    assert caught.value.field == "messages"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% if %}", r"no Jinja: .* \(line 1\)"),
        ("\n\n{{ 'x' | no_such_filter }}", r"No filter named 'no_such_filter'.* \(line 3\)"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("x" * (template_module.MAX_TEMPLATE_CHARS + 1), "longer than"),
    ],
)
def test_what_is_no_template(source, says):
    with pytest.raises(ModelError, match=says) as caught:
        ChatTemplate(source, NAMES)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['__class__'].x }}{{ messages['__class__'] }}{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list | first }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ joiner.__init__ }}",
        "{{ self.__init__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ range.__self__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ ('%s' | format('x')).__class__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].pop('role') }}",
        "{{ messages.clear() }}",
    ],
)
def test_nothing_gets_out(source):
    """Refused, or nothing there: never an object of Python's own."""
    try:
        text = render(source)
    except ModelError as error:
        assert "not allowed" in error.message or "undefined" in error.message or "attribute" in error.message  # noqa: PT017
    else:
        assert text == ""
    assert CHATS[0] == [{"role": "user", "content": "Hi there"}]


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(template_module, "MAX_OUTPUT_CHARS", 1000)
    assert len(render("{% for i in range(100) %}0123456789{% endfor %}")) == 1000
    with pytest.raises(ModelError, match="more than 1000 characters"):
        render("{% for i in range(101) %}0123456789{% endfor %}")


def test_tojson_leaves_markup_alone():
    assert render("{{ messages | tojson }}") == json.dumps(CHATS[0])
    assert render("{{ '<é>' | tojson }}") == '"<é>"'


@pytest.mark.model
def test_the_demo_models_template(demo, demo_reference):
    for chat in CHATS:
        for prompt in (True, False):
            expected = demo_reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert demo.render_chat(chat, add_generation_prompt=prompt) == expected
            ids = demo_reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert demo.encode_chat(chat, add_generation_prompt=prompt) == ids
