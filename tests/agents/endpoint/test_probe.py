"""What is wrong with an agent program is said before anything starts, with its cure."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.agents.endpoint.probe import SAID, Trial, try_program
from keel.agents.endpoint.program import AgentProgram, command_of
from keel.agents.types import NoEnvironment
from keel.rl.types import ENVIRONMENT
from keel.trainer.build_agents import spoken_ids
from tests.agents.endpoint.kit import BUDGET, CHAT
from tests.agents.endpoint.test_driven import ASK, task
from tests.agents.episodes import run
from tests.rollout.chat.families import NAMES, chat_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e


def tried(code: str, folder: Path, **settings: Any) -> Trial:
    (folder / "agent.py").write_text(ASK + code)
    budget = {name: settings.pop(name) for name in ("window", "turns") if name in settings}
    kind = settings.pop("kind", "answer")
    program = AgentProgram(
        **{
            "command": [sys.executable, "agent.py"],
            "folder": folder,
            "open_s": PATIENCE_S,
            **settings,
        }
    )
    return run(
        try_program(
            program,
            NoEnvironment(),
            task=task("p", kind),
            seed=3,
            chat=CHAT,
            speak=lambda text: spoken_ids(CHAT, text, thinking=False),
            budget=replace(BUDGET, **budget),
        )
    )


def test_a_sound_program(tmp_path: Path) -> None:
    found = tried("assert ask() == '\\\\boxed{0}'", tmp_path)
    opening = CHAT.opening(task("p").messages, (), thinking=False)
    assert (found.turns, found.opening_tokens, found.ended) == (1, len(opening), "ended well")


def test_one_that_wants_more_turns_is_stopped_and_sound(tmp_path: Path) -> None:
    found = tried("while True: ask()", tmp_path)
    assert (found.turns, found.ended) == (3, "was stopped there (turns)")


def test_one_that_the_scripts_words_break_is_warned_of(tmp_path: Path) -> None:
    found = tried("int(ask())", tmp_path)
    assert "WARNING" in found.ended and SAID in found.ended
    assert (
        "it exited with status 1 after" in found.ended and "ValueError: invalid lit" in found.ended
    )


def test_structured_output_is_warned_of(tmp_path: Path) -> None:
    found = tried("ask(); ask(response_format={'type': 'json_object'})", tmp_path)
    assert "WARNING: the endpoint refused a request: response_format" in found.ended


@pytest.mark.parametrize(
    ("code", "settings", "why", "cure"),
    [
        (
            "import a_package.part",
            {},
            "ModuleNotFoundError: No module named 'a_package'",
            f". Install what it lacks: {sys.executable} -m pip install a_package (",
        ),
        ("ask()\nimport late", {}, "No module named 'late'", "-m pip install late"),
        ("raise KeyError('mine')", {}, "KeyError: 'mine'", ""),
        ("raise OSError('Connection refused')", {}, "Connection refused", "at OPENAI_BASE_URL"),
        (
            "post(os.environ['OPENAI_BASE_URL'] + '/responses', {}); sys.exit(1)",
            {},
            "POST responses: the endpoint serves chat/completions, messages and models",
            "",
        ),
        ("pass", {}, "ended; without a turn of the policy", "It must ask the policy at OPENAI_"),
        ("time.sleep(1000)", {"open_s": 0.3}, "ask for a turn within 0.3 s", "or raise open_s"),
        ("ask()", {"window": 8}, "maximum context length is 8 tokens", "Raise agents.window"),
        ("ask()", {"kind": ENVIRONMENT}, "gave no verdict with a part `correct`", "KEEL_VERDICT"),
        (
            "messages.append({'role': 'tool'}); ask()",
            {},
            "the endpoint had refused: messages[1].tool_call_id: must be a string, is missing",
            "",
        ),
    ],
)
def test_what_is_wrong_with_one(
    tmp_path: Path, code: str, settings: dict[str, Any], why: str, cure: str
) -> None:
    with pytest.raises(ValueError) as caught:
        tried(code, tmp_path, **settings)
    said = str(caught.value)
    assert said.startswith(f"task p/1: agent program {sys.executable} ")
    assert why in said and cure in said
    assert ("OPENAI_BASE_URL" in said) is ("OPENAI_" in cure)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (
            "agent/my_agent.py:solve",
            "my_agent.py in folder {}; paths begin there; did you mean my_",
        ),
        ("my_agent.py:slve", "my_agent.py has no 'slve'; it has solve"),
        ("my_agnt:solve", "my_agnt is no module; did you mean my_agent:solve?"),
        ("my_agent:more", "more has the parameters `problem` and `x`, and may have: task, prompt"),
    ],
)
def test_a_function_that_is_not_there(tmp_path: Path, target: str, why: str) -> None:
    (tmp_path / "my_agent.py").write_text("def solve(task): ...\ndef more(problem, x): ...\n")
    command = command_of(target, python=sys.executable, folder=tmp_path)
    with pytest.raises(ValueError) as caught:
        tried("", tmp_path, command=command)
    said = str(caught.value)
    assert why.format(tmp_path) in said
    assert "OPENAI_BASE_URL" not in said and "pip install" not in said


def test_a_script_names_its_interpreter_in_its_first_line(tmp_path: Path) -> None:
    own = tmp_path / "python"  # a first line has no room for a space in a path
    own.symlink_to(sys.executable)
    (tmp_path / "tool").write_text(f"#!{own}\nimport a_package_of_its_own\n")
    (tmp_path / "tool").chmod(0o755)
    command = command_of("./tool", python=sys.executable, folder=tmp_path)
    with pytest.raises(ValueError, match=f"{own} -m pip install a_package_of_its_own"):
        tried("", tmp_path, command=command)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("thinking", [False, True])
def test_the_script_speaks_every_format(family: str, thinking: bool) -> None:
    chat = chat_of(family)
    ids = spoken_ids(chat, SAID, thinking=thinking)
    parsed = chat.parse(ids, (), thinking=thinking, turn=0)
    assert parsed.closed and parsed.content.strip() == SAID and not parsed.calls
