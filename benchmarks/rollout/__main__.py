"""Measures tokens per second of Keel's engine, with and without recording, and of plain vLLM.

    python -m benchmarks.rollout --out OUT              # 1.4 B parameters
    python -m benchmarks.rollout --out OUT --small      # smoke test on a CPU

The benchmark uses one GPU. Each arm runs an engine in a separate process. All engines stay up and
take turns in each round. Reported ratios are medians of the ratios within a round.

    stock                `vllm.LLM.generate` with its defaults
    keel-plain           Keel's engine with log-probabilities only
    keel                 with routes and sampling masks
    packed-plain         Keel's engine with `rollout.recorder: packed`, log-probabilities only
    packed               with routes and sampling masks
    packed-head-rounded  with bfloat16 logits (only if `--arms` names it)
"""

import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import arguments, run_facts
from benchmarks.rollout.drivers import ARMS, Arm, Driver, Keel, Stock, timed_run
from benchmarks.rollout.model import SMALL, Size, make_prompts, write
from keel.configs.schema import RolloutConfig
from keel.rollout.spec import env_vars

DEFAULT = tuple(ARMS)[:5]
START_S, RUN_S = 300.0, 120.0
WARM_TOKENS = 24


def variables(arm: Arm, *, gpu: bool) -> dict[str, str]:
    """Return the environment variables for an arm's process.

    Stock vLLM keeps its default sampler.
    """
    result = env_vars(RolloutConfig(threads=2), gpu=gpu)
    if not arm.keel:
        del result["VLLM_USE_FLASHINFER_SAMPLER"]
    return {
        **result,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if arm.keel else "1",
    }


class Process:
    """Runs one arm in a child process that writes each reply as a line of JSON."""

    def __init__(self, arm: Arm, folder: Path, size: Size, out: Path, *, gpu: bool) -> None:
        self.arm = arm
        self._log = (out / f"log_{arm.name}.txt").open("w")
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        child = json.dumps({"arm": arm.name, "folder": str(folder), "size": asdict(size)})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rollout", "--child", child],
            env={**os.environ, **variables(arm, gpu=gpu)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def run(self, salt: str) -> dict[str, Any]:
        """Run the benchmark once and return its results. Raises RuntimeError if it failed."""
        assert self._process.stdin is not None
        print(salt, file=self._process.stdin, flush=True)
        return self.answer(RUN_S)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"{self.arm.name} did not answer within {timeout_s:.0f} s") from None
        if line is None:
            raise RuntimeError(f"{self.arm.name} ended; see {self._log.name}")
        result = json.loads(line)
        if "error" in result:
            raise RuntimeError(f"{self.arm.name} failed: {result['error']}")
        return result

    def close(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self._log.close()


def serve(child: dict[str, Any]) -> None:
    """Start an arm's engine and serve benchmark runs.

    Each line read from stdin is a salt. For each one, the benchmark runs once and its results are
    printed as JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output goes to the log
    arm, size = ARMS[child["arm"]], Size(**child["size"])

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        began = time.perf_counter()
        driver: Driver = (Keel if arm.keel else Stock)(arm, child["folder"], size)
        started = time.perf_counter() - began
        # The first batch compiles kernels and allocates memory.
        driver.run(make_prompts(size, "warm"), min(size.completion, WARM_TOKENS))
        answer({"started_s": started, "warmed_s": time.perf_counter() - began})
        for salt in sys.stdin:
            answer(timed_run(driver, size, salt.strip()))
    except Exception as error:  # the other arms continue
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
    sys.stderr.flush()
    os._exit(0)  # without waiting for vLLM's own processes


class Report:
    """Collects the results and saves them after each change."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.values: dict[str, Any] = {**head, "started": {}, "rounds": [], "failed": {}}
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.values, indent=1))

    def failed(self, arm: str, error: Exception) -> None:
        print(f"  {error}", flush=True)
        self.values["failed"].setdefault(arm, []).append(str(error))
        self.write()


def start_all(
    arms: list[Arm], folder: Path, size: Size, out: Path, report: Report, *, gpu: bool
) -> dict[str, Process]:
    ready: dict[str, Process] = {}
    processes = [Process(arm, folder, size, out, gpu=gpu) for arm in arms]
    until = time.monotonic() + START_S
    for process in processes:
        name = process.arm.name
        try:
            started = process.answer(max(1.0, until - time.monotonic()))
        except RuntimeError as error:
            report.failed(name, error)
            process.close()
            continue
        report.values["started"][name] = started
        report.write()
        ready[name] = process
        print(f"  {name}: ready after {started['warmed_s']:.0f} s", flush=True)
    return ready


def play_rounds(ready: dict[str, Process], rounds: int, report: Report) -> None:
    for index in range(rounds):
        names = list(ready)
        if index % 2:
            names.reverse()
        row: dict[str, Any] = {}
        report.values["rounds"].append(row)
        for name in names:
            try:
                row[name] = ready[name].run(f"round{index}")
            except (RuntimeError, OSError) as error:
                report.failed(name, error)
                ready.pop(name).close()
            report.write()


def summary(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the medians over all rounds, and the medians of the ratios within each round."""
    result: dict[str, dict[str, float]] = {}
    for name in ARMS:
        rows = [row for row in rounds if name in row]
        if not rows:
            continue
        fields = ["tokens_per_second", "ms_per_token_row", "thread_ms_per_token_row"]
        fields += ["mean_kept"] * ("mean_kept" in rows[0][name])
        result[name] = {f: statistics.median(row[name][f] for row in rows) for f in fields}
        for other in ("stock", "packed-plain" if name.startswith("packed") else "keel-plain"):
            pairs = [
                row[name]["tokens_per_second"] / row[other]["tokens_per_second"]
                for row in rows
                if other in row
            ]
            if pairs:
                key = "to_stock" if other == "stock" else "to_plain"
                result[name][key] = statistics.median(pairs)
    return result


def show(report: Report) -> None:
    print("\narm                    tok/s  ms/row  thread ms  ÷ stock  ÷ plain  kept")
    nan = float("nan")
    for name, row in report.values["summary"].items():
        print(
            f"{name:22s}{row['tokens_per_second']:7,.0f}{row['ms_per_token_row']:8.2f}"
            f"{row['thread_ms_per_token_row']:11.2f}{row.get('to_stock', nan):9.2f}"
            f"{row.get('to_plain', nan):9.3f}{row.get('mean_kept', nan):6.1f}"
        )


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        serve(json.loads(sys.argv[2]))
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="use a tiny model, for a CPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(DEFAULT))
    options = parser.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    size = SMALL if options.small else Size()
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options.out / "rollout.json", {**run_facts(), "size": asdict(size)})
    arms = [ARMS[name] for name in options.arms if gpu or not ARMS[name].gpu_only]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report.values["model"] = model = write(folder, size)
        if gpu:
            torch.cuda.empty_cache()
        print(f"model after {time.monotonic() - began:.0f} s: {model}", flush=True)
        ready: dict[str, Process] = {}
        try:
            ready = start_all(arms, folder, size, options.out, report, gpu=gpu)
            play_rounds(ready, options.rounds, report)
        finally:
            for process in ready.values():
                process.close()
    report.values["summary"] = summary(report.values["rounds"])
    report.values["seconds"] = time.monotonic() - began
    report.write()
    facts = {**run_facts(), "parameters": f"{model['parameters'] / 1e9:.2f} B"}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    show(report)
    sys.exit(int(bool(report.values["failed"])))


if __name__ == "__main__":
    main()
