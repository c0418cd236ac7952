"""Reward functions of a user: good, failing and hanging ones."""

import asyncio
import json
import os
import signal
import subprocess
import time
from typing import Any

NAME = __name__
MODEL: list[Any] = []


def polite(prompt: Any, trajectory: Any) -> Any:
    assert prompt.messages[0]["role"] == "user"
    assert trajectory.finish_reason == "stop" and trajectory.sampled_tokens == 1
    return "please" in trajectory.answer or 0.25 * len(trajectory.thinking)


class Brief:
    def __call__(self, prompt: Any, trajectory: Any) -> float:
        return 0.25


def alone(trajectory: Any) -> float:
    return 1.0


def trl(completions: Any, **kwargs: Any) -> list[float]:
    return [1.0 for _ in completions]


def verl(completions: Any, ground_truth: Any) -> float:
    return 1.0


def swapped(trajectory: Any, prompt: Any) -> float:
    return 1.0


def raises(prompt: Any, trajectory: Any) -> Any:
    return json.loads(trajectory.answer)["score"]


async def later(prompt: Any, trajectory: Any) -> Any:
    return await asyncio.sleep(0, json.loads(trajectory.answer)["score"])


def none(prompt: Any, trajectory: Any) -> Any:
    if not trajectory.answer:
        return 1.0


def leaves(prompt: Any, trajectory: Any) -> Any:
    raise SystemExit(3)


def misspelt(prompt: Any, trajectory: Any) -> Any:
    return answr  # type: ignore # noqa: F821


def some(prompt: Any, trajectory: Any) -> float:
    assert trajectory.answer != "bad", "a bad one"
    return 0.5


def unlike(prompt: Any, trajectories: Any) -> list[float]:
    return [float(one.answer == trajectories[0].answer) for one in trajectories]


def dies(prompt: Any, trajectory: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(prompt: Any, trajectory: Any) -> float:
    time.sleep(1000 if trajectory.answer != "3" else 0.4)
    return 1.0


def loads(prompt: Any, trajectory: Any) -> float:
    if not MODEL:
        time.sleep(0.8)
        MODEL.append(1)
    return 1.0


def slow(prompt: Any, trajectory: Any) -> float:
    time.sleep(0.8)
    return 1.0


def wait(prompt: Any, trajectory: Any) -> float:
    if trajectory.sampled_tokens == 1:
        subprocess.Popen(["sleep", os.environ["KEEL_TEST_MARK"]], start_new_session=True)
        time.sleep(1000)
    return 1.0


def deaf(prompt: Any, trajectory: Any) -> float:
    """Compute a huge number, which no signal handler interrupts."""
    number = trajectory.sampled_tokens
    return float(number == 2 if number < 9 else number**number**number > 0)
