"""Fit the constants of `keel check`'s time model to measured steps, and leave steps out.

    python -m benchmarks.scaling_fit          # no GPU, seconds

Least squares of relative errors over benchmarks/training_rows.py. Four constants of `Rates` are
fitted; those that a profile or a part of a step gives are kept. The time is linear in all four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.training_cases import STOCK, estimates, facts_at
from benchmarks.training_rows import MEASURED, Measured
from trainer.estimate import Rates

FITTED = ("layer_moves", "stock_moves", "compiled_moves", "expert_moves")
"""`stock_moves` is the `layer_moves` of stock norms."""
SHAPES = sorted({row.case.shape for row in MEASURED})
GROUPS: tuple[tuple[str, Callable[[Measured], bool]], ...] = (
    *((name, lambda row, name=name: row.case.shape == name) for name in SHAPES),
    ("several ranks", lambda row: row.case.ranks > 1),
    ("recompute", lambda row: row.case.recompute),
    ("4,096 tokens", lambda row: row.case.length == 4096),
)


def rates(constants: Sequence[float], *, stock: bool) -> Rates:
    values = dict(zip(FITTED, constants, strict=True))
    other = values.pop("stock_moves")
    return replace(Rates(), **values | ({"layer_moves": other} if stock else {}))


def predicted(row: Measured, constants: Sequence[float]) -> float:
    """Seconds of the step."""
    used = rates(constants, stock=row.stock)
    return estimates(row.case, facts_at(row.case.shape), gpu=True, rates=used)[0]


def fit(rows: Sequence[Measured]) -> np.ndarray:
    """The constants; NaN where no row tells."""
    nothing = [0.0] * len(FITTED)
    base = np.array([predicted(row, nothing) for row in rows])
    seconds = np.array([row.seconds for row in rows])
    units = np.eye(len(FITTED))
    columns = np.array([[predicted(row, unit.tolist()) for row in rows] for unit in units])
    matrix = ((columns - base) / seconds).T
    told = np.abs(matrix).sum(0) > 0
    found = np.full(len(FITTED), np.nan)
    found[told] = np.linalg.lstsq(matrix[:, told], (seconds - base) / seconds, rcond=None)[0]
    return found


def off(row: Measured, constants: np.ndarray) -> float:
    return predicted(row, constants.tolist()) / row.seconds - 1


def main() -> None:
    best = fit(MEASURED)
    now = [Rates().layer_moves, STOCK.layer_moves, Rates().compiled_moves, Rates().expert_moves]
    for name, value, used in zip(FITTED, best, now, strict=True):
        print(f"{name:15} {value:5.2f}, in use {used:g}")
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
