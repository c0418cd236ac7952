"""Nothing about a folder changes without its manifest saying so."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from keel.trainer.run import manifest
from keel.trainer.run.manifest import (
    MANIFEST,
    Entry,
    find_damage,
    fingerprint,
    said,
    seal,
    sizes,
    write_manifest,
)

WEIGHTS = bytes(range(256)) * 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of which one file is two pieces and a half."""
    monkeypatch.setattr(manifest, "PIECE", 1024)
    made = tmp_path / "made"
    (made / "ranks").mkdir(parents=True)
    (made / "ranks" / "weights").write_bytes(WEIGHTS)
    (made / "state").write_text("here")
    (made / "empty").touch()
    write_manifest(made, seal(made, ["ranks/weights"]))
    return made


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_what_was_written_is_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    assert sizes(folder) == {"empty": 0, "ranks/weights": 2560, "state": 4}
    assert find_damage(folder, extra=True) == []
    shutil.copytree(folder, tmp_path / "copy")
    assert find_damage(tmp_path / "copy", extra=True) == []


def test_pieces_are_those_of_sha256(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert files["state"] == {"bytes": 4, "sha256": [hashlib.sha256(b"here").hexdigest()]}
    pieces = [WEIGHTS[start : start + 1024] for start in (0, 1024, 2048)]
    digests = [hashlib.sha256(piece).hexdigest() for piece in pieces]
    assert files["ranks/weights"] == {"bytes": 2560, "sha256": digests}
    assert files["empty"] == {"bytes": 0, "sha256": []}


@pytest.mark.parametrize("bit", [0, 8 * 1024 - 1, 8 * 1024, 8 * 2000 + 3, 8 * 2560 - 1])
def test_any_bit_is_missed(folder: Path, bit: int) -> None:
    flip(folder / "ranks" / "weights", bit)
    start = bit // 8 // 1024 * 1024
    (found,) = find_damage(folder, extra=True)
    end = min(2560, start + 1024)
    assert found == f"ranks/weights: changed, between bytes {start:,} and {end:,}"


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda f: (f / "state").unlink(), "state: missing"),
        (lambda f: (f / "empty").unlink(), "empty: missing"),
        (lambda f: (f / "empty").unlink() or (f / "empty").symlink_to("gone"), "empty: missing"),
        (lambda f: (f / "ranks/weights").write_bytes(WEIGHTS[:-1]), "truncated, 2,559 bytes of"),
        (lambda f: (f / "state").write_text("there"), "state: too long, 5 bytes of 4"),
        (lambda f: (f / "ranks/more").touch(), "ranks/more: extra"),
        (lambda f: (f / "state").rename(f / "fate"), "state: missing; fate: extra"),
        (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: No such file"),
        (lambda f: (f / MANIFEST).write_text("{}"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_text("[1]"), f"{MANIFEST}: cannot be parsed"),
        (lambda f: (f / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST}: cannot be parsed"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, harm: Callable[[Path], object], found: str) -> None:
    harm(folder)
    assert found in said(find_damage(folder, extra=True))


def test_the_manifest_cannot_be_changed_either(folder: Path) -> None:
    """Most flips make it no JSON; a digit in it would accuse a file that is as it was written."""
    path = folder / MANIFEST
    text = path.read_text()
    path.write_text(text.replace('"bytes": 4,', '"bytes": 5,'))
    assert find_damage(folder, extra=True) == [f"{MANIFEST}: changed since it was written"]


def test_a_folder_that_may_grow(folder: Path) -> None:
    (folder / "README.md").touch()
    assert find_damage(folder, extra=False) == []
    (folder / "empty").unlink()
    assert find_damage(folder, extra=False) == ["empty: missing"]


def test_a_rank_that_wrote_elsewhere_is_found_out(folder: Path) -> None:
    sealed = {"ranks/of_another_machine": Entry(7, ["0"])}
    with pytest.raises(ValueError, match=r"of_another_machine: .* wrote 7 bytes, and no are here"):
        write_manifest(folder, sealed)
    with pytest.raises(ValueError, match=r"state: .* wrote 3 bytes, and 4 are here\. run\.dir"):
        write_manifest(folder, {"state": Entry(3, ["0"])})


def test_other_weights_have_another_fingerprint_with_a_manifest_or_without(
    folder: Path, tmp_path: Path
) -> None:
    assert fingerprint(tmp_path / "nowhere") == fingerprint(tmp_path) == ""
    tensors = folder / "model.safetensors"
    tensors.write_bytes(WEIGHTS * 1000)
    write_manifest(folder, {})
    sealed = fingerprint(folder)
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert fingerprint(copy) == sealed
    (copy / MANIFEST).unlink()
    sampled = fingerprint(copy)
    other = shutil.copytree(copy, tmp_path / "other")
    assert fingerprint(other) == sampled != sealed
    trained = bytearray(WEIGHTS * 1000)
    trained[100_000:900_000] = bytes(800_000)
    for changed in (folder, other):
        (changed / "model.safetensors").write_bytes(trained)
    write_manifest(folder, {})
    assert fingerprint(folder) != sealed and fingerprint(other) != sampled


def test_a_long_list_is_cut() -> None:
    assert said([]) == ""
    assert said(["a", "b", "c"]) == "a; b; c"
    assert said(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
