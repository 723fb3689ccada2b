"""Kernels run here in Triton's interpreter, which has to be chosen before a kernel is defined: in a process of their own.

`test_interpreter.py` starts that process; in it, and only there, `interpreted/` is collected.
"""

import os

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_interpreter.py"] if _INTERPRETED else ["interpreted/*"]
