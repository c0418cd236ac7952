"""Most figures of docs/performance.md and docs/learning.md that want GPUs, unattended.

    python -m benchmarks.run_all --out OUT --gpus 0,1,2,3 --seconds 1500

Runs the jobs below, each on GPUs of its own as soon as enough are free, and writes a log for each
and `figures.json` as it goes. A job that fails or is late does not touch the others. Jobs that have
succeeded under OUT before, at this commit, are skipped: a second call resumes the first. What
another commit has left is put into OUT/earlier, and the job is done again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.common.revision import VARIABLE, commit

GRACE_S = 20.0
"""Between asking a job to end and ending it."""
POLL_S = 0.5
TAIL = 12


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    module: str
    arguments: str
    """`{out}`: a folder of the job's own."""
    gpus: int = 1
    seconds: float
    """Ended after so long."""
    after: str = ""
    """A job whose results it uses."""

    def command(self, out: Path) -> list[str]:
        filled = self.arguments.format(out=out / self.name)
        return [sys.executable, "-m", self.module, *shlex.split(filled)]


RUN = "run.dir={out}/run model.embedded.cache_dir={out}/../cache"
SHARED = "model.dtype=bfloat16 rollout.engines=1 run.device=gpu run.eval_every=0 run.steps=12"
BRIEFLY = "model.embedded.cold_start.steps=150"
"""For runs that are to show that they run, and how fast."""
RECORDERS = (
    "-q -m gpu -p no:cacheprovider tests/gpu/test_recorders_native.py tests/gpu/test_sleep.py"
)
PEERS = "--out {out} --scratch {out}/models --steps 3 --budget-s 560"
JOBS = (
    # What can fail cheaply comes first, and the figures that matter most.
    Job(
        name="tests-trainer",
        module="pytest",
        arguments="-q -m gpu -p no:cacheprovider tests/gpu --deselect tests/gpu/test_cold_start.py "
        "--ignore tests/gpu/test_recorders_native.py --ignore tests/gpu/test_sleep.py "
        "--ignore tests/gpu/test_draw.py --ignore tests/gpu/test_copies.py",
        seconds=400,
    ),
    Job(
        name="tests-copies",
        module="pytest",
        arguments="-q -m gpu -p no:cacheprovider tests/gpu/test_copies.py",
        seconds=400,
    ),
    Job(
        name="tests-draw",
        module="pytest",
        arguments="-q -m gpu -p no:cacheprovider tests/gpu/test_draw.py",
        seconds=240,
    ),
    Job(name="tests-packed", module="pytest", arguments=f"{RECORDERS} -k packed", seconds=400),
    Job(
        name="tests-native", module="pytest", arguments=f"{RECORDERS} -k 'not packed'", seconds=400
    ),
    Job(
        name="rollout",
        module="benchmarks.rollout",
        arguments="--out {out} --profile packed --rounds 2 "
        "--arms stock packed-plain packed packed-head-rounded packed-before",
        seconds=320,
    ),
    Job(
        name="decoding", module="benchmarks.rollout.attention", arguments="--out {out}", seconds=120
    ),
    Job(
        name="peers",
        module="benchmarks.peers.compare",
        arguments=f"{PEERS} --arms keel-turns,trl",
        seconds=580,
    ),
    Job(
        name="mismatch",
        module="benchmarks.stability.mismatch",
        arguments="--out {out} --arms bfloat16-head-rounded bfloat16 bfloat16-no-cascade "
        "bfloat16-compiled float16 float16-compiled",
        seconds=400,
    ),
    Job(
        name="learning",
        module="keel.trainer.cli",
        arguments=f"train embedded-100m {RUN}",
        seconds=580,
    ),
    Job(
        name="sleep",
        module="keel.trainer.cli",
        arguments=f"train quickstart {RUN} {SHARED} rollout.sleep=true "
        "rollout.gpu_memory_utilization=0.85 run.checkpoint_every=6",
        seconds=240,
    ),
    Job(
        name="training",
        module="benchmarks.training",
        arguments="--out {out} --profile --rounds 2 --seconds 200",
        seconds=240,
    ),
    Job(
        name="rollout-dense",
        module="benchmarks.rollout",
        arguments="--out {out} --dense --rounds 1 --arms packed --profile packed packed-fa2 "
        "packed-triton packed-page64 packed-page256",
        seconds=280,
    ),
    Job(
        name="sampling", module="benchmarks.rollout.sampling", arguments="--out {out}", seconds=150
    ),
    Job(
        name="training-peers",
        module="benchmarks.training",
        arguments="--out {out} --peers --profile --rounds 2 --seconds 150",
        seconds=190,
    ),
    Job(
        name="transfer-ipc",
        module="benchmarks.transfer",
        arguments="--direct --rounds 9 --json {out}.json",
        seconds=120,
    ),
    Job(
        name="transfer-nccl",
        module="benchmarks.transfer",
        arguments="--direct --rounds 9 --gpus 2 --json {out}.json",
        gpus=2,
        seconds=120,
    ),
    Job(
        name="transfer-experts",
        module="benchmarks.transfer",
        arguments="--direct --rounds 9 --experts 256 --width 128 --json {out}.json",
        seconds=120,
    ),
    Job(
        name="two-gpus-async",
        module="keel.trainer.cli",
        arguments=f"train gpu2-async {RUN} {BRIEFLY} run.steps=20 run.eval_every=0",
        gpus=2,
        seconds=400,
    ),
    Job(
        name="two-gpus-colocated",
        module="keel.trainer.cli",
        arguments=f"train embedded-100m {RUN} {BRIEFLY} run.steps=10 run.eval_every=0 "
        "trainer.ranks=2 "
        "trainer.zero_stage=2 rollout.engines=2 rollout.colocated=true rollout.sleep=true "
        "rollout.gpu_memory_utilization=0.8",
        gpus=2,
        seconds=400,
    ),
    Job(name="dense-model", module="benchmarks.peers.shape", arguments="--out {out}", seconds=120),
    Job(
        name="dense",
        module="keel.trainer.cli",
        arguments=f"train gpu-dense {RUN} model.path={{out}}/../dense-model/model run.steps=4 "
        "run.eval_every=0 rollout.sampling.max_tokens=256",
        seconds=300,
        after="dense-model",
    ),
    Job(
        name="peers-more",
        module="benchmarks.peers.compare",
        arguments=f"{PEERS} --arms keel-packed-sleep,trl-fast,keel-packed,trl-lean",
        seconds=580,
    ),
    Job(name="agents", module="benchmarks.agents", arguments="--out {out} --rounds 2", seconds=240),
    Job(
        name="agents-8b",
        module="benchmarks.agents",
        arguments="--out {out} --model 8b --rounds 2",
        seconds=420,
    ),
    Job(
        name="trip",
        module="keel.trainer.cli",
        arguments=f"train agent-trip-100m {RUN}",
        seconds=580,
    ),
    Job(
        name="scaling",
        module="benchmarks.training",
        arguments="--out {out} --ranks 1,2,4 --seconds 200",
        gpus=4,
        seconds=240,
    ),
    Job(
        name="four-gpus-experts",
        module="keel.trainer.cli",
        arguments=f"train gpu4-expert-parallel {RUN} {BRIEFLY} run.steps=10 run.eval_every=0",
        gpus=4,
        seconds=400,
    ),
    Job(
        name="support-head",
        module="benchmarks.training.support_head",
        arguments="--rounds 3",
        seconds=110,
    ),
    Job(name="replay", module="benchmarks.training.replay", arguments="--rounds 5", seconds=110),
    Job(
        name="tests-cold-start",
        module="pytest",
        arguments="-q -m gpu -p no:cacheprovider tests/gpu/test_cold_start.py",
        seconds=240,
    ),
)


@dataclass(kw_only=True)
class Running:
    job: Job
    gpus: list[str]
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    asked_to_end: float = 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began


class Figures:
    def __init__(self, out: Path, gpus: list[str], *, end: float, commit: str) -> None:
        self._out, self._free, self._end, self._commit = out, list(gpus), end, commit
        self._running: list[Running] = []
        path = out / "figures.json"
        self._done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def run(self, jobs: list[Job]) -> bool:
        """Each job once, in this order where GPUs are free. Whether all of them are done."""
        waiting = [job for job in jobs if not self._is_done(job.name)]
        size = len(self._free)
        for job in [job for job in waiting if job.gpus > size]:
            self._leave_out(job, waiting, f"needs {job.gpus} GPUs")
        while waiting or self._running:
            for job in list(waiting):
                to_come = {other.name for other in waiting} | {r.job.name for r in self._running}
                if time.monotonic() > self._end - GRACE_S:
                    self._leave_out(job, waiting, "no time")
                elif job.after in to_come:
                    continue
                elif job.after and not self._is_done(job.after):
                    self._leave_out(job, waiting, f"without {job.after} of {self._commit}")
                elif job.gpus <= len(self._free):
                    waiting.remove(job)
                    self._start(job)
                elif job.gpus > 1:
                    break  # or smaller jobs would keep it from ever having enough
            time.sleep(POLL_S)
            self._look()
        for name, noted in self._done.items():
            if noted["commit"] != self._commit:
                print(f"{name}: {noted['status']} at {noted['commit']}, not {self._commit}")
        return all(self._is_done(job.name) for job in jobs)

    def _is_done(self, name: str) -> bool:
        noted = self._done.get(name, {})
        return noted.get("status") == "done" and noted["commit"] == self._commit

    def _put_aside(self, name: str) -> None:
        """What another commit has left of a job, which would go on with that."""
        before = self._done.get(name, {"commit": self._commit})
        if before["commit"] == self._commit:
            return
        places = (self._out / "earlier" / f"{name}-{before['commit']}-{n}" for n in count(1))
        place = next(place for place in places if not place.exists())
        place.mkdir(parents=True)
        for left in (name, f"{name}.log", f"{name}.json"):
            if (self._out / left).exists():
                (self._out / left).rename(place / left)
        (place / "figures.json").write_text(json.dumps({name: before}, indent=1) + "\n")
        was = f"was {before['status']} at {before['commit']}"
        print(f"{name}: {was}, kept in {place}; again at {self._commit}", flush=True)

    def _leave_out(self, job: Job, waiting: list[Job], why: str) -> None:
        waiting.remove(job)
        print(f"{job.name}: left out, {why}", flush=True)

    def _start(self, job: Job) -> None:
        gpus, self._free = self._free[: job.gpus], self._free[job.gpus :]
        self._put_aside(job.name)
        (self._out / job.name).mkdir(parents=True, exist_ok=True)
        # Ray's sockets want a short path; each job has a cluster of its own.
        ray = Path(f"/tmp/keel-figures-{os.getpid()}-{gpus[0]}")
        ray.mkdir(exist_ok=True)
        variables = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "RAY_TMPDIR": str(ray),
            VARIABLE: self._commit,
        }
        with open(self._out / f"{job.name}.log", "wb") as log:
            process = subprocess.Popen(
                job.command(self._out),
                env={**os.environ, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(Running(job=job, gpus=gpus, process=process))
        self._note(job, "started")
        print(f"{job.name}: started on GPU {', '.join(gpus)}", flush=True)

    def _look(self) -> None:
        for entry in list(self._running):
            status = entry.process.poll()
            late = entry.spent > entry.job.seconds or time.monotonic() > self._end
            if status is None and late and not entry.asked_to_end:
                entry.asked_to_end = time.monotonic()
                entry.process.send_signal(signal.SIGINT)
            if status is None and entry.asked_to_end:
                since = time.monotonic() - entry.asked_to_end
                if since > GRACE_S:
                    os.killpg(entry.process.pid, signal.SIGKILL)
                if since > 2 * GRACE_S:  # not even that ends it
                    status = -signal.SIGKILL
            if status is not None:
                self._ended(entry, status)

    def _ended(self, entry: Running, status: int) -> None:
        self._running.remove(entry)
        self._free = sorted([*self._free, *entry.gpus])
        name = entry.job.name
        word = "late" if entry.asked_to_end else "failed" if status else "done"
        self._note(entry.job, word, code=status, seconds=round(entry.spent, 1))
        lines = (self._out / f"{name}.log").read_text(errors="replace").splitlines()
        print(f"{name}: {word} ({status}) after {entry.spent:.0f} s")
        print("\n".join(f"    {line[:240]}" for line in lines[-TAIL:]), flush=True)

    def _note(self, job: Job, status: str, **more: Any) -> None:
        self._done[job.name] = {
            "status": status,
            **more,
            "gpus": job.gpus,
            "commit": self._commit,
            "command": f"python {shlex.join(job.command(self._out)[1:])}",
        }
        text = json.dumps(self._done, indent=1)
        (self._out / "figures.json").write_text(text + "\n")


def main() -> None:
    names = [job.name for job in JOBS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0", help="ids, such as 0,1")
    parser.add_argument("--only", default="", help=f"in this order, of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=3600, help="for everything")
    parser.add_argument("--list", action="store_true", help="print the commands and stop")
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    jobs = sorted((job for job in JOBS if job.name in wanted), key=lambda j: wanted.index(j.name))
    if options.list:
        for job in jobs:
            print(f"{job.name} ({job.gpus} GPU): {shlex.join(job.command(options.out)[1:])}")
        return
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end, here = time.monotonic() + options.seconds, commit()
    if here.endswith("-dirty") or here == "unknown":
        print(f"{here} is no one source: what it did before counts, whatever has changed since")
    done = Figures(out, options.gpus.split(","), end=end, commit=here).run(jobs)
    sys.exit(int(not done))


if __name__ == "__main__":
    main()
