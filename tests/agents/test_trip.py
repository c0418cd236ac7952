"""The trip planner: tasks are solvable with their tools, and the verifier is correct."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.environments.trip.environment import Trip, a_plan, answers, make_task
from keel.agents.environments.trip.solver import solve
from keel.agents.environments.trip.tasks import KEYS, LEVELS, REPORT, Band, Level, TripTask
from keel.agents.environments.trip.verify import band_holds, band_of, checks, judge
from keel.agents.environments.trip.world import Size, World, make_world

TOOLS = {
    "get_all_attractions_by_city": ["city"],
    "get_all_cities": [],
    "get_all_hotels_by_city": ["city"],
    "get_all_restaurants_by_city": ["city"],
    "get_city_by_attraction": ["attraction"],
    "get_city_by_hotel": ["hotel"],
    "get_city_by_restaurant": ["restaurant"],
    "get_city_transport": ["city"],
    "get_infos_by_attraction": ["info_keywords", "attraction"],
    "get_infos_by_city": ["info_keywords", "city"],
    "get_infos_by_hotel": ["info_keywords", "hotel"],
    "get_infos_by_restaurant": ["info_keywords", "restaurant"],
    "get_inter_city_transport": ["from_city", "to_city"],
    "get_weather_by_city_date": ["city", "date"],
    "submit_result": ["answer_text"],
}
DATES = ("2025-10-01", "2025-10-02", "2025-10-03")
SMALL = Size(cities=3, hotels=2, restaurants=2, attractions=2, long_names=False, routes=0.7)


def right(world: World, task: TripTask, answer: str) -> bool:
    return all(checks(world, task, answer).values())


def begun(seed: int, level: int) -> tuple[Trip, World, TripTask]:
    world, task = make_task(seed, LEVELS[level])
    trip = Trip(ready=(world, task, LEVELS[level]))
    return trip, world, task


def solution(seed: int, level: int) -> tuple[World, TripTask, str]:
    trip, world, task = begun(seed, level)
    assert answers(trip, solve(task))
    assert trip._submitted is not None
    return world, task, trip._submitted


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_every_task_is_solvable_with_its_tools(level: int) -> None:
    for seed in range(12):
        world, task, answer = solution(seed, level)
        assert right(world, task, answer)
        assert (world, task) == make_task(seed, LEVELS[level])
        draw = random.Random(seed)
        guesses = [judge(world, task, a_plan(world, task, draw)) for _ in range(60)]
        assert sum(all(met.values()) for met in guesses) < 50  # some well-formed plans are wrong


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_the_offered_tools_suffice(level: int) -> None:
    _, _, task = begun(3, level)
    offered = LEVELS[level].tools or TOOLS
    trip, _, _ = begun(3, level)
    used: list[str] = []

    def watched() -> Any:
        calls, result = solve(task), None
        while True:
            try:
                name, arguments = calls.send(result) if result is not None else next(calls)
            except StopIteration as end:
                return end.value
            used.append(name)
            result = yield name, arguments

    assert answers(trip, watched())
    assert set(used) <= set(offered) and used[-1] == "submit_result"


def plans(world: World, task: TripTask) -> Iterator[list[dict[str, str]]]:
    """Yield every plan whose fields name places of the right kind."""
    kinds = {
        "time": task.dates[:1],
        "city": world.cities,
        "hotel": tuple(world.hotels),
        "afternoon_restaurant": tuple(world.restaurants),
        "afternoon_attraction": tuple(world.attractions),
        "evening_restaurant": tuple(world.restaurants),
    }
    days = [
        dict(zip(task.keys, values, strict=True))
        for values in itertools.product(*(kinds[key] for key in task.keys))
    ]
    for chosen in itertools.product(days, repeat=len(task.dates)):
        yield [
            {**day, **({"time": date} if "time" in day else {})}
            for date, day in zip(task.dates, chosen, strict=True)
        ]


def by_hand(world: World, task: TripTask, plan: Sequence[dict[str, str]]) -> bool:
    """Check a plan with a second, simpler implementation of the task's text."""
    seen: list[str] = []
    before = task.start
    for number, day in enumerate(plan):
        city = day["city"] if "city" in day else task.cities[number]  # type: ignore[index]
        hotel = world.hotels[day["hotel"]]
        sight = world.attractions[day["afternoon_attraction"]]
        lunch = world.restaurants[day["afternoon_restaurant"]]
        dinner = world.restaurants[day["evening_restaurant"]]
        for place in (hotel, sight, lunch, dinner):
            if place.city != city or place.name in seen:
                return False
            seen.append(place.name)
        if city in seen or city == task.start:
            return False
        seen.append(city)
        if task.cities is not None and city != task.cities[number]:
            return False
        if task.connected and (before, city) not in world.routes:
            return False
        before = city
        if task.dry and sight.outdoor and world.weather[city, task.dates[number]] == "rain":
            return False
        if number != task.rule_day:
            continue
        meals, best = lunch.price + dinner.price, max(lunch.rating, dinner.rating)
        worst = min(lunch.rating, dinner.rating)
        if hotel.price >= 800:
            good = meals < 350 and worst >= 4.0 and sight.ticket < 120
        elif hotel.price >= 500:
            good = best >= 4.0 and sight.ticket < 180
        else:
            good = best >= 3.2
        if not good:
            return False
    return True


def small_task(world: World, days: int, **fields: Any) -> TripTask:
    plain: dict[str, Any] = {
        "dates": DATES[:days],
        "start": world.cities[0],
        "cities": None,
        "keys": KEYS,
        "plain": False,
        "rule_day": days - 1,
        "bands": REPORT,
        "hotel_at_most": None,
        "connected": False,
        "dry": False,
    }
    return TripTask(**(plain | fields))


@pytest.mark.parametrize(
    "fields",
    [{}, {"connected": True}, {"dry": True}, {"start": ""}],
    ids=["report", "connected", "dry", "anywhere"],
)
def test_verifier_and_solver_match_brute_force(fields: dict[str, Any]) -> None:
    """Tries every one-day plan in small worlds, with places in any city."""
    possible = 0
    for seed in range(2):
        world = make_world(seed, SMALL, DATES)
        task = small_task(world, 1, **({"start": world.cities[0]} | fields))
        good = 0
        for plan in plans(world, task):
            expected = by_hand(world, task, plan)
            assert all(judge(world, task, plan).values()) == expected, plan
            good += expected
        trip = Trip(ready=(world, task, LEVELS[4]))
        assert answers(trip, solve(task)) == (good > 0)
        possible += good > 0
        if good:
            assert trip.verdict()[0] == {"correct": 1.0, "share": 1.0, "progress": 1.0}
    assert possible


def test_two_day_plans_match_brute_force() -> None:
    """Tries two-day plans that keep each place to one city, though not always the day's."""
    size = replace(SMALL, hotels=1, restaurants=2, attractions=1)
    good = 0
    for seed in range(12):
        world = make_world(seed, size, DATES)
        task = small_task(world, 2, connected=seed % 2 == 0, dry=seed % 3 == 0)
        places = [
            {"city": city, "hotel": hotel.name, "afternoon_restaurant": one.name}
            | {"afternoon_attraction": sight.name, "evening_restaurant": two.name}
            for city in world.cities
            for hotel in world.hotels.values()
            for sight in world.attractions.values()
            for one, two in itertools.product(world.restaurants.values(), repeat=2)
            if hotel.city == sight.city and city in (hotel.city, one.city)
        ]
        rng = random.Random(seed)
        found = 0
        some = [rng.sample(places, 2) for _ in range(300)]
        exact = [day for day in places if by_place(world, day)]
        for pair in [*some, *itertools.product(exact, repeat=2)]:
            plan = [{"time": d, **day} for d, day in zip(task.dates, pair, strict=True)]
            expected = by_hand(world, task, plan)
            assert right(world, task, json.dumps(plan)) == expected
            found += expected
        trip = Trip(ready=(world, task, LEVELS[4]))
        assert answers(trip, solve(task)) == (found > 0)
        good += found > 0
    assert 0 < good < 12


def by_place(world: World, day: dict[str, str]) -> bool:
    places = {**world.hotels, **world.restaurants, **world.attractions}
    return all(places[name].city == day["city"] for key, name in day.items() if key != "city")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_mutated_answers_are_verified_again(data: st.DataObject) -> None:
    level = data.draw(st.sampled_from([3, 4, 5]))
    world, task, answer = solution(data.draw(st.integers(0, 3)), level)
    plan: list[dict[str, str]] = json.loads(answer)
    day = data.draw(st.sampled_from(plan))
    key = data.draw(st.sampled_from(KEYS))
    every = [*world.cities, *world.hotels, *world.restaurants, *world.attractions, *DATES, ""]
    new = data.draw(st.sampled_from(every))
    changed = new != day[key]
    day[key] = new
    kinds = [world.hotels, world.restaurants, world.attractions, world.restaurants]
    names = ["hotel", "afternoon_restaurant", "afternoon_attraction", "evening_restaurant"]
    sound = all(
        d["time"] == date
        and d["city"] in world.cities
        and all(d[name] in kind for name, kind in zip(names, kinds, strict=True))
        for d, date in zip(plan, task.dates, strict=True)
    )
    expected = sound and (by_hand(world, task, plan) if level > 3 else None)
    got = right(world, task, json.dumps(plan))
    if expected is not None:
        assert got == expected
    if changed and (key in ("time", "city") or not sound):
        assert not got


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_malformed_answers_are_wrong(level: int) -> None:
    world, task, answer = solution(1, level)
    easier = [solution(seed, lower)[2] for lower in range(level) for seed in range(3)]
    junk = ["", "[]", "{}", "null", "[[]]", "[1, 2, 3]", "[" * 5000, "x" * 30_000, "the first", ","]
    whole = [f"{answer} ", f"\n{answer}\n"]
    assert all(right(world, task, one) for one in whole)
    junk += [f"My answer: {answer}", f"```json\n{answer}\n```", answer[: len(answer) // 2]]
    if not task.plain:
        plan: list[dict[str, str]] = json.loads(answer)
        junk += [
            json.dumps(plan[:-1]),
            json.dumps([*plan, plan[-1]]),
            json.dumps([{**day, "note": "x"} for day in plan]),
            json.dumps([{k: v for k, v in day.items() if k != "time"} for day in plan]),
            json.dumps([{**day, "hotel": [day["hotel"]]} for day in plan]),
            json.dumps(
                [{**day, "evening_restaurant": day["afternoon_restaurant"]} for day in plan]
            ),
            json.dumps({"plan": plan}),
        ]
        if len(plan) > 1:
            junk.append(json.dumps(plan[::-1]))
            junk.append(json.dumps([{**plan[0], "time": date} for date in task.dates]))
    for one in [*easier, *junk]:
        assert not right(world, task, one), one
        trip = Trip(ready=(world, task, LEVELS[level]))
        trip.submit_result(one)
        assert trip.verdict()[0]["correct"] == 0.0


def test_bounds_match_the_task_text() -> None:
    """ "At least" includes the bound; "below" and "less than" exclude it."""
    assert [band_of(REPORT, price) for price in (199, 200, 499, 500, 799, 800)] == [
        None,
        REPORT[2],
        REPORT[2],
        REPORT[1],
        REPORT[1],
        REPORT[0],
    ]
    dear = REPORT[0]
    assert band_holds(dear, [(175, 4.0), (174, 4.0)], 119)
    assert not band_holds(dear, [(175, 4.0), (175, 4.0)], 119)
    assert not band_holds(dear, [(175, 4.0), (174, 3.9)], 119)
    assert not band_holds(dear, [(175, 4.0), (174, 4.0)], 120)
    assert band_holds(REPORT[2], [(900, 3.2), (900, 1.0)], 900)
    assert not band_holds(REPORT[2], [(1, 3.1), (1, 3.1)], 0)


def test_only_the_first_submission_counts() -> None:
    world, task, answer = solution(2, 0)
    wrong = next(name for name in world.hotels if not right(world, task, name))
    trip = Trip(ready=(world, task, LEVELS[0]))
    assert trip.verdict() == (
        {"correct": 0.0, "share": 0.0, "progress": 0.0},
        {"submitted": False},
    )
    trip.submit_result(wrong)
    trip.submit_result(answer)
    parts, facts = trip.verdict()
    assert parts["correct"] == 0.0 and 0 < parts["share"] < 1 and facts["not met"]


def test_level_zero_tasks_are_small() -> None:
    """One call lists three names, and one or two have the right price."""
    for seed in range(20):
        trip, world, task = begun(seed, 0)
        assert task.cities is not None
        listed = trip.get_all_hotels_by_city(task.cities[0])
        assert len(listed) == len("Ab 200\n") * 3 - 1 and len(task.text()) < 80
        good = [name for name in world.hotels if right(world, task, name)]
        assert 1 <= len(good) <= 2
    assert solution(0, 0)[2] in begun(0, 0)[1].hotels


def test_worlds_are_complete_and_reproducible() -> None:
    size = LEVELS[5].size
    world = make_world(4, size, DATES)
    assert world == make_world(4, size, DATES) != make_world(5, size, DATES)
    names = [*world.cities, *world.hotels, *world.restaurants, *world.attractions]
    assert len(set(names)) == len(names) == 10 * (1 + 4 + 5 + 4)
    assert all(world.routes[b, a] == route for (a, b), route in world.routes.items())
    assert 0 < len(world.routes) < 90
    assert {hotel.price >= 200 for hotel in world.hotels.values()} == {True}
    with pytest.raises(ValueError, match="no names of two letters"):
        Size(cities=10, hotels=5, restaurants=5, attractions=5, long_names=False)
    impossible = Level(size=SMALL, days=1, bands=(Band(low=5000),))
    with pytest.raises(ValueError, match="can be solved"):
        make_task(0, impossible)
