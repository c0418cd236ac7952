"""Keel, TRL and verl on one GPU with the same model, prompts, lengths and sampling.

    pip install -r requirements/peers.txt
    python -m benchmarks.peers.compare --out FOLDER --steps 3
    python -m benchmarks.peers.compare --out FOLDER --small      # smoke test on a CPU
    python -m benchmarks.peers.compare --out FOLDER --draw 3     # random workload
    python -m benchmarks.peers.compare --verdict FOLDER …        # over four or more draws
    python -m benchmarks.peers.compare --out FOLDER --shape 8b --arms keel-auto,keel-narrow
    python -m benchmarks.peers.compare --out FOLDER --arms keel-turns,verl,trl --verl-path PACKAGES

Arms are defined in `trl_grpo.ARMS`, `verl_grpo.ARMS` and `keel_grpo.ARMS`. They run one after the
other in separate processes; the first steps of each are warm-up. FOLDER/results.json and
FOLDER/report.md are rewritten after every arm. verl's requirements conflict with Keel's:
`pip install --target=PACKAGES -r requirements/peers-verl.txt`. Arms are cut short at `--budget-s`.
Further calls add arms to FOLDER; with `--scratch` they share one model.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import arguments, commit
from benchmarks.peers.keel_grpo import AUTO, WITHIN
from benchmarks.peers.memory import PeakMemory, check_alone, gpu_name, gpu_reader, settled
from benchmarks.peers.report import (
    GOALS,
    KNOBS,
    WORK,
    ArmRun,
    Status,
    allowed_gib,
    check_same,
    earlier,
    judge_draws,
    report,
)
from benchmarks.peers.workload import QWEN3, Workload

ROOT = Path(__file__).parents[2]
ORDER = "trl,trl-fit,keel-auto"
SMALL_ORDER = "keel,trl"
DRAWN_ORDER = f"trl,trl-liger,{WITHIN}"
SYSTEMS = ("trl", "keel", "verl")
MIN_S = 60.0
"""Minimum remaining seconds to start an arm."""
MARK = "PEERS_ARM"
"""Environment variable that marks the processes of an arm."""
BUILD_S = 180.0


def environment(mark: str, packages: Path | None = None) -> dict[str, str]:
    """Environment of an arm without network access or telemetry.

    packages: package folder that replaces PYTHONPATH.
    """
    path = str(packages.resolve()) if packages else os.environ.get("PYTHONPATH")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [path])]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "KEEL_TRACEBACK": "1",
        # A concurrent comparison may use torch.distributed's default port.
        "MASTER_PORT": str(port),
        MARK: mark,
    }


class Bench:
    """Runs arms and saves their results."""

    def __init__(self, options: argparse.Namespace, scratch: Path, workload: Workload) -> None:
        self._options, self._scratch, self._workload = options, scratch, workload
        self._end = time.monotonic() + options.budget_s
        self._read_gpu = gpu_reader()
        if self._read_gpu:
            check_alone(self._read_gpu)
        self.runs = earlier(options.out)
        if self.runs:
            check_same(options.out, self.facts())

    @property
    def remaining_s(self) -> float:
        return self._end - time.monotonic()

    def all(self, arms: Sequence[str]) -> None:
        for arm in arms:
            why = self._missing(arm) or ("no time left" if self.remaining_s < MIN_S else "")
            number = len(self.runs) + 1
            skipped = ArmRun(arm=arm, run=number, status="skipped", why=why)
            self.runs.append(skipped if why else self._one(arm))
            self.write()

    def _missing(self, arm: str) -> str:
        """Return the reason why an arm cannot run, if any."""
        name = system(arm)
        if arm == WITHIN and not self._allowed_gib():
            return f"{WITHIN} needs --within or a completed arm of TRL in this folder"
        if name == "trl" and find_spec("trl") is None:
            return "TRL is not installed; pip install -r requirements/peers.txt"
        if name == "verl" and not self._options.verl_path and find_spec("verl") is None:
            return "verl is not installed; set --verl-path (requirements/peers-verl.txt)"
        return ""

    def _one(self, arm: str) -> ArmRun:
        number = len(self.runs) + 1
        name = f"{number}-{arm}"
        out, log = self._options.out / f"{name}.json", self._options.out / f"{name}.log"
        timeout_s = min(self._options.arm_s, self.remaining_s)
        packages = self._options.verl_path if system(arm) == "verl" else None
        print(f"{name}: started, {self.remaining_s:.0f} s left", flush=True)
        wall_began = time.time()
        status, wall_s, peak = watch(
            self._command(arm, out), log, timeout_s=timeout_s, packages=packages
        )
        if self._read_gpu and not settled(self._read_gpu, peak.before):
            print(f"{name}: its GPU memory was not released", flush=True)
        details: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        steps = details.pop("steps", [])
        first = details.pop("first_step_at", 0.0)
        result = ArmRun(
            arm=arm,
            run=number,
            status=status,
            wall_s=wall_s,
            start_s=max(0.0, first - wall_began) if first else 0.0,
            peak_gib=peak.gib,
            why="" if status == "done" else last_line(log),
            steps=[step for step in steps if step["step"] > self._options.warmup],
            details={**details, "GiB before": peak.before / 2**30},
        )
        print(f"{name}: {status} in {result.wall_s:.0f} s, {len(steps)} steps {result.why}")
        return result

    def _command(self, arm: str, out: Path) -> list[str]:
        options, name = self._options, system(arm)
        return [
            sys.executable,
            "-m",
            f"benchmarks.peers.{name}_grpo",
            f"--workload={self._scratch / 'workload.json'}",
            f"--out={out.resolve()}",
            f"--arm={arm}",
            f"--steps={options.steps}",
            f"--warmup={options.warmup}",
            *([f"--scratch={self._scratch}"] if name != "trl" else []),
            *(options.set if name == "keel" else []),
            *([f"run.gpu_gib={self._allowed_gib():g}"] if arm == WITHIN else []),
        ]

    def _allowed_gib(self) -> float:
        return self._options.within or allowed_gib(self.runs)

    def write(self) -> None:
        content = {
            "facts": self.facts(),
            "runs": [run.as_json() for run in self.runs],
        }
        (self._options.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
        text = report(self.runs, self.facts(), judge=self._read_gpu is not None)
        (self._options.out / "report.md").write_text(text)

    def facts(self) -> dict[str, str]:
        workload, options = self._workload, self._options
        versions: dict[str, str] = {}
        for run in self.runs:
            versions |= run.details.get("versions", {})
        return {
            "machine": f"{gpu_name() or 'no GPU'}; {os.cpu_count()} cores ({platform.machine()})",
            "commit": commit(),
            "command": " ".join(["python -m benchmarks.peers.compare", *sys.argv[1:]]),
            "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
            WORK: json.dumps(asdict(replace(workload, model="", prompts=""))),
            KNOBS: ", ".join([*sorted(options.set), f"within {options.within or 'the goal'}"]),
            "measured": (
                f"{options.steps} steps per run after {options.warmup} of warm-up; memory of "
                + ("the whole GPU" if self._read_gpu else "the arm's processes (no GPU)")
                + " above the memory in use before"
            ),
        }


def system(arm: str) -> str:
    """System of an arm: one of `SYSTEMS` and the prefix of its module."""
    return arm.partition("-")[0]


def watch(
    command: Sequence[str],
    log: Path,
    *,
    timeout_s: float,
    packages: Path | None = None,
    gpu: str = "",
    tick: Callable[[float], bool] = lambda _: True,
) -> tuple[Status, float, PeakMemory]:
    """Run an arm; return how it ended, its seconds and its memory.

    tick: gets the peak in GiB five times a second; if it returns False, the arm is cut short.
    """
    mark, began = uuid.uuid4().hex, time.monotonic()
    variables = environment(mark, packages) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=variables,
            cwd=ROOT,
            start_new_session=True,
        )
    status: Status = "done"
    try:
        with PeakMemory(lambda: process.pid, gpu) as peak:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - began > timeout_s or not tick(peak.gib):
                    status = "cut short"
                    break
    finally:
        end_all(process, mark)
    if status == "done" and process.returncode:
        status = "failed"
    return status, time.monotonic() - began, peak


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """Interrupt an arm, then kill every process with its mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
    for other in psutil.process_iter():
        try:
            if other.pid != os.getpid() and other.environ().get(MARK) == mark:
                other.kill()
        except (psutil.Error, OSError):
            continue
    process.wait(timeout=30)


def last_line(log: Path) -> str:
    """Return Keel's last words, or the last line of a log that mentions an error, or its last."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    ours = [line for line in lines if line.startswith("keel train: ")]
    errors = ours or [line for line in lines if "Error" in line or "error" in line] or lines
    return next((line[:300] for line in reversed(errors) if line), "")


def build(options: argparse.Namespace, scratch: Path) -> Workload:
    """Write missing model and prompts in a separate process, so that this one uses no GPU memory.

    Raises SystemExit if existing ones were made with other options.
    """
    which = ["--small"] if options.small else []
    which += [] if options.draw is None else [f"--draw={options.draw}"]
    which += [f"--shape={options.shape}"] if options.shape else []
    marker, expected = scratch / "made.txt", " ".join(which)
    if not marker.exists():
        command = [sys.executable, "-m", "benchmarks.peers.shape", f"--out={scratch}", *which]
        variables = environment("build")
        subprocess.run(command, check=True, timeout=BUILD_S, env=variables, cwd=ROOT)
        marker.write_text(expected)
    elif (known := marker.read_text()) != expected:
        raise SystemExit(f"--scratch {scratch} was built with {known!r} instead of {expected!r}")
    return Workload.load(scratch / "workload.json")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, help="folder of results and report")
    parser.add_argument("--arms", default="", help=f"default: {ORDER}")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each arm")
    parser.add_argument("--warmup", type=int, default=1, help="warm-up steps (at least 1)")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all arms")
    parser.add_argument("--arm-s", type=float, default=300.0, help="seconds for one arm")
    parser.add_argument("--scratch", type=Path, help="folder of model and runs; default: temporary")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help="use a tiny model, for a CPU")
    which.add_argument("--draw", type=int, metavar="SEED", help="draw the workload at random")
    which.add_argument(
        "--shape", default="", metavar="NAME", help=f"one of {', '.join(QWEN3)}; default: 0.6b"
    )
    which.add_argument(
        "--verdict", type=Path, nargs="+", metavar="FOLDER", help="judge drawn workloads instead"
    )
    help_within = f"memory limit of {WITHIN}; default: {GOALS[1]:.0%}% of TRL's fastest arm"
    parser.add_argument("--within", type=float, metavar="GIB", help=help_within)
    parser.add_argument(
        "--verl-path", type=Path, metavar="PACKAGES", help="package folder of verl's arms"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="knob of Keel's arms"
    )
    options = parser.parse_args(argv)
    if options.out is None and options.verdict is None:
        parser.error("--out is missing")
    options.warmup = max(1, options.warmup)
    drawn = options.draw is not None or options.verdict
    default = SMALL_ORDER if options.small else DRAWN_ORDER if drawn else ORDER
    options.arms = (options.arms or default).split(",")
    for arm in options.arms:
        if system(arm) not in SYSTEMS:
            parser.error(f"--arms: {arm!r} must start with one of {', '.join(SYSTEMS)}")
    return options


def run(options: argparse.Namespace) -> int:
    """Run the arms and return the exit status: 0 if all of them completed."""
    if options.verdict:
        print(judge_draws(options.verdict, AUTO if AUTO in options.arms else WITHIN))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running arm
    options.out.mkdir(parents=True, exist_ok=True)
    scratch = (options.scratch or Path(tempfile.mkdtemp(prefix="peers-"))).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        bench = Bench(options, scratch, build(options, scratch))
        before = len(bench.runs)
        try:
            bench.all(options.arms)
        finally:
            bench.write()
    finally:
        if options.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)
    print((options.out / "report.md").read_text())
    return int(any(each.status != "done" for each in bench.runs[before:]))


if __name__ == "__main__":
    sys.exit(run(parse()))
