"""Choice of dtype and time estimates on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keel.configs.auto import DTYPE
from keel.configs.load import dump_config, load_recipe
from keel.configs.schema import Config
from keel.trainer.placement import cpus
from keel.trainer.placement.cpus import has_bfloat16, slow_dtype, with_dtype
from keel.trainer.run import checkpoint
from keel.trainer.run.checkpoint import State


@pytest.fixture(params=[True, False], ids=["avx512_bf16", "avx2"])
def bfloat16(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Fake /proc/cpuinfo. Returns True if the CPU in it has bfloat16 instructions."""
    flags = "fpu avx2" + " avx512f avx512_bf16" * request.param
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(cpus, "CPUINFO", info)
    has_bfloat16.cache_clear()
    monkeypatch.setattr(cpus, "has_bfloat16", lambda: has_bfloat16.__wrapped__())
    return request.param


def recipe(tmp_path: Path, dtype: str) -> tuple[Config, frozenset[str]]:
    path = tmp_path / "own.yaml"
    path.write_text(
        f"model: {{path: a/b{dtype}}}\n"
        "data: {sources: [{name: s, source: jsonl, path: s.jsonl}]}\n"
    )
    return load_recipe(path)


@pytest.mark.parametrize("dtype", ["", ", dtype: auto"])
def test_auto_dtype_is_fast_on_the_cpu(bfloat16: bool, tmp_path: Path, dtype: str) -> None:
    config, open_knobs = recipe(tmp_path, dtype)
    assert DTYPE in open_knobs
    chosen = with_dtype(config, open_knobs, gpu=False)
    assert chosen.model.dtype == ("bfloat16" if bfloat16 else "float32")
    assert not slow_dtype(chosen, gpu=False)
    assert with_dtype(config, open_knobs, gpu=True).model.dtype == "bfloat16"


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("first_dtype", ["float32", "bfloat16"])
def test_resumed_run_keeps_its_dtype(
    bfloat16: bool, tmp_path: Path, first_dtype: str, gpu: bool
) -> None:
    config, open_knobs = recipe(tmp_path, "")
    config = replace(config, run=replace(config.run, dir=str(tmp_path / "run")))
    before = replace(config, model=replace(config.model, dtype=first_dtype))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(before))
    saved = State(step=2, version=2, config="c")
    checkpoint.save(tmp_path / "run" / "checkpoints", saved, lambda _: {}, keep=9)
    assert with_dtype(config, open_knobs, gpu=gpu).model.dtype == first_dtype
