"""The trip planning environment, with fifteen tools and a verdict. Task and tools follow
DeepSeek-V3.2 (2025), section 3.2.3."""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from itertools import permutations
from typing import Any, cast

from keel.agents.env_runtime.tool_objects import text_of
from keel.agents.environments.trip.tasks import (
    KINDS,
    LEVELS,
    MEALS,
    Band,
    Level,
    TripTask,
    World,
    draw_task,
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
        if not self._task.level.listing:
            return [place["name"] for place in matches]
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
        solved = is_solvable(trip, solve(task)) and trip.verdict()[0]["correct"] == 1.0
        if solved and not _anything_goes(world, task):
            return world, task
    raise ValueError(f"trip: no task of seed {seed} can be solved at this level: {level}")


def is_solvable(trip: Trip, calls: Calls) -> bool:
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
    good = bad = 0
    while good <= _GUESSES // 2 and bad < _GUESSES / 2:  # stop once the outcome is certain
        fits = all(judge(world, task, _a_plan(world, task, draw)).values())
        good, bad = good + fits, bad + (not fits)
    return good > _GUESSES // 2


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


_MAX_CHARACTERS = 20_000
_Day = Mapping[str, str]


def check_plan(world: World, task: TripTask, answer: str) -> dict[str, bool]:
    """Check which requirements `answer` meets. Returns only `form` if the answer is malformed."""
    plan = parse_plan(task, answer)
    if plan is None:
        return {"form": False}
    return {"form": True, **judge(world, task, plan)}


def parse_plan(task: TripTask, answer: str) -> list[dict[str, str]] | None:
    """Parse a plan into its days. Returns None if it is malformed or has unknown keys."""
    if len(answer) > _MAX_CHARACTERS:
        return None
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
    if task.level.connected:
        legs = zip((task.start, *cities), cities, strict=False)
        met["connections"] = all(leg in world.routes for leg in legs)
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
    if task.level.dry:
        met["no rain"] = known and not any(
            world.places["attraction"][day["afternoon_attraction"]]["outdoor"]
            and world.weather.get((day["city"], date)) == "rain"
            for date, day in zip(task.dates, days, strict=True)
        )
    return met


def _rule(world: World, bands: Sequence[Band], day: _Day) -> bool:
    meals = [world.places["restaurant"][day[key]] for key in MEALS if key in day]
    sight = world.places["attraction"].get(day.get("afternoon_attraction", ""), {"ticket": 0})
    band = _band_of(bands, world.places["hotel"][day["hotel"]]["price"])
    return band is not None and _band_holds(band, meals, sight["ticket"])


def _band_of(bands: Sequence[Band], price: int) -> Band | None:
    for band in bands:
        if band.low <= price and (band.high is None or price < band.high):
            return band
    return None


def _band_holds(band: Band, meals: Sequence[Mapping[str, Any]], ticket: int) -> bool:
    ratings = [meal["rating"] for meal in meals]
    return (
        (band.meals_below is None or sum(meal["price"] for meal in meals) < band.meals_below)
        and (band.both_rated is None or all(rating >= band.both_rated for rating in ratings))
        and (band.one_rated is None or any(rating >= band.one_rated for rating in ratings))
        and (band.ticket_below is None or ticket < band.ticket_below)
    )


Calls = Generator[tuple[str, dict[str, Any]], str, Any]
"""A generator that yields tool calls as (name, arguments) and receives their results."""
_ABOUT = {
    "hotel": ["price"],
    "restaurant": ["price", "rating"],
    "attraction": ["ticket", "outdoor"],
}


def solve(task: TripTask) -> Calls:
    """Search for a plan that solves the task, and submit it. Returns whether one was found."""
    known: dict[tuple[str, str], list[dict[str, Any]]] = {}
    if task.cities is not None:
        routes = [task.cities]
    else:
        cities: list[str] = json.loads((yield "get_all_cities", {}))
        others = [city for city in cities if city != task.start]
        routes = permutations(others, len(task.dates))
    days: dict[tuple[str, int], dict[str, str] | None] = {}
    legs: dict[tuple[str, str], bool] = {}
    for route in routes:
        plan: list[dict[str, str]] = []
        for day, city in enumerate(route):
            if task.level.connected:
                leg = (route[day - 1] if day else task.start, city)
                if leg not in legs:
                    reply = yield (
                        "get_inter_city_transport",
                        dict(zip(("from_city", "to_city"), leg, strict=True)),
                    )
                    legs[leg] = bool(json.loads(reply))
                if not legs[leg]:
                    break
            if (city, day) not in days:
                days[city, day] = yield from _day(task, day, city, known)
            day_plan = days[city, day]
            if day_plan is None:
                break
            plan.append(day_plan)
        else:
            yield "submit_result", {"answer_text": written(task, plan)}
            return True
    return False


def _day(
    task: TripTask, day: int, city: str, known: dict[tuple[str, str], list[dict[str, Any]]]
) -> Generator[tuple[str, dict[str, Any]], str, dict[str, str] | None]:
    lists: dict[str, list[dict[str, Any]]] = {}
    for kind in task.level.kinds:
        if (kind, city) not in known:
            known[kind, city] = yield from _all(kind, city, task.level.plain)
        lists[kind] = known[kind, city]
    sights: list[dict[str, Any]] = lists.get("attraction", [{"name": "", "ticket": 0}])
    if task.level.dry:
        weather = json.loads(
            (yield "get_weather_by_city_date", {"city": city, "date": task.dates[day]})
        )
        sights = [one for one in sights if not (one["outdoor"] and weather["weather"] == "rain")]
    meals = [key for key in MEALS if key in task.level.keys]
    for hotel in lists.get("hotel", []):
        if task.hotel_at_most is not None and hotel["price"] > task.hotel_at_most:
            continue
        band = _band_of(task.bands, hotel["price"]) if day == task.rule_day else None
        if task.bands and day == task.rule_day and band is None:
            continue
        for sight in sights:
            for meal_places in permutations(lists.get("restaurant", []), len(meals)):
                if band is None or _band_holds(band, meal_places, sight["ticket"]):
                    plan = {"time": task.dates[day], "city": city, "hotel": hotel["name"]}
                    plan["afternoon_attraction"] = sight["name"]
                    plan |= {key: one["name"] for key, one in zip(meals, meal_places, strict=True)}
                    return {key: plan[key] for key in task.level.keys}
    return None


def _all(
    kind: str, city: str, plain: bool
) -> Generator[tuple[str, dict[str, Any]], str, list[dict[str, Any]]]:
    reply = yield f"get_all_{kind}s_by_city", {"city": city}
    if plain:
        pairs = [line.rsplit(" ", 1) for line in reply.splitlines()]
        return [{"name": name, _ABOUT[kind][0]: int(price)} for name, price in pairs]
    listed: list[Any] = json.loads(reply)
    places: list[dict[str, Any]] = []
    for one in listed:
        if isinstance(one, str):
            arguments = {"info_keywords": _ABOUT[kind], kind: one}
            places.append({"name": one, **json.loads((yield f"get_infos_by_{kind}", arguments))})
        else:
            places.append(one)
    return places


def written(task: TripTask, plan: list[dict[str, str]]) -> str:
    if task.level.plain:
        return "\n".join(", ".join(day[key] for key in task.level.keys) for day in plan)
    return json.dumps(plan, ensure_ascii=False)
