"""Draws on the card: its own logarithms choose what float32 ones of the host choose."""

import pytest
import torch
from tests.kernels.interpreted.test_sampling import State
from tests.worker.gpu_doubles import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
V = 128_256
TEMPERATURES = [1.0, 0.0, 0.7, 1.0, 2.0, 0.01, 1.0, 0.3]


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0], ids=["noise alone", "nearly alike", "as models are"])
def test_tokens_are_those_of_the_definition(spread):
    from pagewire_kernels import sampling

    rows = len(TEMPERATURES)
    generator = torch.Generator().manual_seed(int(10 * spread))
    logits = spread * torch.randn(rows, V, generator=generator)
    ours, theirs = (State(TEMPERATURES, [7 * row + 1 for row in range(rows)], [[]] * rows) for _ in range(2))
    for name in ("temperature", "seeds", "stop_ids", "stopped", "special", "last_token"):
        setattr(ours, name, getattr(ours, name).cuda())
    order = torch.arange(rows, dtype=torch.int32)
    scratch, on_card = sampling.SampleScratch(rows, V, "cuda"), logits.cuda()
    out, expected = torch.zeros(2, rows, dtype=torch.int32, device="cuda"), torch.zeros(2, rows, dtype=torch.int32)
    for position in range(8):
        positions = torch.full((rows,), position, dtype=torch.int32)
        sampling.sample(out[0], out[1], on_card, order.cuda(), positions.cuda(), *ours.columns(), scratch)
        TorchOps(None, None, theirs, 0).sample(expected, logits, order, positions)
        assert out.tolist() == expected.tolist()
