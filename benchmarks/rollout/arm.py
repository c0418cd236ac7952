"""One engine of `benchmarks/rollout/__main__.py`, in a process of its own.

Reads commands (a JSON object a line) and answers each with one line. Everything that libraries
print goes to the error stream.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rollout.drivers import ARMS, Arm, Driver, Keel, Steps, Stock
from benchmarks.rollout.measure import profile, timed_run
from benchmarks.rollout.model import SMALL, Size, make_prompts


def serve(arm: Arm, folder: str, size: Size, out: Path, answer: Callable[[Any], None]) -> None:
    began = time.perf_counter()
    steps = Steps()
    driver: Driver = (Keel if arm.keel else Stock)(arm, folder, size, steps)
    started = time.perf_counter() - began
    # Kernels are compiled and memory is taken in the first batch.
    driver.run(make_prompts(size, "warm"), min(size.completion, 24))
    answer({"started_s": started, "warmed_s": time.perf_counter() - began})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "run":
            answer(timed_run(driver, steps, size, command["salt"]))
        elif command["do"] == "profile":
            answer(profile(driver, steps, size, out, arm.name))
        else:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arm", required=True, choices=list(ARMS))
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=json.loads, default={}, help="fields of Size, as JSON")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gate = threading.Lock()

    def answer(value: Any) -> None:
        with gate:
            print(json.dumps(value), file=answers, flush=True)

    size = replace(SMALL, **options.size)
    try:
        serve(ARMS[options.arm], options.folder, size, options.out, answer)
    except Exception as error:  # whatever it is, the other arms go on
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # vLLM's own processes need not be waited for


if __name__ == "__main__":
    main()
