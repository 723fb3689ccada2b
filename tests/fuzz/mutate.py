"""Frames that are nearly right, made of the golden vectors: by structure, by bytes, or out of nothing."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import msgspec

VECTORS = Path(__file__).parents[2] / "transport" / "vectors"

_KEYS = (
    "t", "stream", "prompt", "prompt_ids", "messages", "params", "max_tokens", "n", "seed", "stop", "logprobs", "versions",
    "nonce", "choice", "at", "name", "offset", "template_kwargs", "replay", "resume_key", "received", "memo", "x", "", "é" * 40,
)  # fmt: skip
_TAGS = (
    "hello", "generate", "resume", "cancel", "finish", "pause", "ping", "goodbye", "get_stats", "get_load", "get_file",
    "drain", "reload", "kv_offer", "welcome", "tokens", "",
)  # fmt: skip
_CAP = 6
"""`max_tokens` of what may start a stream: the server is to look at frames, not to compute."""


def seeds() -> list[bytes]:
    """The frames of the vectors that a client may send, good and bad."""
    out = []
    for name in ("client.json", "refused.json", "tolerated.json"):
        for vector in json.loads((VECTORS / name).read_text())["vectors"]:
            if vector.get("from", "client") == "client":
                out.append(bytes.fromhex(vector["frame"]))
    return out


class Mutator:
    """A source of frames; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._seeds = seeds()
        self._maps = []
        for frame in self._seeds:
            try:
                value = msgspec.msgpack.decode(frame[1:])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue
            if isinstance(value, dict):
                self._maps.append(value)

    def frame(self) -> bytes:
        """The next one."""
        kind = self.random.random()
        if kind < 0.70:
            return b"\1" + msgspec.msgpack.encode(self._structured())
        if kind < 0.95:
            return self._bytewise(bytearray(self.random.choice(self._seeds)))
        return self.random.randbytes(self.random.choice((0, 1, 2, 9, 40, 300)))

    def parts(self) -> list[bytes]:
        """A message of several frames."""
        return [self.frame() for _ in range(self.random.randrange(2, 4))]

    def _structured(self):
        value = json_copy(self.random.choice(self._maps))
        if value.get("t") in ("generate", "resume") and isinstance(value.get("params", {}), dict):
            value.setdefault("params", {})
            value["params"] = {**value["params"], "max_tokens": self.random.randrange(_CAP)}
        if "stream" in value and self.random.random() < 0.7:
            value["stream"] = self.random.randrange(4)
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self._change(value)
        return value

    def _change(self, value) -> None:
        """One thing somewhere inside."""
        target = value
        while True:
            inner = [
                v for v in (target.values() if isinstance(target, dict) else target) if isinstance(v, dict | list) and v
            ]
            if not inner or self.random.random() < 0.4:
                break
            target = self.random.choice(inner)
        if isinstance(target, list):
            target[self.random.randrange(len(target))] = self._value()
            return
        what = self.random.random()
        if what < 0.2 and target:
            del target[self.random.choice(list(target))]
        elif what < 0.3:
            target["t"] = self.random.choice(_TAGS)
        elif what < 0.75 and target:
            target[self.random.choice(list(target))] = self._value()
        else:
            target[self.random.choice(_KEYS)] = self._value()

    def _value(self):
        random = self.random
        return random.choice(
            (
                lambda: random.choice((0, 1, -1, 2**16, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63))),
                lambda: random.randrange(8),
                lambda: random.choice((0.0, -0.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))),
                lambda: random.choice((None, True, False, "", "x", "\0", "\ufffd" * 300, "z" * 5000)),
                lambda: random.randbytes(random.choice((0, 1, 3, 4, 8, 64, 4096))),
                lambda: [random.randrange(300)] * random.choice((0, 1, 70, 1000)),
                lambda: {random.choice(_KEYS): random.choice(_TAGS)},
                lambda: {"role": "user", "content": "hi"},
                lambda: nested(random.choice((3, 50, 900))),
                lambda: random.choice(_TAGS),
            )
        )()

    def _bytewise(self, frame: bytearray) -> bytes:
        random = self.random
        for _ in range(random.choice((1, 1, 2, 4))):
            at = random.randrange(len(frame) + 1)
            what = random.randrange(6)
            if what == 0 and at < len(frame):
                frame[at] = random.randrange(256)
            elif what == 1 and at < len(frame):
                frame[at] ^= 1 << random.randrange(8)
            elif what == 2:
                del frame[at:]
            elif what == 3:
                frame[at:at] = random.randbytes(random.randrange(1, 9))
            elif what == 4:
                frame[at:at] = bytes(
                    (random.choice((0xC6, 0xDB, 0xDD, 0xDF)), *random.randbytes(4))
                )  # a declared length
            else:
                other = random.choice(self._seeds)
                frame[at:] = other[random.randrange(len(other) + 1) :]
        return bytes(frame)


def nested(depth: int):
    """A list in a list in …"""
    out: list = []
    for _ in range(depth):
        out = [out]
    return out


def json_copy(value):
    """A deep copy of plain values."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
