from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from keel.model.imports import heavy_imports, not_found


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
