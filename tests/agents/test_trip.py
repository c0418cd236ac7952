"""The trip planner: tasks are solvable with their tools, and the verifier is correct."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from keel.agents.environments.demonstrations import trip_demonstrations
from keel.agents.environments.trip.environment import (
    Trip,
    _a_plan,
    _finds_a_plan,
    make_task,
    solve,
)
from keel.agents.environments.trip.tasks import (
    _KEYS,
    _REPORT,
    LEVELS,
    TripTask,
    World,
    _Band,
    _make_world,
    band_of,
    check_plan,
    judge,
)

DATES = ("2025-10-01", "2025-10-02", "2025-10-03")
SMALL = replace(LEVELS[4], cities=3, hotels=2, restaurants=2, attractions=2, long_names=False)


def right(world: World, task: TripTask, answer: str) -> bool:
    return all(check_plan(world, task, answer).values())


def solution(seed: int, level: int) -> tuple[World, TripTask, str]:
    world, task = make_task(seed, LEVELS[level])
    trip = Trip(ready=(world, task))
    assert _finds_a_plan(trip, solve(task)) and trip._submitted is not None
    return world, task, trip._submitted


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_every_task_is_solvable_with_its_tools(level: int) -> None:
    for seed in range(6):
        world, task, answer = solution(seed, level)
        assert right(world, task, answer)
        assert (world, task) == make_task(seed, LEVELS[level])
        draw = random.Random(seed)
        guesses = [judge(world, task, _a_plan(world, task, draw)) for _ in range(60)]
        assert sum(all(met.values()) for met in guesses) < 50  # some well-formed plans are wrong


def choices(world: World, dates: Sequence[str]) -> dict[str, Sequence[str]]:
    names = {kind: tuple(places) for kind, places in world.places.items()}
    given = {"time": dates, "city": world.cities}
    return {key: given.get(key) or names[key.rpartition("_")[2]] for key in _KEYS}


def by_hand(world: World, task: TripTask, plan: Sequence[dict[str, str]]) -> bool:
    seen: list[str] = []
    for number, day in enumerate(plan):
        city = day["city"]
        hotel, lunch, sight, dinner = (
            world.places[key.rpartition("_")[2]][day[key]] for key in _KEYS[2:]
        )
        for place in (hotel, sight, lunch, dinner):
            if place["city"] != city or place["name"] in seen:
                return False
            seen.append(place["name"])
        if city in seen or city == task.start:
            return False
        seen.append(city)
        if number != task.rule_day:
            continue
        meals = lunch["price"] + dinner["price"]
        worst, best = sorted((lunch["rating"], dinner["rating"]))
        if hotel["price"] >= 800:
            good = meals < 350 and worst >= 4.0 and sight["ticket"] < 120
        elif hotel["price"] >= 500:
            good = best >= 4.0 and sight["ticket"] < 180
        else:
            good = best >= 3.2
        if not good:
            return False
    return True


def test_verifier_and_solver_match_brute_force() -> None:
    possible = 0
    for seed in range(3):
        world = _make_world(seed, SMALL, DATES)
        task = replace(make_task(0, LEVELS[4])[1], level=SMALL, dates=DATES[:1], rule_day=0)
        task = replace(task, start=world.cities[0])
        good = 0
        for values in itertools.product(*choices(world, task.dates).values()):
            plan = [dict(zip(_KEYS, values, strict=True))]
            expected = by_hand(world, task, plan)
            assert all(judge(world, task, plan).values()) == expected, plan
            good += expected
        trip = Trip(ready=(world, task))
        assert _finds_a_plan(trip, solve(task)) == (good > 0)
        possible += good > 0
        if good:
            assert trip.verdict()[0] == {"correct": 1.0, "share": 1.0, "progress": 1.0}
    assert possible


def test_changed_answers_are_verified_again() -> None:
    draw = random.Random(3)
    for seed in range(6):
        world, task, answer = solution(seed, 4)
        for key in _KEYS * 4:
            plan: list[dict[str, str]] = json.loads(answer)
            day = draw.choice(plan)
            before, day[key] = day[key], draw.choice(choices(world, DATES)[key])
            expected = by_hand(world, task, plan) and (key != "time" or day[key] == before)
            assert right(world, task, json.dumps(plan)) == expected
            day[key] = "Nowhere"
            assert not right(world, task, json.dumps(plan))


@pytest.mark.parametrize("level", [0, 4])
def test_malformed_answers_are_wrong(level: int) -> None:
    world, task, answer = solution(1, level)
    assert right(world, task, f"\n{answer} ")
    junk = ["", "[]", "{}", "[1, 2, 3]", "[" * 5000, f"My answer: {answer}"]
    if not task.level.plain:
        plan: list[dict[str, str]] = json.loads(answer)
        junk += [json.dumps(plan[:-1]), json.dumps([*plan, plan[-1]])]
        junk += [json.dumps([{**plan[0], "note": "x"}, *plan[1:]])]
    assert not any(right(world, task, one) for one in junk)


def test_bounds_match_the_task_text() -> None:
    def holds(band: _Band, meals: list[tuple[int, float]], ticket: int) -> bool:
        places = [{"price": price, "rating": rating} for price, rating in meals]
        return band.holds(places, ticket)

    dear, middle, cheap = _REPORT
    bands = [band_of(_REPORT, price) for price in (199, 200, 499, 500, 799, 800)]
    assert bands == [None, cheap, cheap, middle, middle, dear]
    assert holds(dear, [(175, 4.0), (174, 4.0)], 119)
    assert not holds(dear, [(175, 4.0), (175, 4.0)], 119)
    assert not holds(dear, [(175, 4.0), (174, 3.9)], 119)
    assert not holds(dear, [(175, 4.0), (174, 4.0)], 120)
    assert not holds(cheap, [(1, 3.1), (1, 3.1)], 0)


def test_level_zero_matches_brute_force() -> None:
    for seed in range(10):
        world, task, answer = solution(seed, 0)
        trip = Trip(ready=(world, task))
        assert task.cities is not None and task.hotel_at_most is not None
        assert len(trip.get_all_hotels_by_city(task.cities[0])) == len("Ab 200\n") * 3 - 1
        good = 0
        for name in sorted(a + b for a in "BDFGKLMNPRSTVZ" for b in "aeiou"):
            hotel = world.places["hotel"].get(name, {"city": ""})
            expected = hotel["city"] == task.cities[0] and hotel["price"] <= task.hotel_at_most
            assert right(world, task, name) == expected, name
            good += expected
            for other in (f"{name}, {name}", f"{name}\n{name}", name.lower(), f'["{name}"]'):
                assert not right(world, task, other)
        assert 1 <= good <= 2
        assert trip.verdict()[0] == {"correct": 0.0, "share": 0.0, "progress": 0.5}
        trip.submit_result(
            next(name for name in world.places["hotel"] if not right(world, task, name))
        )
        trip.submit_result(answer)
        parts, facts = trip.verdict()
        assert parts["correct"] == 0.0 and 0 < parts["share"] < 1 and facts["not met"]


@pytest.mark.parametrize("level", [0, 3])
def test_careful_demonstrations_succeed_and_hasty_ones_fail(level: int) -> None:
    arguments = {"level": level}
    made = trip_demonstrations(6, seed=0, arguments=arguments)
    assert made == trip_demonstrations(6, seed=0, arguments=arguments)
    for number, one in enumerate(made):
        seed = (1 << 20) * 1_000_000 + number
        assert one.worked[0] == one.hasty[0] and one.tools
        for messages, expected in ((one.worked, 1.0), (one.hasty, 0.0)):
            trip = Trip(ready=make_task(seed, LEVELS[level]))
            for message in messages:
                if message["role"] == "assistant":
                    call = message["tool_calls"][0]["function"]
                    getattr(trip, call["name"])(**call["arguments"])
            parts = trip.verdict()[0]
            assert parts["correct"] == expected
            assert (parts["progress"] == 1.0) == bool(expected)
