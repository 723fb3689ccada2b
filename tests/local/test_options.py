"""Options by name instead of nested sections."""

from pathlib import Path

import pytest

from pagewire.config import Config, ModelConfig, SchedulerConfig
from pagewire.errors import ConfigError
from pagewire.local.options import config_of


def test_options_land_in_their_sections():
    made = config_of("model.gguf", None, {"max_rows": 3, "device": "cpu", "prefix_cache": False, "threads": 2})
    assert made.model.path == "model.gguf"
    assert made.model.device == "cpu"
    assert made.scheduler.max_rows == 3
    assert made.cache.prefix_cache is False
    assert made.engine.threads == 2


def test_options_override_a_whole_configuration():
    base = Config(model=ModelConfig(path="a.gguf", name="x"), scheduler=SchedulerConfig(max_rows=5, overlap=False))
    made = config_of(None, base, {"max_rows": 3})
    assert (made.model.path, made.model.name) == ("a.gguf", "x")
    assert (made.scheduler.max_rows, made.scheduler.overlap) == (3, False)
    assert config_of(Path("b"), base, {}).model.path == "b"


@pytest.mark.parametrize(
    ("options", "field", "hint"),
    [
        ({"max_row": 3}, "max_row", "max_rows"),
        ({"quux": 3}, "quux", "unknown option"),
        ({"max_rows": 0}, "scheduler.max_rows", ">= 1"),
        ({"max_rows": "3"}, "scheduler.max_rows", "int"),
        ({"block_size": 17}, "cache.block_size", "17"),
        ({"device": "tpu"}, "model.device", "tpu"),
        ({"path": "b.gguf"}, "model.path", "twice"),
        ({"kv_scales": "s.json"}, "cache.kv_scales", "kv-dtype fp8"),
    ],
)
def test_bad_options_are_named(options, field, hint):
    with pytest.raises(ConfigError) as caught:
        config_of("a.gguf", None, options)
    assert caught.value.field == field
    assert hint in caught.value.message


def test_no_model_at_all():
    with pytest.raises(ConfigError) as caught:
        config_of(None, None, {})
    assert caught.value.field == "model.path"
