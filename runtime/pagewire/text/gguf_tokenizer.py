"""A tokenizer from the metadata of a GGUF file (`tokenizer.ggml.*`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pagewire.errors import ModelError
from pagewire.text.chat_renderer import ChatRenderer
from pagewire.text.text_model import TextModel
from pagewire_client.text.byte_table import byte_table

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merges apply.

    Attributes:
        pattern: regular expression of the pieces; None: GPT-2's.
        whole_words: a piece that is a token needs no merges, as in the vocabularies made by tiktoken.
        add_bos: what holds where the file does not say.
        nfc: text is normalised to NFC first.
    """

    pattern: str | None = None
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)
_QWEN2 = PreTokenizer(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    nfc=True,
)
_TEKKEN = PreTokenizer(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_words=True,
    add_bos=True,
)
_GPT2 = PreTokenizer()

# By tokenizer.ggml.pre. `smollm`: transformers reads these files with GPT-2's pattern and is what our tokens are
# compared with; llama.cpp cuts digits off first, which gives other ids only where several spaces precede a digit.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def text_model_from_gguf(metadata: Mapping[str, Any], path: str) -> TextModel:
    """The text side of a GGUF file, from its metadata.

    Args:
        metadata: of the header.
        path: named in errors.

    Raises:
        ModelError: a key is missing or wrong, or the tokenizer's kind is not supported (the supported ones are named).
    """
    header = _Header(metadata, path)
    kind = header.need("tokenizer.ggml.model", str)
    tokens = header.strings("tokenizer.ggml.tokens")
    if kind == "gpt2":
        pre = _pre_tokenizer(header)
        tokenizer, add_bos = _byte_level(header, tokens, pre), pre.add_bos
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(header, tokens), True
    else:
        raise ModelError(f"{path} has a tokenizer of kind {kind!r}; supported are gpt2 and llama")

    names = {name: header.token_id(f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in _NAMED.items()}
    _add_tokens(header, tokenizer, tokens, {i for i in names.values() if i is not None})
    bos, eos = names["bos_token"], names["eos_token"]
    if bos is None or not header.get("tokenizer.ggml.add_bos_token", bool, default=add_bos):
        prefix: tuple[int, ...] = ()
    else:
        prefix = (bos,)
    suffix = (eos,) if eos is not None and header.get("tokenizer.ggml.add_eos_token", bool, default=False) else ()
    template = header.get("tokenizer.chat_template", str, default="")
    variables = {name: tokens[i] for name, i in names.items() if i is not None and name.endswith("_token")}
    return TextModel(
        tokenizer=tokenizer,
        byte_table=byte_table(tokenizer, size=len(tokens)),
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_id=bos,
        eos_ids=tuple(sorted({i for name in _ENDS if (i := names[name]) is not None} | _ends_by_text(header, tokens))),
        chat_renderer=ChatRenderer(template, variables) if template else None,
    )


# Special tokens by the name that chat templates know (or, for the last two, that only the end of a turn needs).
_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "end_of_turn": "eot",
    "end_of_message": "eom",
}
_ENDS = ("eos_token", "end_of_turn", "end_of_message")

# Many files name one end only, and leave out the one that ends a turn (Gemma's `<end_of_turn>`): a chat would go on
# for ever. llama.cpp knows these by their text, too.
_ENDS_BY_TEXT = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"})


def _ends_by_text(header: _Header, tokens: list[str]) -> set[int]:
    """Ids of tokens that end a turn by what they are called; as ordinary text, such a token would be no mark."""
    types = header.numbers("tokenizer.ggml.token_type", len(tokens))
    return {i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED) and tokens[i] in _ENDS_BY_TEXT}


class _Header:
    """Typed access to the metadata."""

    def __init__(self, metadata: Mapping[str, Any], path: str) -> None:
        self._metadata = metadata
        self.path = path

    def get(self, key: str, kind: type[T], *, default: T) -> T:
        value = self._metadata.get(key, default)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: {key} must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        if key not in self._metadata:
            raise ModelError(f"{self.path} has no {key}, so its tokenizer cannot be rebuilt; use another GGUF file")
        return self.get(key, kind, default=kind())

    def strings(self, key: str) -> list[str]:
        values = self.need(key, list)
        if not values or not all(type(value) is str for value in values):
            raise ModelError(f"{self.path}: {key} must be strings, at least one")
        return values

    def numbers(self, key: str, length: int) -> list[Any]:
        """A column beside the tokens; zeros where the file has none."""
        values = self.get(key, list, default=[])
        if not values:
            return [0] * length
        if len(values) != length or type(values[0]) not in (int, float):
            raise ModelError(f"{self.path}: {key} must be {length} numbers, one a token")
        return values

    def token_id(self, key: str, length: int) -> int | None:
        value = self.get(key, int, default=-1)
        # Converters write 2³² − 1 for "none".
        if value in (-1, 2**32 - 1):
            return None
        if not 0 <= value < length:
            raise ModelError(f"{self.path}: {key} is {value}, but there are {length} tokens")
        return value


def _pre_tokenizer(header: _Header) -> PreTokenizer:
    name = header.get("tokenizer.ggml.pre", str, default="default")
    if name not in PRE_TOKENIZERS:
        supported = ", ".join(PRE_TOKENIZERS)
        raise ModelError(f"{header.path} names the pre-tokenizer {name!r}; supported are {supported}")
    return PRE_TOKENIZERS[name]


def _byte_level(header: _Header, tokens: list[str], pre: PreTokenizer) -> Tokenizer:
    """BPE over bytes, spelt in GPT-2's alphabet."""
    merges = [tuple(merge.split(" ")) for merge in header.strings("tokenizer.ggml.merges")]
    if not all(len(merge) == 2 for merge in merges):
        raise ModelError(f"{header.path}: tokenizer.ggml.merges must be pairs of tokens with one space between")
    tokenizer = _bpe(header, tokens, merges, ignore_merges=pre.whole_words)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if pre.pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: _Header, tokens: list[str]) -> Tokenizer:
    """BPE over characters with ▁ for the space; what is in no token falls back to bytes.

    SentencePiece joins the pair whose result scores best, which is the same as merges in the order of the scores.
    """
    scores = header.numbers("tokenizer.ggml.scores", len(tokens))
    unknown = header.token_id("tokenizer.ggml.unknown_token_id", len(tokens))
    tokenizer = _bpe(
        header,
        tokens,
        merges_by_score(tokens, scores),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else tokens[unknown],
    )
    spaced = header.get("tokenizer.ggml.add_space_prefix", bool, default=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first" if spaced else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaced:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best score of the result first, then the longer left part.

    Ties beyond that go by the result's id, then by the parts' ids, as in `transformers`.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    found = [
        (-scores[i], -cut, -(len(token) - cut), i, ids[token[:cut]], ids[token[cut:]])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    found.sort()
    return [(tokens[left], tokens[right]) for *_, left, right in found]


def _bpe(header: _Header, tokens: list[str], merges: list[Any], **options: Any) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # noqa: BLE001  (the package raises bare Exception)
        raise ModelError(f"{header.path}: the tokenizer cannot be rebuilt: {error}") from None


def _add_tokens(header: _Header, tokenizer: Tokenizer, tokens: list[str], named: set[int]) -> None:
    """Tokens that are found in text as wholes, by token_type: control tokens are special, user-defined ones are not."""
    types = header.numbers("tokenizer.ggml.token_type", len(tokens))
    special = [i for i, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN) or i in named]
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False, special=True) for i in special if tokens[i]])
    plain = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and i not in named]
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=False) for i in plain if tokens[i]])
