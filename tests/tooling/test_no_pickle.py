"""The no-pickle rule finds planted violations and lets innocent look-alikes pass (F48)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "check_no_pickle.py"


def _load():
    spec = importlib.util.spec_from_file_location("check_no_pickle", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_no_pickle"] = module
    spec.loader.exec_module(module)
    return module


rule = _load()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, pickle as p",
        "from pickle import loads",
        "import cPickle",
        "import dill",
        "import marshal",
        "import shelve",
        "import joblib",
        "import joblib.numpy_pickle",
        "import cloudpickle",
        "__import__('pickle')",
        "import importlib\nimportlib.import_module('marshal')",
        "from importlib import import_module\nimport_module('dill')",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load",
        "from torch import load as innocent",
        "import torch\nloader = torch.load",
        "import torch\ntorch.jit.load(path)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import numpy as np\nnp.load(path, allow_pickle=flag)",
        "read(path, weights_only=False)",
        "socket.recv_pyobj()",
        "self.socket.send_pyobj(thing)",
        "eval(text)",
        "run = exec",
        "import builtins\nbuiltins.exec(text)",
        "compile(text, 'f', 'exec')",
        "def f():\n    class A:\n        def g(self):\n            return eval('1')",
    ],
)
def test_a_planted_violation_is_found(source):
    assert rule.check_source(source), source


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('a')",
        "import torch\ntorch.compile(model)",
        "import triton\ntriton.compile(source)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import json\njson.load(file)",
        "from safetensors.torch import load_file",
        "# pickle\nname = 'pickle'",
        "model.load(path)",
    ],
)
def test_an_innocent_look_alike_passes(source):
    assert rule.check_source(source) == []


def test_the_line_is_named(tmp_path, capsys):
    (tmp_path / "a.py").write_text("x = 1\nimport pickle\n")
    assert rule.main([str(tmp_path)]) == 1
    assert "a.py:2: import of pickle" in capsys.readouterr().out


def test_a_folder_that_does_not_exist_is_an_error_not_a_pass(tmp_path):
    assert rule.main([str(tmp_path / "none")]) == 2
    assert rule.main([]) == 2


def test_the_tree_is_clean():
    roots = [
        name for name in ("runtime", "transport", "kernels", "clients", "scripts", "perf") if (ROOT / name).exists()
    ]
    done = subprocess.run([sys.executable, str(SCRIPT), *roots], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
