"""Creates a made-up country with cities, hotels, restaurants, attractions and transport.

Everything is drawn from a seed, and all names are unique.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

WEATHER = ("sunny", "cloudy", "rain")
CUISINES = ("noodles", "seafood", "grill", "vegetarian", "dumplings")
INSIDE = ("bus", "tram", "metro", "bicycle")
BETWEEN = ("train", "coach", "ferry")
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
    """The size of a world."""

    cities: int
    hotels: int
    """Number of hotels per city. Restaurants and attractions are also counted per city."""
    restaurants: int
    attractions: int
    long_names: bool = True
    """Whether to use long names. Short names have two letters, which a small model copies more
    easily, but only 70 of them exist."""
    price_step: int = 10
    """Step between hotel prices, which start at 200 CNY."""
    routes: float = 1.0
    """Fraction of city pairs that have a route between them."""

    def __post_init__(self) -> None:
        each = 1 + self.hotels + self.restaurants + self.attractions
        if min(self.cities, self.hotels, self.restaurants, self.attractions) < 1:
            raise ValueError(f"trip: a world needs one of everything, got {self}")
        if not self.long_names and self.cities * each > len(_CONSONANTS) * len(_VOWELS):
            raise ValueError(f"trip: {self.cities * each} things have no names of two letters")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    cities: tuple[str, ...]
    hotels: dict[str, Hotel]
    """Hotels by name. Restaurants and attractions are stored in the same way."""
    restaurants: dict[str, Restaurant]
    attractions: dict[str, Attraction]
    routes: dict[tuple[str, str], Route]
    """Routes by (from, to), in both directions."""
    transport: dict[str, tuple[str, ...]]
    """Local transport in each city."""
    weather: dict[tuple[str, str], str]
    """Weather by city and date."""


def make_world(seed: int, size: Size, dates: tuple[str, ...]) -> World:
    """Draw a world. The same seed gives the same world on every machine."""
    draw = random.Random(f"world {seed}")
    names = _names(draw, size.long_names)
    cities = tuple(next(names) for _ in range(size.cities))
    hotels: dict[str, Hotel] = {}
    restaurants: dict[str, Restaurant] = {}
    attractions: dict[str, Attraction] = {}
    long = size.long_names
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
                cuisine=draw.choice(CUISINES),
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
                by=draw.choice(BETWEEN),
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
        transport={city: tuple(sorted(draw.sample(INSIDE, 2))) for city in cities},
        weather={(city, date): draw.choice(WEATHER) for city in cities for date in dates},
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
