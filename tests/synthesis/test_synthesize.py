"""Concurrent task synthesis: kept, rejected, stopped and resumed."""

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.synthesize import Make, make_all
from keel.configs.load import load_synthesis
from keel.configs.schema import SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.synthesis.author import AuthorLost
from keel.synthesis.ledger import Ledger, Rejected
from keel.synthesis.redteam import main as redteam
from tests.waiting import PATIENCE_S

KEYS = [f"t{n}" for n in range(8)]


def synthesized(
    folder: Path, make: Make, *, stop_at: str = "", at_once: int = 2, **more: Any
) -> tuple[str, dict[str, Any], list[str]]:
    async def all_of_them() -> tuple[str, dict[str, Any], list[str]]:
        lines: list[str] = []
        stop = asyncio.Event()

        async def one(key: str) -> Sequence[Rejected] | None:
            if key == stop_at:
                stop.set()
                await asyncio.sleep(1000)
            return await make(key)

        with Ledger(folder, {"family": "f", "seed": 1}) as ledger:
            say = lines.append
            why = await make_all(KEYS, one, ledger, at_once=at_once, say=say, stop=stop, **more)
            return why, ledger.report(), lines

    return asyncio.run(asyncio.wait_for(all_of_them(), PATIENCE_S))


async def even(key: str) -> None:
    await asyncio.sleep(0)
    if int(key[1:]) % 2:
        raise Rejected("parity", "is odd \ud83d"[: 6 + 2 * (key == "t1")])


def test_tasks_are_kept_or_rejected(tmp_path: Path) -> None:
    why, report, lines = synthesized(tmp_path / "out", even)
    assert why == "" and (report["made"], report["kept"]) == (8, 4)
    assert report["refused"] == {
        "parity": {"tasks": 4, "reasons": {"is odd": 3, "is odd \ud83d": 1}}
    }
    saved = json.loads((tmp_path / "out/report.json").read_text())
    assert lines[-1].startswith("8 of 8: ") and saved["kept"] == report["kept"]
    assert saved["refused"]["parity"]["reasons"] == {"is odd": 3, "is odd ?": 1}


def test_stopped_synthesis_resumes(tmp_path: Path) -> None:
    requests: list[str] = []

    async def make(key: str) -> None:
        requests.append(key)
        await even(key)

    why, report, _ = synthesized(tmp_path, make, stop_at="t5", at_once=1)
    assert (why, report["made"], requests) == ("stopped", 5, KEYS[:5])
    with (tmp_path / "outcomes.jsonl").open("a") as file:
        file.write('{"key": "t5", "outc')  # as a crash leaves it
    why, report, lines = synthesized(tmp_path, make)
    assert (why, report["made"]) == ("", 8) and sorted(requests) == KEYS
    assert lines[0] == "5 of 8 tasks already made"


def test_next_start_retries_a_lost_author(tmp_path: Path) -> None:
    lost = set(KEYS[:2])

    async def make(key: str) -> None:
        if key in lost:
            raise AuthorLost("no reply")

    why, report, lines = synthesized(tmp_path, make)
    assert why == "stopped" and report["made"] == 6 and "t0: no reply" in lines[0]
    lost.clear()
    assert synthesized(tmp_path, make)[1]["made"] == 8


@pytest.mark.e2e
def test_synthesis_needs_a_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    recipe = tmp_path / "tasks.yaml"
    author = {"base_url": "http://localhost:1/v1", "model": "m"}
    general = {"categories": ["shops"]}
    sections = {"family": "general", "dir": str(tmp_path / "out"), "author": author}
    recipe.write_text(json.dumps({**sections, "general": general}))
    assert main(["synthesize", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "bwrap is not installed" in error and "i-trust" not in error


@pytest.mark.parametrize(
    ("only", "kind"), [("refuse", "refusal"), ("help", "refusal"), ("inject", "rubric")]
)
def test_every_request_is_a_prompt_with_a_reward(only: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    assert redteam(["--only", only, str(path)]) == 0
    source = SourceConfig(name="set", source="jsonl", path=str(path))
    items = load_jsonl(source, check_spec).items
    assert len(items) > 150 and {item.prompt.reward["kind"] for item in items} == {kind}
    assert len({str(item.prompt.messages) for item in items}) == len(items)
    if kind == "refusal":
        turns = [[message["role"] for message in item.prompt.messages] for item in items]
        assert ["user", "assistant", "user"] in turns and ["user"] in turns
        assert all(item.prompt.reward["refuse"] is (only == "refuse") for item in items)
    else:
        assert all("<document>" in item.prompt.messages[-1]["content"] for item in items)


def test_recipe_of_the_page_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/synthesis.md").read_text()
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0])
    config = load_synthesis(recipe)
    assert config.family == "general" and len(config.general.categories) == 3
