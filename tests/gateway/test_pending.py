"""What one choice has to send: taken out in whatever parts, it is what was put in, each text with its last token."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pagewire.gateway.columns import LogprobRun, TokensBuilder
from pagewire.gateway.stream import Pending
from pagewire_transport.messages import Tokens

_LONGEST_ADD = 30
_ADDS = st.lists(st.tuples(st.integers(0, _LONGEST_ADD), st.text(max_size=3)), max_size=20)


def _logprobs(first: int, count: int, top: int) -> LogprobRun | None:
    if top < 0:
        return None
    wide = range(first * top, (first + count) * top)
    columns = (array("f", range(first, first + count + 2)), array("I", wide), array("f", wide))  # two too many
    return LogprobRun(top, *(memoryview(column.tobytes()) for column in columns))


@given(adds=_ADDS, takes=st.lists(st.integers(0, 200), max_size=20), top=st.integers(-1, 3), as_message=st.booleans())
def test_parts_are_the_whole(adds, takes, top, as_message):
    pending, total, texts_at = Pending(), 0, {}
    ids, texts, chosen, wide, at = [], "", [], [], 0

    def take(most: int) -> None:
        nonlocal texts, at
        if as_message:
            builder = TokensBuilder()
            spent = pending.move_into(builder, 1, 2, most, shows_text=True)
            message: Tokens = builder.build()
            start = array("I", message.starts)[0] if message.starts else at
            run, text = array("I", message.ids).tolist(), "".join(message.texts)
            columns = message.logprobs
            assert spent == len(run) * (top + 2)
        else:
            piece = pending.take(most)
            if piece is None:
                return
            start, run, text, columns = piece.start, list(piece.ids), piece.text, piece.logprobs
        assert start == at
        assert len(run) * (top + 2) < most + top + 2 or len(run) <= _LONGEST_ADD
        if columns is not None:
            chosen.extend(array("f", bytes(columns.chosen)))
            wide.extend(array("I", bytes(columns.top_ids)))
            assert len(columns.chosen) == 4 * len(run)
            assert len(columns.top_logprobs) == 4 * len(run) * top
        ids.extend(run)
        texts += text
        at += len(run)
        assert at in {end for end, _ in texts_at} | {0}  # whole deliveries, since text is made of them
        if run or text:
            assert texts == "".join(text for end, text in texts_at.items() if end[0] <= at)

    remaining = list(takes)
    for number, (count, text) in enumerate(adds):
        pending.add(memoryview(array("I", range(total, total + count))), text, _logprobs(total, count, top))
        total += count
        texts_at[total, number] = text
        if remaining:
            take(remaining.pop())
    while not pending.is_empty:
        take(50)
    assert ids == list(range(total))
    assert texts == "".join(text for _, text in adds)
    if top >= 0:
        assert chosen == list(range(total))
        assert wide == list(range(total * top))
