"""Command-line flags generated from frozen structs: the configuration of a server, the parameters of a request.

One field, one flag: `max_rows` is `--max-rows`, a switch is `--overlap` / `--no-overlap`, a tuple repeats its flag, and
what counts bytes (`…_bytes`) also takes `2GiB`. A field may name further flags that other programs have taught people.
Only flags that were given appear in the result, so that they override a file and defaults stand in one place.
Limits are not repeated here: the structs are the one place that checks values.
"""

from __future__ import annotations

import argparse
import inspect
import tomllib
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pagewire.config import Config, check_together, from_mapping
from pagewire.errors import ConfigError
from pagewire.sizes import parse_size, size_text

_METAVARS: dict[Callable[[str], Any], str] = {int: "N", float: "X", str: "TEXT"}


def flag_name(field: str) -> str:
    """`max_rows` → `--max-rows`."""
    return "--" + field.replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser, *, skip: Collection[str] = ()) -> None:
    """Every field of every section of `Config` but those in `skip` (sections, or `section.field`), by section; `--config FILE`."""
    parser.add_argument("--config", metavar="FILE.toml", type=Path, help="settings by section; flags override them")
    for section, kind in get_type_hints(Config).items():
        if section in skip:
            continue
        group = parser.add_argument_group(section, inspect.getdoc(kind))
        add_struct_flags(
            group,
            kind,
            prefix=section,
            skip=[name.partition(".")[2] for name in skip if name.startswith(f"{section}.")],
        )


def add_struct_flags(
    group: argparse._ArgumentGroup,
    kind: type[msgspec.Struct],
    *,
    prefix: str,
    helps: Mapping[str, str] = types.MappingProxyType({}),
    defaults: Mapping[str, object] = types.MappingProxyType({}),
    skip: Collection[str] = (),
) -> None:
    """A flag for each field of `kind` but those in `skip`; parsed values land in the namespace as `prefix.field`.

    `helps` has help texts by field, where the types carry none or another one is true here; `defaults` those that a
    command sets by itself, as they are shown.
    """
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        if field.name in skip:
            continue
        description, options = _options(hints[field.name])
        description = helps.get(field.name, description)
        is_size = field.name.endswith("_bytes")
        if is_size:
            options = {"type": _size, "metavar": "SIZE"}
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        default = defaults.get(field.name, default)
        if default not in ("", (), {}, None) and options.get("action") != "append":
            description = f"{description} (default: {_shown(default, is_size=is_size)})".strip()
        group.add_argument(
            flag_name(field.name),
            *_other_flags(hints[field.name]),
            dest=f"{prefix}.{field.name}",
            default=argparse.SUPPRESS,
            help=description.replace("%", "%%"),
            **options,
        )


def values_of(namespace: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The given flags of one struct, by field name."""
    lead = prefix + "."
    return {name.removeprefix(lead): value for name, value in vars(namespace).items() if name.startswith(lead)}


def config_from(namespace: argparse.Namespace) -> Config:
    """The configuration: defaults, overridden by the file, overridden by flags.

    Raises:
        ConfigError: the file cannot be read or is wrong, and the message begins with its name; or a flag's value is
            wrong, and `field` is the dotted key.
    """
    values = read_config_file(namespace.config) if namespace.config is not None else {}
    try:
        from_mapping(values)
    except ConfigError as error:
        raise ConfigError(f"{namespace.config}: {error}") from None
    for section in get_type_hints(Config):
        given = values_of(namespace, section)
        if given:
            values.setdefault(section, {}).update(given)
    config = from_mapping(values)
    check_together(config)
    return config


def read_config_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None


def _options(hint: Any) -> tuple[str, dict[str, Any]]:
    """Description and argparse options for a field of this type."""
    description = ""
    while get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        description = next((e.description for e in extras if isinstance(e, msgspec.Meta) and e.description), "")
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (arm for arm in get_args(hint) if arm is not types.NoneType)
        deeper, options = _options(inner)
        return description or deeper, options
    if hint is bool:
        return description, {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return description, {"choices": choices, "type": type(choices[0])}
    if get_origin(hint) is tuple:
        _, options = _options(get_args(hint)[0])
        return description, {**options, "action": "append"}
    if get_origin(hint) is dict:
        key, value = (_scalar(arm) for arm in get_args(hint))
        return description, {"action": _PairAction, "type": _pair(key, value), "metavar": "KEY=VALUE"}
    kind = _scalar(hint)
    return description, {"type": kind, "metavar": _METAVARS[kind]}


def _other_flags(hint: Any) -> tuple[str, ...]:
    """Further flags of a field: `Meta(extra={"flags": …})`."""
    for extra in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if isinstance(extra, msgspec.Meta) and extra.extra and "flags" in extra.extra:
            return tuple(extra.extra["flags"])
    return ()


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _scalar(hint: Any) -> Callable[[str], Any]:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    assert hint in _METAVARS, f"no flag for a field of type {hint}"
    return hint  # type: ignore[no-any-return]


def _pair(key: Callable[[str], Any], value: Callable[[str], Any]) -> Callable[[str], tuple[Any, Any]]:
    def parse(text: str) -> tuple[Any, Any]:
        left, sign, right = text.partition("=")
        if not sign:
            raise argparse.ArgumentTypeError(f"{text!r} has no '='")
        return key(left), value(right)

    parse.__name__ = "KEY=VALUE"
    return parse


class _PairAction(argparse.Action):
    """Collects repeated KEY=VALUE into a dict."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        del parser, option
        collected: Mapping[Any, Any] = getattr(namespace, self.dest, {})
        setattr(namespace, self.dest, {**collected, values[0]: values[1]})


def _shown(default: object, *, is_size: bool) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if is_size and isinstance(default, int):
        return size_text(default)
    return str(default)
