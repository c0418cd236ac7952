"""Shipped environments pass every gate."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from keel.agents.env_process.client import Hosted, Program
from keel.agents.environments.general.folder import Folder, folders
from keel.agents.types import Transcript
from keel.configs.load import load_config, load_synthesis
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt, Verdict
from keel.synthesis.general.sandboxes import GeneralSandboxes
from tests.agents.sandboxes import wrap_of
from tests.synthesis.general.kit import Counted, config, held
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
                calls = await held(rooms, folder.path, Counted(*history["passed"]))
                within = [sum(count <= most for most in history["most_calls"]) for count in calls]
                assert calls == history["calls_of_the_solution"]
                return within, history["passed"]

            return await asyncio.gather(*map(one, SHIPPED))

    for within, passed in asyncio.run(asyncio.wait_for(all_of_them(), 2 * PATIENCE_S)):
        assert within == passed


def test_three_small_categories_are_shipped() -> None:
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


def recipes() -> list[str]:
    page = (ROOT / "docs/synthesis.md").read_text()
    return re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def test_recipe_of_the_page_loads(tmp_path: Path) -> None:
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(recipes()[0])
    config = load_synthesis(recipe)
    assert config.family == "general" and len(config.general.categories) == 3


@pytest.mark.e2e
def test_recipe_of_the_page_runs(tmp_path: Path) -> None:
    """Solve and submit the last task in the sandbox of a run."""
    recipe = tmp_path / "run.yaml"
    recipe.write_text(f"defaults: {ROOT}/configs/agent-trip.yaml\n{recipes()[1]}")
    (source,) = load_config(recipe).data.sources
    hosting = source.environment
    program = Program(target=hosting.target, arguments=hosting.arguments, wrap=wrap_of())
    task = Prompt(
        prompt_id=f"{source.name}/{source.size - 1}",
        domain="general",
        messages=({"role": "user", "content": "?"},),
        reward={"kind": "environment"},
    )

    async def played() -> tuple[list[str], object]:
        hosted = Hosted(program)
        try:
            opening = await hosted.open(task, seed=1)
            answer = {"answer_text": "[]"}
            call = ToolCall(call_id="c", name="submit_result", arguments=answer)
            assert (await hosted.call(call, timeout_s=PATIENCE_S)).done
            verdict = await hosted.verdict(Transcript(messages=(), finish_reason="stop"))
            return [tool.name for tool in opening.tools], verdict
        finally:
            await hosted.close()

    names, verdict = asyncio.run(asyncio.wait_for(played(), PATIENCE_S))
    assert names == [*SHIPPED[2].tasks()[2]["tools"], "submit_result"]
    assert isinstance(verdict, Verdict) and verdict.parts == {"correct": 0.0, "share": 0.0}
