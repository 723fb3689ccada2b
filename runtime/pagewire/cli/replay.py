"""`pagewire replay FILE`: a recording of `serve --record`, decided again by the real scheduler, without a GPU."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

from pagewire.recording.events import Event, read
from pagewire.recording.replay import Player


def run(namespace: argparse.Namespace) -> int:
    """Play it, tell it; 1 if a decision differs."""
    header, events = read(namespace.file)
    begun = time.perf_counter()
    shown: Iterable[Event] = tqdm(
        events, unit="event", disable=not sys.stderr.isatty(), leave=False, file=sys.stderr, mininterval=0.2
    )
    found = Player(header).play(shown, check=namespace.check)
    took = time.perf_counter() - begun
    if namespace.json:
        facts = {
            "recorded_by": header.pagewire,
            "events": found.events,
            "requests": found.requests,
            "refused": found.refused,
            "ended": found.ended,
            "steps": found.steps,
            "tokens": found.tokens,
            "preemptions": found.preemptions,
            "recorded_seconds": found.virtual_ns / 1e9,
            "is_cut": found.is_cut,
            "difference": found.difference or None,
        }
        print(json.dumps(facts))
    else:
        print(f"recorded by       Pagewire {header.pagewire}: {found.virtual_ns / 1e9:,.1f} s, played in {took:,.1f} s")
        print(f"requests          {found.requests:,}, {found.refused:,} refused, {found.ended:,} sequences ended")
        print(f"steps             {found.steps:,}, {found.tokens:,} tokens, {found.preemptions:,} preemptions")
        if found.is_cut:
            print("the recorder fell behind the engine and stopped: the rest is missing")
        print(f"first difference  {found.difference or 'none: the same decisions'}")
    return 1 if found.difference else 0
