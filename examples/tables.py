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
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from statistics import mean, median
from typing import Any

_CLEAR = 0.002
"""The minimum distance between the two largest values, as a fraction of the range of all values."""


@dataclass(frozen=True, slots=True)
class _Answer:
    question: str
    value: float | str
    decimals: int = 0

    @property
    def clear(self) -> bool:
        """False if the answer is so close to 0 that the tolerance on its last decimal would accept
        wrong values."""
        if isinstance(self.value, str) or not self.decimals:
            return True
        return round(abs(self.value) * 10**self.decimals) not in (1, 2)

    @property
    def rule(self) -> dict[str, Any]:
        """Return the answer rule to write to the JSONL file. It accepts answers whose last decimal
        is rounded either up or down."""
        if isinstance(self.value, str):
            return {"answer": self.value, "match": "exact"}
        text = f"{self.value:.{self.decimals}f}"
        if not self.decimals:
            return {"answer": text, "match": "math"}
        # Relative to the written value; absolute for a 0.
        near = 1.1 * 10**-self.decimals / (abs(float(text)) or 1.0)
        return {"answer": text, "match": "math", "tolerance": float(f"{near:.3g}")}


def _clear_first(values: Mapping[str, float], question: str) -> _Answer | None:
    first, second, *_ = sorted(values.values(), reverse=True)
    if first - second <= _CLEAR * (first - min(values.values())):
        return None
    return _Answer(question, max(values, key=lambda name: values[name]))


_CATEGORIES = ("tea", "paper", "tools", "lamps", "seeds", "glass", "wool", "maps")
_REGIONS = ("north", "south", "east", "west", "coast", "hills")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DAY_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d %b %Y")


@dataclass(frozen=True, slots=True)
class _Order:
    number: int
    day: date
    customer: str
    product: str
    units: int
    discount: int | None


@dataclass(frozen=True, slots=True)
class _Shop:
    orders: tuple[_Order, ...]
    products: dict[str, tuple[str, float]]
    """Maps the name of each product to its category and price."""
    customers: dict[str, str]
    """Maps the name of each customer to their region."""
    day_format: str

    def revenue(self, order: _Order) -> float:
        price = self.products[order.product][1]
        return order.units * price * (1 - (order.discount or 0) / 100)


def _draw_shop(draw: random.Random) -> _Shop:
    categories = draw.sample(_CATEGORIES, draw.randint(3, 6))
    products = {
        f"{category}-{number}": (category, round(draw.uniform(2, 90), 2))
        for category in categories
        for number in range(1, draw.randint(3, 7))
    }
    regions = draw.sample(_REGIONS, draw.randint(3, 5))
    customers = {f"c{n:03d}": draw.choice(regions) for n in range(draw.randint(30, 90))}
    first = date(draw.randint(2015, 2024), 1, 1) + timedelta(days=draw.randint(0, 300))
    buyers = draw.sample(sorted(customers), int(0.85 * len(customers)))
    orders = tuple(
        _Order(
            number=1000 + n,
            day=first + timedelta(days=draw.randint(0, 200)),
            customer=draw.choice(buyers),
            product=draw.choice(sorted(products)),
            units=min(40, 1 + int(draw.expovariate(0.25))),
            discount=draw.choice((None, None, None, 5, 10, 15, 25)),
        )
        for n in range(draw.randint(150, 500))
    )
    return _Shop(orders, products, customers, draw.choice(_DAY_FORMATS))


def _files_of(shop: _Shop) -> dict[str, str]:
    rows = [
        (o.number, o.day.strftime(shop.day_format), o.customer, o.product, o.units, o.discount)
        for o in shop.orders
    ]
    products = [
        {"product": name, "category": category, "price": price}
        for name, (category, price) in shop.products.items()
    ]
    header = ("order", "day", "customer", "product", "units", "discount_percent")
    return {
        "orders.csv": _csv(header, rows),
        "products.json": json.dumps({"products": products}, indent=1),
        "customers.csv": _csv(("customer", "region"), shop.customers.items()),
    }


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


_ABOUT = (
    "orders.csv lists a shop's orders (an empty discount means none), products.json has category "
    "and price of each product, and customers.csv the region of each customer. The revenue of an "
    "order is units × price, less the discount."
)


def _best_category(shop: _Shop, draw: random.Random) -> _Answer | None:
    totals = _totals((shop.products[o.product][0], shop.revenue(o)) for o in shop.orders)
    return _clear_first(totals, "Which category has the largest revenue? Give its name.")


def _revenue_of_region(shop: _Shop, draw: random.Random) -> _Answer | None:
    region = draw.choice(sorted(set(shop.customers.values())))
    month = draw.choice(sorted({(o.day.year, o.day.month) for o in shop.orders}))
    result = [
        shop.revenue(o)
        for o in shop.orders
        if shop.customers[o.customer] == region and (o.day.year, o.day.month) == month
    ]
    request = (
        f"Compute the revenue with customers of the region {region} in month {month[1]} of "
        f"{month[0]}, rounded to two decimals."
    )
    return _Answer(request, sum(result), 2) if len(result) > 2 else None


def _buyers_of_category(shop: _Shop, draw: random.Random) -> _Answer | None:
    region = draw.choice(sorted(set(shop.customers.values())))
    category = draw.choice(sorted({category for category, _ in shop.products.values()}))
    result = {
        o.customer
        for o in shop.orders
        if shop.customers[o.customer] == region and shop.products[o.product][0] == category
    }
    request = f"How many different customers of the region {region} have ordered {category}?"
    return _Answer(request, len(result), 0)


def _days_between(shop: _Shop, draw: random.Random) -> _Answer | None:
    days: dict[str, list[date]] = defaultdict(list)
    for o in shop.orders:
        days[o.customer].append(o.day)
    spans = [(max(result) - min(result)).days for result in days.values() if len(result) > 1]
    request = (
        "How many days lie between the first and the last order on average, for customers with at "
        "least two orders, rounded to two decimals?"
    )
    return _Answer(request, mean(spans), 2)


def _busiest_weekday(shop: _Shop, draw: random.Random) -> _Answer | None:
    counts = Counter(_WEEKDAYS[o.day.weekday()] for o in shop.orders)
    return _clear_first(counts, "On which day of the week were most orders placed? Name it.")


def _without_orders(shop: _Shop, draw: random.Random) -> _Answer | None:
    region = draw.choice(sorted(set(shop.customers.values())))
    ordered = {o.customer for o in shop.orders}
    result = [c for c, r in shop.customers.items() if r == region and c not in ordered]
    return _Answer(f"How many customers of the region {region} have no order?", len(result), 0)


def _median_revenue(shop: _Shop, draw: random.Random) -> _Answer | None:
    category = draw.choice(sorted({category for category, _ in shop.products.values()}))
    result = [shop.revenue(o) for o in shop.orders if shop.products[o.product][0] == category]
    request = f"Compute the median revenue of an order of {category}, rounded to two decimals."
    return _Answer(request, median(result), 2) if len(result) > 5 else None


def _second_product(shop: _Shop, draw: random.Random) -> _Answer | None:
    totals = _totals((o.product, float(o.units)) for o in shop.orders)
    first = max(totals, key=lambda name: totals[name])
    rest = {name: total for name, total in totals.items() if name != first}
    if totals[first] <= max(rest.values()):
        return None
    return _clear_first(rest, "Which product comes second by units sold? Give its name.")


_QUESTIONS: tuple[Callable[[_Shop, random.Random], _Answer | None], ...] = (
    _best_category,
    _revenue_of_region,
    _buyers_of_category,
    _days_between,
    _busiest_weekday,
    _without_orders,
    _median_revenue,
    _second_product,
)


def _totals(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        totals[name] += value
    return totals


_BOXED = "Put the final answer in \\boxed{}."


def _task_lines(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `count` tasks as JSONL lines, cycling through all kinds of questions. The same seed
    always gives the same lines."""
    for number in range(count):
        ask = _QUESTIONS[number % len(_QUESTIONS)]
        draw = random.Random(f"{seed}/{number}")
        data = _draw_shop(draw)
        while (answer := ask(data, draw)) is None or not answer.clear:
            data = _draw_shop(draw)  # until the question has one clear answer
        yield {
            "id": f"shop{ask.__name__.replace('_', '-', 1)}-{number}",
            "prompt": f"{_ABOUT}\n\n{answer.question} {_BOXED}",
            **answer.rule,
            "environment": {"files": _files_of(data)},
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
