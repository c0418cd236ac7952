"""Tokens per second of an engine with and without recording, beside plain vLLM, on one GPU.

    python -m benchmarks.rollout --out OUT              # 1.4 B parameters, mean sampling mask 8
    python -m benchmarks.rollout --out OUT --profile keel
    python -m benchmarks.rollout --out OUT --dense      # the workload of benchmarks/peers
    python -m benchmarks.rollout --out OUT --draw 3     # one of its drawn workloads
    python -m benchmarks.rollout --out OUT --small      # on a CPU, to see that it runs

Every arm is an engine in a process of its own; all of them stay up, and in each round they take
turns on the whole of the card. Ratios are medians of ratios within a round.

    stock            `vllm.LLM.generate`, as it comes
    stock+logprobs   with the sampled tokens' log-probabilities, which any RL system needs
    stock+recording  with vLLM's routes and sampling masks as well
    keel-plain       Keel's engine with log-probabilities alone
    keel             with routes and sampling masks
    packed-plain     Keel's engine with `rollout.recorder: packed`, log-probabilities alone
    packed           with routes and sampling masks

Only where `--arms` or `--profile` names them, as `packed`: `packed-no-cascade` with attention that
reads a prompt once for each completion, `packed-no-graph` without a CUDA graph for sampling,
`packed-no-steady` with every step prepared anew, `packed-no-bursts` with one step at a time,
`packed-before` without all of them; `packed-fa2` and `packed-triton` with other attention kernels,
`packed-page64` and `packed-page256` with more tokens in a cache block. A dense model has no routes;
its arms record sampling masks alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.revision import commit
from benchmarks.peers import workload
from benchmarks.rollout.drivers import ARMS, Arm
from benchmarks.rollout.model import SMALL, Size, dense, write_dense, write_model
from keel.configs.schema import RolloutConfig
from keel.rollout.spec import environment

DEFAULT = (
    "stock",
    "stock+logprobs",
    "stock+recording",
    "keel-plain",
    "keel",
    "packed-plain",
    "packed",
)
RSS_EVERY_S = 0.2
START_S = 300.0
RUN_S = 120.0
PROFILE_S = 240.0
KERNELS = 15
"""Lines for each profiled arm."""


def variables(arm: Arm, *, gpu: bool) -> dict[str, str]:
    """Of an arm's process. Stock vLLM chooses its sampler itself."""
    found = environment(RolloutConfig(threads=2), gpu=gpu)
    if not arm.keel:
        del found["VLLM_USE_FLASHINFER_SAMPLER"]
    return {**found, "HF_HUB_OFFLINE": "1", **arm.environment()}


class Process:
    """An arm that answers commands, and the largest resident memory it was seen with."""

    def __init__(self, arm: Arm, folder: Path, size: Size, out: Path, *, gpu: bool) -> None:
        self.arm = arm
        self._log = (out / f"log_{arm.name}.txt").open("w")
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [
                sys.executable,
                *("-m", "benchmarks.rollout.arm", "--arm", arm.name, "--folder", str(folder)),
                *("--out", str(out), "--size", json.dumps(asdict(size))),
            ],
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

    def ask(self, deadline_s: float, **command: str) -> dict[str, Any]:
        """The answer to a command; raises `RuntimeError` if it failed."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self.answer(deadline_s)

    def answer(self, deadline_s: float) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        before = peak = self._resident()
        while True:
            try:
                line = self._answers.get(timeout=RSS_EVERY_S)
            except queue.Empty:
                peak = max(peak, self._resident())
                if time.monotonic() > until:
                    raise RuntimeError(
                        f"{self.arm.name}: no answer within {deadline_s:.0f} s"
                    ) from None
                continue
            if line is None:
                raise RuntimeError(f"{self.arm.name}: ended; see its log")
            result = json.loads(line)
            if "error" in result:
                raise RuntimeError(f"{self.arm.name}: {result['error']}")
            growth = (max(peak, self._resident()) - before) / 2**20
            return {**result, "resident_growth_mib": growth}

    def _resident(self) -> int:
        """Bytes, of the process and its children."""
        import psutil  # noqa: PLC0415 (not needed to read this file's docstring)

        total = 0
        with suppress(psutil.Error):
            here = psutil.Process(self._process.pid)
            for process in (here, *here.children(recursive=True)):
                with suppress(psutil.Error):
                    total += process.memory_info().rss
        return total

    def close(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self._log.close()


class Report:
    """Everything so far, written after every step."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.values: dict[str, Any] = {**head, "started": {}, "rounds": [], "profiles": {}}
        self.values["failed"] = {}
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.values, indent=1))

    def failed(self, arm: str, error: Exception) -> None:
        print(f"  {arm}: {error}", flush=True)
        self.values["failed"].setdefault(arm, []).append(str(error))
        self.write()


def start_all(
    arms: list[Arm], folder: Path, size: Size, out: Path, report: Report, *, gpu: bool, serial: bool
) -> dict[str, Process]:
    """The arms that came up. `serial`: one after the other."""
    up: dict[str, Process] = {}
    waves = [[arm] for arm in arms] if serial else [arms]
    for wave in waves:
        processes = [Process(arm, folder, size, out, gpu=gpu) for arm in wave]
        until = time.monotonic() + START_S
        for process in processes:
            try:
                started = process.answer(max(1.0, until - time.monotonic()))
            except RuntimeError as error:
                report.failed(process.arm.name, error)
                process.close()
                continue
            report.values["started"][process.arm.name] = started
            report.write()
            up[process.arm.name] = process
            print(f"  {process.arm.name}: ready after {started['warmed_s']:.0f} s", flush=True)
    return up


def play_rounds(up: dict[str, Process], rounds: int, report: Report) -> None:
    for index in range(rounds):
        names = list(up)
        if index % 2:
            names.reverse()
        row: dict[str, Any] = {}
        report.values["rounds"].append(row)
        for name in names:
            try:
                row[name] = up[name].ask(RUN_S, do="run", salt=f"round{index}")
            except (RuntimeError, OSError) as error:
                report.failed(name, error)
                up.pop(name).close()
            report.write()


def summary(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, and medians of ratios within a round."""
    names = [name for name in ARMS if any(name in row for row in rounds)]
    result: dict[str, dict[str, float]] = {}
    for name in names:
        rows = [row for row in rounds if name in row]

        def middle(field: str, rows: list[Any] = rows, name: str = name) -> float:
            return statistics.median(row[name][field] for row in rows)

        result[name] = {
            "tokens_per_second": middle("tokens_per_second"),
            "ms_per_token_row": middle("ms_per_token_row"),
            "thread_ms_per_step": middle("thread_ms_per_step"),
            "resident_growth_mib": max(row[name]["resident_growth_mib"] for row in rows),
        }
        for other in ("stock", "keel-plain", "packed-plain"):
            pairs = [
                row[name]["tokens_per_second"] / row[other]["tokens_per_second"]
                for row in rows
                if other in row
            ]
            if pairs:
                result[name][f"to_{other}"] = statistics.median(pairs)
        for field in ("mean_kept", "host_bytes_per_token_sum"):
            if field in rows[0][name]:
                result[name][field] = middle(field)
    return result


def plain_of(arm: str) -> str:
    """The ratio that says what recording costs an arm."""
    return "to_packed-plain" if arm.startswith("packed") else "to_keel-plain"


def show(report: Report) -> None:
    print(
        "\narm                    tok/s  ms/row  thread ms  ÷ stock  ÷ plain  kept"
        "  host B/tok  RSS +MiB"
    )
    for name, row in report.values["summary"].items():
        print(
            f"{name:22s}{row['tokens_per_second']:7,.0f}{row['ms_per_token_row']:8.2f}"
            f"{row['thread_ms_per_step']:11.2f}{row.get('to_stock', float('nan')):9.2f}"
            f"{row.get(plain_of(name), float('nan')):9.3f}"
            f"{row.get('mean_kept', float('nan')):6.1f}"
            f"{row.get('host_bytes_per_token_sum', float('nan')):12.0f}"
            f"{row['resident_growth_mib']:10.0f}"
        )
    last: dict[str, Any] = report.values["rounds"][-1] if report.values["rounds"] else {}
    for name, row in last.items():
        parts = ", ".join(
            f"{part} {value:.2f}"
            for part, value in sorted(row["parts_ms_per_step"].items(), key=lambda item: -item[1])
        )
        print(f"{name}: {row['steps']} steps; ms per step: {parts}")
    for name, row in report.values["profiles"].items():
        if gpu := row.get("gpu"):
            print(
                f"\n{name}: GPU busy {gpu['busy_fraction']:.0%} of {gpu['ms_per_step']:.2f} ms "
                f"a step\n{'ms':>8} {'calls':>6}  kernel, a step"
            )
            for kernel, (ms, calls) in list(gpu["kernels_ms_per_step"].items())[:KERNELS]:
                print(f"{ms:8.3f} {calls:6.1f}  {kernel[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--dense", action="store_true", help="without experts, long completions")
    parser.add_argument("--draw", type=int, metavar="SEED", help="--dense, of a workload by chance")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(DEFAULT))
    parser.add_argument("--profile", nargs="*", choices=list(ARMS), default=[])
    parser.add_argument("--mean-kept", type=float, default=8.0)
    parser.add_argument("--completion", type=int, help="tokens per completion")
    parser.add_argument("--group", type=int, help="completions per prompt")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--serial", action="store_true", help="start one engine at a time")
    options = parser.parse_args()
    began = time.monotonic()
    gpu = torch.cuda.is_available()
    changes = {
        name: getattr(options, name)
        for name in ("completion", "group", "prompts")
        if getattr(options, name)
    }
    size = SMALL if options.small else Size()
    peers = workload.SMALL if options.small else workload.QWEN3_06B
    if options.draw is not None:
        options.dense, peers = True, workload.drawn(options.draw)
    size = replace(dense(size, peers) if options.dense else size, **changes)
    options.out.mkdir(parents=True, exist_ok=True)
    head = {
        "command": " ".join(sys.argv[1:]),
        "commit": commit(),
        "device": torch.cuda.get_device_name() if gpu else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "size": asdict(size),
    }
    report = Report(options.out / "rollout.json", head)
    names = list(dict.fromkeys([*options.arms, *options.profile]))
    arms = [ARMS[name] for name in names if gpu or not ARMS[name].gpu_only]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report.values["model"] = (
            write_dense(folder, peers)
            if options.dense
            else write_model(folder, size, options.mean_kept)
        )
        if gpu:
            torch.cuda.empty_cache()
        print(f"model after {time.monotonic() - began:.0f} s: {report.values['model']}", flush=True)
        up: dict[str, Process] = {}
        try:
            up = start_all(arms, folder, size, options.out, report, gpu=gpu, serial=options.serial)
            play_rounds(up, options.rounds, report)
            for name in options.profile:
                if name not in up:
                    continue
                try:
                    report.values["profiles"][name] = up[name].ask(PROFILE_S, do="profile")
                except (RuntimeError, OSError) as error:
                    report.failed(name, error)
                report.write()
        finally:
            for process in up.values():
                process.close()
    report.values["summary"] = summary(report.values["rounds"])
    report.values["seconds"] = time.monotonic() - began
    report.write()
    print(
        f"{report.values['model']['parameters'] / 1e9:.2f} B parameters, {size}, commit "
        f"{head['commit']}, {head['device']}, torch {head['torch']}, Python {head['python']}, "
        f"{report.values['seconds']:.0f} s in all"
    )
    show(report)
    sys.exit(int(bool(report.values["failed"])))


if __name__ == "__main__":
    main()
