"""Keel, TRL and verl side by side on one GPU: the same model, prompts, lengths and sampling.

    pip install -r requirements/peers.txt
    python -m benchmarks.peers.compare --out FOLDER
    python -m benchmarks.peers.compare --out FOLDER --small      # on a CPU: does it run at all
    python -m benchmarks.peers.compare --out FOLDER --draw 3     # a workload that nobody tuned for
    python -m benchmarks.peers.compare --out FOLDER --long --set algorithm.max_lag=2
    python -m benchmarks.peers.compare --out FOLDER --arms keel-turns,verl,trl --verl-path PACKAGES

The arms alternate, each a process of its own, and the first steps of each are left out. After
every arm FOLDER/results.json and FOLDER/report.md are written anew. Arms of TRL are those of
`trl_grpo.ARMS`, of verl `verl_grpo.ARMS`, ours those of `keel_grpo.ARMS`. verl needs versions that
do not go with ours: `pip install --target=PACKAGES -r requirements/peers-verl.txt`. An arm that
would not end within `--budget-s`, judged by the last one of its name, is not started. A FOLDER that
has results already gets further ones, so arms can be spread over several calls; with `--scratch`
they use one model. The verdict over several draws is `benchmarks.peers.draws`'s.
"""

from __future__ import annotations

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.revision import commit
from benchmarks.peers.keel_grpo import WITHIN
from benchmarks.peers.memory import (
    EVERY_S,
    SLOW_EVERY_S,
    PeakMemory,
    check_alone,
    gpu_name,
    gpu_reader,
    note_processes,
    settled,
    tree_reader,
)
from benchmarks.peers.report import (
    GOALS,
    KNOBS,
    ArmRun,
    Status,
    allowed_gib,
    check_same,
    earlier,
    report,
)
from benchmarks.peers.workload import Workload

ROOT = Path(__file__).parents[2]
ORDER = "trl,keel,keel-async,trl-lean,keel,trl"
SMALL_ORDER = "keel,keel-async,trl"
DRAWN_ORDER = f"trl,trl-liger,{WITHIN}"
INSTEAD = {"trl-lean": "trl-lean-awake"}
"""What to try when an arm fails."""
GUESS_S = {"trl": 120.0, "keel": 90.0, "verl": 150.0}
"""How long an arm takes, by the start of its name, until one of that name has been timed."""
MARK = "PEERS_ARM"
"""Environment variable that tells the processes of an arm from all others."""
BUILD_S = 180.0


def environment(mark: str, packages: Path | None = None) -> dict[str, str]:
    """Of an arm: no network, no telemetry, and its mark. packages: a folder of them, instead of
    those that this process was told of."""
    known = str(packages.resolve()) if packages else os.environ.get("PYTHONPATH")
    paths = [str(ROOT), *filter(None, [known])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "KEEL_TRACEBACK": "1",
        # Of torch.distributed, whose usual one another comparison on this machine may have.
        "MASTER_PORT": str(free_port()),
        MARK: mark,
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Bench:
    """Runs arms one after the other and writes down what came of them."""

    def __init__(self, options: argparse.Namespace, scratch: Path, workload: Workload) -> None:
        self._options, self._scratch, self._workload = options, scratch, workload
        self._end = time.monotonic() + options.budget_s
        self._read_gpu = gpu_reader()
        if self._read_gpu:
            check_alone(self._read_gpu)
        self._idle = self._read_gpu() if self._read_gpu else 0.0
        self._took: dict[str, float] = {}
        self.runs = earlier(options.out)
        if self.runs:
            check_same(options.out, self.facts())

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def all(self, arms: Sequence[str]) -> None:
        waiting = list(arms)
        while waiting:
            arm = waiting.pop(0)
            expected = self._took.get(arm) or GUESS_S[system(arm)]
            if expected > self.left:
                why = f"{expected:.0f} s expected, {self.left:.0f} s left"
                made = ArmRun(arm=arm, run=len(self.runs) + 1, status="skipped", why=why)
            elif why := self._missing(arm):
                made = ArmRun(arm=arm, run=len(self.runs) + 1, status="skipped", why=why)
            else:
                made = self._one(arm)
                self._took[arm] = 1.1 * made.wall_s
            if made.status == "failed" and arm in INSTEAD:
                waiting = [INSTEAD[name] if name == arm else name for name in [arm, *waiting]]
            self.runs.append(made)
            self.write()

    def _missing(self, arm: str) -> str:
        """What an arm lacks: packages, or figures; empty: nothing."""
        name = system(arm)
        if arm == WITHIN and not self._allowed():
            return f"no arm of TRL has run in this folder, and --within says no GiB for {WITHIN}"
        if name == "trl" and find_spec("trl") is None:
            return "TRL is not installed (requirements/peers.txt)"
        if name == "verl" and not self._options.verl_path and find_spec("verl") is None:
            return "verl is not installed and no --verl-path is given (requirements/peers-verl.txt)"
        return ""

    def _one(self, arm: str) -> ArmRun:
        number, mark = len(self.runs) + 1, uuid.uuid4().hex
        name = f"{number}-{arm}"
        out, log = self._options.out / f"{name}.json", self._options.out / f"{name}.log"
        deadline = min(self._options.arm_s, self.left)
        began, wall_began = time.monotonic(), time.time()
        packages = self._options.verl_path if system(arm) == "verl" else None
        print(f"{name}: started, {self.left:.0f} s left", flush=True)
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command(arm, out),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(mark, packages),
                cwd=ROOT,
                start_new_session=True,
            )
            by_process: dict[str, float] = {}
            read = self._read_gpu or tree_reader(lambda: process.pid)
            peak = PeakMemory(read, EVERY_S if self._read_gpu else SLOW_EVERY_S)
            if not self._read_gpu:
                peak.before = 0.0
            status: Status = "done"
            try:
                with peak:
                    while process.poll() is None:
                        if time.monotonic() - began > deadline:
                            status = "cut short"
                            break
                        time.sleep(0.25)
                        note_processes(by_process)
            finally:
                end_all(process, mark)
        if status == "done" and process.returncode:
            status = "failed"
        why = "" if status == "done" else last_line(log)
        if self._read_gpu and not settled(self._read_gpu, self._idle):
            print(f"{name}: GPU memory has not come back", flush=True)
        return self._made(arm, status, why, out, peak, by_process, began, wall_began)

    def _made(
        self,
        arm: str,
        status: Status,
        why: str,
        out: Path,
        peak: PeakMemory,
        by_process: dict[str, float],
        began: float,
        wall_began: float,
    ) -> ArmRun:
        details: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        steps = details.pop("steps", [])
        wall = time.monotonic() - began
        first = details.pop("first_step_at", 0.0)
        made = ArmRun(
            arm=arm,
            run=len(self.runs) + 1,
            status=status,
            wall_s=wall,
            start_s=max(0.0, first - wall_began) if first else 0.0,
            peak_gib=peak.gib,
            why=why,
            steps=[step for step in steps if step["step"] > self._options.warmup],
            details={
                **details,
                "GiB before": peak.before / 2**30,
                "GiB by process": by_process,
                "samples of memory": peak.samples,
            },
        )
        print(f"{made.run}-{arm}: {status} in {wall:.0f} s, {len(steps)} steps {why}", flush=True)
        return made

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
            *([f"run.gpu_gib={self._allowed():g}"] if arm == WITHIN else []),
        ]

    def _allowed(self) -> float:
        """GiB of `WITHIN`."""
        return self._options.within or allowed_gib(self.runs)

    def write(self) -> None:
        made = {
            "facts": self.facts(),
            "workload": json.loads((self._scratch / "workload.json").read_text()),
            "runs": [run.as_json() for run in self.runs],
        }
        (self._options.out / "results.json").write_text(json.dumps(made, indent=1) + "\n")
        text = report(self.runs, self.facts(), judge=self._read_gpu is not None)
        (self._options.out / "report.md").write_text(text)

    def facts(self) -> dict[str, str]:
        shape, workload, options = self._workload.shape, self._workload, self._options
        versions: dict[str, str] = {}
        for run in self.runs:
            versions |= run.details.get("versions", {})
        return {
            "machine": f"{gpu_name() or 'no GPU'}; {os.cpu_count()} cores ({platform.machine()})",
            "commit": commit(),
            "command": " ".join(["python -m benchmarks.peers.compare", *sys.argv[1:]]),
            "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
            "model": (
                f"{shape.layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size:,}, "
                f"tied head, random weights (sharpness {workload.sharpness:g})"
            ),
            "a step": (
                f"{workload.prompts_per_step} prompts × {workload.group_size} completions, "
                f"{workload.prompt_tokens} + {workload.completion_tokens} tokens each"
                + (
                    f" (made to end after {workload.ends_after} or so)"
                    if workload.ends_after
                    else ""
                )
                + f", top-p "
                f"{workload.top_p:g}, top-k {workload.top_k}, β {workload.kl_coef:g}"
            ),
            KNOBS: ", ".join([*sorted(options.set), f"within {options.within or 'what TRL had'}"]),
            "measured": (
                f"{options.steps} steps a run after {options.warmup} of warm-up; "
                "memory is that of "
                + ("the whole GPU" if self._read_gpu else "the arm's processes (no GPU)")
                + " over what was in use before"
            ),
        }


def system(arm: str) -> str:
    """Whose arm it is: a key of `GUESS_S`, and the start of a module's name."""
    return arm.partition("-")[0]


def end_all(process: subprocess.Popen[bytes], mark: str) -> None:
    """End what is left of an arm: first politely, then everything that carries its mark."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
    for each in psutil.process_iter():
        try:
            if each.pid != os.getpid() and each.environ().get(MARK) == mark:
                each.kill()
        except (psutil.Error, OSError):
            continue
    process.wait(timeout=30)


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    telling = [line for line in lines if "Error" in line or "error" in line] or lines
    return next((line[:300] for line in reversed(telling) if line), "")


def build(options: argparse.Namespace, scratch: Path) -> Workload:
    """Model and prompts, unless they are there; made by a process of its own, since this one must
    hold no GPU memory. Raises SystemExit where those that are there are of other options."""
    command = [sys.executable, "-m", "benchmarks.peers.shape", f"--out={scratch}"]
    command += ["--small"] if options.small else ["--long"] if options.long else []
    command += [f"--sharpness={options.sharpness}"] if options.sharpness else []
    command += [f"--seed={options.seed}"]
    command += [] if options.draw is None else [f"--draw={options.draw}"]
    made, asked = scratch / "made.txt", " ".join(command[4:])
    if made.exists():
        if (known := made.read_text()) != asked:
            raise SystemExit(f"{scratch} has the model of {known!r}, not of {asked!r}")
        return Workload.load(scratch / "workload.json")
    variables = environment("build")
    subprocess.run(command, check=True, timeout=BUILD_S, env=variables, cwd=ROOT)
    made.write_text(asked)
    return Workload.load(scratch / "workload.json")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="", help=f"default: {ORDER}")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each arm")
    parser.add_argument("--warmup", type=int, default=1, help="steps before those (at least 1)")
    parser.add_argument("--budget-s", type=float, default=480.0, help="seconds for all arms")
    parser.add_argument("--arm-s", type=float, default=300.0, help="seconds for one arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sharpness", type=float, default=0.0, help="spread of the logits, nats")
    parser.add_argument(
        "--scratch", type=Path, help="for model and run folders; default: a new one"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--small", action="store_true", help="a tiny model, for a CPU")
    which.add_argument("--long", action="store_true", help="answers of up to 32,768 tokens")
    which.add_argument("--draw", type=int, metavar="SEED", help="a workload by chance")
    help_within = f"for {WITHIN}; default: {GOALS[1]:.0%}% of the fastest arm's of TRL"
    parser.add_argument("--within", type=float, metavar="GIB", help=help_within)
    parser.add_argument(
        "--verl-path", type=Path, metavar="PACKAGES", help="of verl's arms, instead of PYTHONPATH"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="a knob of Keel's arms"
    )
    options = parser.parse_args(argv)
    options.warmup = max(1, options.warmup)
    default = SMALL_ORDER if options.small else ORDER if options.draw is None else DRAWN_ORDER
    options.arms = (options.arms or default).split(",")
    for arm in options.arms:
        if system(arm) not in GUESS_S:
            parser.error(f"--arms: {arm!r} is no arm of {', '.join(GUESS_S)}")
    return options


def run(options: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Exit status: 0 if every arm that was asked for is done."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its arm ends with it
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
    say((options.out / "report.md").read_text())
    return int(any(each.status != "done" for each in bench.runs[before:]))


if __name__ == "__main__":
    sys.exit(run(arguments()))
