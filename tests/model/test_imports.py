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

from keel.model.imports import compiled_anew, heavy_imports, not_found


def test_nothing_is_collected_meanwhile_or_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with heavy_imports():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_the_collector_is_left_as_it_was() -> None:
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


def test_what_is_not_wanted_is_not_found_meanwhile() -> None:
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
    ("forbidden", "why"), [(True, "PYTHONDONTWRITEBYTECODE is set"), (False, "cannot be written")]
)
def test_a_library_whose_bytecode_is_not_kept_is_named_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forbidden: bool, why: str
) -> None:
    folder = tmp_path / "site packages" / "uncompiled"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "__pycache__").touch(mode=0o444)  # a file: not even root writes into it
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    library = import_module("uncompiled")
    try:
        said = compiled_anew(library)
        assert "bytecode of uncompiled is not kept" in said and why in said
        with monkeypatch.context() as patch:  # a read-only image, or another user's
            patch.setattr(os, "access", lambda *_: False)
            elsewhere = compiled_anew(library).partition("To keep it elsewhere, ")[2]
        assert elsewhere.startswith("unset" if forbidden else "set PYTHONPYCACHEPREFIX")
        (folder / "__pycache__").unlink()
        subprocess.run(shlex.split(said.partition("Once: ")[2]), check=True, timeout=60)
        assert compiled_anew(library) == ""
    finally:
        del sys.modules["uncompiled"]
