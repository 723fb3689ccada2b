"""Text as one model knows it: its tokenizer, its special ids and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from pagewire.errors import InvalidRequest, PromptTooLong, UnsupportedFeature
from pagewire.text.chat_renderer import ChatRenderer
from pagewire.text.panics import panics_as
from pagewire_client.text.byte_table import ByteTable
from pagewire_transport.messages import ChatMessage

Message = ChatMessage | Mapping[str, object]


@dataclass(frozen=True, slots=True, eq=False)
class TextModel:
    """Read-only, shared by all threads of a process. Made by `load_text_model`.

    Attributes:
        tokenizer: the Rust tokenizer; it never truncates, pads or adds special tokens here.
        byte_table: for `Detokeniser` and `TextStream`.
        prefix_ids: what a prompt starts with (BOS, mostly), unless it already does.
        suffix_ids: what a prompt ends with; empty for almost every model that generates.
        bos_id: the model's BOS, whether or not it is added.
        eos_ids: ids that end a continuation, ascending, may be empty.
        chat_renderer: None where the model has no chat template.
    """

    tokenizer: Tokenizer
    byte_table: ByteTable
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_renderer: ChatRenderer | None

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token; a model's logits may be padded beyond."""
        return len(self.byte_table)

    @property
    def add_bos(self) -> bool:
        """A plain prompt is given a BOS in front."""
        return self.bos_id is not None and self.bos_id in self.prefix_ids

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template."""
        return self.chat_renderer.source if self.chat_renderer else None

    def encode(
        self, text: str, *, add_special: bool = True, max_tokens: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """Token ids of `text`. Special tokens written in the text are taken as such.

        With `add_special`, BOS goes in front unless the text begins with it already, so there are never two; the empty
        text then is [BOS] if the model adds one, else []. Thread-safe; the interpreter lock is released meanwhile, so
        that other threads, and an event loop among them, keep running (F27). Costs about 2 µs a token.

        A text that cannot have as few as `max_tokens` tokens, given the longest token there is, is refused unread:
        encoding takes some 250 bytes of memory a token, so 16 MiB of text would take 2 GiB and 20 s (F50). A result
        longer than `max_tokens` is still possible, and whoever knows the exact limit judges it.

        Raises:
            InvalidRequest: the text has a lone surrogate, so it is no Unicode text; `field` is named.
            PromptTooLong: longer than `max_tokens` tokens can be; `field` is named.
        """
        if max_tokens is not None:
            self.refuse_too_long(len(text), max_tokens, field)
        try:
            # `encode` holds the interpreter lock throughout (0.4 s for 130,000 tokens); the batch call does not.
            with panics_as(RuntimeError):
                ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError):
            raise InvalidRequest("must be text in Unicode without lone surrogates", field=field) from None
        if not add_special:
            return ids
        prefix, suffix = list(self.prefix_ids), list(self.suffix_ids)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        return ids + suffix

    def refuse_too_long(self, num_chars: int, max_tokens: int, field: str) -> None:
        """Raises `PromptTooLong` for a text that has more characters than `max_tokens` of the longest tokens."""
        if num_chars > max_tokens * self.byte_table.longest:
            raise PromptTooLong(
                f"has {num_chars} characters, which cannot be {max_tokens} tokens or fewer", field=field
            )

    def encode_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Token ids of a rendered chat. The template writes BOS itself where the model wants one: none is added.

        Raises as `render_chat` and `encode` do.
        """
        text = self.render_chat(messages, template_kwargs, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special=False, max_tokens=max_tokens, field="messages")

    def render_chat(
        self,
        messages: Sequence[Message],
        template_kwargs: Mapping[str, object] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The chat as the model was trained to read it. Blocks for a fraction of a millisecond: call it off the loop.

        Args:
            messages: with `role` and `content`, mappings also with whatever else the template reads.
            template_kwargs: variables of the template beside `messages`; may override `add_generation_prompt`.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            UnsupportedFeature: the model has no chat template.
            InvalidRequest: no messages, or the template refuses them; its own words are in the message.
            ModelError: the template is broken, needs what is not there, or exceeds its limits.
        """
        if self.chat_renderer is None:
            raise UnsupportedFeature("this model has no chat template; send `prompt` instead", field="messages")
        variables = {"add_generation_prompt": add_generation_prompt, **(template_kwargs or {})}
        return self.chat_renderer.render(messages, variables)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids` as a whole."""
        return self.byte_table.decode(token_ids, skip_special=skip_special)
