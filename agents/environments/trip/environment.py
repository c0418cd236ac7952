"""The trip planning environment, with fifteen tools and a verdict. Task and tools follow
DeepSeek-V3.2 (2025), section 3.2.3."""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from itertools import permutations
from typing import Any

from keel.agents.env_runtime.tool_objects import text_of
from keel.agents.environments.trip.tasks import (
    KINDS,
    LEVELS,
    MEALS,
    Level,
    TripTask,
    World,
    band_of,
    check_plan,
    draw_task,
    judge,
)

_MAX_TRIES = 500
_GUESSES = 40


class Trip:
    """An environment for planning one trip. The prompt's `reward` can select the task, for example
    with `{"trip": {"level": 0, "seed": 17}}`. Otherwise, `level` and the seed of the episode select
    it."""

    def __init__(self, level: int = 0, ready: tuple[World, TripTask] | None = None) -> None:
        if not 0 <= level < len(LEVELS):
            raise ValueError(f"trip: level = {level}, there are 0 to {len(LEVELS) - 1}")
        self._of = level
        self.done = False
        self.offered: Sequence[str] | None = None
        if ready is not None:
            self._begin(*ready)

    def opening(self, task: Mapping[str, Any], seed: int) -> str:
        default = {"level": self._of, "seed": seed}
        named: Mapping[str, int] = task.get("reward", {}).get("trip", default)
        self._begin(*make_task(named["seed"], LEVELS[named["level"]]))
        return self._task.text()

    def _begin(self, world: World, task: TripTask) -> None:
        self._world, self._task = world, task
        self._submitted: str | None = None
        self._seen: set[tuple[str, str]] = set()
        self.offered = task.level.tools

    def get_all_attractions_by_city(self, city: str) -> Any:
        """All attractions of a city."""
        return self._listed("attraction", city)

    def get_all_cities(self) -> list[str]:
        """The names of all cities."""
        return list(self._world.cities)

    def get_all_hotels_by_city(self, city: str) -> Any:
        """All hotels of a city."""
        return self._listed("hotel", city)

    def get_all_restaurants_by_city(self, city: str) -> Any:
        """All restaurants of a city."""
        return self._listed("restaurant", city)

    def get_city_by_attraction(self, attraction: str) -> str:
        """The city that an attraction is in."""
        return self._one("attraction", attraction)["city"]

    def get_city_by_hotel(self, hotel: str) -> str:
        """The city that a hotel is in."""
        return self._one("hotel", hotel)["city"]

    def get_city_by_restaurant(self, restaurant: str) -> str:
        """The city that a restaurant is in."""
        return self._one("restaurant", restaurant)["city"]

    def get_city_transport(self, city: str) -> list[str]:
        """How to get about inside a city."""
        return list(self._world.transport[self._city(city)])

    def get_infos_by_attraction(self, info_keywords: list[str], attraction: str) -> dict[str, Any]:
        """Facts about an attraction.

        Args:
            info_keywords: Of city, ticket, rating, outdoor.
        """
        return _facts(self._one("attraction", attraction), info_keywords)

    def get_infos_by_city(self, info_keywords: list[str], city: str) -> dict[str, Any]:
        """Facts about a city.

        Args:
            info_keywords: Of hotels, restaurants, attractions (how many), transport.
        """
        name = self._city(city)
        known: dict[str, Any] = {
            f"{kind}s": sum(place["city"] == name for place in self._world.places[kind].values())
            for kind in KINDS
        }
        return _facts({**known, "transport": self._world.transport[name]}, info_keywords)

    def get_infos_by_hotel(self, info_keywords: list[str], hotel: str) -> dict[str, Any]:
        """Facts about a hotel.

        Args:
            info_keywords: Of city, price, rating.
        """
        return _facts(self._one("hotel", hotel), info_keywords)

    def get_infos_by_restaurant(self, info_keywords: list[str], restaurant: str) -> dict[str, Any]:
        """Facts about a restaurant.

        Args:
            info_keywords: Of city, price, rating, cuisine.
        """
        return _facts(self._one("restaurant", restaurant), info_keywords)

    def get_inter_city_transport(self, from_city: str, to_city: str) -> list[dict[str, Any]]:
        """The connections from one city to another; an empty list if there is none."""
        route = self._world.routes.get((self._city(from_city), self._city(to_city)))
        return [] if route is None else [route]

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
        met = check_plan(self._world, self._task, self._submitted)
        # A well-formed answer alone is worth nothing.
        share = sum(met.values()) / len(met) if met["form"] else 0.0
        right = float(all(met.values()))
        parts = {"correct": right, "share": share, "progress": self._progress(share)}
        return parts, {"submitted": True, "not met": [name for name, ok in met.items() if not ok]}

    def _progress(self, share: float) -> float:
        """Return the fraction of steps completed. Each list that the task requires is a step, which
        is completed by looking it up. Submitting a plan is another step, which counts as `share`.
        """
        task, kinds = self._task, self._task.level.kinds
        if task.cities is None:
            looked, needed = {kind for kind, _ in self._seen} & set(kinds), len(kinds)
        else:
            lists = {(kind, city) for kind in kinds for city in task.cities}
            looked, needed = self._seen & lists, len(lists)
        return (len(looked) + share) / (needed + 1)

    def _listed(self, kind: str, city: str) -> Any:
        self._seen.add((kind, self._city(city)))
        matches = [place for place in self._world.places[kind].values() if place["city"] == city]
        if self._task.level.plain:
            price = "ticket" if kind == "attraction" else "price"
            return "\n".join(f"{one['name']} {one[price]}" for one in matches)
        return [{k: v for k, v in place.items() if k != "city"} for place in matches]

    def _city(self, name: str) -> str:
        if name not in self._world.cities:
            raise LookupError(f"there is no city {name!r}")
        return name

    def _one(self, kind: str, name: str) -> dict[str, Any]:
        if name not in (places := self._world.places[kind]):
            raise LookupError(f"there is no {kind} {name!r}")
        return places[name]


def _facts(known: dict[str, Any], keywords: Sequence[str]) -> dict[str, Any]:
    known = {word: fact for word, fact in known.items() if word != "name"}
    unknown = [word for word in keywords if word not in known]
    if unknown:
        raise LookupError(f"nothing is known of {unknown[0]!r}; there are {', '.join(known)}")
    return {word: known[word] for word in keywords} if keywords else known


def make_task(seed: int, level: Level) -> tuple[World, TripTask]:
    """Generate a task from a seed. The task can be solved with its tools, and most random plans
    fail it."""
    for attempt in range(_MAX_TRIES):
        world, task = draw_task(seed * _MAX_TRIES + attempt, level)
        trip = Trip(ready=(world, task))
        solved = _finds_a_plan(trip, solve(task)) and trip.verdict()[0]["correct"] == 1.0
        if solved and not _anything_goes(world, task):
            return world, task
    raise ValueError(f"trip: no task of seed {seed} can be solved at this level: {level}")


def _finds_a_plan(trip: Trip, calls: Calls) -> bool:
    """Run a solver's tool calls in a local environment. Returns whether the solver finds a plan."""
    result: str | None = None
    while True:
        try:
            name, arguments = calls.send(result) if result is not None else next(calls)
        except StopIteration as end:
            return bool(end.value)
        result = text_of(getattr(trip, name)(**arguments))


def _anything_goes(world: World, task: TripTask) -> bool:
    draw = random.Random(task.text())
    plans = (_a_plan(world, task, draw) for _ in range(_GUESSES))
    return sum(all(judge(world, task, plan).values()) for plan in plans) > _GUESSES // 2


def _a_plan(world: World, task: TripTask, draw: random.Random) -> list[dict[str, str]]:
    others = [city for city in world.cities if city != task.start]
    cities = task.cities or draw.sample(others, len(task.dates))
    plan: list[dict[str, str]] = []
    for date, city in zip(task.dates, cities, strict=True):
        hotels, restaurants, attractions = (
            [one["name"] for one in world.places[kind].values() if one["city"] == city]
            for kind in KINDS
        )
        meals = draw.sample(restaurants * 2, 2)
        day = {"time": date, "city": city, "hotel": draw.choice(hotels)}
        day |= dict(zip(MEALS, meals, strict=True))
        day["afternoon_attraction"] = draw.choice(attractions)
        plan.append({key: day[key] for key in task.level.keys})
    return plan


Calls = Generator[tuple[str, dict[str, Any]], str, Any]
"""A generator that yields tool calls as (name, arguments) and receives their results."""


def solve(task: TripTask) -> Calls:
    """Search for a plan that solves the task, and submit it. Returns whether one was found."""
    if task.cities is not None:
        routes = [task.cities]
    else:
        cities: list[str] = json.loads((yield "get_all_cities", {}))
        others = [city for city in cities if city != task.start]
        routes = permutations(others, len(task.dates))
    places: dict[str, dict[str, list[dict[str, Any]]]] = {}
    days: dict[tuple[str, int], dict[str, str] | None] = {}
    for route in routes:
        plan: list[dict[str, str]] = []
        for day, city in enumerate(route):
            if city not in places:
                places[city] = {}
                for kind in task.level.kinds:
                    text = yield f"get_all_{kind}s_by_city", {"city": city}
                    places[city][kind] = _parse_list(kind, text, task.level.plain)
            if (city, day) not in days:
                days[city, day] = _plan_day(task, day, city, places[city])
            day_plan = days[city, day]
            if day_plan is None:
                break
            plan.append(day_plan)
        else:
            yield "submit_result", {"answer_text": task.write(plan)}
            return True
    return False


def _parse_list(kind: str, text: str, plain: bool) -> list[dict[str, Any]]:
    if not plain:
        return json.loads(text)
    price = "ticket" if kind == "attraction" else "price"
    pairs = [line.rsplit(" ", 1) for line in text.splitlines()]
    return [{"name": name, price: int(value)} for name, value in pairs]


def _plan_day(
    task: TripTask, day: int, city: str, places: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, str] | None:
    meals = [key for key in MEALS if key in task.level.keys]
    for hotel in places.get("hotel", []):
        if task.hotel_at_most is not None and hotel["price"] > task.hotel_at_most:
            continue
        band = band_of(task.bands, hotel["price"]) if day == task.rule_day else None
        if task.bands and day == task.rule_day and band is None:
            continue
        for sight in places.get("attraction", [{"name": "", "ticket": 0}]):
            for meal_places in permutations(places.get("restaurant", []), len(meals)):
                if band is None or band.holds(meal_places, sight["ticket"]):
                    plan = {"time": task.dates[day], "city": city, "hotel": hotel["name"]}
                    plan["afternoon_attraction"] = sight["name"]
                    plan |= {key: one["name"] for key, one in zip(meals, meal_places, strict=True)}
                    return {key: plan[key] for key in task.level.keys}
    return None
