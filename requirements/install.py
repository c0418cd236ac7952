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
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.request import Request, urlopen

HERE = Path(__file__).parent
CPU, DEV, CUDA = (HERE / f"{name}.txt" for name in ("cpu", "dev", "cuda-libraries"))
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
OTHERS_GB = 0.7
CURE = """\
A CPU build is a tenth of that. To have it, press Ctrl-C, let pip find one and call make again:
  export PIP_EXTRA_INDEX_URL=…   the index that PyTorch's installation page names for CPU
  export PIP_FIND_LINKS=…        or a folder that holds the wheel"""

Find = Callable[[str], list[dict]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A build of torch: how pip is asked for it, what pip found, whether it loads CUDA libraries.

    `address` is empty if it is installed already."""

    requirement: str
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


def choose(version: str, find: Find = find) -> Build:
    """The CPU build if pip finds one, else whatever has the bare version. Raises LookupError.

    A version may say what its build is for (2.13.0+cpu, 2.13.0+cu126), but a folder may also hold a
    CPU build that does not: its requirements tell."""
    labelled, bare = f"torch=={version}+cpu", f"torch==={version}"
    try:
        return _build(labelled, find(labelled))
    except LookupError:
        return _build(bare, find(bare))


def _build(requirement: str, entries: list[dict]) -> Build:
    if entries:
        about, address = entries[0]["metadata"], entries[0]["download_info"]["url"]
        label, requires = about["version"], about.get("requires_dist", [])
    else:
        label, requires, address = metadata.version("torch"), metadata.requires("torch") or [], ""
    cuda = any(line.startswith(("nvidia-", "cuda-")) for line in requires)
    return Build(requirement=requirement, version=label, address=address, cuda=cuda)


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


def announcement(build: Build, size: float | None) -> str:
    """Which build is taken and what there is to download."""
    if not build.address:
        return f"torch {build.version} is installed."
    kind = "CUDA build with its libraries: pip finds no CPU build" if build.cuda else "CPU build"
    amount = "a download of unknown size" if size is None else f"{size:.1f} GB to download"
    lines = [f"torch {build.version} ({kind}): {amount}, and {OTHERS_GB} GB of other packages."]
    return "\n".join(lines + [CURE] * build.cuda)


def main() -> None:
    version = pinned(CPU)["torch"]
    try:
        build = choose(version)
        libraries = ("--requirement", str(CUDA)) if build.cuda else ()
        new = [entry["download_info"]["url"] for entry in find(build.requirement, *libraries)]
    except LookupError as error:
        sys.exit(
            f"{error}\npip finds no build of torch {version} to install: see its message above"
        )
    print(announcement(build, gigabytes(new)), flush=True)

    tools = [f"{name}=={(pinned(CPU) | pinned(DEV))[name]}" for name in ("setuptools", "wheel")]
    everything = ("--requirement", str(CPU), "--requirement", str(DEV))
    for arguments in (
        ("--quiet", *tools),  # what builds the packages that come as source
        (build.requirement, *libraries),  # not quiet: it takes long
        ("--quiet", build.requirement, *libraries, *everything),
        ("--quiet", "--no-build-isolation", "--editable", str(HERE.parent)),
    ):
        if subprocess.run([*PIP, *arguments]).returncode:
            sys.exit(f"pip could not install {' '.join(arguments)}: see its message above")
    if subprocess.run([sys.executable, "-c", "import torch"]).returncode:
        sys.exit(
            f"torch {build.version} from {build.address or 'an earlier installation'} does not "
            "load. Take it out of pip's configuration, remove .venv and call make again"
        )


if __name__ == "__main__":
    main()
