"""The structure: imports point one way and in no circle, those inside functions included; each
heavy library has one owner; no file and no folder is too large to take in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "configs": set[str](),
    "rl": set[str](),
    "data": {"rl", "configs"},
    "rewards": {"rl"},
    "agents": {"rl", "configs"},
    "model": {"rl", "configs"},
    "rollout": {"rl", "model", "configs"},
    "trainer": {"rl", "model", "configs"},
}
WIRING = ("trainer/main.py", "trainer/prepare.py")
WIRING_ALSO = {"rollout", "rewards", "data"}
OWNERS = {
    "vllm": ("rollout/",),
    "deepspeed": ("trainer/engine/",),
    "omegaconf": ("configs/load.py",),
    "mcp": ("agents/",),
    "jupyter_client": ("agents/",),
    "ray": ("rollout/", "trainer/", "model/weight_transfer/sender.py"),
    "transformers": ("model/", "rollout/", "trainer/"),
}
MOST_LINES = 440
MOST_FILES = 14
"""In a folder, `__init__.py` left out: about a dozen."""


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(*more: str) -> list[Path]:
    return [
        path for package in (*MAY_IMPORT, *more) for path in sorted((ROOT / package).rglob("*.py"))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] in ("__init__", "__main__") else parts
    return ".".join(parts if parts[0] == "benchmarks" else ("keel", *parts))


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    name = name_of(path)
    package = name.split("/")[0]
    allowed = MAY_IMPORT[package] | {package} | (WIRING_ALSO if name in WIRING else set())
    for imported in imports_of(path):
        top, *rest = imported.split(".")
        assert top not in MAY_IMPORT, f"{name} imports {imported}: say keel.{imported}"
        if top == "keel" and rest:
            assert rest[0] in allowed, f"{name} imports {imported}"
        if top in OWNERS:
            assert name.startswith(OWNERS[top]), f"{name} imports {imported}"


def arrows(unit: Callable[[str], str]) -> dict[str, set[str]]:
    """Who imports whom, by `unit` of the modules' names."""
    known = {module_of(path) for path in sources("benchmarks")}
    graph: dict[str, set[str]] = {}
    for path in sources("benchmarks"):
        here = module_of(path)
        for imported in imports_of(path):
            target = next((m for m in (imported, imported.rpartition(".")[0]) if m in known), None)
            if target and unit(target) != unit(here):
                graph.setdefault(unit(here), set()).add(unit(target))
    return graph


def folder_of(module: str) -> str:
    """`keel.trainer.engine` of `keel.trainer.engine.zero`; a module at a package's top alone."""
    return ".".join(module.split(".")[: 2 if module.startswith("benchmarks") else 3])


@pytest.mark.parametrize("unit", [str, folder_of], ids=["modules", "folders"])
def test_there_is_no_cycle(unit: Callable[[str], str]) -> None:
    try:
        TopologicalSorter(arrows(unit)).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_no_file_and_no_folder_is_too_large() -> None:
    long = {
        name_of(path): lines
        for path in sources("benchmarks", "tests")
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    files = Counter(path.parent for path in sources("benchmarks") if path.name != "__init__.py")
    full = {name_of(folder): count for folder, count in files.items() if count > MOST_FILES}
    assert (long, full) == ({}, {})


def test_every_package_is_in_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT).parts for path in sources()}
    assert set(setuptools["packages"]) == {"keel", *(".".join(("keel", *f)) for f in folders)}
    assert setuptools["package-dir"] == {f"keel.{package}": package for package in MAY_IMPORT}
    links = [path for path in (ROOT / "keel").iterdir() if path.is_symlink()]
    assert {path.name: os.readlink(path) for path in links} == {
        package: f"../{package}" for package in MAY_IMPORT
    }


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("keel.trainer.cli", ("torch", "ray", "vllm", "deepspeed", "transformers", "omegaconf")),
        ("keel.rl.losses", ("ray", "vllm", "deepspeed", "transformers")),
        ("keel.trainer.loop", ("ray", "vllm", "deepspeed", "transformers")),
        ("keel.rewards.judge.service", ("openai",)),
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
        f"import sys; from keel.trainer.cli import main; status = main({arguments!r}); "
        f"print(status, [m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "2 []", done.stderr
