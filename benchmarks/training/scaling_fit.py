"""Fit the constants of `keel check`'s time model to measured steps, and leave steps out.

    python -m benchmarks.training.scaling_fit          # no GPU, seconds

Least squares of relative errors over benchmarks/training/measured.py. Five constants of `Rates` are
fitted; those that a profile or a part of a step gives are kept. The time is linear in all five,
where it is the GPU's: steps that wait for the host say nothing about them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.training.cases import estimates, facts_at
from benchmarks.training.measured import MEASURED, Measured
from keel.trainer.planning.step_time import Rates

FITTED = ("layer_moves", "norm_moves", "compiled_moves", "expert_moves", "stock_expert_moves")
NO_HOST = {"pass_s": 0.0, "compiled_pass_s": 0.0, "expert_pass_s": 0.0}
NO_GPU = {
    "gemm_share": float("inf"),
    "attention_share": float("inf"),
    "optimizer_bytes": 0.0,
    "gradient_bytes": 0.0,
    "summed_bytes": 0.0,
}
SHAPES = sorted({row.case.shape for row in MEASURED})
MIXTURES = ("30b-a3b-slice", "moe-1.6b")
GROUPS: tuple[tuple[str, Callable[[Measured], bool]], ...] = (
    *((name, lambda row, name=name: row.case.shape == name) for name in SHAPES),
    ("several ranks", lambda row: row.case.ranks > 1),
    ("recompute", lambda row: row.case.recompute),
    ("4,096 tokens", lambda row: row.case.length == 4096),
    ("compiled", lambda row: row.case.compiled),
    ("Keel's experts", lambda row: row.case.shape in MIXTURES and not row.stock),
)


def predicted(row: Measured, constants: Sequence[float], **others: float) -> float:
    """Seconds of the step; `others`: constants that are not fitted."""
    used = replace(row.rates, **dict(zip(FITTED, constants, strict=True)), **others)
    return estimates(row.case, facts_at(row.case.shape, stock=row.stock), gpu=True, rates=used)[0]


def waits_for_host(row: Measured) -> bool:
    """The host starts kernels nearly all of the step."""
    return predicted(row, [0.0] * len(FITTED), **NO_GPU) > 0.9 * row.seconds


def fit(rows: Sequence[Measured]) -> np.ndarray:
    """The constants; NaN where no row tells."""
    rows = [row for row in rows if not waits_for_host(row)]
    nothing = [0.0] * len(FITTED)
    base = np.array([predicted(row, nothing, **NO_HOST) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    units = np.eye(len(FITTED))
    columns = np.array([[predicted(row, u.tolist(), **NO_HOST) for row in rows] for u in units])
    matrix = ((columns - base) / seconds).T
    told = np.abs(matrix).sum(0) > 0
    found = np.full(len(FITTED), np.nan)
    found[told] = np.linalg.lstsq(matrix[:, told], (seconds - base) / seconds, rcond=None)[0]
    return found


def off(row: Measured, constants: np.ndarray) -> float:
    return predicted(row, constants.tolist()) / row.seconds - 1


def in_use() -> list[float]:
    return [getattr(Rates(), name) for name in FITTED]


def main() -> None:
    best = fit(MEASURED)
    now = in_use()
    for name, value, used in zip(FITTED, best, now, strict=True):
        print(f"{name:18} {value:5.2f}, in use {used:g}")
    errors = [off(row, np.array(now)) for row in MEASURED]
    print(f"largest error with those in use {max(map(abs, errors)):.1%}")
    alone = [(off(row, fit([r for r in MEASURED if r is not row])), row) for row in MEASURED]
    worst = max(alone, key=lambda each: abs(each[0]))
    print(f"each row left out in turn: at most {worst[0]:+.1%} ({worst[1]})")
    for name, belongs in GROUPS:
        found = fit([row for row in MEASURED if not belongs(row)])
        # A constant that the other rows say nothing about is kept.
        found = np.where(np.isnan(found), best, found)
        left = [(off(row, found), row) for row in MEASURED if belongs(row)]
        worst = max(left, key=lambda each: abs(each[0]))
        constants = ", ".join(f"{value:.1f}" for value in found)
        print(f"without {name} ({len(left)}): at most {worst[0]:+.1%} ({worst[1]}); {constants}")


if __name__ == "__main__":
    main()
