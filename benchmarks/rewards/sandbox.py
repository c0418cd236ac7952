"""What the sandbox costs: start-up, and programs a second.

    python -m benchmarks.rewards.sandbox [--seconds 10] [--workers 2]

start-up: `/bin/true` under full isolation, seen from the caller. program: a Python program that
reads a line and prints a sum, verified as a completion is. bwrap: `bwrap --unshare-all` around the
same `/bin/true`. python: the same interpreter and program without a sandbox. These four alternate,
so that a machine which others use slows all of them alike; the ratios are what to compare. Then
both with `--workers` processes at once.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from keel.rewards.code.verifier import verify_code
from keel.rewards.sandbox.sandbox import Python, open_sandbox
from keel.rewards.sandbox.watch import Limits

ANSWER = "```python\nprint(sum(map(int, input().split())))\n```"
TEST = {"stdin": "20 22\n", "stdout": "42\n"}
CALLS = [{"call": "add", "args": [n, 1], "returns": n + 1} for n in range(50)]
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def verify_one() -> None:
    verdict = verify_code({"kind": "code", "tests": [TEST]}, ANSWER)
    assert verdict.score == 1.0, verdict


def verify_calls() -> None:
    verdict = verify_code({"kind": "code", "tests": CALLS}, ADD)
    assert verdict.score == 1.0, verdict


def start() -> None:
    ran = open_sandbox("bubblewrap").run(["/bin/true"], files={}, limits=Limits())
    assert ran.ok, ran


def bwrap() -> None:
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "/bin/true"]
    subprocess.run(words, check=True)


def python() -> None:
    source = "print(sum(map(int, input().split())))"
    subprocess.run(
        [Python.current().executable, "-S", "-c", source],
        input=b"20 22\n",
        stdout=subprocess.DEVNULL,
        check=True,
    )


def milliseconds(what: Callable[[], None], seconds: float) -> list[float]:
    """Of each repetition, for about so long; one at least."""
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        began = time.perf_counter()
        what()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def verified(seconds: float) -> tuple[int, float]:
    """How many programs, and the CPU seconds of them and of this process meanwhile."""
    open_sandbox("bubblewrap")
    before = cpu_seconds()
    done = len(milliseconds(verify_one, seconds))
    return done, cpu_seconds() - before


def run_alone(seconds: float) -> tuple[int, float]:
    """The same without a sandbox."""
    before = cpu_seconds()
    done = len(milliseconds(python, seconds))
    return done, cpu_seconds() - before


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each figure")
    parser.add_argument("--workers", type=int, default=2, help="processes that verify at once")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(
        f"{platform.platform()}, {os.cpu_count()} cores, load {load:.1f}, python {sys.version[:7]}"
    )
    ways = {"bwrap": bwrap, "start-up": start, "python": python, "program": verify_one}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    until = time.perf_counter() + 4 * options.seconds
    while time.perf_counter() < until:
        for name, what in ways.items():
            taken[name] += milliseconds(what, 0.0)
    taken["50 calls"] = milliseconds(verify_calls, options.seconds)
    for name, times in taken.items():
        p90 = sorted(times)[int(0.9 * len(times))]
        print(f"{name:10} median {statistics.median(times):6.1f} ms  p90 {p90:6.1f} ms")
    for name, other in (("start-up", "bwrap"), ("program", "python")):
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken[other], strict=False))
        print(f"{name} / {other}: {ratio:.2f} (median of pairs)")
    with ProcessPoolExecutor(options.workers) as pool:
        list(pool.map(verified, [0.1] * options.workers))
        for name, what in (("python", run_alone), ("program", verified)):
            began = time.perf_counter()
            done, cpu = map(
                sum, zip(*pool.map(what, [options.seconds] * options.workers), strict=True)
            )
            rate = done / (time.perf_counter() - began)
            print(
                f"{name:10} {rate:6.1f}/s with {options.workers} workers, "
                f"{cpu / done * 1e3:.1f} ms of CPU time each"
            )


if __name__ == "__main__":
    main()
