"""Concurrent task synthesis: kept, rejected, stopped and resumed."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.commands.synthesize import Make, make_all
from keel.synthesis.author import AuthorLost
from keel.synthesis.ledger import Ledger, Rejected
from tests.waiting import PATIENCE_S

KEYS = [f"t{n}" for n in range(8)]


def made(
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
    why, report, lines = made(tmp_path / "out", even)
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

    why, report, _ = made(tmp_path, make, stop_at="t5", at_once=1)
    assert (why, report["made"], requests) == ("stopped", 5, KEYS[:5])
    with (tmp_path / "outcomes.jsonl").open("a") as file:
        file.write('{"key": "t5", "outc')  # as a crash leaves it
    why, report, lines = made(tmp_path, make)
    assert (why, report["made"]) == ("", 8) and sorted(requests) == KEYS
    assert lines[0] == "5 of 8 tasks already made"


def test_next_start_retries_a_lost_author(tmp_path: Path) -> None:
    lost = set(KEYS[:2])

    async def make(key: str) -> None:
        if key in lost:
            raise AuthorLost("no reply")

    why, report, lines = made(tmp_path, make)
    assert why == "stopped" and report["made"] == 6 and "t0: no reply" in lines[0]
    lost.clear()
    assert made(tmp_path, make)[1]["made"] == 8


RECIPE = """\
family: general
dir: {out}
author:
  base_url: http://localhost:1/v1
  model: m
"""


@pytest.mark.e2e
def test_synthesis_needs_a_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of authors runs in a sandbox only, and no knob changes that."""
    which = shutil.which

    def without(name: str, **more: Any) -> str | None:
        return None if name == "bwrap" else which(name, **more)

    monkeypatch.setattr(shutil, "which", without)
    recipe = tmp_path / "tasks.yaml"
    recipe.write_text(RECIPE.format(out=tmp_path / "out") + "general: {categories: [shops]}")
    assert main(["synthesize", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "bwrap is not installed" in error
    assert "i-trust" not in error and "agents.isolation" not in error
