"""How often a reference policy solves a task: pass@1, from k attempts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

from keel.agents.types import EnvironmentLost, Transcript, Unscored
from keel.synthesis.author import Author
from keel.synthesis.general.gates import general
from keel.synthesis.general.rooms import Rooms
from keel.synthesis.work import together, work


@runtime_checkable
class Reference(Protocol):
    """What difficulty is measured by."""

    name: str

    async def passed(self, rooms: Rooms, environment: Path, number: int) -> int:
        """How many of `rooms.config.attempts` attempts pass."""
        ...


class Policy:
    """A model with the tools."""

    def __init__(self, author: Author) -> None:
        self.name, self._author = author.name, author

    async def passed(self, rooms: Rooms, environment: Path, number: int) -> int:
        tries = range(rooms.config.attempts)
        return sum(await together(*(self._passes(rooms, environment, number) for _ in tries)))

    async def _passes(self, rooms: Rooms, environment: Path, number: int) -> bool:
        try:
            async with general(rooms, environment, number) as (hosted, opening):
                worked = await work(
                    self._author,
                    opening.messages,
                    tools=opening.tools,
                    call=partial(hosted.call, timeout_s=rooms.config.call_s),
                    most_turns=rooms.config.max_turns,
                    purpose="attempt",
                )
                verdict = await hosted.verdict(
                    Transcript(messages=worked.messages, finish_reason="stop")
                )
        except EnvironmentLost as error:
            if error.during == "parent":
                raise
            return False  # over what it called
        return not isinstance(verdict, Unscored) and verdict.parts["correct"] == 1.0
