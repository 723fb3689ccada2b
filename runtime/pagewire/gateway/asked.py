"""What a client asked for, without its prompt: kept with the stream, and with the engine as the stream's memo.

From it and the prompt's ids the stream can be begun again, by this gateway at another engine or by another gateway.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pagewire.errors import ProtocolError
from pagewire_transport.messages import Accepted, Generate, OnLag, Replay
from pagewire_transport.params import SamplingParams


class Asked(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """The fields of `generate` that matter after the prompt was prepared, and which of them held the prompt."""

    params: SamplingParams = SamplingParams()
    priority: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    deadline_ms: float | None = None
    namespace: str = ""
    client: str = ""
    user: str = ""
    """The CURVE key that it was asked with: nobody else may resume it. "" where there are no keys."""
    echo_text: bool = True
    on_lag: OnLag = "coalesce"
    prompt_field: str = "prompt_ids"


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Asked)


def asked_in(message: Generate, prompt_field: str, share: str, user: str = "") -> Asked:
    """What `message` asks for, and on whose behalf."""
    return Asked(
        params=message.params,
        priority=message.priority,
        ttft_ms=message.ttft_ms,
        itl_ms=message.itl_ms,
        deadline_ms=message.deadline_ms,
        namespace=message.namespace,
        client=message.namespace or share,
        user=user,
        echo_text=message.echo_text,
        on_lag=message.on_lag,
        prompt_field=prompt_field,
    )


def asked_of(memo: bytes) -> Asked:
    """What a gateway noted.

    Raises:
        ProtocolError: no gateway wrote this: the stream was begun at the engine itself.
    """
    try:
        return _decoder.decode(memo)
    except Exception:  # noqa: BLE001  (whoever talks to the engine may have written anything there)
        raise ProtocolError("the stream was not begun at a gateway; resume it at the engine") from None


def request(
    asked: Asked,
    number: int,
    prompt_ids: bytes,
    *,
    resumable: bool,
    accepted: Accepted | None,
    output_ids: tuple[bytes, ...],
    has_prompt_logprobs: bool,
) -> Generate:
    """The message to an engine, without what is the gateway's to do.

    With `accepted`, another engine took the request before and generated `output_ids`: it goes on there.
    """
    params, replay = msgspec.structs.replace(asked.params, stop=()), None
    if accepted is not None:
        params = msgspec.structs.replace(params, seed=accepted.seed, max_tokens=accepted.max_tokens)
        if has_prompt_logprobs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        replay = Replay(request_id=accepted.request_id, resume_key=accepted.resume_key, output_ids=output_ids)
    return Generate(
        stream=number,
        prompt_ids=prompt_ids,
        params=params,
        priority=asked.priority,
        ttft_ms=asked.ttft_ms if replay is None else 0,  # what was begun is not refused for coming late
        itl_ms=asked.itl_ms if replay is None else 0,
        deadline_ms=asked.deadline_ms,
        namespace=asked.namespace,
        client=asked.client,
        resumable=resumable,
        replay=replay,
        memo=_encoder.encode(asked) if resumable else b"",
    )
