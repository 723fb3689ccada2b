"""Stands for the engine or the gateway in tests of the supervisor: `model.name` says how each behaves.

`engine=sleep gateway=ok`: words are `role=behaviour`; a role not named behaves well. `role=one,two`: `one` in its first
life, `two` in its second, and so on; the last stays.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time

from pagewire.child import Report, Reporter, explain_crashes, leave_with_parent, read_config
from pagewire.errors import ModelError

arguments = argparse.ArgumentParser()
arguments.add_argument("--config-fd", type=int)
arguments.add_argument("--report-fd", type=int)
arguments.add_argument("--engine", default="")
arguments.add_argument("--admin", default="")
given = arguments.parse_args()
leave_with_parent(given.report_fd)
config = read_config(given.config_fd)
reporter = Reporter(given.report_fd)
role = "gateway" if given.engine else "engine"
lives = dict(word.split("=") for word in config.model.name.split()).get(role, "ok").split(",")
life = 0
if config.model.path:
    with open(os.path.join(config.model.path, role + ".lives"), "a+") as file:
        file.write(config.server.bind + "\n")
        file.seek(0)
        life = len(file.readlines()) - 1
behaviour = lives[min(life, len(lives) - 1)]
stopping = threading.Event()


def on_sigterm(number, frame):
    with open(os.path.join(config.model.path, "terminated"), "a") as file:
        file.write(role + "\n")
    if behaviour != "deaf":
        stopping.set()


signal.signal(signal.SIGTERM, on_sigterm)
reporter.loading("import")
print("noise on standard output", flush=True)
if behaviour == "exit3":
    sys.exit(3)
if behaviour == "exit0":
    sys.exit(0)
if behaviour == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
reporter.loading("weights")
if behaviour == "sleep":
    time.sleep(600)
if behaviour == "model_error":
    reporter.failed(ModelError("the file is truncated", field="model.path"))
    sys.exit(1)
if behaviour == "spin":  # holds the interpreter and answers nothing
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        pass
os.write(given.report_fd, b"garbage that is no report\n")
ready = {"event": "ready", "endpoint": config.server.bind, "model": "fake", "info": {"kv_blocks": 7}, "newer": 1}
import msgspec  # noqa: E402

os.write(given.report_fd, msgspec.json.encode(ready) + b"\n")
if behaviour == "asks_to_stop":
    reporter.send(Report(event="stop"))
if behaviour == "die_later":
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "crash_later":
    print("timestamp=2026 level=error process=engine event=odd", file=sys.stderr)
    print("Traceback …\nValueError: nine lives", file=sys.stderr, flush=True)
    print("timestamp=2026 level=info process=engine event=routine", file=sys.stderr, flush=True)
    os._exit(9)
if behaviour == "fail_later":
    reporter.failed(ModelError("the device fell off the bus"))
    sys.exit(1)
if behaviour == "segfault":
    explain_crashes()
    import ctypes

    ctypes.string_at(0)
if behaviour == "hush":  # lives, and its loop does not turn
    explain_crashes()
    time.sleep(600)
while not stopping.wait(0.05):
    reporter.beat("forward of step 7" if behaviour == "stall" else "")
if behaviour == "draining":
    reporter.send(Report(event="draining", streams=3))
