"""docs/scaling.md says what its command prints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling import MEASURED, STUDIES, tables

DOC = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_the_tables_are_what_the_benchmark_prints() -> None:
    text, made = DOC.read_text(), tables()
    assert len(made) == len(STUDIES) + 2
    for title, table in made.items():
        assert f"## {title}\n" in text
        assert table in text, f"{title}: run benchmarks/scaling.py and copy its table"


def test_the_model_is_within_a_fifth_of_every_measured_figure() -> None:
    rows = [line.split("|") for line in tables()["Measured and modelled"].splitlines()[2:]]
    assert len(rows) == 7 + 2 * len(MEASURED)
    for row in rows:
        assert abs(float(row[5].strip().rstrip("%"))) <= 20, row
