"""An environment that fails on request.

A hundred processes import it, so slow modules are imported where they are used.
"""

import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Literal, Optional

REPLIES = {
    "garbage": b"Welcome!",
    "another": b'{"id": 99, "is": {}}',
    "no reason": b'{"id": 2, "failed": []}',
}


def go_wrong(how: str) -> None:
    print("these are my last words", file=sys.stderr)
    if how == "crash":
        os.kill(os.getpid(), 11)
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        sys.exit(3)
    if how == "late exit":  # as on a busy machine
        for fd in channels():
            os.close(fd)
        time.sleep(1.5)
        os._exit(3)
    if how == "raise":
        raise RuntimeError("the shop burnt down")
    if how == "memory":
        bytearray(1 << 45)
    if how in REPLIES:
        os.write(channels()[0], REPLIES[how] + b"\n")


def channels() -> list[int]:
    folder = "/proc/self/fd"
    names = os.listdir(folder)
    return [int(one) for one in names if "socket" in os.path.realpath(f"{folder}/{one}")]


@dataclass
class Item:
    name: str
    count: int = 1


class Shop:
    """go_wrong: `crash`, … at: `open`, `reply`, `verdict`, `close` or `call`."""

    def __init__(self, how: str = "", at: str = "") -> None:
        self._how, self._at = how, at
        self._bought: list[str] = []
        self.done = False
        print("the shop is open")
        self._maybe("import")

    def _maybe(self, at: str) -> None:
        if at == self._at:
            go_wrong(self._how)

    def opening(self, task: dict, seed: int) -> str:
        self._maybe("open")
        return f"{task['prompt_id']} {seed} {random.random()} {hash('salt')}"

    def buy(
        self,
        item: Item,
        pay: Optional[float] = None,  # noqa: UP045
        how: Literal["cash", "card"] = "cash",
    ) -> str:
        """Buy something.

        Args:
            item: The item to
                buy.
            pay (float): Maximum price.
        """
        if item.name == "bomb":
            raise ValueError("no bombs here")
        self._bought.append(item.name)
        return f"{type(item).__name__} {item.name} {item.count} {pay!r} {how}"

    async def wait(self, seconds: float, then: str = "") -> dict:
        """Wait.

        :param seconds: Duration.
        """
        import asyncio  # noqa: PLC0415

        await asyncio.sleep(seconds)
        go_wrong(then)
        self.done = then == "done"
        return {"slept": seconds, "of": type(seconds).__name__}

    def call(self) -> str:
        """Fail if configured to fail in a call."""
        self._maybe("call")
        return "fine"

    def say(self, letters: int) -> str:
        """Return a long text."""
        sys.stderr.write("x" * letters)
        return "x" * letters

    def hire(self) -> list:
        """Start two helpers that ignore SIGTERM; one leaves the process group."""
        import subprocess  # noqa: PLC0415

        deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"
        started = [
            subprocess.Popen([sys.executable, "-S", "-c", deaf], start_new_session=apart)
            for apart in (False, True)
        ]
        return [helper.pid for helper in started]

    def look(self) -> dict:
        """Report visible secrets and loaded packages."""
        import tempfile  # noqa: PLC0415

        return {
            "environ": sorted(os.environ),
            "keel": sorted(name for name in sys.modules if name.startswith("keel")),
            "heavy": [m for m in ("numpy", "jsonschema", "torch") if m in sys.modules],
            "folder": os.getcwd(),
            "temporary": tempfile.gettempdir(),
        }

    def reply(self, text: str) -> str | None:
        self._maybe("reply")
        return None if text == "bye" else f"you said {text}"

    def verdict(self, messages: list, finish_reason: str) -> tuple:
        self._maybe("verdict")
        return {"correct": float("ring" in self._bought)}, {"ended": finish_reason}

    def close(self) -> None:
        self._maybe("close")


class Graded:
    """Returns a fixed verdict."""

    def __init__(self, verdict: object) -> None:
        self._verdict = verdict

    def verdict(self, messages: list) -> object:
        return self._verdict


class Guess:
    """A gymnasium-style game: guess a number."""

    class _Space:
        n, start = 8, 1

    action_space = _Space()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        self._number = random.Random(seed).randint(1, 8)
        self._left = 3
        return "Guess from 1 to 8.", {"left": 3}

    def step(self, action: int) -> tuple:
        assert type(action) is int
        self._left -= 1
        right = action == self._number
        seen = "Right." if right else "Higher." if action < self._number else "Lower."
        return seen, float(right), right, self._left == 0, {}

    def close(self) -> None: ...
