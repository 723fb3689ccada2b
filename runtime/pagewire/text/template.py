"""A chat template: Jinja from a model's files, which are hostile input (F51).

The environment is the one that `transformers` renders with, so that prompts are the ones models were trained on:
sandboxed and immutable, `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, a `tojson`
that does not escape HTML, and `generation` blocks (a mark for training, without effect here).

The sandbox keeps a template from reaching Python's internals. It cannot keep one from burning time or memory: that is
what the process around it is for, see `template_worker`. This module adds the bounds that are cheap to state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pagewire.errors import InvalidRequest, ModelError, PagewireError

MAX_TEMPLATE_CHARS = 2**20
MAX_OUTPUT_CHARS = 2**25


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja.
        variables: what it can read in every chat: `bos_token`, `eos_token`, ….

    Raises:
        ModelError: it is too long or no Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters", field="messages")
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is no Jinja: {error.message} (line {error.lineno})", field="messages"
            ) from None
        except (RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise ModelError(f"the chat template cannot be compiled: {_words(error)}", field="messages") from None
        self._variables = dict(variables)

    def render(self, variables: Mapping[str, Any]) -> str:
        """The chat as text.

        Args:
            variables: plain values; `messages`, `add_generation_prompt` and whatever else the template reads.

        Raises:
            InvalidRequest: the template called `raise_exception`: it refuses these messages, in its own words.
            ModelError: it failed: a function or filter that is not there, an attribute that is not allowed, too much
                output, any other error.
        """
        try:
            return self._joined({**self._variables, **variables})
        except PagewireError:
            raise
        except _RefusalError as error:
            raise InvalidRequest(f"the chat template refuses: {error.message}", field="messages") from None
        except SecurityError as error:
            raise ModelError(f"the chat template does what is not allowed: {error.message}", field="messages") from None
        except MemoryError:
            raise ModelError("the chat template needs too much memory", field="messages") from None
        except Exception as error:  # noqa: BLE001  (template code raises what it likes)
            raise ModelError(f"the chat template fails: {_words(error)}", field="messages") from None

    def _joined(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        room = MAX_OUTPUT_CHARS
        for part in self._template.generate({"tools": None, "documents": None, **variables}):
            room -= len(part)
            if room < 0:
                raise ModelError(f"the chat template writes more than {MAX_OUTPUT_CHARS} characters", field="messages")
            parts.append(part)
        return "".join(parts)


class _RefusalError(TemplateError):
    """What `raise_exception` raises."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own convention)

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Dict:
    """`dict(…)` and nothing else of it: the class itself would lead to Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class _Namespace(Namespace):
    """Jinja's namespace, less names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise _RefusalError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005  (local time, as templates expect)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _words(error: BaseException) -> str:
    """An error in a line, with its kind where its text alone says too little (`KeyError('x')`)."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, TemplateError) else f"{type(error).__name__}: {text}"
