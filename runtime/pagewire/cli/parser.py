"""An `ArgumentParser` that complains in one line, and knows which flag was meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn

EXIT_USAGE = 2
_KEY: Final = re.compile(r"-[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{39}")
"""A CURVE key that begins with a minus: 40 characters of Z85."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Examples keep their lines; help texts begin where long flags leave room for them."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=32, **options)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        """Arguments by name, flags as one word: `serve` has some forty, which stand below, in groups."""
        named = [action for action in actions if not action.option_strings]
        rest = "" if len(named) == len(list(actions)) else " [FLAGS]"
        needed = [f" {a.option_strings[0]} {a.metavar}" for a in actions if a.option_strings and a.required]
        text = f"%(prog)s{rest}{''.join(needed)} {_positionals(named)}".rstrip()
        super().add_usage(usage or text, [], groups, prefix)


def _positionals(actions: Iterable[argparse.Action]) -> str:
    words = []
    for action in actions:
        word = str(action.metavar or "{" + "|".join(map(str, action.choices or (action.dest,))) + "}")
        words.append(f"[{word}]" if action.nargs == "?" else f"{word} …" if action.nargs == argparse.PARSER else word)
    return " ".join(words)


class Parser(argparse.ArgumentParser):
    """Flags are given in full: a shortened one would change its meaning when a new flag is added.

    The whole usage with every complaint was rejected: that of `serve` has forty lines, and hides the one that counts.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        epilog = f"examples:\n{examples}" if examples else None
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _Help, "epilog": epilog, **kwargs})

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        see = " See" if message.endswith("?") else "; see"
        self.exit(EXIT_USAGE, f"pagewire: {' '.join(message.split())}{see} `{self.prog} --help`\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Argparse's own complaint lists every command and guesses none."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            near = get_close_matches(str(value), choices, 1)
            known = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(choices)}"
            if action.dest == "command":
                raise argparse.ArgumentError(None, f"there is no command {value!r}{known}")
            raise argparse.ArgumentError(action, f"{value!r} is no value of it{known}")

    def _parse_optional(self, arg_string: str) -> Any:
        """Argparse takes whatever begins with a minus for a flag; one key in 85 does."""
        if _KEY.fullmatch(arg_string) and arg_string.partition("=")[0] not in self._option_string_actions:
            return None
        return super()._parse_optional(arg_string)

    def flag_of(self, dest: str) -> str | None:
        """The flag whose value lands at `dest`."""
        return next((a.option_strings[0] for a in self._actions if a.dest == dest and a.option_strings), None)

    def flags(self) -> list[str]:
        """All flags of this command."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def parse(top: Parser, commands: dict[str, Parser], arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; what is left over is a flag that does not exist, a word too many, or a prompt that begins with '-'."""
    namespace, extra = top.parse_known_args(arguments)
    # `pagewire chat "-5+3"`: no flag has a digit for a name.
    if len(extra) == 1 and extra[0][1:2].isdigit() and getattr(namespace, "prompt", "") is None:
        namespace.prompt = extra.pop()
    if extra:
        _refuse(commands[namespace.command], extra[0], has_prompt=hasattr(namespace, "prompt"))
    return namespace


def _refuse(command: Parser, word: str, *, has_prompt: bool) -> NoReturn:
    flag = word.partition("=")[0]
    if not flag.startswith("-"):
        command.error(f"{word!r} is one word too many; put quotes around a text")
    if flag in command.flags():
        command.error(f"{flag} stands behind '--', where everything is text; flags go before it")
    longer = [known for known in command.flags() if known.startswith(flag)]
    near = longer if len(longer) == 1 else get_close_matches(flag, command.flags(), 1)
    if near:
        command.error(f"there is no flag {flag}; did you mean {near[0]}?")
    hint = f"; a prompt that begins with '-' goes after --: {command.prog} -- '-…'" if has_prompt else ""
    command.error(f"there is no flag {flag}{hint}")
