"""Configuration from keyword options: `Engine(model, max_rows=8, device="cpu")` instead of nested sections."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import msgspec

from pagewire.config import Config, check_together, from_mapping
from pagewire.errors import ConfigError


def _sections() -> dict[str, str]:
    """Option → its section. Names are unique over all sections, so that options need no prefix."""
    out: dict[str, str] = {}
    for section in msgspec.structs.fields(Config):
        for option in msgspec.structs.fields(section.type):
            assert option.name not in out, f"{option.name} stands in two sections"
            out[option.name] = section.name
    return out


SECTION_OF = _sections()


def config_of(
    model: str | Path | None, config: Config | None, options: dict[str, Any], *, needs_model: bool = True
) -> Config:
    """The configuration that a model, a base and single options make together; options win.

    Raises:
        ConfigError: an unknown option, a bad value, or no model; `field` names it.
    """
    values: dict[str, Any] = msgspec.to_builtins(config if config is not None else Config())
    if model is not None:
        if "path" in options:
            raise ConfigError("the model is named twice: as the first argument and as `path`", field="model.path")
        options = {**options, "path": str(model)}
    for name, value in options.items():
        section = SECTION_OF.get(name)
        if section is None:
            near = difflib.get_close_matches(name, SECTION_OF, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown option{hint}", field=name)
        values[section][name] = str(value) if isinstance(value, Path) else value
    made = from_mapping(values)
    check_together(made)
    if needs_model and not made.model.path:
        raise ConfigError("which model? Give a GGUF file or a folder in Hugging Face layout", field="model.path")
    return made
