"""Keel can be built, installed and used outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.e2e


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


def test_wheel_has_recipes_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "keel/configs/recipes/quickstart.yaml" in names
    data = [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/*/*.jsonl")]
    data += [f"keel/{path.relative_to(ROOT)}" for path in ROOT.glob("commands/report/page/*")]
    assert len(data) > 8 and set(data) <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"keel", "keel_rl"}


def test_installed_command_works_next_to_equal_names(wheel: Path, tmp_path: Path) -> None:
    """In a new environment, whose dependencies come from this one's site-packages."""
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
    heavy = (
        "import sys, keel.commands.cli as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: print({'torch', 'ray', 'vllm'} & set(sys.modules))"
    )
    assert run(python, "-c", heavy, cwd=project).endswith("set()\n"), "help waits for libraries"
    assert run(keel, "--version", cwd=project).startswith("keel ")
    rewards = "data.sources[spelling].rewards={rewards.mine.short: 1.0}"
    sizes = [f"data.sources[{name}].size=200" for name in ("spelling", "spiral")]
    assert "actors" in run(keel, "check", "quickstart", rewards, *sizes, cwd=project)
