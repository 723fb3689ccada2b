"""Streams whose kernels run on some of the card's multiprocessors only: disjoint parts of one card, by the driver's green contexts.

torch's `GreenContext` takes a number of multiprocessors, always from the beginning, so that two of them overlap; here the rest is a
part of its own. Driver API of CUDA 12.4 and later; the split is in steps of 8 on Hopper.
"""

from __future__ import annotations

import ctypes

import torch

_RESOURCE_BYTES = 256
"""A `CUdevResource` has 144."""
_SM_COUNT_OFFSET = 96
"""Of `sm.smCount` in it."""
_TYPE_SM = 1
_DEFAULT_STREAM = 1
_NON_BLOCKING = 1


class Partition:
    """Some multiprocessors and a stream on them. Lives as long as the process."""

    def __init__(self, driver: ctypes.CDLL, resource: ctypes.Array, device: int) -> None:
        self.num_sms = ctypes.c_uint.from_buffer(resource, _SM_COUNT_OFFSET).value
        description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        _do(driver.cuDevResourceGenerateDesc(ctypes.byref(description), ctypes.byref(resource), ctypes.c_uint(1)))
        _do(
            driver.cuGreenCtxCreate(
                ctypes.byref(context), description, ctypes.c_int(device), ctypes.c_uint(_DEFAULT_STREAM)
            )
        )
        _do(driver.cuGreenCtxStreamCreate(ctypes.byref(stream), context, ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0)))
        assert stream.value is not None
        self.stream = torch.cuda.ExternalStream(stream.value)


def split(num_sms: int, device: int = 0) -> tuple[Partition, Partition]:
    """At least so many multiprocessors, and the rest.

    Raises:
        RuntimeError: the driver does not want to, with its number.
    """
    torch.cuda.init()
    torch.zeros(1, device=f"cuda:{device}")  # the primary context
    driver = ctypes.CDLL("libcuda.so.1")
    whole, part, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    _do(driver.cuDeviceGetDevResource(ctypes.c_int(device), ctypes.byref(whole), ctypes.c_int(_TYPE_SM)))
    groups = ctypes.c_uint(1)
    _do(driver.cuDevSmResourceSplitByCount(
        ctypes.byref(part), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(rest), ctypes.c_uint(0), ctypes.c_uint(num_sms)
    ))  # fmt: skip
    return Partition(driver, part, device), Partition(driver, rest, device)


def _do(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver answered {result}")
