"""Write code-interpreter tasks about generated tables: `python -m keel.examples.tables --count 2000
tables.jsonl`.

Each line contains a question, the rule for its answer, and the text of the files. The seed is
random unless given, because the policy can read this code and could recompute the answers from a
known seed.
"""

import argparse
import csv
import io
import json
import random
import secrets
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

_CATEGORIES = ("tea", "paper", "tools", "lamps", "seeds", "glass", "wool", "maps")
_REGIONS = ("north", "south", "east", "west", "coast", "hills")
_DAY_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d %b %Y")
_CLEAR = 0.002
"""The minimum distance between the two largest values, as a fraction of the range of all values."""
_PROMPT = (
    "orders.csv lists a shop's orders (an empty discount means none), products.json has category "
    "and price of each product, and customers.csv the region of each customer. The revenue of an "
    "order is units × price, less the discount.\n\n{question} Put the final answer in \\boxed{{}}."
)
_TABLES = """
CREATE TABLE products (product, category, price);
CREATE TABLE customers (customer, region);
CREATE TABLE orders (number, day, customer, product, units, discount);
CREATE VIEW sales AS
    SELECT *, strftime('%Y-%m', day) AS month,
        units * price * (1 - coalesce(discount, 0) / 100.0) AS revenue
    FROM orders JOIN products USING (product) JOIN customers USING (customer) ORDER BY number;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    text: str
    """May name a {region}, {category} or {month}, which are drawn for each task."""
    query: str
    """Selects one column of values or, without `combine`, names with their values."""
    combine: Callable[[Sequence[Any]], float] | None = None
    """Computes the answer from the selected values. None: the answer is the name with the largest
    value."""
    decimals: int = 0
    least: int = 0
    """Minimum number of selected values."""


_QUESTIONS = {
    "best_category": _Question(
        text="Which category has the largest revenue? Give its name.",
        query="SELECT category, sum(revenue) FROM sales GROUP BY category",
    ),
    "revenue_of_region": _Question(
        text="Compute the revenue with customers of the region {region} in month {month}, rounded "
        "to two decimals.",
        query="SELECT revenue FROM sales WHERE region = :region AND month = :month",
        combine=sum,
        decimals=2,
        least=3,
    ),
    "buyers_of_category": _Question(
        text="How many different customers of the region {region} have ordered {category}?",
        query="SELECT DISTINCT customer FROM sales WHERE region = :region AND category = :category",
        combine=len,
    ),
    "days_between": _Question(
        text="How many days lie between the first and the last order on average, for customers "
        "with at least two orders, rounded to two decimals?",
        query="SELECT julianday(max(day)) - julianday(min(day)) FROM orders GROUP BY customer "
        "HAVING count(*) > 1",
        combine=mean,
        decimals=2,
    ),
    "busiest_weekday": _Question(
        text="On which day of the week were most orders placed? Name it.",
        query="SELECT CASE strftime('%w', day) WHEN '0' THEN 'Sunday' WHEN '1' THEN 'Monday' "
        "WHEN '2' THEN 'Tuesday' WHEN '3' THEN 'Wednesday' WHEN '4' THEN 'Thursday' "
        "WHEN '5' THEN 'Friday' ELSE 'Saturday' END, count(*) FROM orders GROUP BY 1",
    ),
    "without_orders": _Question(
        text="How many customers of the region {region} have no order?",
        query="SELECT customer FROM customers WHERE region = :region AND customer NOT IN "
        "(SELECT customer FROM orders)",
        combine=len,
    ),
    "median_revenue": _Question(
        text="Compute the median revenue of an order of {category}, rounded to two decimals.",
        query="SELECT revenue FROM sales WHERE category = :category",
        combine=median,
        decimals=2,
        least=6,
    ),
    "second_product": _Question(
        text="Which product comes second by units sold? Give its name.",
        query="WITH totals AS (SELECT product, sum(units) AS units FROM orders GROUP BY product) "
        "SELECT product, units FROM totals WHERE units < (SELECT max(units) FROM totals) "
        "AND (SELECT count(*) FROM totals WHERE units = (SELECT max(units) FROM totals)) = 1",
    ),
}


def _draw_shop(draw: random.Random) -> sqlite3.Connection:
    categories = draw.sample(_CATEGORIES, draw.randint(3, 6))
    products = [
        (f"{category}-{number}", category, round(draw.uniform(2, 90), 2))
        for category in categories
        for number in range(1, draw.randint(3, 7))
    ]
    regions = draw.sample(_REGIONS, draw.randint(3, 5))
    customers = [(f"c{n:03d}", draw.choice(regions)) for n in range(draw.randint(30, 90))]
    first = date(draw.randint(2015, 2024), 1, 1) + timedelta(days=draw.randint(0, 300))
    buyers = draw.sample([name for name, _ in customers], int(0.85 * len(customers)))
    names = sorted(name for name, _, _ in products)
    orders = [
        (
            1000 + n,
            str(first + timedelta(days=draw.randint(0, 200))),
            draw.choice(buyers),
            draw.choice(names),
            min(40, 1 + int(draw.expovariate(0.25))),
            draw.choice((None, None, None, 5, 10, 15, 25)),
        )
        for n in range(draw.randint(150, 500))
    ]
    shop = sqlite3.connect(":memory:")
    shop.executescript(_TABLES)
    shop.executemany("INSERT INTO products VALUES (?, ?, ?)", products)
    shop.executemany("INSERT INTO customers VALUES (?, ?)", customers)
    shop.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", orders)
    return shop


def _ask(
    question: _Question, shop: sqlite3.Connection, draw: random.Random
) -> tuple[str, dict[str, Any]] | None:
    """Return the text of the question and the rule for its answer, or None if the answer is not
    clear."""
    chosen: dict[str, str] = {}
    for name, table in (("region", "customers"), ("month", "sales"), ("category", "products")):
        if f"{{{name}}}" in question.text:
            rows = shop.execute(f"SELECT DISTINCT {name} FROM {table} ORDER BY 1")
            chosen[name] = draw.choice([value for (value,) in rows])
    rows = shop.execute(question.query, chosen).fetchall()
    if "month" in chosen:
        year, month = chosen["month"].split("-")
        chosen["month"] = f"{int(month)} of {year}"
    rule: dict[str, Any] | None = None
    if question.combine is None:
        rule = _name_rule(dict(rows))
    elif len(rows) >= question.least:
        rule = _number_rule(question.combine([value for (value,) in rows]), question.decimals)
    return None if rule is None else (question.text.format(**chosen), rule)


def _files_of(shop: sqlite3.Connection, day_format: str) -> dict[str, str]:
    orders = [
        (number, date.fromisoformat(day).strftime(day_format), *more)
        for number, day, *more in shop.execute("SELECT * FROM orders ORDER BY number")
    ]
    products = [
        {"product": product, "category": category, "price": price}
        for product, category, price in shop.execute("SELECT * FROM products")
    ]
    header = ("order", "day", "customer", "product", "units", "discount_percent")
    customers = shop.execute("SELECT * FROM customers")
    return {
        "orders.csv": _csv(header, orders),
        "products.json": json.dumps({"products": products}, indent=1),
        "customers.csv": _csv(("customer", "region"), customers),
    }


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _name_rule(values: dict[str, float]) -> dict[str, Any] | None:
    """Return the rule for the name with the largest value, or None if another value is almost as
    large."""
    first, second, *_ = sorted(values.values(), reverse=True) or (0, 0)
    if first - second <= _CLEAR * (first - min(values.values(), default=0)):
        return None
    return {"answer": max(values, key=lambda name: values[name]), "match": "exact"}


def _number_rule(value: float, decimals: int) -> dict[str, Any] | None:
    """Return the rule for a number. It accepts answers whose last decimal is rounded either up or
    down. Returns None if the number is so close to 0 that it would accept wrong values."""
    text = f"{value:.{decimals}f}"
    if not decimals:
        return {"answer": text, "match": "math"}
    if round(abs(value) * 10**decimals) in (1, 2):
        return None
    # Relative to the written value; absolute for a 0.
    near = 1.1 * 10**-decimals / (abs(float(text)) or 1.0)
    return {"answer": text, "match": "math", "tolerance": float(f"{near:.3g}")}


def _task_lines(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` tasks as JSONL lines, cycling through all kinds of questions. The same seed
    always gives the same lines."""
    for number in range(count):
        kind = list(_QUESTIONS)[number % len(_QUESTIONS)]
        draw = random.Random(f"{seed}/{number}")
        while True:  # until the question has one clear answer
            shop = _draw_shop(draw)
            day_format = draw.choice(_DAY_FORMATS)
            if task := _ask(_QUESTIONS[kind], shop, draw):
                break
        text, rule = task
        yield {
            "id": f"shop-{kind}-{number}",
            "prompt": _PROMPT.format(question=text),
            **rule,
            "environment": {"files": _files_of(shop, day_format)},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.tables", description=__doc__)
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=1000, help="tasks (1000)")
    parser.add_argument("--seed", type=int, help="drawn by chance unless given, and then no secret")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(64) if options.seed is None else options.seed
    try:
        with options.file.open("x", encoding="utf-8") as file:
            for task in _task_lines(options.count, seed):
                file.write(json.dumps(task, ensure_ascii=False) + "\n")
    except OSError as error:
        print(f"{options.file}: {error.strerror}; name a new file", file=sys.stderr)
        return 2
    print(f"{options.count:,} tasks in {options.file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
