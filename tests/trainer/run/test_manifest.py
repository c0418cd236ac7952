"""A manifest detects any change to its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from keel.trainer.run import manifest
from keel.trainer.run.manifest import (
    MANIFEST,
    find_damage,
    join_problems,
    seal,
    write_manifest,
)

WEIGHTS = bytes(range(256)) * 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with several files, one of which has two and a half pieces."""
    monkeypatch.setattr(manifest, "PIECE", 1024)
    made = tmp_path / "made"
    (made / "ranks").mkdir(parents=True)
    (made / "ranks" / "weights").write_bytes(WEIGHTS)
    (made / "state").write_text("here")
    (made / "empty").touch()
    write_manifest(made, seal(made, ["ranks/weights"]))
    return made


@pytest.mark.parametrize("bit", [0, 8 * 1024 - 1, 8 * 1024, 8 * 2000 + 3, 8 * 2560 - 1])
def test_any_flipped_bit_is_located(folder: Path, bit: int) -> None:
    content = bytearray(WEIGHTS)
    content[bit // 8] ^= 1 << bit % 8
    (folder / "ranks" / "weights").write_bytes(content)
    (problem,) = find_damage(folder, extra=True)
    start = bit // 8 // 1024 * 1024
    assert problem.startswith("ranks/weights: ")
    assert f"{start:,} and {min(2560, start + 1024):,}" in problem
    assert find_damage(folder, extra=True, bits=False) == []


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda f: (f / "state").unlink(), "state: missing"),
        (lambda f: (f / "empty").unlink(), "empty: missing"),
        (lambda f: (f / "empty").unlink() or (f / "empty").symlink_to("gone"), "empty: missing"),
        (lambda f: (f / "ranks/weights").write_bytes(WEIGHTS[:-1]), "ranks/weights: truncated"),
        (lambda f: (f / "state").write_text("there"), "state: too long"),
        (lambda f: (f / "ranks/more").touch(), "ranks/more: extra"),
        (lambda f: (f / "state").rename(f / "fate"), "state: missing; fate: extra"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: No such file"),
        (lambda f: (f / MANIFEST).write_text("{}"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_text("[1]"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST}: cannot be parsed"),
        (
            lambda f: (f / MANIFEST).write_text(
                (f / MANIFEST).read_text().replace('"bytes": 4,', '"bytes": 5,')
            ),
            f"{MANIFEST}: changed",
        ),
    ],
)
def test_damage_is_named(folder: Path, harm: Callable[[Path], object], problem: str) -> None:
    harm(folder)
    assert problem in join_problems(find_damage(folder, extra=True))
