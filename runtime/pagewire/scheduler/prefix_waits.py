"""Who waits a little longer because its prefix is just being computed."""

from __future__ import annotations

from collections import deque

from pagewire.request.request import Namespace, TokenArray
from pagewire.scheduler.sequence import Sequence


class PrefixWaits:
    """Lets a shared prefix be computed once: a prompt that shares blocks with one being prefilled waits for it.

    Producers are the sequences in prefill, found by namespace and first block (exact tokens), then compared token by
    token. A held sequence is released when its producer publishes or stops producing, or after a bounded number of
    steps, whichever comes first. Rejected: entries in the radix tree for blocks to come; a tree whose nodes may not
    be read yet would have to be checked for that in every place that reads it.
    """

    def __init__(self, block_size: int, max_steps: int) -> None:
        self._block_size = block_size
        self._max_steps = max_steps
        self._producers: dict[tuple[Namespace, bytes], dict[int, tuple[Sequence, TokenArray]]] = {}
        self._key_of: dict[int, tuple[Namespace, bytes]] = {}
        self._held: dict[int, list[Sequence]] = {}  # by the producer's order
        self._deadlines: deque[Sequence] = deque()  # held_until_step ascends: a constant is added to the step
        self.num_held = 0

    def begin(self, producer: Sequence, token_ids: TokenArray) -> None:
        """`producer` starts to compute `token_ids`."""
        if self._max_steps == 0 or token_ids.size <= self._block_size:
            return
        key = (producer.request.namespace, token_ids[: self._block_size].tobytes())
        self._producers.setdefault(key, {})[producer.order] = (producer, token_ids)
        self._key_of[producer.order] = key

    def end(self, producer: Sequence) -> list[Sequence]:
        """`producer` published, or will not; who waited for it."""
        key = self._key_of.pop(producer.order, None)
        if key is not None:
            peers = self._producers[key]
            del peers[producer.order]
            if not peers:
                del self._producers[key]
        return self._release(producer.order)

    def producer_of(self, sequence: Sequence, token_ids: TokenArray, num_matched: int, step: int) -> Sequence | None:
        """Whom to wait for: who is computing more leading blocks of `token_ids` than the `num_matched` in the tree."""
        if self._max_steps == 0 or token_ids.size <= self._block_size or 0 <= sequence.held_until_step <= step:
            return None
        key = (sequence.request.namespace, token_ids[: self._block_size].tobytes())
        usable = (token_ids.size - 1) // self._block_size
        best: tuple[int, Sequence | None] = (num_matched, None)
        for producer, theirs in self._producers.get(key, {}).values():
            shared = min(_common_prefix(token_ids, theirs) // self._block_size, usable)
            if shared > best[0]:
                best = (shared, producer)
        return best[1]

    def hold(self, sequence: Sequence, producer: Sequence, step: int) -> None:
        """Let `sequence`, which left the queue, wait for `producer`."""
        if sequence.held_until_step < 0:
            sequence.held_until_step = step + self._max_steps
            self._deadlines.append(sequence)
        self._held.setdefault(producer.order, []).append(sequence)
        sequence.is_held = True
        self.num_held += 1

    def expired(self, step: int) -> list[Sequence]:
        """Who waited long enough by `step`."""
        out = []
        while self._deadlines and self._deadlines[0].held_until_step <= step:
            sequence = self._deadlines.popleft()
            if sequence.is_held:
                self._forget(sequence)
                out.append(sequence)
        return out

    def remove(self, sequence: Sequence) -> None:
        """`sequence` ended while it was held."""
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        # The entry in `_held` goes when its producer ends; is_held says that it no longer counts.
        sequence.is_held = False
        self.num_held -= 1

    def _release(self, producer_order: int) -> list[Sequence]:
        released = [s for s in self._held.pop(producer_order, []) if s.is_held]
        for sequence in released:
            self._forget(sequence)
        return released


def _common_prefix(a: TokenArray, b: TokenArray) -> int:
    """How many leading tokens agree."""
    n = min(a.size, b.size)
    differs = a[:n] != b[:n]
    first = int(differs.argmax())
    return first if differs[first] else n
