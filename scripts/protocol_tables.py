"""The tables of `transport/PROTOCOL.md`, from the structs that the codec decodes with.

    python scripts/protocol_tables.py             writes them into the page
    python scripts/protocol_tables.py --check     exit code 1 if the page is not what would be written

In the page, `<!-- table NAME -->` … `<!-- end -->` holds a table: of a message (by its tag), of a map inside one (by its
struct's name), `errors` or `limits`. The script refuses a page that lacks one of the messages. Meanings are the comments
and strings beside the fields in the source.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import protocol_meanings
from protocol_examples import FROM_CLIENT, FROM_SERVER
from protocol_vectors import on_wire

from pagewire_transport import errors, limits, messages, params
from pagewire_transport.codec import encode
from pagewire_transport.limits import FileInfo, Limits
from pagewire_transport.messages import FromClient, FromServer

PAGE = Path(__file__).parent.parent / "transport" / "PROTOCOL.md"
_TABLE = re.compile(r"(<!-- table (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_ERROR = re.compile(r'^[│├└─ ]*\w+ +"(\w+)" +(.+)$', re.MULTILINE)
_NAMES = {int: "int", str: "str", bytes: "bin", bool: "bool", float: "float"}


def _meanings(module: Any) -> dict[tuple[str, str], str]:
    """By (struct, field): the string below a field, or the comment behind it."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    out = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = str(after.value.value)
            else:
                text = (
                    lines[(field.end_lineno or 1) - 1].rpartition("  # ")[2]
                    if "  # " in lines[(field.end_lineno or 1) - 1]
                    else ""
                )
            out[node.name, field.target.id] = " ".join(text.split())
    return out


MEANINGS = {**_meanings(messages), **_meanings(limits), **_meanings(params)}


def _meaning(kind: type[msgspec.Struct], field: str) -> str:
    found = MEANINGS.get((kind.__name__, field)) or protocol_meanings.MEANINGS.get(kind.__name__, {}).get(field)
    if not found:
        raise SystemExit(f"what does {kind.__name__}.{field} mean? Say it beside the field, or in protocol_meanings.py")
    return found.replace("|", "\\|")


def _number(value: float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    for power in (31, 32, 53, 63):
        if value in (2**power, 2**power - 1):
            return f"2^{power}" + (" − 1" if value == 2**power - 1 else "")
    return str(value)


def _limits(metas: list[msgspec.Meta], what: str) -> str:
    parts = []
    for meta in metas:
        low = meta.ge if meta.ge is not None else meta.gt
        if low is not None and (meta.le is not None):
            parts.append(f"{'above ' if meta.gt is not None else ''}{_number(low)} … {_number(meta.le)}")
        if meta.max_length is not None:
            least = f"{meta.min_length} … " if meta.min_length else "≤ "
            parts.append(f"{least}{meta.max_length} {what}")
    return ", ".join(parts)


def _type(hint: Any) -> str:
    """As the page names it, its limits in brackets."""
    metas: list[msgspec.Meta] = []
    while get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        metas = [extra for extra in extras if isinstance(extra, msgspec.Meta)] + metas
    text, counted = _bare(hint)
    limits = _limits(metas, counted)
    return f"{text} ({limits})" if limits else text


def _bare(hint: Any) -> tuple[str, str]:
    """The type, and what its length counts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join("nil" if arm is NoneType else _type(arm) for arm in arguments), ""
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments), ""
    if origin is tuple:
        return f"array of {_type(arguments[0])}", "items"
    if origin is dict:
        return f"map of {_type(arguments[0])} to {_type(arguments[1])}", "entries"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"map [{hint.__name__}](#{hint.__name__.lower()})", ""
    return _NAMES[hint], {str: "characters", bytes: "bytes"}.get(hint, "")


def _default(field: Any) -> str:
    if field.required:
        return "**required**"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None:
        return "nil"
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    if isinstance(value, bytes):
        return "empty"
    return json.dumps(value)


def table_of(kind: type[msgspec.Struct]) -> str:
    """Fields of a message or map."""
    fields = msgspec.structs.fields(kind)
    hints = get_type_hints(kind, include_extras=True)
    if not fields:
        return "No fields.\n"
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        kind_of, default = _type(hints[field.name]), _default(field)
        rows.append(f"| `{field.encode_name}` | {kind_of} | {default} | {_meaning(kind, field.name)} |")
    return "\n".join(rows) + "\n"


def _errors() -> str:
    rows = ["| code | when |", "|---|---|"]
    found = dict(_ERROR.findall(inspect.getdoc(errors) or ""))
    missing = set(errors.BY_CODE) - set(found) - {"error"}
    if missing:
        raise SystemExit(f"the tree in errors.py does not draw {', '.join(sorted(missing))}")
    rows += [f"| `{code}` | {meaning} |" for code, meaning in found.items()]
    return "\n".join(rows) + "\n"


_EXAMPLES = (
    ("client", FROM_CLIENT["hello"]),
    ("server", FROM_SERVER["welcome"]),
    ("client", FROM_CLIENT["generate, text"]),
    ("server", FROM_SERVER["accepted, resumable"]),
    ("server", FROM_SERVER["tokens, one each"]),
    ("server", FROM_SERVER["tokens, runs of several choices"]),
    ("client", FROM_CLIENT["cancel"]),
    ("server", FROM_SERVER["finished, cancelled"]),
    ("server", FROM_SERVER["done"]),
    ("server", FROM_SERVER["error, of a stream"]),
)


def _examples() -> str:
    """Frames in hex, 32 bytes a line, under what they hold."""
    lines = ["```"]
    for sender, message in _EXAMPLES:
        held = json.dumps(on_wire(message), ensure_ascii=False)
        lines.append(f"{'client ─▶' if sender == 'client' else '◀─ server'}  {held}")
        frame = encode(message)
        lines += [f"    {frame[at : at + 32].hex(' ')}" for at in range(0, len(frame), 32)]
    return "\n".join([*lines, "```"]) + "\n"


def tables() -> dict[str, str]:
    """Every table that the page may hold."""
    kinds = (*get_args(FromClient), *get_args(FromServer))
    inner = (messages.ChatMessage, messages.Replay, messages.LogprobColumns, messages.Usage, messages.Timings)
    inner += (FileInfo, Limits, params.SamplingParams)
    return {
        **{str(kind.__struct_config__.tag): table_of(kind) for kind in kinds},
        **{kind.__name__: table_of(kind) for kind in inner},
        "errors": _errors(),
        "examples": _examples(),
    }


def page(text: str) -> str:
    """`text` with its tables as they should be."""
    made = tables()
    named = [match[1] for match in _TABLE.finditer(text) for match in [(match[0], match[2])]]
    if sorted(named) != sorted(made):
        raise SystemExit(f"PROTOCOL.md must have each table once; differs: {sorted(set(named) ^ set(made))}")
    return _TABLE.sub(lambda match: match[1] + "\n" + made[match[2]] + "\n" + match[4], text)


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    is_check = parser.parse_args().check
    text = PAGE.read_text()
    wanted = page(text)
    if text == wanted:
        return 0
    if is_check:
        print("transport/PROTOCOL.md is out of date: run scripts/protocol_tables.py")
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
