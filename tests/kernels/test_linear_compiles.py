"""The Hopper product cannot be interpreted, but it is compiled for the card without one."""

import os
import subprocess
import sys

# In a process of its own: the driver of a card that is not there would stay.
_COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from pagewire_kernels.linear_fixed import fixed_tiling
from pagewire_kernels.linear_hopper import Tiling, compile_ahead
from pagewire_kernels.linear_table import TABLE

class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Hopper())
F8 = torch.float8_e4m3fn
for n, k, kind, bucket in ((14336, 4096, "gated", 128), (1280, 8192, "", 32)):
    tiling = Tiling(*TABLE[n, k, kind, bucket])
    out_dtype = torch.float32 if kind == "wide" else torch.bfloat16
    ptx = compile_ahead(n, k, tiling, torch.bfloat16, out_dtype, gated=kind == "gated")
    print(*(name in ptx for name in ("wgmma.mma_async", "cp.async.bulk.tensor", "griddepcontrol.wait")))
ptx = compile_ahead(512, 256, fixed_tiling(512, 256, 1, gated=True, programs=132), F8, torch.bfloat16, gated=True)
print(*(name in ptx for name in ("f32.e4m3.e4m3", "cp.async.bulk.tensor", "griddepcontrol.wait")))
"""


def test_it_compiles_to_the_instructions_that_it_is_for():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["True True True"] * 3
