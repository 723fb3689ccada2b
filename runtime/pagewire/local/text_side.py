"""The text of a model in this process: prompts to token ids in a thread, token ids to text on the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from pagewire.config import ModelConfig
from pagewire.errors import InvalidRequest, ModelError, UnsupportedFeature
from pagewire.text.text_model import TextModel
from pagewire.text.tokenizer import load_text_model
from pagewire_client.text.text_stream import TextStream
from pagewire_transport.messages import ChatMessage, Generate
from pagewire_transport.params import SamplingParams


class TextSide:
    """Text where the model has a tokenizer; a clear refusal where it has none (random weights without one)."""

    def __init__(self, model: TextModel | None) -> None:
        self.model = model

    @classmethod
    def load(cls, config: ModelConfig) -> TextSide:
        """Load; blocks.

        Raises:
            ModelError: the model's text cannot be served.
        """
        try:
            model = load_text_model(config.path)
        except ModelError:
            if config.load_format == "dummy":
                return cls(None)
            raise
        return cls(model)

    def close(self) -> None:
        """Release what the chat template holds. Idempotent."""
        if self.model is not None and self.model.chat_renderer is not None:
            self.model.chat_renderer.close()

    async def prompt_ids(self, request: Generate, *, max_tokens: int) -> list[int]:
        """Token ids of a request's text or messages, computed in a thread (F27).

        Args:
            request: with text or messages.
            max_tokens: a text that cannot have as few is refused before it is encoded, or even rendered (F50).

        Raises:
            PromptTooLong: see `max_tokens`.
            InvalidRequest: nothing is left of the prompt, or the template refuses it.
            UnsupportedFeature: this model has no tokenizer, or no chat template.
        """
        ids = await asyncio.to_thread(self._prompt_ids, request, max_tokens)
        if not ids:
            raise InvalidRequest("holds nothing that the model could read", field=prompt_field(request))
        return ids

    def streams(self, params: SamplingParams, *, shows_text: bool) -> list[TextStream | None]:
        """What makes the text of each of `n` choices; None where nobody wants it.

        Raises:
            UnsupportedFeature: stop strings without a tokenizer.
        """
        if self.model is None:
            if params.stop:
                raise UnsupportedFeature(
                    "this model has no tokenizer here, so stop strings cannot be found", field="stop"
                )
            return [None] * params.n
        if not shows_text and not params.stop:
            return [None] * params.n
        return [TextStream(self.model.byte_table, params.stop) for _ in range(params.n)]

    def _prompt_ids(self, request: Generate, max_tokens: int) -> list[int]:
        if self.model is None:
            raise UnsupportedFeature(
                "this model has no tokenizer here; give token ids as the prompt", field=prompt_field(request)
            )
        if request.messages is not None:
            self.model.refuse_too_long(sum(len(turn.content) for turn in request.messages), max_tokens, "messages")
            return self.model.encode_chat(
                [_as_mapping(message) for message in request.messages],
                template_kwargs=request.template_kwargs,
                max_tokens=max_tokens,
            )
        assert request.prompt is not None
        return self.model.encode(request.prompt, max_tokens=max_tokens)


def prompt_field(request: Generate) -> str:
    """What the caller named the prompt by."""
    if request.messages is not None:
        return "messages"
    return "prompt" if request.prompt is not None else "prompt_ids"


def _as_mapping(message: ChatMessage) -> Mapping[str, object]:
    return msgspec.structs.asdict(message)


Messages = Sequence[Mapping[str, str] | ChatMessage]
