"""Checks whether a submitted plan meets the demands of its task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from keel.agents.environments.trip.tasks import Band, TripTask
from keel.agents.environments.trip.world import World

MOST_CHARACTERS = 20_000
MEALS = ("afternoon_restaurant", "evening_restaurant")
Day = Mapping[str, str]


def checks(world: World, task: TripTask, answer: str) -> dict[str, bool]:
    """Return the name of each demand and whether `answer` meets it.

    If the answer is malformed, the only demand is `form`.
    """
    plan = parse(task, answer)
    if plan is None:
        return {"form": False}
    return {"form": True, **judge(world, task, plan)}


def parse(task: TripTask, answer: str) -> list[dict[str, str]] | None:
    """Return the days of a plan, or None if the answer is malformed.

    Each day must have exactly the keys that the task asks for.
    """
    if len(answer) > MOST_CHARACTERS:
        return None
    if task.plain:
        lines = [line for line in answer.strip().splitlines() if line.strip()]
        words = [[word.strip() for word in line.split(",")] for line in lines]
        if len(words) != len(task.dates) or any(len(day) != len(task.keys) for day in words):
            return None
        return [dict(zip(task.keys, day, strict=True)) for day in words]
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    days = cast(list[Any], value) if isinstance(value, list) else []
    if len(days) != len(task.dates):
        return None
    for day in days:
        fields = cast(dict[str, Any], day) if isinstance(day, dict) else {}
        if set(fields) != set(task.keys) or not all(isinstance(v, str) for v in fields.values()):
            return None
    return days


def judge(world: World, task: TripTask, plan: Sequence[Day]) -> dict[str, bool]:
    """Check whether a well-formed plan meets each demand."""
    days = [{"time": date, **day} for date, day in zip(task.dates, plan, strict=True)]
    if task.cities is not None:
        days = [{"city": city, **day} for city, day in zip(task.cities, days, strict=True)]
    met: dict[str, bool] = {}
    if "time" in task.keys:
        met["time"] = [day["time"] for day in days] == list(task.dates)
    cities = [day["city"] for day in days]
    if "city" in task.keys:
        as_named = task.cities is None or cities == list(task.cities)
        met["cities"] = as_named and all(c in world.cities and c != task.start for c in cities)
        met["no city twice"] = len(set(cities)) == len(cities)
    if task.connected:
        legs = zip((task.start, *cities), cities, strict=False)
        met["connections"] = all(leg in world.routes for leg in legs)
    places: dict[str, Mapping[str, Any]] = {
        "hotel": world.hotels,
        "afternoon_restaurant": world.restaurants,
        "evening_restaurant": world.restaurants,
        "afternoon_attraction": world.attractions,
    }
    keys = [key for key in task.keys if key in places]
    known = True
    for key in keys:
        places_named = [places[key].get(day[key]) for day in days]
        in_city = [
            one is not None and one.city == day["city"]
            for one, day in zip(places_named, days, strict=True)
        ]
        met[f"{key} in the city"] = all(in_city)
        known = known and all(one is not None for one in places_named)
    names = [day[key] for day in days for key in keys]
    if len(names) > 1:
        met["nothing twice"] = len(set(names)) == len(names)
    if task.hotel_at_most is not None:
        met["hotel's price"] = known and all(
            world.hotels[day["hotel"]].price <= task.hotel_at_most for day in days
        )
    if task.bands:
        met["rule"] = known and _rule(world, task.bands, days[task.rule_day])
    if task.dry:
        met["no rain"] = known and not any(
            world.attractions[day["afternoon_attraction"]].outdoor
            and world.weather.get((day["city"], date)) == "rain"
            for date, day in zip(task.dates, days, strict=True)
        )
    return met


def _rule(world: World, bands: Sequence[Band], day: Day) -> bool:
    meals = [world.restaurants[day[key]] for key in MEALS if key in day]
    ticket = (
        world.attractions[day["afternoon_attraction"]].ticket
        if "afternoon_attraction" in day
        else 0
    )
    band = band_of(bands, world.hotels[day["hotel"]].price)
    return band is not None and band_holds(
        band, [(meal.price, meal.rating) for meal in meals], ticket
    )


def band_of(bands: Sequence[Band], price: int) -> Band | None:
    """Return the band that contains a hotel's price."""
    for band in bands:
        if band.low <= price and (band.high is None or price < band.high):
            return band
    return None


def band_holds(band: Band, meals: Sequence[tuple[int, float]], ticket: int) -> bool:
    """Return whether a day meets the demands of a band. `meals` lists (price, rating) pairs."""
    ratings = [rating for _, rating in meals]
    return (
        (band.meals_below is None or sum(price for price, _ in meals) < band.meals_below)
        and (band.both_rated is None or all(rating >= band.both_rated for rating in ratings))
        and (band.one_rated is None or any(rating >= band.one_rated for rating in ratings))
        and (band.ticket_below is None or ticket < band.ticket_below)
    )
