"""Questions about the data of a shop, with their answers and answer rules.

The orders, products and customers are in three files that have to be joined.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from statistics import mean, median
from typing import Any

Files = dict[str, str]
"""The contents of the files, by file name."""
_CLEAR = 0.002
"""The minimum distance between the two largest values, as a fraction of the range of all values."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question and its right answer."""

    question: str
    value: float | str
    decimals: int = 0

    @property
    def clear(self) -> bool:
        """True if the answer, when rounded, can be told apart from its neighbours."""
        if isinstance(self.value, str) or not self.decimals:
            return True
        return round(abs(self.value) * 10**self.decimals) not in (1, 2)

    @property
    def rule(self) -> dict[str, Any]:
        """Return the answer rule for JSONL. It accepts both ways of rounding the last decimal."""
        if isinstance(self.value, str):
            return {"answer": self.value, "match": "exact"}
        text = f"{self.value:.{self.decimals}f}"
        if not self.decimals:
            return {"answer": text, "match": "math"}
        # Relative to the written value; absolute for a 0.
        near = 1.1 * 10**-self.decimals / (abs(float(text)) or 1.0)
        return {"answer": text, "match": "math", "tolerance": float(f"{near:.3g}")}


def clear_first(values: Mapping[str, float], question: str) -> Answer | None:
    """Return the name with the largest value as the answer, or None if it is not clearly the
    largest."""
    first, second, *_ = sorted(values.values(), reverse=True)
    if first - second <= _CLEAR * (first - min(values.values())):
        return None
    return Answer(question, max(values, key=lambda name: values[name]))


_CATEGORIES = ("tea", "paper", "tools", "lamps", "seeds", "glass", "wool", "maps")
_REGIONS = ("north", "south", "east", "west", "coast", "hills")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DAY_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d %b %Y")
"""Date formats that are unambiguous."""


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    day: date
    customer: str
    product: str
    units: int
    discount: int | None
    """The discount in percent."""


@dataclass(frozen=True, slots=True)
class Shop:
    orders: tuple[Order, ...]
    products: dict[str, tuple[str, float]]
    """Maps the name of each product to its category and price."""
    customers: dict[str, str]
    """Maps the name of each customer to their region."""
    day_format: str

    def revenue(self, order: Order) -> float:
        price = self.products[order.product][1]
        return order.units * price * (1 - (order.discount or 0) / 100)


def draw_shop(draw: random.Random) -> Shop:
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
        Order(
            number=1000 + n,
            day=first + timedelta(days=draw.randint(0, 200)),
            customer=draw.choice(buyers),
            product=draw.choice(sorted(products)),
            units=min(40, 1 + int(draw.expovariate(0.25))),
            discount=draw.choice((None, None, None, 5, 10, 15, 25)),
        )
        for n in range(draw.randint(150, 500))
    )
    return Shop(orders, products, customers, draw.choice(_DAY_FORMATS))


def files_of(shop: Shop) -> Files:
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


ABOUT = (
    "orders.csv lists a shop's orders (an empty discount means none), products.json has category "
    "and price of each product, and customers.csv the region of each customer. The revenue of an "
    "order is units × price, less the discount."
)


def best_category(shop: Shop, draw: random.Random) -> Answer | None:
    totals = _totals((shop.products[o.product][0], shop.revenue(o)) for o in shop.orders)
    return clear_first(totals, "Which category has the largest revenue? Give its name.")


def revenue_of_region(shop: Shop, draw: random.Random) -> Answer | None:
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
    return Answer(request, sum(result), 2) if len(result) > 2 else None


def buyers_of_category(shop: Shop, draw: random.Random) -> Answer | None:
    region = draw.choice(sorted(set(shop.customers.values())))
    category = draw.choice(sorted({category for category, _ in shop.products.values()}))
    result = {
        o.customer
        for o in shop.orders
        if shop.customers[o.customer] == region and shop.products[o.product][0] == category
    }
    request = f"How many different customers of the region {region} have ordered {category}?"
    return Answer(request, len(result), 0)


def days_between(shop: Shop, draw: random.Random) -> Answer | None:
    days: dict[str, list[date]] = defaultdict(list)
    for o in shop.orders:
        days[o.customer].append(o.day)
    spans = [(max(result) - min(result)).days for result in days.values() if len(result) > 1]
    request = (
        "How many days lie between the first and the last order on average, for customers with at "
        "least two orders, rounded to two decimals?"
    )
    return Answer(request, mean(spans), 2)


def busiest_weekday(shop: Shop, draw: random.Random) -> Answer | None:
    counts = Counter(_WEEKDAYS[o.day.weekday()] for o in shop.orders)
    return clear_first(counts, "On which day of the week were most orders placed? Name it.")


def without_orders(shop: Shop, draw: random.Random) -> Answer | None:
    region = draw.choice(sorted(set(shop.customers.values())))
    ordered = {o.customer for o in shop.orders}
    result = [c for c, r in shop.customers.items() if r == region and c not in ordered]
    return Answer(f"How many customers of the region {region} have no order?", len(result), 0)


def median_revenue(shop: Shop, draw: random.Random) -> Answer | None:
    category = draw.choice(sorted({category for category, _ in shop.products.values()}))
    result = [shop.revenue(o) for o in shop.orders if shop.products[o.product][0] == category]
    request = f"Compute the median revenue of an order of {category}, rounded to two decimals."
    return Answer(request, median(result), 2) if len(result) > 5 else None


def second_product(shop: Shop, draw: random.Random) -> Answer | None:
    totals = _totals((o.product, float(o.units)) for o in shop.orders)
    first = max(totals, key=lambda name: totals[name])
    rest = {name: total for name, total in totals.items() if name != first}
    if totals[first] <= max(rest.values()):
        return None
    return clear_first(rest, "Which product comes second by units sold? Give its name.")


QUESTIONS: tuple[Callable[[Shop, random.Random], Answer | None], ...] = (
    best_category,
    revenue_of_region,
    buyers_of_category,
    days_between,
    busiest_weekday,
    without_orders,
    median_revenue,
    second_product,
)


def _totals(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        totals[name] += value
    return totals
