"""The trip planner's environment: fifteen tools over a world, and a verdict on what was submitted.

DeepSeek-V3.2 (2025), section 3.2.3, has a task of this kind as its example; the names of the tools
and their parameters are the report's, the world is made up.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from keel.agents.env_runtime.tool_objects import text_of
from keel.agents.environments.trip.solver import Calls, solve
from keel.agents.environments.trip.tasks import LEVELS, Level, TripTask, draw_task
from keel.agents.environments.trip.verify import checks, judge
from keel.agents.environments.trip.world import Attraction, World

MOST_TRIES = 500
"""Draws of a task until one has a solution."""
GUESSES = 40


class Trip:
    """One task: the one that the prompt's `reward` names, `{"trip": {"level": 0, "seed": 17}}`, or
    else one of `level`, made from the seed."""

    def __init__(self, level: int = 0, ready: tuple[World, TripTask, Level] | None = None) -> None:
        """ready: in place of an opening. Raises ValueError for a level that there is not."""
        if not 0 <= level < len(LEVELS):
            raise ValueError(f"trip: level = {level}, there are 0 to {len(LEVELS) - 1}")
        self._of = level
        self.done = False
        self.offered: Sequence[str] | None = None
        if ready is not None:
            self._begin(*ready)

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        own = {"level": self._of, "seed": seed}
        named: Mapping[str, int] = task.get("reward", {}).get("trip", own)
        level = LEVELS[named["level"]]
        self._begin(*make_task(named["seed"], level), level)
        return self._task.text()

    def _begin(self, world: World, task: TripTask, level: Level) -> None:
        self._world, self._task, self._level = world, task, level
        self._submitted: str | None = None
        self._seen: set[tuple[str, str]] = set()
        self.offered = level.tools

    def get_all_attractions_by_city(self, city: str) -> Any:
        """All attractions of a city."""
        return self._listed("attraction", self._world.attractions, self._city(city))

    def get_all_cities(self) -> list[str]:
        """The names of all cities."""
        return list(self._world.cities)

    def get_all_hotels_by_city(self, city: str) -> Any:
        """All hotels of a city."""
        return self._listed("hotel", self._world.hotels, self._city(city))

    def get_all_restaurants_by_city(self, city: str) -> Any:
        """All restaurants of a city."""
        return self._listed("restaurant", self._world.restaurants, self._city(city))

    def get_city_by_attraction(self, attraction: str) -> str:
        """The city that an attraction is in."""
        return self._one("attraction", self._world.attractions, attraction).city

    def get_city_by_hotel(self, hotel: str) -> str:
        """The city that a hotel is in."""
        return self._one("hotel", self._world.hotels, hotel).city

    def get_city_by_restaurant(self, restaurant: str) -> str:
        """The city that a restaurant is in."""
        return self._one("restaurant", self._world.restaurants, restaurant).city

    def get_city_transport(self, city: str) -> list[str]:
        """How to get about inside a city."""
        return list(self._world.transport[self._city(city)])

    def get_infos_by_attraction(self, info_keywords: list[str], attraction: str) -> dict[str, Any]:
        """Facts about an attraction.

        Args:
            info_keywords: Of city, ticket, rating, outdoor.
        """
        found = self._one("attraction", self._world.attractions, attraction)
        return _facts(asdict(found), info_keywords)

    def get_infos_by_city(self, info_keywords: list[str], city: str) -> dict[str, Any]:
        """Facts about a city.

        Args:
            info_keywords: Of hotels, restaurants, attractions (how many), transport.
        """
        name = self._city(city)
        kinds: dict[str, Mapping[str, Any]] = {
            "hotels": self._world.hotels,
            "restaurants": self._world.restaurants,
            "attractions": self._world.attractions,
        }
        known: dict[str, Any] = {
            kind: sum(place.city == name for place in places.values())
            for kind, places in kinds.items()
        }
        return _facts({**known, "transport": self._world.transport[name]}, info_keywords)

    def get_infos_by_hotel(self, info_keywords: list[str], hotel: str) -> dict[str, Any]:
        """Facts about a hotel.

        Args:
            info_keywords: Of city, price, rating.
        """
        return _facts(asdict(self._one("hotel", self._world.hotels, hotel)), info_keywords)

    def get_infos_by_restaurant(self, info_keywords: list[str], restaurant: str) -> dict[str, Any]:
        """Facts about a restaurant.

        Args:
            info_keywords: Of city, price, rating, cuisine.
        """
        found = self._one("restaurant", self._world.restaurants, restaurant)
        return _facts(asdict(found), info_keywords)

    def get_inter_city_transport(self, from_city: str, to_city: str) -> list[dict[str, Any]]:
        """The connections from one city to another; an empty list if there is none."""
        route = self._world.routes.get((self._city(from_city), self._city(to_city)))
        return [] if route is None else [asdict(route)]

    def get_weather_by_city_date(self, city: str, date: str) -> dict[str, str]:
        """The weather in a city on a day of the journey (YYYY-MM-DD)."""
        weather = self._world.weather.get((self._city(city), date))
        if weather is None:
            raise LookupError(f"no forecast for {date!r}; there is one for each day of the journey")
        return {"city": city, "date": date, "weather": weather}

    def submit_result(self, answer_text: str) -> str:
        """Submit the finished plan. This ends the task."""
        if self._submitted is None:
            self._submitted = answer_text
        self.done = True
        return "Submitted."

    def verdict(self) -> tuple[dict[str, float], dict[str, Any]]:
        if self._submitted is None:
            parts = {"correct": 0.0, "share": 0.0, "progress": self._progress(0.0)}
            return parts, {"submitted": False}
        met = checks(self._world, self._task, self._submitted)
        # Nothing is owed to the form alone.
        share = sum(met.values()) / len(met) if met["form"] else 0.0
        right = float(all(met.values()))
        parts = {"correct": right, "share": share, "progress": self._progress(share)}
        return parts, {"submitted": True, "not met": [name for name, ok in met.items() if not ok]}

    def _progress(self, share: float) -> float:
        """Of the lists that have to be looked at and the answer, the share that is done: each kind
        of place that is asked for, in each day's city, or in any where the cities are free."""
        task = self._task
        kinds = [kind for kind in ("hotel", "restaurant", "attraction") if task.asks_for(kind)]
        if task.cities is None:
            looked, needed = {kind for kind, _ in self._seen} & set(kinds), len(kinds)
        else:
            wanted = {(kind, city) for kind in kinds for city in task.cities}
            looked, needed = self._seen & wanted, len(wanted)
        return (len(looked) + share) / (needed + 1)

    def _listed(self, kind: str, places: Mapping[str, Any], city: str) -> Any:
        self._seen.add((kind, city))
        found = [place for place in places.values() if place.city == city]
        if self._level.plain:
            return "\n".join(f"{one.name} {_price(one)}" for one in found)
        if not self._level.listing:
            return [place.name for place in found]
        return [{k: v for k, v in asdict(place).items() if k != "city"} for place in found]

    def _city(self, name: str) -> str:
        if name not in self._world.cities:
            raise LookupError(f"there is no city {name!r}")
        return name

    @staticmethod
    def _one(kind: str, places: Mapping[str, Any], name: str) -> Any:
        if name not in places:
            raise LookupError(f"there is no {kind} {name!r}")
        return places[name]


def _price(place: Any) -> int:
    return place.ticket if isinstance(place, Attraction) else place.price


def _facts(known: dict[str, Any], keywords: Sequence[str]) -> dict[str, Any]:
    known.pop("name", None)
    unknown = [word for word in keywords if word not in known]
    if unknown:
        raise LookupError(f"nothing is known of {unknown[0]!r}; there are {', '.join(known)}")
    return {word: known[word] for word in keywords} if keywords else known


def make_task(seed: int, level: Level) -> tuple[World, TripTask]:
    """The task of a seed. It has a solution, which its own tools find, and not every plan of the
    right form is one."""
    for attempt in range(MOST_TRIES):
        world, task = draw_task(seed * MOST_TRIES + attempt, level)
        if _possible(world, task, level) and not _anything_goes(world, task):
            return world, task
    raise ValueError(f"trip: no task of seed {seed} can be solved at this level: {level}")


def answers(trip: Trip, calls: Calls) -> bool:
    """Run a solver against an environment of this process. Returns what it returns."""
    said: str | None = None
    while True:
        try:
            name, arguments = calls.send(said) if said is not None else next(calls)
        except StopIteration as end:
            return bool(end.value)
        said = text_of(getattr(trip, name)(**arguments))


def _possible(world: World, task: TripTask, level: Level) -> bool:
    trip = Trip(ready=(world, task, level))
    return answers(trip, solve(task)) and trip.verdict()[0]["correct"] == 1.0


def _anything_goes(world: World, task: TripTask) -> bool:
    """Whether most plans that only put things where they are would do."""
    draw = random.Random(task.text())
    good = bad = 0
    while good <= GUESSES // 2 and bad < GUESSES / 2:  # or the other guesses decide nothing
        fits = all(judge(world, task, a_plan(world, task, draw)).values())
        good, bad = good + fits, bad + (not fits)
    return good > GUESSES // 2


def a_plan(world: World, task: TripTask, draw: random.Random) -> list[dict[str, str]]:
    """A plan that keeps to the cities, and is drawn at random else."""
    others = [city for city in world.cities if city != task.start]
    cities = task.cities or draw.sample(others, len(task.dates))
    plan: list[dict[str, str]] = []
    for date, city in zip(task.dates, cities, strict=True):
        meals = draw.sample([r.name for r in world.restaurants.values() if r.city == city] * 2, 2)
        day = {
            "time": date,
            "city": city,
            "hotel": draw.choice([h.name for h in world.hotels.values() if h.city == city]),
            "afternoon_restaurant": meals[0],
            "afternoon_attraction": draw.choice(
                [a.name for a in world.attractions.values() if a.city == city]
            ),
            "evening_restaurant": meals[1],
        }
        plan.append({key: day[key] for key in task.keys})
    return plan
