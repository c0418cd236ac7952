"""Conversations about the small tasks for `keel sft`, with and without thinking.

Some conversations are careful and some are hasty. The thinking states which kind follows, so that
reinforcement learning can also act on the thinking.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.examples.small.demonstrations import (
    pace_demonstrations,
    price_demonstrations,
    tower_demonstrations,
)
from keel.examples.small.programs import answer, every_program
from keel.rl.turns import Message, ToolSpec

LOOK, GUESS = "look", "guess"
_WORKED = 0.6
"""The fraction of conversations that are careful."""
_SEARCH = {"results": 1, "cite": False}
"""The arguments for the search environment in the recipes."""
_Ways = tuple[Sequence[Message], Sequence[Message], Sequence[ToolSpec]]
"""A careful and a hasty conversation about the same task, and the tools that both use."""


def write(folder: Path, count: int, seed: int) -> None:
    """Write `count` conversations into a new folder, for each family with and without thinking."""
    folder.mkdir(parents=True)
    # Disjoint from the seeds of cold starts, which start at 0.
    far = 1 << 20
    drawn = {
        "general": price_demonstrations(count, seed=far + seed, arguments={}),
        "search": tower_demonstrations(count, seed=far + seed, arguments=_SEARCH),
        "coding": pace_demonstrations(count, seed=far + seed, arguments={}),
    }
    families: dict[str, list[_Ways]] = {
        name: [(one.worked, one.hasty, one.tools) for one in shown] for name, shown in drawn.items()
    }
    families["code"] = _programs(count, random.Random(f"lessons {seed}"))
    for name, ways in families.items():
        for thinking in (True, False):
            draw = random.Random(f"{name} {thinking} {seed}")
            path = folder / f"{name}{'' if thinking else '-direct'}.jsonl"
            lines = [json.dumps(line) for line in _lines(ways, draw, thinking=thinking)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(
    ways: Sequence[_Ways], draw: random.Random, *, thinking: bool
) -> Iterator[Mapping[str, Any]]:
    for worked, hasty, tools in ways:
        works = draw.random() < _WORKED
        reply = [dict(message) for message in (worked if works else hasty)]
        first = next(one for one in reply if one["role"] == "assistant")
        if thinking:
            first["reasoning_content"] = LOOK if works else GUESS
        yield {
            "messages": reply,
            "tools": [tool.as_json() for tool in tools],
            "thinking": thinking,
        }


def _programs(count: int, draw: random.Random) -> list[_Ways]:
    made: list[_Ways] = []
    known = every_program(draw)
    for program in (known[n % len(known)] for n in range(count)):
        wrong = draw.choice([one for one in known if one.sign == program.sign and one != program])
        request = {"role": "user", "content": program.question}
        worked, hasty = (
            [request, {"role": "assistant", "content": answer(one.source)}]
            for one in (program, wrong)
        )
        made.append((worked, hasty, ()))
    return made
