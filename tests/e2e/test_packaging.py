"""Keel can be built, installed (also editable), and used outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.e2e


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
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


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(
    request: pytest.FixtureRequest,
    source: Path,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A new environment with Keel, whose dependencies come from this one's site-packages."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=home).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    what = (wheel,) if request.param == "wheel" else ("--no-build-isolation", "--editable", source)
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", *what, cwd=home)
    return python


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project whose folders have the same names as ours."""
    for name in ("configs", "data", "model", "report", "rewards", "rl", "rollout", "trainer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    (tmp_path / "rewards" / "mine.py").write_text(
        "import data, model\n"
        "from keel.rl.types import Prompt\n\n\n"
        "def short(prompt: Prompt, trajectory) -> float:\n"
        "    return float(data.mine and model.mine and len(trajectory.answer) < 9)\n"
    )
    return tmp_path


def test_wheel_has_recipes_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "keel/configs/quickstart.yaml" in names
    data = [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.jsonl")]
    data += [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("commands/report/page/*")]
    assert len(data) > 8 and set(data) <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"keel", "keel_rl"}


def test_modules_import_next_to_equal_names(
    python: Path, project: Path, source: Path, request: pytest.FixtureRequest
) -> None:
    editable = request.node.callspec.params["python"] == "editable"
    code = (
        "import gc, importlib, importlib.util, pkgutil\n"
        "gc.disable()  # a fifth of the time\n"
        "import keel\n"
        f"load = importlib.{'util.find_spec' if editable else 'import_module'}\n"
        "modules = [load(each.name) for each in pkgutil.walk_packages(keel.__path__, 'keel.')]\n"
        "specs = [getattr(module, '__spec__', module) for module in modules]\n"
        "ours = [spec.origin for spec in specs]\n"
        f"places = ('site-packages/keel', {str(source)!r})\n"
        "assert all(any(place in path for place in places) for path in ours), ours\n"
        "import data, rewards.mine, rl, trainer\n"
        "print(len(ours) > 150, data.mine, rl.mine, trainer.mine)"
    )
    assert run(python, "-c", code, cwd=project).split()[-4:] == ["True"] * 4


def test_command_checks_a_recipe_elsewhere(python: Path, project: Path) -> None:
    keel = python.parent / "keel"
    assert "train" in run(keel, "--help", cwd=project)
    heavy = (
        "import sys, keel.commands.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print({'torch', 'ray', 'vllm'} & set(sys.modules))"
    )
    assert run(python, "-c", heavy, cwd=project).endswith("set()\n"), "help waits for libraries"
    assert run(keel, "--version", cwd=project).startswith("keel ")
    knobs = ["data.sources[spelling].rewards={rewards.mine.short: 1.0}"]
    knobs += ["rewards.judge.base_url=http://127.0.0.1:9/v1", "rewards.judge.model=m"]
    knobs += ["rewards.code.isolation=none-i-trust-the-answers"]
    knobs += [f"rewards.code.time_s={PATIENCE_S}", f"rewards.code.completion_s={PATIENCE_S}"]
    knobs += [f"data.sources[{name}].size=200" for name in ("spelling", "spiral")]
    output = run(keel, "check", "mixed", *knobs, cwd=project)
    assert re.search(r"[1-9]\d* of 12 reference solutions run", output)
