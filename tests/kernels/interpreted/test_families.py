"""What the GPU worker launches for families beyond a plain Llama, interpreted: the logits of the same in plain PyTorch."""

import pytest
import torch
from tests.models.families import save_family
from tests.worker.gpu_doubles import HostDevice, TorchOps
from tests.worker.plans import Clerk

from pagewire.config import ModelConfig, from_mapping
from pagewire.models.load import load_model
from pagewire.worker.gpu_ops import TritonOps
from pagewire.worker.gpu_stepper import Stepper
from pagewire_kernels import decode_plan

SMALL = {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 6, "max_position_embeddings": 64}
FAMILIES = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
}


def triton(decoder, memory, rows, max_step_tokens):
    return TritonOps(decoder, memory, rows, max_step_tokens=max_step_tokens)


def all_logits(folder, make_ops):
    """Of the samples of some steps: chunks, decode, both."""
    decoder = load_model(ModelConfig(path=str(folder)))
    made = from_mapping({
        "model": {"path": str(folder), "device": "cpu"},
        "cache": {"kv_bytes": 2**20},
        "scheduler": {"max_rows": 2, "max_step_tokens": 10},
    })  # fmt: skip
    clerk, out = Clerk(num_blocks=20), []
    stepper = Stepper(made, decoder, HostDevice(), make_ops, with_graphs=False)

    def step():
        plan = clerk.plan()
        stepper.forward(plan)
        out.append(stepper._logits[: plan.sample_rows.size].clone())
        stepper.sample(plan, None)

    a, b = (clerk.join(row, range(3, 30), max_tokens=20) for row in range(2))
    clerk.chunk(a, range(3, 8))
    step()
    clerk.chunk(a, range(8, 17), a)
    step()
    clerk.decode(a)
    clerk.chunk(b, range(50, 55), b)
    step()
    clerk.decode(a, b)
    step()
    return torch.cat(out)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(tmp_path, monkeypatch, family):
    monkeypatch.setattr(decode_plan, "_default_programs", lambda device: 3)
    save_family(family, tmp_path, **{**SMALL, **FAMILIES[family]})
    with torch.inference_mode():
        expected = all_logits(tmp_path, TorchOps)
        torch.testing.assert_close(all_logits(tmp_path, triton), expected, rtol=1e-3, atol=1e-4)
