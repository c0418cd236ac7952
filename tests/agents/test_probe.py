"""Faults of an environment are reported before a run, with how to fix them."""

import re
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.probe import try_environment
from tests.agents.episodes import PATIENT, TASK, program, run
from tests.rollout.chat.families import chat_of

pytestmark = pytest.mark.e2e


CHAT = chat_of("qwen3")


def tried(spec: EnvironmentProgram, window: int = 4096, task: Any = TASK) -> str:
    work = try_environment(spec, task=task, seed=3, chat=CHAT, window=window, thinking=True)
    return run(work)[0]


def complaint(spec: EnvironmentProgram, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        tried(spec, **settings)
    return str(caught.value)


def test_opening_is_counted_against_the_window() -> None:
    note = tried(program())
    tokens = int(re.search(r"with (\d+) tokens; tools: .*buy", note)[1])
    assert tried(program(), window=tokens + 1)
    assert "agents.window" in complaint(program(), window=tokens)


def test_episodes_that_are_not_forked_say_why() -> None:
    assert "without forking" not in tried(program())
    assert "without forking: environment.preload is false" in tried(program(preload=False))


SOURCES = {
    "hints.py": "class Bad:\n    def use(self, x: complex): ...\n",
    "eats.py": "class Shop:\n    def opening(self): self.x = bytearray(1 << 30)\n",
    "opens.py": "class Shop:\n    def opening(self): raise KeyError('no such shop')\n",
}


@pytest.mark.parametrize(
    ("target", "reason", "cure"),
    [
        ("shap:make", "No module named 'shap'", "interpreter"),
        ("hints:Bad", "parameter x", "dataclass"),
        ("eats:Shop", "memory", "memory_mib = 512"),
        ("opens:Shop", "KeyError: 'no such shop'", "opens.py"),
    ],
)
def test_failed_opening_names_the_cure(tmp_path: Path, target: str, reason: str, cure: str) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).write_text(text)
    spec = EnvironmentProgram(target=target, folder=tmp_path, memory_mib=512, **PATIENT)
    message = complaint(spec)
    assert message.startswith(f"environment {target} cannot be opened for task p7: ")
    assert reason in message and cure in message
