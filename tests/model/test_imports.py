"""Faster imports of large libraries."""

from __future__ import annotations

import gc
import os
import shlex
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from keel.model.imports import heavy_imports, missing_bytecode, not_found


def test_heavy_imports_freezes_objects() -> None:
    before = gc.get_freeze_count()
    with heavy_imports():
        assert not gc.isenabled()
        objects = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(objects)


def test_the_collector_state_is_restored() -> None:
    with pytest.raises(ImportError), heavy_imports():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with heavy_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_not_found_hides_modules() -> None:
    sys.modules.pop("this", None)
    loaded = sys.modules["gc"]
    with not_found("this", "gc"):
        assert import_module("gc") is loaded
        with pytest.raises(ModuleNotFoundError):
            import_module("this")
    assert "this" not in sys.modules and find_spec("this")
    with pytest.raises(ImportError), not_found("this"):
        raise ImportError
    assert "this" not in sys.modules


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("forbidden", "reason"), [(True, "PYTHONDONTWRITEBYTECODE"), (False, "cannot be written")]
)
def test_missing_bytecode_is_reported_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool, reason: str
) -> None:
    folder = tmp_path / "site packages" / "uncompiled"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__pycache__").touch(mode=0o444)  # a file, which even root cannot use as a folder
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    library = import_module("uncompiled")
    try:
        message = missing_bytecode(library)
        assert "uncompiled" in message and reason in message
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            elsewhere = missing_bytecode(library).partition("To cache it elsewhere, ")[2]
        assert elsewhere.startswith("unset" if forbidden else "set PYTHONPYCACHEPREFIX")
        (folder / "__pycache__").unlink()
        subprocess.run(shlex.split(message.partition("Run once: ")[2]), check=True, timeout=60)
        assert missing_bytecode(library) == ""
    finally:
        del sys.modules["uncompiled"]
