"""Threads of OpenMP are told to sleep soon before torch, which brings it, is imported; a user's own word counts."""

import os
import subprocess
import sys

import pytest

WATCH = """
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == 'torch':
            print('spins:', os.environ.get('GOMP_SPINCOUNT'), file=sys.stderr)
            sys.exit(3)
sys.meta_path.insert(0, Watch())
"""
IN_PROCESS = "import pagewire; pagewire.Engine"
ENGINE_PROCESS = """
from pagewire.config import Config
from pagewire.engine import main as engine
engine.leave_with_parent = engine.explain_crashes = lambda *_: None
engine.read_config = lambda fd: Config()
engine.main(['--config-fd', '0', '--report-fd', '1'])
"""


@pytest.mark.parametrize("code", [IN_PROCESS, ENGINE_PROCESS])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "3000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None),
    ],
)
def test_told_before_torch_is_imported(code, given, wanted):
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WATCH + code], env=env | given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == f"spins: {wanted}"
