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
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from keel.examples import write_lines

_CATEGORIES = ("tea", "paper", "tools", "lamps", "seeds", "glass", "wool", "maps")
_CLEAR = 0.002
"""The minimum distance between the two largest values, as a fraction of the range of all values."""
_PROMPT = (
    "orders.csv lists a shop's orders (an empty discount means none), and products.json has "
    "category and price of each product. The revenue of an order is units × price, less the "
    "discount.\n\n{question} Put the final answer in \\boxed{{}}."
)
_TABLES = """
CREATE TABLE products (product, category, price);
CREATE TABLE orders ("order", day, customer, product, units, discount_percent);
CREATE VIEW sales AS SELECT *, substr(day, 1, 7) AS month,
    units * price * (1 - coalesce(discount_percent, 0) / 100.0) AS revenue
    FROM orders JOIN products USING (product);
"""
_QUESTIONS = {
    "best_category": (
        "Which category has the largest revenue? Give its name.",
        "SELECT category, sum(revenue) FROM sales GROUP BY category",
    ),
    "best_month": (
        "In which month (YYYY-MM) was the revenue from {category} largest?",
        "SELECT month, sum(revenue) FROM sales WHERE category = :category GROUP BY month",
    ),
    "second_product": (
        "Which product comes second by revenue? Give its name.",
        "SELECT product, sum(revenue) AS total FROM sales GROUP BY product ORDER BY total DESC "
        "LIMIT -1 OFFSET 1",
    ),
    "revenue": (
        "Compute the revenue from {category} in {month}, rounded to two decimals.",
        "SELECT sum(revenue) FROM sales WHERE category = :category AND month = :month",
    ),
    "mean_order": (
        "Compute the mean revenue of an order of {category}, rounded to two decimals.",
        "SELECT avg(revenue) FROM sales WHERE category = :category",
    ),
    "buyers": (
        "How many different customers have ordered {category}?",
        "SELECT count(DISTINCT customer) FROM sales WHERE category = :category",
    ),
    "days_between": (
        "How many days lie between the first and the last order on average, for customers with at "
        "least two orders, rounded to two decimals?",
        "SELECT avg(days) FROM (SELECT julianday(max(day)) - julianday(min(day)) AS days "
        "FROM orders GROUP BY customer HAVING count(*) > 1)",
    ),
}
"""Maps each kind of question to its text and its query. A query selects either the answer, or names
with their values. Then the answer is the name with the largest value. A category and a month are
drawn for each task."""


def _draw_shop(draw: random.Random) -> sqlite3.Connection:
    products = [
        (f"{category}-{number}", category, round(draw.uniform(2, 90), 2))
        for category in draw.sample(_CATEGORIES, draw.randint(3, 6))
        for number in range(1, draw.randint(3, 7))
    ]
    first = date(draw.randint(2015, 2024), 1, 1) + timedelta(days=draw.randint(0, 300))
    orders = [
        (
            1000 + n,
            str(first + timedelta(days=draw.randint(0, 200))),
            f"c{draw.randint(1, 60):03d}",
            draw.choice(products)[0],
            min(40, 1 + int(draw.expovariate(0.25))),
            draw.choice((None, None, None, 5, 10, 15, 25)),
        )
        for n in range(draw.randint(150, 500))
    ]
    shop = sqlite3.connect(":memory:")
    shop.executescript(_TABLES)
    shop.executemany("INSERT INTO products VALUES (?, ?, ?)", products)
    shop.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?)", orders)
    return shop


def _rule_of(rows: Sequence[tuple[Any, ...]]) -> dict[str, Any] | None:
    """Return the rule for the answer, or None if the answer is not clear. The rule for a number
    with decimals accepts answers whose last decimal is rounded either up or down."""
    if len(rows) > 1:
        names = dict(rows)
        first, second, *_ = sorted(names.values(), reverse=True)
        if first - second <= _CLEAR * (first - min(names.values())):
            return None
        return {"answer": max(names, key=names.__getitem__), "match": "exact"}
    (value,) = rows[0]
    if isinstance(value, int):
        return {"answer": str(value), "match": "math"}
    if value is None or round(100 * value) <= 2:  # the tolerance would accept wrong values
        return None
    text = f"{value:.2f}"
    return {"answer": text, "match": "math", "tolerance": float(f"{0.011 / float(text):.3g}")}


def _files_of(shop: sqlite3.Connection) -> dict[str, str]:
    orders = shop.execute("SELECT * FROM orders")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column for column, *_ in orders.description)
    writer.writerows(orders)
    products = shop.execute("SELECT * FROM products").fetchall()
    rows = [dict(zip(("product", "category", "price"), row, strict=True)) for row in products]
    return {"orders.csv": text.getvalue(), "products.json": json.dumps(rows, indent=1)}


def _task_lines(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` tasks as JSONL lines, cycling through all kinds of questions. The same seed
    always gives the same lines."""
    for number in range(count):
        kind = list(_QUESTIONS)[number % len(_QUESTIONS)]
        question, query = _QUESTIONS[kind]
        draw = random.Random(f"{seed}/{number}")
        while True:  # until the question has one clear answer
            shop = _draw_shop(draw)
            sold = shop.execute("SELECT category, month FROM sales ORDER BY 1, 2").fetchall()
            category, month = draw.choice(sold)
            chosen = {"category": category, "month": month}
            if rule := _rule_of(shop.execute(query, chosen).fetchall()):
                break
        yield {
            "id": f"shop-{kind}-{number}",
            "prompt": _PROMPT.format(question=question.format(**chosen)),
            **rule,
            "environment": {"files": _files_of(shop)},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.tables", description=__doc__)
    parser.add_argument("file", type=Path, help="the JSONL file to write")
    parser.add_argument("--count", type=int, default=1000, help="tasks (1000)")
    parser.add_argument("--seed", type=int, help="drawn by chance unless given, and then no secret")
    options = parser.parse_args(arguments)
    seed = secrets.randbits(64) if options.seed is None else options.seed
    return write_lines(options.file, _task_lines(options.count, seed), "tasks")


if __name__ == "__main__":
    sys.exit(main())
