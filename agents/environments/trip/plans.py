"""Checks plans for trip tasks, and solves such tasks using only the tools."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from itertools import permutations
from typing import Any, cast

from keel.agents.environments.trip.tasks import MEALS, Band, TripTask, World

_MAX_CHARACTERS = 20_000
_Day = Mapping[str, str]


def checks(world: World, task: TripTask, answer: str) -> dict[str, bool]:
    """Return each requirement and whether `answer` meets it, or only `form` if it is malformed."""
    plan = parse(task, answer)
    if plan is None:
        return {"form": False}
    return {"form": True, **judge(world, task, plan)}


def parse(task: TripTask, answer: str) -> list[dict[str, str]] | None:
    """Return the days of a plan, or None if the answer is malformed or has other keys."""
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
    """Return, for each requirement, whether a well-formed plan meets it."""
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
    band = band_of(bands, world.places["hotel"][day["hotel"]]["price"])
    return band is not None and band_holds(band, meals, sight["ticket"])


def band_of(bands: Sequence[Band], price: int) -> Band | None:
    """Return the price band that contains a hotel's price."""
    for band in bands:
        if band.low <= price and (band.high is None or price < band.high):
            return band
    return None


def band_holds(band: Band, meals: Sequence[Mapping[str, Any]], ticket: int) -> bool:
    """Return whether a day's restaurants and ticket meet a price band."""
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
    """Search for a plan that solves the task, and submit it. Returns True if there is one."""
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
    """Return a plan for a day in a city that meets all requirements for that day, if any."""
    lists: dict[str, list[dict[str, Any]]] = {}
    for kind in task.kinds:
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
        band = band_of(task.bands, hotel["price"]) if day == task.rule_day else None
        if task.bands and day == task.rule_day and band is None:
            continue
        for sight in sights:
            for meal_places in permutations(lists.get("restaurant", []), len(meals)):
                if band is None or band_holds(band, meal_places, sight["ticket"]):
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
    """Return a plan as text that can be submitted."""
    if task.level.plain:
        return "\n".join(", ".join(day[key] for key in task.level.keys) for day in plan)
    return json.dumps(plan, ensure_ascii=False)
