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
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).absolute().parent
CPU, DEV, CUDA = (HERE / f"{name}.txt" for name in ("cpu", "dev", "cuda-libraries"))
PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps")
CURE = """\
pip finds no CPU build of torch, so this installs the CUDA build: 7 GB in .venv instead of 4 GB.
To use a CPU build, press Ctrl-C, set one of these and run make again:
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


def main() -> None:
    try:
        build = choose(pinned(CPU)["torch"])
    except LookupError as error:
        sys.exit(f"{error}\npip could not find torch; see the message above.")
    if build.cuda and build.address:
        print(CURE, flush=True)
    tools = [f"{name}=={(pinned(CPU) | pinned(DEV))[name]}" for name in ("setuptools", "wheel")]
    libraries = ["--requirement", str(CUDA)]
    steps = [  # setuptools builds the source packages
        ("setuptools", tools),
        (f"torch {build.version}", [*build.query, *(libraries if build.cuda else [])]),
        ("the other packages", ["--requirement", str(CPU), "--requirement", str(DEV)]),
        ("Keel", ["--no-build-isolation", "--editable", str(HERE.parent)]),
    ]
    for what, words in steps:
        print(f"installing {what}", flush=True)
        if subprocess.run([*PIP, *words]).returncode:
            sys.exit(f"pip could not install {what}: see its message above")
    put_on_path(Path(sysconfig.get_path("purelib")))
    if subprocess.run([sys.executable, "-c", "import torch"]).returncode:
        sys.exit(
            f"torch {build.version} from {build.address or 'an earlier installation'} cannot be "
            "imported. Remove it from pip's configuration, delete .venv and run make again."
        )


if __name__ == "__main__":
    main()
