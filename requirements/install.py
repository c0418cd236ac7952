"""Installs the pinned packages and a build of torch into .venv, for `make install`.

Keel does not need CUDA here, but PyPI only has torch's CUDA build, which requires its CUDA
libraries: together ten times the size of the CPU build. So this script first looks for a CPU build
in the indexes and folders of pip's configuration. It uses the standard library only, because the
environment is still empty.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parent))
from keel.trainer.run.progress import Wait, waiting  # noqa: E402  standard library alone, too

CPU, DEV, CUDA = (HERE / f"{name}.txt" for name in ("cpu", "dev", "cuda-libraries"))
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
OTHERS_GB = 0.7  # download size without torch and its libraries
DISK_GB = {"CPU": 4, "CUDA": 7}
RAW = (24, 1)
"""First pip version with machine-readable progress."""
CURE = """\
A CPU build is a tenth of that size. To use one, press Ctrl-C, set one of these and run make again:
  export PIP_EXTRA_INDEX_URL=…   CPU index from PyTorch's installation page
  export PIP_FIND_LINKS=…        folder with the wheel"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build of torch, as found by pip for `query`.

    `address` is empty if the build is already installed.
    """

    query: tuple[str, ...]
    version: str
    address: str
    cuda: bool


def pinned(path: Path) -> dict[str, str]:
    """Read a requirements file: name → version."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def find(*requirements: str) -> list[dict]:
    """Return the entries of pip's report for these requirements; installed ones have no entry.

    Raises LookupError with pip's message.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "--quiet", "--dry-run", "--report", str(report), *requirements]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        return json.loads(report.read_text())["install"]


def choose(version: str) -> Build:
    """Prefer a CPU build; otherwise return any build with the bare version. Raises LookupError.

    A version may name its build (2.13.0+cpu, 2.13.0+cu126), but a folder may hold a CPU build
    without a label, recognised by its requirements. pip prefers the index over folders for the bare
    version, so folders are queried separately.
    """
    bare = f"torch==={version}"
    for query in ((f"torch=={version}+cpu",), ("--no-index", bare)):
        with suppress(LookupError):
            build = _build(query, find(*query))
            if not build.cuda:
                return build
    return _build((bare,), find(bare))


def _build(query: tuple[str, ...], entries: list[dict]) -> Build:
    if entries:
        about, address = entries[0]["metadata"], entries[0]["download_info"]["url"]
        label, requires = about["version"], about.get("requires_dist", [])
    else:
        label, requires, address = metadata.version("torch"), metadata.requires("torch") or [], ""
    cuda = any(line.startswith(("nvidia-", "cuda-")) for line in requires)
    return Build(query=query, version=label, address=address, cuda=cuda)


def gigabytes(addresses: Sequence[str]) -> float | None:
    """Total size of the files in GB (1e9 bytes); None if a server does not report it."""
    total = 0
    for address in addresses:
        try:
            with urlopen(Request(address, method="HEAD"), timeout=30) as answer:
                total += int(answer.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            return None
    return total / 1e9


def install(what: str, words: Sequence[str], packages: int = 0) -> int:
    """Run pip and return its exit status; show its output on failure.

    packages: number of packages for the progress bar; 0: one package, counted in bytes.
    """
    raw = tuple(map(int, metadata.version("pip").split(".")[:2])) >= RAW
    if not packages and not raw:  # pip shows its own progress bar
        return subprocess.run([*PIP, *words]).returncode
    command = [*PIP, "--progress-bar", "raw" if raw else "off", *words]
    output: list[str] = []
    unit = "packages" if packages else "bytes"
    with (
        waiting(what, total=packages, unit=unit) as wait,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not update_progress(wait, line):
                output.append(line)
    if process.returncode:
        print("".join(output), file=sys.stderr)
    return process.returncode


def update_progress(wait: Wait, line: str) -> bool:
    """Update the progress from a line of pip's output; return True if the line is progress only."""
    match line.split():
        case ["Progress", done, "of", total] if done.isdecimal() and total.isdecimal():
            if wait.unit == "bytes":
                wait.done, wait.total = int(done), int(total)
            return True
        case ["Collecting" | "Requirement", *_] if wait.unit == "packages":
            wait.done = min(wait.done + 1, wait.total)
        case ["Downloading", file, *size]:
            wait.note = " ".join([file.rpartition("/")[2], *size])
        case ["Installing", "collected", *_]:
            wait.total, wait.note = 0, "copying files"
    return False


def announcement(build: Build, size: float | None) -> str:
    """Describe the chosen build and the size of the download."""
    if not build.address:
        return f"torch {build.version} is installed."
    kind = "CUDA" if build.cuda else "CPU"
    why = " with its libraries, because pip finds no CPU build" if build.cuda else ""
    amount = "a download of unknown size" if size is None else f"{size:.1f} GB to download"
    lines = [
        f"torch {build.version}, the {kind} build{why}: {amount}, and {OTHERS_GB} GB of other "
        f"packages; .venv takes {DISK_GB[kind]} GB."
    ]
    return "\n".join(lines + [CURE] * build.cuda)


def put_on_path(site: Path) -> None:
    """Put the checkout's package on the path of the environment with this site-packages.

    pip's finder for editable packages comes last: from the parent folder, Python would import a
    checkout named `keel` as an empty namespace package.
    """
    folder = site / "keel-checkout"
    folder.mkdir(exist_ok=True)
    link = folder / "keel"
    link.unlink(missing_ok=True)
    link.symlink_to(HERE.parent / "keel")
    (site / "keel-checkout.pth").write_text(f"{folder.name}\n")


def of(path: Path) -> tuple[str, str]:
    return "--requirement", str(path)


def main() -> None:
    version = pinned(CPU)["torch"]
    try:
        build = choose(version)
        libraries = find("--requirement", str(CUDA)) if build.cuda else []
    except LookupError as error:
        sys.exit(f"{error}\npip could not find packages that Keel needs; see the message above.")
    files = [build.address] * bool(build.address) + [
        entry["download_info"]["url"] for entry in libraries
    ]
    print(announcement(build, gigabytes(files)), flush=True)

    tools = [f"{name}=={(pinned(CPU) | pinned(DEV))[name]}" for name in ("setuptools", "wheel")]
    packages = len(pinned(CPU)) + len(pinned(DEV))
    steps = [  # setuptools builds the source packages
        ("installing setuptools", tools, len(tools)),
        ("installing torch", build.query, 0),
        *([("installing CUDA libraries", of(CUDA), len(libraries))] if build.cuda else []),
        ("installing the other packages", (*of(CPU), *of(DEV)), packages),
        ("installing Keel", ("--no-build-isolation", "--editable", str(HERE.parent)), 0),
    ]
    for what, words, count in steps:
        if install(what, words, count):
            sys.exit(f"pip could not install {' '.join(words)}: see its message above")
    put_on_path(Path(sysconfig.get_path("purelib")))
    if subprocess.run([sys.executable, "-c", "import torch"]).returncode:
        sys.exit(
            f"torch {build.version} from {build.address or 'an earlier installation'} cannot be "
            "imported. Remove it from pip's configuration, delete .venv and run make again."
        )


if __name__ == "__main__":
    main()
