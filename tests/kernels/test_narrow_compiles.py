"""Decode over 8-bit KV cannot be interpreted, but it is compiled for the card without one: what its loop may not do shows there."""

import os
import subprocess
import sys

# In a process of its own: the driver of a card that is not there would stay.
_COMPILE = """
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from pagewire_kernels.paged_decode_narrow import paged_decode_narrow_kernel

class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Hopper())
value, word, fp32 = (MockTensor(dtype) for dtype in (torch.bfloat16, torch.int32, torch.float32))
for warps in (1, 2, 4):
    ptx = paged_decode_narrow_kernel.warmup(
        value, value, word, word, word, word, word, word, word, word, fp32, fp32, word, fp32, fp32, 0.1, 0.0, 4096, 4096,
        64, 512, NUM_KV_HEADS=8, GROUP=4, BLOCK_G=4, BLOCK_SIZE=16, WINDOW=0, HAS_SOFT_CAP=False, HAS_ROWS=True,
        HAS_SCALES=True, NUM_PROGRAMS=1584, OFFSET=tl.int32, DEPENDENT=True, NUM_WARPS=warps, num_warps=warps, maxnreg=168,
        grid=(1,), launch_pdl=True,
    ).asm["ptx"]
    loop = ptx[ptx.index("mma.sync") : ptx.rindex("mma.sync")]
    print("ld.global.v4.b32" in ptx, "cvt.rn.f16x2.e4m3x2" in loop, "shared" in loop, "bar" in loop)
"""


def test_nothing_passes_through_shared_memory_in_its_loop():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["True True False False"] * 3
