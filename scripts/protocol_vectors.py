"""The golden vectors of the wire protocol: `transport/vectors/*.json`, made by the codec.

    python scripts/protocol_vectors.py            writes the files
    python scripts/protocol_vectors.py --check    exit code 1 if one is not what would be written

`transport/vectors/README.md` says how a client in another language uses them. A new message needs an example in
`protocol_examples.py`: the script refuses to run without one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
from protocol_examples import FROM_CLIENT, FROM_SERVER, REFUSED, TOLERATED

from pagewire_transport.codec import decode_client, decode_server, encode, stream_to_refuse
from pagewire_transport.columns import unpack
from pagewire_transport.errors import PagewireError
from pagewire_transport.messages import FromClient, FromServer, LogprobColumns, Tokens

FOLDER = Path(__file__).parent.parent / "transport" / "vectors"
_SAFE_INTEGER = 2**53


def plain(value: Any) -> Any:
    """`value` as JSON has it: bytes, large integers and maps without text keys are marked, see the README there."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, bool) or not isinstance(value, int | float | dict | list):
        return value
    if isinstance(value, int):
        return value if abs(value) < _SAFE_INTEGER else {"int": str(value)}
    if isinstance(value, float):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    return {"map": [[plain(key), plain(item)] for key, item in value.items()]}


def on_wire(message: FromClient | FromServer) -> Any:
    """The map that a frame holds."""
    return plain(msgspec.msgpack.decode(encode(message)[1:]))


def in_full(message: FromClient | FromServer) -> Any:
    """The same with every default written out."""
    return plain({"t": message.__struct_config__.tag, **_fields(message)})


def _fields(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _fields(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_fields(item) for item in value]
    return value


def runs(message: Tokens) -> list[dict[str, Any]]:
    """The entries of a `tokens` message one by one."""
    streams, starts = unpack("I", message.streams), unpack("I", message.starts)
    ids = list(unpack("I", message.ids))
    counts = unpack("H", message.counts) if message.counts else [1] * len(streams)
    choices = unpack("H", message.choices) if message.choices else [0] * len(streams)
    logprobs = _logprobs(message.logprobs, counts) if message.logprobs is not None else {}
    out, first = [], 0
    for entry, count in enumerate(counts):
        out.append(
            {
                "stream": streams[entry],
                "choice": choices[entry],
                "start": starts[entry],
                "ids": ids[first : first + count],
                "text": message.texts[entry] if message.texts else None,
                "logprobs": logprobs.get(entry),
            }
        )
        first += count
    return out


def _logprobs(columns: LogprobColumns, counts: Any) -> dict[int, list[dict[str, Any]]]:
    chosen, top_ids = unpack("f", columns.chosen), unpack("I", columns.top_ids)
    top_logprobs = unpack("f", columns.top_logprobs)
    out: dict[int, list[dict[str, Any]]] = {}
    token = pair = 0
    for entry, top in zip(unpack("I", columns.entries), unpack("B", columns.top), strict=True):
        out[entry] = []
        for _ in range(counts[entry]):
            pairs = range(pair, pair + top)
            out[entry].append({"chosen": chosen[token], "top": [[top_ids[i], top_logprobs[i]] for i in pairs]})
            token, pair = token + 1, pair + top
    return out


def _refusal(sender: str, frame: bytes) -> PagewireError:
    try:
        decode_client(frame) if sender == "client" else decode_server(frame)
    except PagewireError as error:
        return error
    raise SystemExit(f"taken, and listed as refused: {frame.hex()}")


def _messages(examples: dict[str, Any], kinds: Any) -> list[dict[str, Any]]:
    missing = {kind.__name__ for kind in get_args(kinds)} - {type(message).__name__ for message in examples.values()}
    if missing:
        raise SystemExit(f"no example of {', '.join(sorted(missing))}: add one to protocol_examples.py")
    out = []
    for name, message in examples.items():
        vector = {"name": name, "frame": encode(message).hex(), "message": on_wire(message), "full": in_full(message)}
        if isinstance(message, Tokens):
            vector["runs"] = runs(message)
        out.append(vector)
    return out


def files() -> dict[str, str]:
    """The text of each file by its name."""
    tolerated = []
    for name, (sender, frame) in TOLERATED.items():
        message = decode_client(frame) if sender == "client" else decode_server(frame)
        tolerated.append({"name": name, "from": sender, "frame": frame.hex(), "full": in_full(message)})
    refused = []
    for name, (sender, frame) in REFUSED.items():
        error = _refusal(sender, frame)
        vector = {"name": name, "from": sender, "frame": frame.hex(), "code": error.code}
        if sender == "client":
            vector |= {"field": error.field, "stream": stream_to_refuse(frame)}
        refused.append(vector)
    contents = {
        "client.json": _messages(FROM_CLIENT, FromClient),
        "server.json": _messages(FROM_SERVER, FromServer),
        "tolerated.json": tolerated,
        "refused.json": refused,
    }
    return {
        name: json.dumps({"format": 1, "protocol": 1, "vectors": vectors}, indent=1, ensure_ascii=False) + "\n"
        for name, vectors in contents.items()
    }


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is out of date")
    is_check = parser.parse_args().check
    code = 0
    for name, text in files().items():
        path = FOLDER / name
        if path.exists() and path.read_text() == text:
            continue
        if is_check:
            print(f"{path.name} is out of date: run scripts/protocol_vectors.py")
            code = 1
        else:
            path.write_text(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
