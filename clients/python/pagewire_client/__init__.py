"""Talk to a Pagewire server. Needs pyzmq and msgspec, and no GPU stack.

>>> async with connect(url) as client:                                   # doctest: +SKIP
...     async for chunk in client.generate("Once upon", max_tokens=64):
...         print(chunk.text, end="", flush=True)
"""

from pagewire_client.client import Client, connect
from pagewire_client.result import ChoiceResult, Chunk, Result, Timings, TokenLogprob
from pagewire_client.stream import Stream

__all__ = ["ChoiceResult", "Chunk", "Client", "Result", "Stream", "Timings", "TokenLogprob", "connect"]
