"""The device that checks: right bookkeeping gives the tokens of a sequence alone, each planted mistake is caught (F14)."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fake.mini import BLOCK, SHAPE, Live, Mini, ints

from pagewire.step.step import RowJoin, SampleFlag, StepPlan
from pagewire.worker.fake import BookkeepingError, PureFakeDevice, continuation
from pagewire.worker.interface import LogitMasks
from pagewire_transport.params import SamplingParams


def alone(sequence: Live) -> list[int]:
    model = PureFakeDevice(SHAPE).model
    return continuation(
        model, sequence.prompt, sequence.params, sequence.seed, vocab_size=SHAPE.vocab_size, eos_ids=SHAPE.eos_ids
    )


def many(mini: Mini) -> list[Live]:
    """Enough work that rows and blocks change hands, stops and length ends both come up."""
    return [
        mini.add([(7 * i + j) % 31 for j in range(1 + 3 * i % 11)], seed=i, max_tokens=3 + i % 9, min_tokens=i % 3)
        for i in range(30)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_right_bookkeeping_gives_the_tokens_of_a_sequence_alone(depth):
    mini = Mini(PureFakeDevice(SHAPE), depth=depth)
    sequences = many(mini)
    mini.run()
    assert [s.output for s in sequences] == [alone(s) for s in sequences]
    assert any(s.output[-1] in SHAPE.eos_ids for s in sequences)
    assert (mini.device.num_dropped > 0) == (depth > 1), "late stops are dropped, and only where steps overlap"


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("wrong chunk", "its tokens are other ones"),
        ("forget a block", "no block for column"),
        ("skip a position", "decodes position"),
        ("stale epoch", "is for epoch"),
        ("share a block", "write block"),
        ("free blocks before the fence", "still writes it"),
        ("free the row before the fence", "leaves while a queued step names it"),
    ],
)
def test_planted_mistakes_are_caught(mistake, complaint):
    mini = Mini(PureFakeDevice(SHAPE), mistake=mistake)
    many(mini)
    with pytest.raises(BookkeepingError, match=complaint):
        mini.run()


# ---- by hand ---------------------------------------------------------------------------------------------------------


def join(row: int, prompt, *, epoch: int = 0, seed: int = 0, outputs=(), **params) -> RowJoin:
    params.setdefault("max_tokens", 20)
    return RowJoin(row, epoch, SamplingParams(**params), seed, ints(prompt), ints(outputs), ())


def plan_of(
    step: int, entries, *, num_decode: int = 0, tokens=(), samples=(), blocks=(), joins=(), **columns
) -> StepPlan:
    """`entries`: (row, start, num); `samples`: (entry, row); `blocks`: (row, col, block). All epochs are 0."""
    return StepPlan(
        step=step,
        rows=ints(e[0] for e in entries),
        starts=ints(e[1] for e in entries),
        num_tokens=ints(e[2] for e in entries),
        epochs=ints(0 for _ in entries),
        num_decode=num_decode,
        token_ids=ints(tokens),
        sample_entries=ints(s[0] for s in samples),
        sample_rows=ints(s[1] for s in samples),
        sample_epochs=ints(0 for _ in samples),
        joins=list(joins),
        block_rows=ints(b[0] for b in blocks),
        block_cols=ints(b[1] for b in blocks),
        block_ids=ints(b[2] for b in blocks),
        **columns,
    )


PROMPT = [1, 2, 3, 4, 6, 7]


def forked(device: PureFakeDevice, *, seeds=(10, 11)) -> None:
    """Step 0: row 0 prefills PROMPT, rows 0 and 1 draw; row 1 shares block 1 and has block 3 for its tail."""
    joins = [join(0, PROMPT, seed=seeds[0]), join(1, PROMPT, seed=seeds[1])]
    blocks = [(0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 3)]
    device.submit(plan_of(0, [(0, 0, 6)], tokens=PROMPT, samples=[(0, 0), (0, 1)], joins=joins, blocks=blocks))


def test_a_fork_gives_what_single_requests_give():
    device = PureFakeDevice(SHAPE)
    forked(device)
    decode = {"num_decode": 2, "samples": [(0, 0), (1, 1)]}
    device.submit(plan_of(1, [(0, 6, 1), (1, 6, 1)], copy_src=ints([2]), copy_dst=ints([3]), **decode))
    drawn = [device.complete().token_ids, device.complete().token_ids]
    for row, seed in ((0, 10), (1, 11)):
        expected = continuation(device.model, PROMPT, SamplingParams(max_tokens=2), seed, vocab_size=SHAPE.vocab_size)
        assert [int(tokens[row]) for tokens in drawn] == expected


def test_a_fork_whose_tail_was_not_copied_is_caught():
    device = PureFakeDevice(SHAPE)
    forked(device)
    device.complete()
    device.submit(plan_of(1, [(1, 6, 1)], num_decode=1, samples=[(0, 1)]))
    with pytest.raises(BookkeepingError, match="reads block 3 for position 4"):
        device.complete()


def test_a_prefix_shared_before_its_step_is_done_is_caught():
    """A stranger may not use what a queued step has yet to write; a fork may."""
    device = PureFakeDevice(SHAPE)
    forked(device)
    stranger = plan_of(1, [(2, 4, 2)], tokens=PROMPT[4:], joins=[join(2, PROMPT)], blocks=[(2, 0, 1), (2, 1, 4)])
    with pytest.raises(BookkeepingError, match="has yet to write it"):
        device.submit(stranger)


def test_a_prefix_shared_after_its_step_is_read_and_checked():
    for prompt, fits in ((PROMPT, True), ([9, *PROMPT[1:]], False)):
        device = PureFakeDevice(SHAPE)
        forked(device)
        device.complete()
        blocks = [(2, 0, 1), (2, 1, 4)]
        device.submit(plan_of(1, [(2, 4, 2)], tokens=prompt[4:], joins=[join(2, prompt)], blocks=blocks))
        if fits:
            device.complete()
        else:  # a hit by something else than the tokens (F28)
            with pytest.raises(BookkeepingError, match="reads block 1 for position 0"):
                device.complete()


def test_a_block_handed_on_while_a_queued_step_reads_it_is_caught():
    device = PureFakeDevice(SHAPE)
    forked(device)
    device.complete()
    device.submit(plan_of(1, [(0, 6, 1)], num_decode=1, samples=[(0, 0)]))
    with pytest.raises(BookkeepingError, match="still read it"):
        device.submit(plan_of(2, [(2, 0, 1)], tokens=[8], joins=[join(2, [8])], blocks=[(2, 0, 1)]))


def test_kv_overwritten_meanwhile_is_caught():
    device = PureFakeDevice(SHAPE)
    forked(device)
    device.complete()
    device.submit(plan_of(1, [(2, 0, 1)], tokens=[8], joins=[join(2, [8])], blocks=[(2, 0, 1)]))
    device.complete()
    device.submit(plan_of(2, [(0, 6, 1)], num_decode=1, samples=[(0, 0)]))
    with pytest.raises(BookkeepingError, match="holds token 8 of position 0, last written by row, epoch \\(2, 0\\)"):
        device.complete()


def test_equal_tokens_of_another_position_are_no_hit():
    device = PureFakeDevice(SHAPE)
    same = [1] * 8
    device.submit(plan_of(0, [(0, 0, 8)], tokens=same, joins=[join(0, same)], blocks=[(0, 0, 1), (0, 1, 2)]))
    device.complete()
    swapped = [(1, 0, 2), (1, 1, 1), (1, 2, 3)]
    device.submit(plan_of(1, [(1, 8, 1)], tokens=[1], joins=[join(1, [*same, 1])], blocks=swapped))
    with pytest.raises(BookkeepingError, match="for position 0: it holds token 1 of position 4"):
        device.complete()


def test_a_resumed_row_goes_on_with_its_outputs():
    device = PureFakeDevice(SHAPE)
    full = continuation(device.model, PROMPT, SamplingParams(max_tokens=4), 3, vocab_size=SHAPE.vocab_size)
    known = PROMPT + full[:2]
    device.submit(
        plan_of(
            0,
            [(0, 0, 8)],
            tokens=known,
            samples=[(0, 0)],
            joins=[join(0, PROMPT, seed=3, outputs=full[:2])],
            blocks=[(0, 0, 1), (0, 1, 2)],
        )
    )
    assert device.complete().token_ids.tolist() == [full[2]]


def test_poison_spreads_by_kv_and_no_further():
    device = PureFakeDevice(SHAPE)
    device.poison(0, from_position=5)
    prompt = [*range(8), 9]
    blocks = [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
    device.submit(plan_of(0, [(0, 0, 9)], tokens=prompt, samples=[(0, 0)], joins=[join(0, prompt)], blocks=blocks))
    assert device.complete().flags.tolist() == [SampleFlag.NUMERIC]
    device.heal()
    for row, num_shared, flag in ((1, 1, SampleFlag.OK), (2, 2, SampleFlag.NUMERIC)):
        start = num_shared * BLOCK
        device.submit(
            plan_of(
                row,
                [(row, start, 1)],
                tokens=[9],
                samples=[(0, row)],
                joins=[join(row, [*prompt[:start], 9])],
                blocks=[*((row, col, col + 1) for col in range(num_shared)), (row, num_shared, 10 + row - 1)],
            )
        )
        assert device.complete().flags.tolist() == [flag]


def test_what_follows_a_numeric_fault_is_dropped():
    device = PureFakeDevice(SHAPE)
    device.poison(lambda j: j.prompt_ids.size == 6)
    forked(device)
    device.submit(plan_of(1, [(0, 6, 1)], num_decode=1, samples=[(0, 0)]))
    assert device.complete().counts.tolist() == [0, 0]
    result = device.complete()
    assert (result.counts.tolist(), result.flags.tolist()) == ([0], [SampleFlag.DROPPED])


def test_logprobs_name_their_tokens():
    device = PureFakeDevice(SHAPE)
    joins = [join(0, PROMPT, logprobs=3, prompt_logprobs=2)]
    device.submit(
        plan_of(
            0,
            [(0, 0, 6)],
            tokens=PROMPT,
            samples=[(0, 0)],
            joins=joins,
            blocks=[(0, 0, 1), (0, 1, 2)],
            prompt_logprobs={0: 2},
        )
    )
    result = device.complete()
    token = int(result.token_ids[0])
    assert result.logprobs.samples.tolist() == [0]
    assert result.logprobs.top_ids.tolist() == [(token + i) % SHAPE.vocab_size for i in range(3)]
    (rows,) = result.prompt_logprobs
    assert (rows.entry, rows.start) == (0, 0)
    assert rows.top_ids[:, 0].tolist() == PROMPT[1:], "the last position of the prompt has no next token"


def test_masks_are_obeyed():
    device = PureFakeDevice(SHAPE)
    forked(device)
    result = device.complete(LogitMasks(np.array([1], np.int32), np.array([[1 << 17]], np.uint32)))
    assert result.token_ids[1] == 17


def test_steps_come_in_order():
    device = PureFakeDevice(SHAPE)
    forked(device)
    with pytest.raises(BookkeepingError, match="out of order"):
        device.submit(plan_of(2, [(0, 6, 1)], num_decode=1))


def test_positions_end_with_the_context():
    device = PureFakeDevice(SHAPE)
    prompt = [1] * (SHAPE.max_model_len + 1)
    with pytest.raises(BookkeepingError, match="beyond the model's context"):
        device.submit(plan_of(0, [(0, SHAPE.max_model_len, 1)], tokens=[1], joins=[join(0, prompt)]))
    assert SHAPE.max_model_len % BLOCK == 0
