"""How long PyTorch's threads look for their next piece of work before they sleep.

A step of a model on a CPU is hundreds of short pieces that several threads do together. GNU's OpenMP, which PyTorch's
builds for Linux bring, lets a thread that has nothing to do spin for milliseconds. On a machine that others use, too,
that takes the time slice from the very thread that it waits for: with 2 cores and a dozen busy processes a token of a
135M-parameter model took 3.5 s, and 0.1 to 0.4 s where threads soon sleep.

Not spinning at all was rejected: on an idle machine each piece would begin with waking a thread.
"""

from __future__ import annotations

import os
from typing import Final

_SPINS: Final = "3000"
"""About 0.1 ms: longer than what lies between two pieces of a step, far shorter than a time slice."""


def spin_briefly() -> None:
    """Say so to OpenMP, which reads it once, when torch is first imported; whoever has said something else is heard."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
