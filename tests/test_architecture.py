"""Imports point one way, in-function imports included, and each heavy library has one owner."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": set[str](),
    "rl": set[str](),
    "data": {"rl", "configs"},
    "rewards": {"rl"},
    "model": {"rl", "configs"},
    "rollout": {"rl", "model", "configs"},
    "trainer": {"rl", "model", "configs"},
}
WIRING = ("trainer/main.py", "trainer/prepare.py")
WIRING_ALSO = {"rollout", "rewards", "data"}
OWNERS = {
    "vllm": ("rollout/",),
    "deepspeed": ("trainer/",),
    "omegaconf": ("configs/load.py",),
    "ray": ("rollout/", "trainer/"),
    "transformers": ("model/", "rollout/", "trainer/"),
}


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def sources() -> list[Path]:
    return [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    package = name.split("/")[0]
    allowed = MAY_IMPORT[package] | {package} | (WIRING_ALSO if name in WIRING else set())
    for imported in imports_of(path):
        if imported in MAY_IMPORT:
            assert imported in allowed, f"{name} imports {imported}"
        if imported in OWNERS:
            assert name.startswith(OWNERS[imported]), f"{name} imports {imported}"


def test_every_package_is_listed_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in MAY_IMPORT
        for path in (ROOT / package).rglob("*.py")
    }
    assert set(listed) == found


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("trainer.cli", ("torch", "ray", "vllm", "deepspeed", "transformers", "omegaconf")),
        ("rl.losses", ("ray", "vllm", "deepspeed", "transformers")),
        ("trainer.loop", ("ray", "vllm", "deepspeed", "transformers")),
        ("rewards.judge.service", ("openai",)),
    ],
)
def test_light_modules_load_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "quikstart"),
        ("train", "quickstart", "trainer.lrr=1"),
        ("eval", "quickstart", "run.steps=0"),
        ("judge", "answers.jsonl", "--recipe", "quikstart"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_heavy_loads(arguments: tuple[str, ...]) -> None:
    heavy = ("torch", "ray", "vllm", "deepspeed", "transformers", "matplotlib", "numpy", "sympy")
    code = (
        f"import sys; from trainer.cli import main; status = main({arguments!r}); "
        f"print(status, [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2 []", done.stderr
