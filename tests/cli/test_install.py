"""What works where something is not installed: client and transport alone, no torch, no Triton, no uvloop."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SERVE = "torch numpy gguf tokenizers jinja2 safetensors structlog tqdm huggingface_hub uvloop triton transformers yaml"

BLOCK = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


def _python(tmp_path, missing: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, and every child of it, without some packages."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK.replace("MISSING", repr(missing.split())))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("XDG_RUNTIME_DIR", None)
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _pagewire(tmp_path, missing, *arguments):
    return _python(tmp_path, missing, "-m", "pagewire.cli.entry", *arguments)


def test_client_and_transport_alone(tmp_path):
    code = "import pagewire, pagewire_client, pagewire_transport; print(pagewire_client.connect, pagewire.__version__)"
    done = _python(tmp_path, SERVE, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["LLM", "Engine"])
def test_the_engine_in_process_says_what_to_install(tmp_path, name):
    done = _python(tmp_path, SERVE, "-c", f"import pagewire\npagewire.{name}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: pagewire.{name} needs ")
    assert "pip install 'pagewire[serve]'" in last


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["version"], 0), (["keys", "list"], 0), (["serve", "--help"], 0)]
)
def test_commands_that_need_nothing_more(tmp_path, arguments, code):
    assert _pagewire(tmp_path, SERVE, *arguments).returncode == code


@pytest.mark.parametrize("arguments", [["generate", "x"], ["chat", "x"], ["chat", "-i"]])
def test_commands_that_ask_a_server_need_the_client_alone(tmp_path, arguments):
    done = _pagewire(tmp_path, SERVE, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "no server of yours runs on this machine" in done.stderr


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        (SERVE, ["serve"]),
        (SERVE, ["serve", "m.gguf"]),
        (SERVE, ["batch", "r.jsonl"]),
        (SERVE, ["info", "m.gguf"]),
        (SERVE, ["demo"]),
        ("torch", ["serve", "m.gguf"]),
        ("jinja2", ["serve", "m.gguf"]),
    ],
)
def test_the_others_say_what_to_install(tmp_path, missing, arguments):
    done = _pagewire(tmp_path, missing, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"pagewire: `pagewire {arguments[0]}` needs " in done.stderr
    assert done.stderr.endswith("which is not installed: pip install 'pagewire[serve]'\n")


def test_without_triton_and_uvloop_all_but_the_gpu_worker_works(tmp_path):
    code = "import pagewire.engine.process, pagewire.gateway.process, pagewire.local.engine, pagewire.event_loop as e\n"
    code += "import asyncio; assert e._run is asyncio.run"
    done = _python(tmp_path, "triton uvloop transformers", "-c", code)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "r.jsonl").write_text('{"prompt_ids": [1, 2, 3]}')
    flags = ["--model", str(folder), "--load-format=dummy", "--max-tokens=4", "--threads=1", "--kv-bytes=8MiB"]
    done = _pagewire(tmp_path, "triton uvloop transformers", "batch", str(tmp_path / "r.jsonl"), *flags)
    assert done.returncode == 0, done.stderr


def test_the_gateway_needs_no_torch(tmp_path):
    done = _python(tmp_path, "torch triton transformers", "-c", "import pagewire.gateway.process")
    assert done.returncode == 0, done.stderr
