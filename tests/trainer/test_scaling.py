"""docs/scaling.md says what its command prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.scaling import STUDIES, tables
from benchmarks.scaling_fit import FITTED, fit
from benchmarks.training_cases import STOCK
from benchmarks.training_rows import MEASURED, row
from trainer.estimate import Rates

DOC = Path(__file__).parents[2] / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return tables()


def test_the_tables_are_what_the_benchmark_prints(made: dict[str, str]) -> None:
    text = DOC.read_text()
    assert len(made) == len(STUDIES) + 3
    for title, table in made.items():
        assert f"## {title}\n" in text
        assert table in text, f"{title}: run benchmarks/scaling.py and copy its table"


def test_the_model_is_within_a_fifth_of_every_measured_figure(made: dict[str, str]) -> None:
    for title, rows, columns in (
        ("Training steps, measured and modelled", len(MEASURED), 2),
        ("Other measured figures", 13, 1),
    ):
        errors = [re.findall(r"([+-]\d+)%", line) for line in made[title].splitlines()[2:]]
        assert len(errors) == rows
        assert all(len(line) == columns for line in errors)
        assert max(abs(int(error)) for line in errors for error in line) <= 20, title


def test_the_constants_are_those_of_the_fit() -> None:
    used = [Rates().layer_moves, STOCK.layer_moves, Rates().compiled_moves, Rates().expert_moves]
    for name, got, value in zip(FITTED, fit(MEASURED), used, strict=True):
        assert abs(got - value) < 0.06, f"{name}: run benchmarks/scaling_fit.py"


def test_a_row_is_written_as_it_is_read() -> None:
    for each in MEASURED:
        assert eval(each.line().rstrip(","), {"row": row}) == each
