"""Trip tasks in fictional countries, drawn from a seed. A task asks for a plan for several days,
with no place visited twice and a rule about hotel prices."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

_WEATHER = ("sunny", "cloudy", "rain")
_CUISINES = ("noodles", "seafood", "grill", "vegetarian", "dumplings")
_INSIDE = ("bus", "tram", "metro", "bicycle")
_BETWEEN = ("train", "coach", "ferry")
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotel:
    name: str
    city: str
    price: int
    """Price per night in CNY."""
    rating: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restaurant:
    name: str
    city: str
    price: int
    """Price per person in CNY."""
    rating: float
    cuisine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attraction:
    name: str
    city: str
    ticket: int
    """Ticket price in CNY."""
    rating: float
    outdoor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A connection between two cities in both directions."""

    by: str
    hours: float
    price: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of a world, and how it names and prices its places."""

    cities: int
    hotels: int
    """Number of hotels per city. The numbers of restaurants and attractions are also per city."""
    restaurants: int
    attractions: int
    long_names: bool = True
    """False for the 70 names of two letters, which a small model copies more easily."""
    price_step: int = 10
    """Difference between hotel prices, which start at 200 CNY."""
    routes: float = 1.0
    """Fraction of city pairs that are connected by a route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cities: tuple[str, ...]
    hotels: dict[str, Hotel]
    """Hotels, keyed by name. Restaurants and attractions are stored in the same way."""
    restaurants: dict[str, Restaurant]
    attractions: dict[str, Attraction]
    routes: dict[tuple[str, str], Route]
    """Routes in both directions, keyed by (from, to)."""
    transport: dict[str, tuple[str, ...]]
    """Local transport in each city."""
    weather: dict[tuple[str, str], str]
    """Weather by city and date."""

    def places(self, kind: str) -> Mapping[str, Any]:
        """Return all places of a kind (hotel, restaurant or attraction), keyed by name."""
        return getattr(self, f"{kind}s")


def make_world(seed: int, size: Size, dates: tuple[str, ...]) -> World:
    """Draw a world from a seed. The same seed gives the same world on every machine."""
    draw = random.Random(f"world {seed}")
    long = size.long_names
    names = _names(draw, long)
    cities = tuple(next(names) for _ in range(size.cities))
    hotels: dict[str, Hotel] = {}
    restaurants: dict[str, Restaurant] = {}
    attractions: dict[str, Attraction] = {}
    max_price = 1000 if size.price_step == 100 else 1200  # coarse prices all have three digits
    for city in cities:
        for _ in range(size.hotels):
            name = next(names) + (draw.choice((" Inn", " Hotel", " House")) if long else "")
            price, rating = draw.randrange(200, max_price, size.price_step), _rating(draw)
            hotels[name] = Hotel(name=name, city=city, price=price, rating=rating)
        for _ in range(size.restaurants):
            name = next(names) + (draw.choice((" Kitchen", " Table", " Diner")) if long else "")
            restaurants[name] = Restaurant(
                name=name,
                city=city,
                price=draw.randrange(30, 320, 5),
                rating=_rating(draw),
                cuisine=draw.choice(_CUISINES),
            )
        for _ in range(size.attractions):
            outdoor = draw.random() < 0.5
            kind = draw.choice((" Lake", " Park", " Hill") if outdoor else (" Museum", " Hall"))
            name = next(names) + (kind if long else "")
            attractions[name] = Attraction(
                name=name,
                city=city,
                ticket=draw.randrange(0, 260, 10),
                rating=_rating(draw),
                outdoor=outdoor,
            )
    routes: dict[tuple[str, str], Route] = {}
    for one, other in permutations(cities, 2):
        if one < other and draw.random() < size.routes:
            route = Route(
                by=draw.choice(_BETWEEN),
                hours=draw.randrange(2, 20) / 2,
                price=draw.randrange(40, 400, 10),
            )
            routes[one, other] = routes[other, one] = route
    return World(
        cities=cities,
        hotels=hotels,
        restaurants=restaurants,
        attractions=attractions,
        routes=routes,
        transport={city: tuple(sorted(draw.sample(_INSIDE, 2))) for city in cities},
        weather={(city, date): draw.choice(_WEATHER) for city in cities for date in dates},
    )


def _rating(draw: random.Random) -> float:
    return draw.randrange(20, 51) / 10


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


MEALS = ("afternoon_restaurant", "evening_restaurant")
KEYS = ("time", "city", "hotel", MEALS[0], "afternoon_attraction", MEALS[1])
"""The keys of a day in a plan."""
_FIRST_DAY = datetime.date(2025, 10, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Requirements for a day whose hotel costs at least `low` and less than `high` CNY, None for no
    requirement."""

    low: int
    high: int | None = None
    """Upper bound in CNY. None means no bound."""
    meals_below: int | None = None
    """The two restaurants together must cost less than this, in CNY."""
    both_rated: float | None = None
    one_rated: float | None = None
    """Minimum rating that at least one restaurant must have."""
    ticket_below: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A level of difficulty."""

    size: Size
    days: int = 1
    keys: tuple[str, ...] = KEYS
    """The keys that a plan must contain for each day."""
    plain: bool = False
    """True if the answer is a comma-separated list of names instead of JSON."""
    bands: tuple[Band, ...] = ()
    """Price bands near which each task draws its bounds, or none to bound only the hotel's price.
    """
    fixed: bool = False
    """True if the task names the city for each day."""
    connected: bool = False
    """True if there must be a route from each city to the next."""
    dry: bool = False
    """True if outdoor attractions are forbidden on rainy days."""
    listing: bool = True
    """True if lists contain prices and ratings as well as names."""
    tools: tuple[str, ...] | None = None
    """Names of the available tools. None means all tools."""


REPORT = (
    Band(low=800, meals_below=350, both_rated=4.0, ticket_below=120),
    Band(low=500, high=800, one_rated=4.0, ticket_below=180),
    Band(low=200, high=500, one_rated=3.2),
)
"""The price bands in the example of DeepSeek-V3.2 (2025), section 3.2.3."""
_HOTELS = ("get_all_hotels_by_city", "submit_result")
_LISTS = ("get_all_restaurants_by_city", "get_all_attractions_by_city")
LEVELS = (
    Level(
        size=Size(
            cities=2, hotels=3, restaurants=1, attractions=1, long_names=False, price_step=100
        ),
        keys=("hotel",),
        plain=True,
        fixed=True,
        tools=_HOTELS,
    ),
    Level(
        size=Size(
            cities=2, hotels=3, restaurants=1, attractions=3, long_names=False, price_step=100
        ),
        keys=("hotel", "afternoon_attraction"),
        plain=True,
        fixed=True,
        bands=(Band(low=200, ticket_below=130),),
        tools=(*_HOTELS, "get_all_attractions_by_city"),
    ),
    Level(
        size=Size(cities=2, hotels=3, restaurants=3, attractions=3, long_names=False),
        fixed=True,
        bands=(
            Band(low=500, both_rated=3.0, ticket_below=130),
            Band(low=200, high=500, one_rated=3.5),
        ),
        tools=(*_HOTELS, *_LISTS),
    ),
    Level(
        size=Size(cities=4, hotels=3, restaurants=4, attractions=3),
        days=2,
        bands=(*REPORT[:2], replace(REPORT[2], ticket_below=150)),
    ),
    Level(size=Size(cities=7, hotels=4, restaurants=5, attractions=4), days=3, bands=REPORT),
    Level(
        size=Size(cities=10, hotels=4, restaurants=5, attractions=4, routes=0.4),
        days=3,
        bands=REPORT,
        connected=True,
        dry=True,
        listing=False,
    ),
)
"""All levels. The first asks only for a hotel's name. The last exceeds the report's example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TripTask:
    """A plan for the policy to make. The prompt describes the task in full."""

    dates: tuple[str, ...]
    start: str
    """City before the first day, or "" if the task names the cities."""
    cities: tuple[str, ...] | None
    """The city for each day, if the task fixes them."""
    keys: tuple[str, ...]
    plain: bool
    rule_day: int
    """Index of the day to which `bands` apply."""
    bands: tuple[Band, ...]
    hotel_at_most: int | None
    connected: bool
    dry: bool

    def asks_for(self, kind: str) -> bool:
        """Return whether the plan must name a hotel, a restaurant or an attraction (`kind`)."""
        return any(kind in key for key in self.keys)

    def text(self) -> str:
        """Return the description of the task for the policy."""
        days, one_day = len(self.dates), len(self.dates) == 1
        span = self.dates[0] if one_day else f"{self.dates[0]} to {self.dates[-1]}"
        keys = [key for key in self.keys if key not in ("time", "city")]
        if self.cities is not None and keys == ["hotel"] and one_day:
            most = self.hotel_at_most
            parts = [f"Find a hotel in {self.cities[0]} for at most {most} CNY."]
        elif self.cities is not None and one_day:
            things = ", ".join(f"the {key.replace('_', ' ')}" for key in keys)
            parts = [f"Plan one day in {self.cities[0]} ({span}): {things}."]
        else:
            places = ""
            if self.cities is not None:
                places = f" Stay in {', then '.join(self.cities)}."
            elif self.start:
                places = f" Choose a city for each day; {self.start} itself is not one of them."
            parts = [
                f"Plan a journey of {days} days from {self.start or self.dates[0]} ({span}), with "
                "a hotel, an afternoon restaurant, an afternoon attraction and an evening "
                f"restaurant for each day.{places}"
            ]
        if len(self.keys) > 1:
            parts.append("Everything must be in that day's city, and nothing may come twice.")
        if self.connected:
            parts.append("Every city must have a transport connection from the one before it.")
        if self.dry:
            parts.append("Where it rains on the day, the attraction must not be outdoors.")
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
            text = text or "anything"
            parts.append(f"If the hotel{day} costs at least {band.low} CNY{below}: {text}.")
        if self.plain:
            words = " and ".join(key.replace("_", " ") for key in self.keys)
            parts.append(f"Submit the {words}{', separated by a comma' * (len(self.keys) > 1)}.")
        else:
            parts.append(
                "Submit a JSON list with an object for each day, in order, with the keys "
                f"{', '.join(self.keys)}; time is the date as YYYY-MM-DD, and the others are names."
            )
        return " ".join(parts)


def draw_task(seed: int, level: Level) -> tuple[World, TripTask]:
    """Draw a world and a task. The task may have no solution."""
    draw = random.Random(f"task {seed}")
    first = _FIRST_DAY + datetime.timedelta(days=draw.randrange(60))
    dates = tuple(str(first + datetime.timedelta(days=day)) for day in range(level.days))
    world = make_world(seed, level.size, dates)
    cities = draw.sample(world.cities, level.days if level.fixed else 1)
    at_most = None
    if not level.bands:  # at least one and at most half of the city's hotels are cheap enough
        prices = sorted(one.price for one in world.hotels.values() if one.city == cities[0])
        at_most = prices[draw.randrange(max(1, len(prices) // 2))]
    exact = level.bands == REPORT
    return world, TripTask(
        dates=dates,
        start="" if level.fixed else cities[0],
        cities=tuple(cities) if level.fixed else None,
        keys=level.keys,
        plain=level.plain,
        rule_day=min(1, level.days - 1),
        bands=level.bands if exact else tuple(_varied(band, draw) for band in level.bands),
        hotel_at_most=at_most,
        connected=level.connected,
        dry=level.dry,
    )


def _varied(band: Band, draw: random.Random) -> Band:
    return replace(
        band,
        meals_below=band.meals_below and band.meals_below + 10 * draw.randrange(-6, 7),
        both_rated=band.both_rated and round(band.both_rated + draw.randrange(-4, 5) / 10, 1),
        one_rated=band.one_rated and round(band.one_rated + draw.randrange(-4, 5) / 10, 1),
        ticket_below=band.ticket_below and band.ticket_below + 10 * draw.randrange(-4, 5),
    )
