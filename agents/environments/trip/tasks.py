"""Generates and verifies trip planning tasks in fictional countries from a seed. A task asks for a
plan of several days. The plan must not visit any place twice and must follow a rule about hotel
prices."""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, cast

_WEATHER = ("sunny", "cloudy", "rain")
_CUISINES = ("noodles", "seafood", "grill", "vegetarian", "dumplings")
_INSIDE = ("bus", "tram", "metro", "bicycle")
_BETWEEN = ("train", "coach", "ferry")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_FIRST_DAY = datetime.date(2025, 10, 1)
KINDS = ("hotel", "restaurant", "attraction")
MEALS = ("afternoon_restaurant", "evening_restaurant")
_KEYS = ("time", "city", "hotel", MEALS[0], "afternoon_attraction", MEALS[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """Requirements for a day if its hotel costs at least `low` and less than `high` CNY. None means
    no requirement."""

    low: int
    high: int | None = None
    meals_below: int | None = None
    """Upper limit for the total price of the two restaurants, in CNY."""
    both_rated: float | None = None
    one_rated: float | None = None
    ticket_below: int | None = None

    def covers(self, price: int) -> bool:
        return self.low <= price and (self.high is None or price < self.high)

    def holds(self, meals: Sequence[Mapping[str, Any]], ticket: int) -> bool:
        ratings = [meal["rating"] for meal in meals]
        return (
            (self.meals_below is None or sum(meal["price"] for meal in meals) < self.meals_below)
            and (self.both_rated is None or all(rating >= self.both_rated for rating in ratings))
            and (self.one_rated is None or any(rating >= self.one_rated for rating in ratings))
            and (self.ticket_below is None or ticket < self.ticket_below)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Settings for a level of difficulty: the size of the world and the requirements of the
    tasks."""

    cities: int
    hotels: int
    """Number of hotels per city. The next two fields are the numbers of restaurants and attractions
    per city."""
    restaurants: int
    attractions: int
    long_names: bool = True
    """If False, use only the 70 names with two letters, which a small model can copy more
    easily."""
    price_step: int = 10
    """Difference between possible hotel prices, which start at 200 CNY."""
    days: int = 1
    keys: tuple[str, ...] = _KEYS
    plain: bool = False
    """If True, lists have one line per place with its name and price, and answers have one line per
    day with only names."""
    bands: tuple[_Band, ...] = ()
    """Price bands. Their limits are varied at random for each task. Without bands, only the hotel's
    price is limited."""
    fixed: bool = False
    """True if the task names the city. It is then about a single day."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of places that a plan must name."""
        return [kind for kind in KINDS if any(kind in key for key in self.keys)]

    @property
    def tools(self) -> tuple[str, ...] | None:
        """Names of the available tools, or None for all."""
        if not self.fixed:
            return None
        lists = [f"get_all_{kind}s_by_city" for kind in self.kinds]
        return (lists[0], "submit_result", *lists[1:])


_REPORT = (
    _Band(low=800, meals_below=350, both_rated=4.0, ticket_below=120),
    _Band(low=500, high=800, one_rated=4.0, ticket_below=180),
    _Band(low=200, high=500, one_rated=3.2),
)
"""The price bands of the example in DeepSeek-V3.2 (2025), section 3.2.3."""
_FIRST = Level(
    cities=2,
    hotels=3,
    restaurants=1,
    attractions=1,
    long_names=False,
    price_step=100,
    keys=("hotel",),
    plain=True,
    fixed=True,
)
LEVELS = (
    _FIRST,
    replace(
        _FIRST,
        attractions=3,
        keys=("hotel", "afternoon_attraction"),
        bands=(_Band(low=200, ticket_below=130),),
    ),
    Level(
        cities=2,
        hotels=3,
        restaurants=3,
        attractions=3,
        long_names=False,
        fixed=True,
        bands=(
            _Band(low=500, both_rated=3.0, ticket_below=130),
            _Band(low=200, high=500, one_rated=3.5),
        ),
    ),
    Level(
        cities=4,
        hotels=3,
        restaurants=4,
        attractions=3,
        days=2,
        bands=(*_REPORT[:2], replace(_REPORT[2], ticket_below=150)),
    ),
    Level(cities=7, hotels=4, restaurants=5, attractions=4, days=3, bands=_REPORT),
)
"""All levels. The first asks only for the name of a hotel. The last is the example in the
report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cities: tuple[str, ...]
    places: dict[str, dict[str, dict[str, Any]]]
    """The facts about each place, by kind (hotel, restaurant or attraction) and name. Prices and
    tickets are in CNY, per night or per person."""
    routes: dict[tuple[str, str], dict[str, Any]]
    transport: dict[str, tuple[str, ...]]
    weather: dict[tuple[str, str], str]


def _make_world(seed: int, level: Level, dates: tuple[str, ...]) -> World:
    """Generate a world from a seed. The same seed gives the same world on every machine."""
    draw = random.Random(f"world {seed}")
    long = level.long_names
    names = _names(draw, long)
    cities = tuple(next(names) for _ in range(level.cities))
    places: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}
    max_price = 1000 if level.price_step == 100 else 1200  # coarse prices all have three digits

    def add(kind: str, city: str, name: str, **facts: Any) -> None:
        places[kind][name] = {"name": name, "city": city, **facts}

    def rating() -> float:
        return draw.randrange(20, 51) / 10

    for city in cities:
        for _ in range(level.hotels):
            name = next(names) + (draw.choice((" Inn", " Hotel", " House")) if long else "")
            price = draw.randrange(200, max_price, level.price_step)
            add("hotel", city, name, price=price, rating=rating())
        for _ in range(level.restaurants):
            name = next(names) + (draw.choice((" Kitchen", " Table", " Diner")) if long else "")
            price, rated = draw.randrange(30, 320, 5), rating()
            add("restaurant", city, name, price=price, rating=rated, cuisine=draw.choice(_CUISINES))
        for _ in range(level.attractions):
            outdoor = draw.random() < 0.5
            kind = draw.choice((" Lake", " Park", " Hill") if outdoor else (" Museum", " Hall"))
            name = next(names) + (kind if long else "")
            ticket = draw.randrange(0, 260, 10)
            add("attraction", city, name, ticket=ticket, rating=rating(), outdoor=outdoor)
    routes: dict[tuple[str, str], dict[str, Any]] = {}
    for one, other in combinations(sorted(cities), 2):
        routes[one, other] = routes[other, one] = {
            "by": draw.choice(_BETWEEN),
            "hours": draw.randrange(2, 20) / 2,
            "price": draw.randrange(40, 400, 10),
        }
    return World(
        cities=cities,
        places=places,
        routes=routes,
        transport={city: tuple(sorted(draw.sample(_INSIDE, 2))) for city in cities},
        weather={(city, date): draw.choice(_WEATHER) for city in cities for date in dates},
    )


def _names(draw: random.Random, long: bool) -> Iterator[str]:
    short = [one + two for one in _CONSONANTS for two in _VOWELS]
    if not long:
        draw.shuffle(short)
        yield from (name.capitalize() for name in short)
        return
    used: set[str] = set()
    while True:
        name = "".join(draw.choices(short, k=draw.choice((2, 3)))).capitalize()
        name += draw.choice(("", "n", "r", "s"))
        if name not in used:
            used.add(name)
            yield name


@dataclass(frozen=True, slots=True, kw_only=True)
class TripTask:
    level: Level
    dates: tuple[str, ...]
    start: str
    cities: tuple[str, ...] | None
    """The city for each day, or None if the policy chooses the cities."""
    rule_day: int
    bands: tuple[_Band, ...]
    hotel_at_most: int | None

    def write(self, plan: list[dict[str, str]]) -> str:
        """Write a plan in the form of an answer."""
        if self.level.plain:
            return "\n".join(", ".join(day[key] for key in self.level.keys) for day in plan)
        return json.dumps(plan, ensure_ascii=False)

    @property
    def place_keys(self) -> list[str]:
        return [key for key in self.level.keys if key not in ("time", "city")]

    def text(self) -> str:
        level, one_day = self.level, len(self.dates) == 1
        span = self.dates[0] if one_day else f"{self.dates[0]} to {self.dates[-1]}"
        if self.cities is not None and self.place_keys == ["hotel"]:
            most = self.hotel_at_most
            parts = [f"Find a hotel in {self.cities[0]} for at most {most} CNY."]
        elif self.cities is not None:
            things = ", ".join(f"the {key.replace('_', ' ')}" for key in self.place_keys)
            parts = [f"Plan one day in {self.cities[0]} ({span}): {things}."]
        else:
            parts = [
                f"Plan a journey of {len(self.dates)} days from {self.start} ({span}), with a "
                "hotel, an afternoon restaurant, an afternoon attraction and an evening restaurant "
                f"for each day. Choose a city for each day; {self.start} itself is not one of them."
            ]
        if len(level.keys) > 1:
            parts.append("Everything must be in that day's city, and nothing may come twice.")
        day = "" if one_day else f" of day {self.rule_day + 1}"
        for band in self.bands:
            below = "" if band.high is None else f" and below {band.high}"
            terms = [
                (band.meals_below, "both restaurants together cost less than {} CNY"),
                (band.both_rated, "both restaurants are rated at least {}"),
                (band.one_rated, "at least one restaurant is rated at least {}"),
                (band.ticket_below, "the attraction's ticket costs less than {} CNY"),
            ]
            text = ", ".join(text.format(value) for value, text in terms if value is not None)
            parts.append(f"If the hotel{day} costs at least {band.low} CNY{below}: {text}.")
        if level.plain:
            words = " and ".join(key.replace("_", " ") for key in level.keys)
            parts.append(f"Submit the {words}{', separated by a comma' * (len(level.keys) > 1)}.")
        else:
            parts.append(
                "Submit a JSON list with an object for each day, in order, with the keys "
                f"{', '.join(level.keys)}; time is the date as YYYY-MM-DD, and the others are "
                "names."
            )
        return " ".join(parts)


def draw_task(seed: int, level: Level) -> tuple[World, TripTask]:
    """Draw a world and a task. The task can be unsolvable."""
    draw = random.Random(f"task {seed}")
    first = _FIRST_DAY + datetime.timedelta(days=draw.randrange(60))
    dates = tuple(str(first + datetime.timedelta(days=day)) for day in range(level.days))
    world = _make_world(seed, level, dates)
    cities = draw.sample(world.cities, level.days if level.fixed else 1)
    at_most = None
    if not level.bands:  # at least one and at most half of the city's hotels are cheap enough
        hotels = world.places["hotel"].values()
        prices = sorted(one["price"] for one in hotels if one["city"] == cities[0])
        at_most = prices[draw.randrange(max(1, len(prices) // 2))]
    bands = level.bands
    if bands != _REPORT:
        bands = tuple(_varied(band, draw) for band in bands)
    return world, TripTask(
        level=level,
        dates=dates,
        start="" if level.fixed else cities[0],
        cities=tuple(cities) if level.fixed else None,
        rule_day=min(1, level.days - 1),
        bands=bands,
        hotel_at_most=at_most,
    )


def _varied(band: _Band, draw: random.Random) -> _Band:
    return replace(
        band,
        meals_below=band.meals_below and band.meals_below + 10 * draw.randrange(-6, 7),
        both_rated=band.both_rated and round(band.both_rated + draw.randrange(-4, 5) / 10, 1),
        one_rated=band.one_rated and round(band.one_rated + draw.randrange(-4, 5) / 10, 1),
        ticket_below=band.ticket_below and band.ticket_below + 10 * draw.randrange(-4, 5),
    )


_Day = Mapping[str, str]


def check_plan(world: World, task: TripTask, answer: str) -> dict[str, bool]:
    """Check which requirements `answer` meets. Returns only `form` if the answer is malformed."""
    plan = _parse_plan(task, answer)
    if plan is None:
        return {"form": False}
    return {"form": True, **judge(world, task, plan)}


def _parse_plan(task: TripTask, answer: str) -> list[dict[str, str]] | None:
    """Parse a plan into its days. Returns None if it is malformed or has unknown keys."""
    keys = task.level.keys
    if task.level.plain:
        lines = [line for line in answer.strip().splitlines() if line.strip()]
        words = [[word.strip() for word in line.split(",")] for line in lines]
        if len(words) != len(task.dates) or any(len(day) != len(keys) for day in words):
            return None
        return [dict(zip(keys, day, strict=True)) for day in words]
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    days = cast(list[Any], value) if isinstance(value, list) else []
    if len(days) != len(task.dates):
        return None
    for day in days:
        fields = cast(dict[str, Any], day) if isinstance(day, dict) else {}
        if set(fields) != set(keys) or not all(isinstance(v, str) for v in fields.values()):
            return None
    return days


def judge(world: World, task: TripTask, plan: Sequence[_Day]) -> dict[str, bool]:
    days = [{"time": date, **day} for date, day in zip(task.dates, plan, strict=True)]
    if task.cities is not None:
        days = [{"city": city, **day} for city, day in zip(task.cities, days, strict=True)]
    met: dict[str, bool] = {}
    if "time" in task.level.keys:
        met["time"] = [day["time"] for day in days] == list(task.dates)
    cities = [day["city"] for day in days]
    if "city" in task.level.keys:
        as_named = task.cities is None or cities == list(task.cities)
        met["cities"] = as_named and all(c in world.cities and c != task.start for c in cities)
        met["no city twice"] = len(set(cities)) == len(cities)
    known = True
    for key in task.place_keys:
        places = world.places[key.rpartition("_")[2]]
        in_city = [places.get(day[key], {}).get("city") == day["city"] for day in days]
        met[f"{key} in the city"] = all(in_city)
        known = known and all(day[key] in places for day in days)
    names = [day[key] for day in days for key in task.place_keys]
    if len(names) > 1:
        met["nothing twice"] = len(set(names)) == len(names)
    if task.hotel_at_most is not None:
        met["hotel's price"] = known and all(
            world.places["hotel"][day["hotel"]]["price"] <= task.hotel_at_most for day in days
        )
    if task.bands:
        met["rule"] = known and _rule(world, task.bands, days[task.rule_day])
    return met


def _rule(world: World, bands: Sequence[_Band], day: _Day) -> bool:
    meals = [world.places["restaurant"][day[key]] for key in MEALS if key in day]
    sight = world.places["attraction"].get(day.get("afternoon_attraction", ""), {"ticket": 0})
    band = band_of(bands, world.places["hotel"][day["hotel"]]["price"])
    return band is not None and band.holds(meals, sight["ticket"])


def band_of(bands: Sequence[_Band], price: int) -> _Band | None:
    return next((band for band in bands if band.covers(price)), None)
