"""Tests that the kernels compile for Hopper GPUs, without using a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keel.rollout.vllm_fast import sample_graphs, step_reuse

pytestmark = pytest.mark.e2e
HOPPER = GPUTarget("cuda", 90, 32)
FLOATS, NUMBERS, LONG = "*fp32", "*i32", "*i64"
POINTERS = {
    **dict.fromkeys(["sums_ptr", "found_ptr"], FLOATS),
    **{f"{to}{of}_ptr": FLOATS for to in ("", "to_") for of in ("temperature", "top_p")},
    **dict.fromkeys(["requests_ptr", "seeds_ptr", "to_seeds_ptr"], LONG),
    **dict.fromkeys(["sampled_ptr", "positions_ptr", "slots_ptr"], LONG),
}


def binary(kernel: Any, **constants: int) -> bytes:
    names = [name for name in kernel.arg_names if name not in constants]
    types = {n: POINTERS.get(n, NUMBERS if n.endswith("_ptr") else "i32") for n in names}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): it for name, it in constants.items()},
    )
    return compiled(source, target=HOPPER).asm["cubin"]


@pytest.mark.parametrize(
    ("module", "name", "constants"),
    [
        (sample_graphs, "_gather", {"BLOCK": sample_graphs.BLOCK}),
        (step_reuse, "_advance", {"PAGE": 16, "BLOCK": step_reuse.BLOCK}),
    ],
)
def test_it_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: Any, name: str, constants: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert binary(getattr(module, name), **constants).startswith(b"\x7fELF")
