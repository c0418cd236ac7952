"""Solves a trip task with the tools alone, without access to the world."""

from __future__ import annotations

import json
from collections.abc import Generator
from itertools import permutations
from typing import Any

from keel.agents.environments.trip.tasks import TripTask
from keel.agents.environments.trip.verify import MEALS, band_holds, band_of

Calls = Generator[tuple[str, dict[str, Any]], str, Any]
"""A generator that yields calls (name, arguments) and receives their results."""
_ABOUT = {
    "hotel": ["price"],
    "restaurant": ["price", "rating"],
    "attraction": ["ticket", "outdoor"],
}


def solve(task: TripTask) -> Calls:
    """Submit a solution if there is one, and return whether there is."""
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
            if task.connected:
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
    """Return a plan for a day in a city that meets all demands on that day, or None if there is
    none."""
    keys = [key for key in task.keys if key not in ("time", "city")]
    lists: dict[str, list[dict[str, Any]]] = {}
    for kind in _ABOUT:
        if task.asks_for(kind):
            if (kind, city) not in known:
                known[kind, city] = yield from _all(kind, city, task.plain)
            lists[kind] = known[kind, city]
    sights: list[dict[str, Any]] = lists.get("attraction", [{"name": "", "ticket": 0}])
    if task.dry:
        weather = json.loads(
            (yield "get_weather_by_city_date", {"city": city, "date": task.dates[day]})
        )
        sights = [one for one in sights if not (one["outdoor"] and weather["weather"] == "rain")]
    meals = [key for key in MEALS if key in keys]
    for hotel in lists.get("hotel", []):
        if task.hotel_at_most is not None and hotel["price"] > task.hotel_at_most:
            continue
        band = band_of(task.bands, hotel["price"]) if day == task.rule_day else None
        if task.bands and day == task.rule_day and band is None:
            continue
        for sight in sights:
            for meal_places in permutations(lists.get("restaurant", []), len(meals)):
                meal_facts = [(one["price"], one["rating"]) for one in meal_places]
                if band is None or band_holds(band, meal_facts, sight["ticket"]):
                    plan = {"time": task.dates[day], "city": city, "hotel": hotel["name"]}
                    plan["afternoon_attraction"] = sight["name"]
                    plan |= {key: one["name"] for key, one in zip(meals, meal_places, strict=True)}
                    return {key: plan[key] for key in task.keys}
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
    """Return a plan as the text to submit."""
    if task.plain:
        return "\n".join(", ".join(day[key] for key in task.keys) for day in plan)
    return json.dumps(plan, ensure_ascii=False)
