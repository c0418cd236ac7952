"""The environments that come along pass every gate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from keel.agents.environments.general.folder import Folder, folders
from keel.tasks.general.rooms import Rooms
from tests.agents.sandboxes import wrap_of
from tests.tasks.general.kit import Counted, config, held

SHIPPED = folders(["shipped"])


@pytest.mark.e2e
def test_what_comes_along_passes_every_gate(tmp_path: Path) -> None:
    """As a reference policy there is the solution itself with ever fewer calls allowed."""
    wrap_of()

    async def all_of_them() -> list[tuple[list[int], list[int]]]:
        async with Rooms(tmp_path / "making", config(call_s=20.0, verify_s=20.0)) as rooms:

            async def one(folder: Folder) -> tuple[list[int], list[int]]:
                history = json.loads(folder.text("provenance.json"))
                calls = await held(rooms, folder.path, Counted(*history["passed"]))
                within = [sum(count <= most for most in history["most_calls"]) for count in calls]
                assert calls == history["calls_of_the_solution"]
                return within, history["passed"]

            return await asyncio.gather(*map(one, SHIPPED))

    for within, passed in asyncio.run(asyncio.wait_for(all_of_them(), 200)):
        assert within == passed


def test_three_categories_come_along_and_are_small() -> None:
    assert [each.path.name for each in SHIPPED] == [
        "meeting_rooms",
        "order_filling",
        "trip_planning",
    ]
    for folder in SHIPPED:
        assert len(folder.tasks()) == 3
        assert sum(file.stat().st_size for file in folder.path.iterdir()) < 24_000
        history = json.loads(folder.text("provenance.json"))
        assert history["made"].startswith("by hand") and not history["author"]
