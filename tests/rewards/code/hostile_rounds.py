"""Verifies every hostile program repeatedly and reports what remains in this process.

    python -m tests.rewards.code.hostile_rounds [--rounds 5] [--sleepers]

Prints a JSON object: number of `programs` after a first round for warming up, names of `rewarded`
ones, seconds of the slowest answer, and the process's footprint `before` and `after`. Nothing else
runs here, so that the two can be compared exactly.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from keel.rewards.code.verifier import CodeSettings, verify_code
from keel.rewards.sandbox.processes import subreaper
from keel.rewards.sandbox.watch import Limits
from tests.rewards.code.hostile import ADD_CALL, ADD_STDIN, HOSTILE, answer

HURRIED = CodeSettings(completion_s=0.8, limits=Limits(time_s=0.1, memory_mib=256))
SLEEPERS = {"sleeping", "sleeping deaf to signals", "stopping itself"}
"""Programs that always use up their time."""


def footprint() -> dict[str, Any]:
    """Resources of this process."""
    gc.collect()
    own = Path(f"/proc/{os.getpid()}")
    children = [
        child
        for task in os.listdir(own / "task")
        for child in (own / "task" / task / "children").read_text().split()
    ]
    return {
        "files": len(os.listdir(own / "fd")),
        "processes": len(children),
        "threads": threading.active_count(),
        "folders": sorted(os.listdir(tempfile.gettempdir())),
        "resident": int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="after the first")
    parser.add_argument("--sleepers", action="store_true", help="with those that only take time")
    options = parser.parse_args()
    names = sorted(set(HOSTILE) - (set() if options.sleepers else SLEEPERS))
    rewarded: list[str] = []
    slowest = 0.0

    def round_of_all() -> int:
        nonlocal slowest
        for name in names:
            for test in (ADD_STDIN, ADD_CALL):
                started = time.monotonic()
                verdict = verify_code(
                    {"kind": "code", "tests": [test]}, answer(HOSTILE[name]), HURRIED
                )
                slowest = max(slowest, time.monotonic() - started)
                if verdict.score:
                    rewarded.append(name)
        return 2 * len(names)

    # A private folder and a subreaper, so that everything the rounds leave behind is counted.
    with tempfile.TemporaryDirectory(prefix="keel-rounds-") as folder, subreaper():
        tempfile.tempdir = folder
        round_of_all()
        before, programs = footprint(), 0
        for number in range(options.rounds):
            programs += round_of_all()
            print(f"round {number + 1}: {programs} programs", file=sys.stderr, flush=True)
        after = footprint()
    report = {"programs": programs, "rewarded": rewarded, "slowest_s": slowest}
    print(json.dumps({**report, "before": before, "after": after}))


if __name__ == "__main__":
    main()
