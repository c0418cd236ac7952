"""What `make install` puts into .venv: the pinned packages, and the build of torch that pip finds.

Nothing here needs CUDA, but PyPI has torch's CUDA build alone, and that does not even load without
its CUDA libraries: together ten times the CPU build. So pip is asked for a CPU build first, which
it finds where its configuration names an index or a folder that has one. Standard library only:
the environment that runs this is empty.
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
OTHERS_GB = 0.7  # to download besides torch and its libraries
DISK_GB = {"CPU": 4, "CUDA": 7}
RAW = (24, 1)
"""From this pip on it says in plain lines how many bytes it has."""
CURE = """\
A CPU build is a tenth of that. To have it, press Ctrl-C, let pip find one and call make again:
  export PIP_EXTRA_INDEX_URL=…   the index that PyTorch's installation page names for CPU
  export PIP_FIND_LINKS=…        or a folder that holds the wheel"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build of torch: what pip is asked for it, what it found, whether that loads CUDA libraries.

    `address` is empty if it is installed already."""

    query: tuple[str, ...]
    version: str
    address: str
    cuda: bool


def pinned(path: Path) -> dict[str, str]:
    """Name → version of a list of requirements."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def find(*requirements: str) -> list[dict]:
    """What pip would install for these alone: the entries of its report, none for what is there.

    Raises LookupError with pip's words."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [*PIP, "--quiet", "--dry-run", "--report", str(report), *requirements]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise LookupError(done.stderr.strip())
        return json.loads(report.read_text())["install"]


def choose(version: str) -> Build:
    """A CPU build if pip finds one, else whatever has the bare version. Raises LookupError.

    A version may say what its build is for (2.13.0+cpu, 2.13.0+cu126), but a folder may also hold a
    CPU build that does not: its requirements tell. Of two builds of the bare version pip takes the
    index's, so folders are asked by themselves.
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
    """Size of these files together, in units of 1e9 bytes; None if a server does not tell."""
    total = 0
    for address in addresses:
        try:
            with urlopen(Request(address, method="HEAD"), timeout=30) as answer:
                total += int(answer.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            return None
    return total / 1e9


def install(what: str, words: Sequence[str], packages: int = 0) -> int:
    """pip's exit status; what it says is shown where that is not 0. packages: how many it looks at;
    0: one, whose bytes are counted instead."""
    raw = tuple(map(int, metadata.version("pip").split(".")[:2])) >= RAW
    if not packages and not raw:  # pip has a bar for it
        return subprocess.run([*PIP, *words]).returncode
    command = [*PIP, "--progress-bar", "raw" if raw else "off", *words]
    said: list[str] = []
    unit = "packages" if packages else "bytes"
    with (
        waiting(what, what, total=packages, unit=unit) as wait,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if not heard(wait, line):
                said.append(line)
    if process.returncode:
        print("".join(said), file=sys.stderr)
    return process.returncode


def heard(wait: Wait, line: str) -> bool:
    """What a line of pip's says of how far it is. Returns whether that is all it says."""
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
    """Which build is taken and what there is to download."""
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
    """The checkout's package on the path of the environment whose site-packages this is, too.

    pip's finder for editable packages comes last: in the folder that the checkout lies in, Python
    would take a checkout that is called `keel` itself for the package, and find nothing in it."""
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
        sys.exit(f"{error}\nKeel needs these packages, and pip finds them nowhere: see above")
    files = [build.address] * bool(build.address) + [
        entry["download_info"]["url"] for entry in libraries
    ]
    print(announcement(build, gigabytes(files)), flush=True)

    tools = [f"{name}=={(pinned(CPU) | pinned(DEV))[name]}" for name in ("setuptools", "wheel")]
    packages = len(pinned(CPU)) + len(pinned(DEV))
    steps = [  # the first is what builds the packages that come as source
        ("installing setuptools", tools, len(tools)),
        ("installing torch", build.query, 0),
        *([("installing CUDA libraries", of(CUDA), len(libraries))] if build.cuda else []),
        ("installing the other packages", (*of(CPU), *of(DEV)), packages),
        ("installing Keel", ("--no-build-isolation", "--editable", str(HERE.parent)), 0),
    ]
    for what, words, count in steps:
        if install(what, words, count):
            sys.exit(f"pip could not install {' '.join(words)}: its message is above")
    put_on_path(Path(sysconfig.get_path("purelib")))
    if subprocess.run([sys.executable, "-c", "import torch"]).returncode:
        sys.exit(
            f"torch {build.version} from {build.address or 'an earlier installation'} does not "
            "load. Take it out of pip's configuration, remove .venv and call make again"
        )


if __name__ == "__main__":
    main()
