"""Generated table tasks, with every answer recomputed by SQL."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.examples.tables.__main__ import main, tasks
from keel.examples.tables.shop import clear_first
from keel.rewards.checks import check_spec
from keel.rewards.rules.verifiers import verifier_for

REVENUE = "o.units * p.price * (1 - coalesce(nullif(o.discount_percent, ''), 0) / 100.0)"
ALL = (
    "orders o join products p on p.product = o.product join customers c on c.customer = o.customer"
)
FITS = {
    "best_category": f"select category from {ALL} group by 1 order by sum({REVENUE}) desc limit 1",
    "revenue_of_region": f"select round(sum({REVENUE}), 2) from {ALL} "
    "where region = :region and cast(strftime('%m', day) as int) = :month "
    "and cast(strftime('%Y', day) as int) = :year",
    "buyers_of_category": f"select count(distinct o.customer) from {ALL} "
    "where region = :region and category = :category",
    "days_between": "select round(avg(d), 2) from (select julianday(max(day)) - "
    "julianday(min(day)) as d from orders group by customer having count(*) > 1)",
    "busiest_weekday": "select case strftime('%w', day) when '0' then 'Sunday' when '1' then "
    "'Monday' when '2' then 'Tuesday' when '3' then 'Wednesday' when '4' then 'Thursday' when '5' "
    "then 'Friday' else 'Saturday' end from orders group by 1 order by count(*) desc limit 1",
    "without_orders": "select count(*) from customers where region = :region and customer not in "
    "(select customer from orders)",
    "median_revenue": f"with r as (select {REVENUE} as v, row_number() over (order by {REVENUE}) "
    f"as n, count(*) over () as m from {ALL} where category = :category) "
    "select round(avg(v), 2) from r where n in ((m + 1) / 2, (m + 2) / 2)",
    "second_product": "select product from orders group by 1 order by sum(units) desc "
    "limit 1 offset 1",
}


@cache
def some() -> list[dict[str, Any]]:
    return list(tasks(32, seed=5))


def base_of(files: dict[str, str]) -> sqlite3.Connection:
    base = sqlite3.connect(":memory:")
    for name, text in files.items():
        rows: list[dict[str, Any]]
        if name.endswith(".csv"):
            rows = list(csv.DictReader(io.StringIO(text)))
        else:
            rows = json.loads(text)["products"]
        for row in rows if name == "orders.csv" else ():
            row["day"] = iso(row["day"])
        columns = [f'"{column}"' for column in rows[0]]
        base.execute(f"create table {name.partition('.')[0]} ({', '.join(columns)})")
        marks = ", ".join("?" * len(columns))
        base.executemany(
            f"insert into {name.partition('.')[0]} values ({marks})",
            [tuple(row.values()) for row in rows],
        )
    return base


def iso(day: str) -> str:
    for form in ("%Y-%m-%d", "%d.%m.%Y", "%d %b %Y"):
        try:
            return datetime.strptime(day, form).date().isoformat()
        except ValueError:
            continue
    raise AssertionError(day)


def named(question: str) -> dict[str, Any]:
    """Parameters of a question."""
    words = question.partition("\n\n")[2]
    values: dict[str, Any] = {}
    for name, pattern in (
        ("region", r"region (\w+)"),
        ("category", r"(?:ordered|order of) (\w+)"),
        ("month", r"month (\d+)"),
        ("year", r"month \d+ of (\d+)"),
    ):
        if match := re.search(pattern, words):
            values[name] = int(match[1]) if match[1].isdigit() else match[1]
    return values


@pytest.mark.parametrize("kind", FITS)
def test_every_answer_by_sql(kind: str) -> None:
    chosen = [task for task in some() if f"-{kind}-" in task["id"]]
    assert len(chosen) == 4
    for task in chosen:
        base = base_of(task["environment"]["files"])
        (value,) = base.execute(FITS[kind], named(task["prompt"])).fetchone()
        verify = verifier_for({"kind": "answer", **{k: task[k] for k in task.keys() & RULE}})
        assert verify(f"So it is \\boxed{{{value}}}.") == 1.0, (value, task["answer"])
        wrong = f"{value + 1}" if isinstance(value, int | float) else f"{value}x"
        assert verify(f"\\boxed{{{wrong}}}") == 0.0
        base.close()


RULE = {"answer", "match", "tolerance"}


def test_ties_have_no_answer() -> None:
    assert clear_first({"a": 5.0, "b": 5.0, "c": 1.0}, "?") is None
    first = clear_first({"a": 5.0, "b": 5.1, "c": 1.0}, "?")
    assert first is not None and first.value == "b"


def test_command_writes_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tables.jsonl"
    assert main([str(path), "--count", "3", "--seed", "5"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == some()[:3]
    interpreter = EnvironmentConfig(target="keel.agents.environments.interpreter:Interpreter")
    source = SourceConfig(name="t", source="jsonl", path=str(path), environment=interpreter)
    prompts = [item.prompt for item in load_jsonl(source, check_spec).items]
    assert prompts[0].reward["environment"]["files"].keys() == {
        "orders.csv",
        "products.json",
        "customers.csv",
    }
    assert main([str(path)]) == 2 and "name a new file" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    assert main([str(other), "--count", "3"]) == 0  # a random seed
    assert json.loads(other.read_text().splitlines()[0]) != some()[0]
