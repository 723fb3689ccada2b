"""A tokenizer from a folder in Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pagewire.errors import ModelError
from pagewire.text.chat_renderer import ChatRenderer
from pagewire.text.text_model import TextModel
from pagewire_client.text.byte_table import byte_table

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json")


def text_model_from_folder(folder: Path) -> TextModel:
    """The text side of a model folder.

    Reads `tokenizer.json` (required), `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`,
    `generation_config.json` and `config.json`. EOS ids are all that the tokenizer and the generation configuration
    name; `config.json` counts where there is no generation configuration.

    Raises:
        ModelError: a file is missing or malformed; it is named.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    names = _special_names({**_read_json(folder / "special_tokens_map.json"), **config})
    # Named tokens are matched whole and left out of text, even where tokenizer.json has them as plain vocabulary.
    known = [text for text in names.values() if tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in known])

    bos = tokenizer.token_to_id(names["bos_token"]) if "bos_token" in names else None
    eos = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
    prefix, suffix = _frame(tokenizer)
    generation = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    eos_ids = _ids(generation.get("eos_token_id"), folder) | ({eos} if eos is not None else set())
    template = _chat_template(folder, config)
    return TextModel(
        tokenizer=tokenizer,
        byte_table=byte_table(tokenizer),
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_id=bos if bos is not None else min(_ids(generation.get("bos_token_id"), folder), default=None),
        eos_ids=tuple(sorted(eos_ids)),
        chat_renderer=ChatRenderer(template, names) if template else None,
    )


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        # SentencePiece's own format would need its package, and rules of each model that stand in no file.
        beside = next((name for name in _OTHER_FORMATS if (path.parent / name).is_file()), "")
        only = f", only {beside}, which is not read" if beside else ""
        raise ModelError(
            f"{path.parent} has no tokenizer.json{only}; `transformers` makes one:"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  (the package raises bare Exception)
        raise ModelError(f"{path} is no readable tokenizer: {error}") from None
    # Some files carry the settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is no JSON object")
    return value


def _special_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by name; each is written as a string or as an object with `content`."""
    names = {}
    for name in _NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            names[name] = text
    return names


def _frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What goes before and after a prompt: asked by encoding a text with special tokens and without.

    The post-processor of tokenizer.json decides; `add_bos_token` in tokenizer_config.json is for tokenizers without
    that file, and `transformers` ignores it beside one as well.
    """
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _ids(value: object, folder: Path) -> set[int]:
    """Ids given as one number, several or none."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in values):
        raise ModelError(f"{folder}: bos_token_id and eos_token_id must be token ids, not {value!r}")
    return set(values)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """Source of the template: its own file first (`.jinja`, last the older `.json`); of several named ones `default`, or the only one."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if value is None or isinstance(value, str):
        return value or ""
    try:
        named = {entry["name"]: entry["template"] for entry in value}
        chosen = named["default"] if "default" in named or len(named) != 1 else next(iter(named.values()))
    except (KeyError, TypeError):
        chosen = None
    if not isinstance(chosen, str):
        raise ModelError(f"{folder}: chat_template must be a string, or named templates with one called default")
    return chosen
