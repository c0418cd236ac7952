from __future__ import annotations

import gc

import pytest

from keel.model.imports import heavy_imports


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
