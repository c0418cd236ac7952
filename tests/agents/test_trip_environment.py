"""The trip planner as an environment: prompts, tools, and a task in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest

import keel
from keel.agents.env_process.client import Hosted, Program
from keel.agents.environments.trip.environment import make_task
from keel.agents.environments.trip.prompts import trip_prompts
from keel.agents.environments.trip.solver import solve, written
from keel.agents.environments.trip.tasks import LEVELS
from keel.rl.types import Verdict
from tests.agents.episodes import run, transcript, use
from tests.agents.test_trip import TOOLS, begun


def test_prompts() -> None:
    prompts = trip_prompts(0, 20, seed=1)
    assert len({prompt.prompt_id for prompt in prompts}) == 20
    assert len({prompt.messages[0]["content"] for prompt in prompts}) > 10
    others = {prompt.prompt_id for prompt in trip_prompts(0, 20, seed=2)}
    assert not others & {prompt.prompt_id for prompt in prompts}
    with pytest.raises(ValueError, match="level = 6, there are 0 to 5"):
        trip_prompts(6, 1, seed=0)


@pytest.mark.e2e
@pytest.mark.parametrize("level", [0, 5])
def test_a_task_runs_in_its_own_process(level: int) -> None:
    async def play() -> None:
        (prompt,) = trip_prompts(level, 1, seed=3)
        here = Path(keel.__file__).parent
        target = "keel.agents.environments.trip.environment:Trip"
        environment = Hosted(Program(target=target, folder=here))
        try:
            opening = await environment.open(prompt, seed=0)
            assert opening.messages == prompt.messages
            offered = {tool.name: list(tool.parameters["properties"]) for tool in opening.tools}
            expected = LEVELS[level].tools or TOOLS
            assert offered == {name: TOOLS[name] for name in expected}
            assert all(tool.description for tool in opening.tools)
            if level == 5:
                for name, arguments, why in [
                    ("get_city_by_hotel", {"hotel": "Nowhere"}, "there is no hotel 'Nowhere'"),
                    ("get_weather_by_city_date", {"city": "X", "date": "1"}, "no city 'X'"),
                    ("get_infos_by_hotel", {"info_keywords": "price", "hotel": "X"}, "'array'"),
                ]:
                    result = await use(environment, name, **arguments)
                    assert result.failed and why in result.text
            _, task = make_task(prompt.reward["trip"]["seed"], LEVELS[level])
            calls, said, done = solve(task), None, False
            while True:
                try:
                    name, arguments = calls.send(said) if said is not None else next(calls)
                except StopIteration:
                    break
                result = await use(environment, name, **arguments)
                assert not result.failed and not done
                said, done = result.text, result.done
            assert done
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict)
            assert verdict.parts == {"correct": 1.0, "share": 1.0, "progress": 1.0}
        finally:
            await environment.close()

    run(play())


def test_every_tool_answers() -> None:
    trip, world, task = begun(0, 5)
    city = world.cities[0]
    hotel = next(one for one in world.hotels.values() if one.city == city)
    sight = next(one for one in world.attractions.values() if one.city == city)
    table = next(one for one in world.restaurants.values() if one.city == city)
    assert trip.get_all_cities() == list(world.cities)
    assert hotel.name in trip.get_all_hotels_by_city(city)
    assert sight.name in trip.get_all_attractions_by_city(city)
    assert table.name in trip.get_all_restaurants_by_city(city)
    assert trip.get_city_by_hotel(hotel.name) == city
    assert trip.get_city_by_attraction(sight.name) == city
    assert trip.get_city_by_restaurant(table.name) == city
    assert trip.get_infos_by_hotel(["price"], hotel.name) == {"price": hotel.price}
    assert trip.get_infos_by_attraction(["ticket"], sight.name) == {"ticket": sight.ticket}
    assert trip.get_infos_by_restaurant([], table.name)["cuisine"] == table.cuisine
    assert trip.get_infos_by_city(["hotels"], city) == {"hotels": 4}
    assert len(trip.get_city_transport(city)) == 2
    assert trip.get_weather_by_city_date(city, task.dates[0])["weather"] in (
        "sunny",
        "cloudy",
        "rain",
    )
    one, other = next(iter(world.routes))
    assert trip.get_inter_city_transport(one, other)[0]["hours"] > 0
    with pytest.raises(LookupError, match="nothing is known of 'stars'"):
        trip.get_infos_by_hotel(["stars"], hotel.name)
    with pytest.raises(LookupError, match="no forecast"):
        trip.get_weather_by_city_date(city, "2001-01-01")
    assert written(task, []) == "[]"
