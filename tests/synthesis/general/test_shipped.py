"""Shipped environments pass every gate."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from keel.agents.environments.general.author_code import Folder, folders
from keel.configs.load import load_synthesis
from keel.synthesis.general.sandboxes import GeneralSandboxes
from tests.agents.sandboxes import wrap_of
from tests.synthesis.general.kit import config, counted, held
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]
SHIPPED = folders(["shipped"])


@pytest.mark.e2e
def test_shipped_environments_pass_every_gate(tmp_path: Path) -> None:
    """The reference policy is the solution with a shrinking limit of calls."""
    wrap_of()

    async def all_of_them() -> list[tuple[list[int], list[int]]]:
        async with GeneralSandboxes(tmp_path / "making", config()) as rooms:

            async def one(folder: Folder) -> tuple[list[int], list[int]]:
                history = json.loads(folder.text("provenance.json"))
                calls = await held(rooms, folder.path, counted(*history["passed"]))
                within = [sum(count <= most for most in history["most_calls"]) for count in calls]
                assert calls == history["calls_of_the_solution"]
                return within, history["passed"]

            return await asyncio.gather(*map(one, SHIPPED))

    for within, passed in asyncio.run(asyncio.wait_for(all_of_them(), 2 * PATIENCE_S)):
        assert within == passed


def recipes() -> list[str]:
    page = (ROOT / "docs/synthesis.md").read_text()
    return re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_recipe_of_the_page_loads(tmp_path: Path) -> None:
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(recipes()[0])
    config = load_synthesis(recipe)
    assert config.family == "general" and len(config.general.categories) == 3
