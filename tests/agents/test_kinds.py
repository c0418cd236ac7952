"""Classes, functions and games become environments as they are."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.agents.env_process.client import Hosted, fork_server_for
from keel.agents.env_runtime.episode import Episode
from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.tool_objects import Object, bind_arguments, methods_of, parameters_of
from keel.agents.types import EnvironmentLost
from keel.rl.types import Verdict
from tests.agents.episodes import TASK, episode, program, run, transcript, use

ROOT = Path(__file__).parents[2]


def test_methods_and_functions_are_given_what_they_have_parameters_for() -> None:
    def passed(function: Any) -> Any:
        first, named = bind_arguments("opening", parameters_of(function), {"task": "t", "seed": 3})
        return function(*first, **named)

    assert passed(lambda: "nothing") == "nothing"
    assert passed(lambda seed: seed) == 3
    assert passed(lambda seed, task, more=1: (task, seed, more)) == ("t", 3, 1)
    assert passed(lambda whatever: whatever) == "t"
    assert passed(lambda whatever=None: whatever) == "t"
    assert passed(lambda whatever, more=1: (whatever, more)) == ("t", 1)
    assert passed(lambda *several: several) == ("t",)
    assert passed(lambda **every: every) == {"task": "t", "seed": 3}
    assert passed(lambda task, **others: (task, others)) == ("t", {})
    assert passed(lambda whatever, **others: (whatever, others)) == ("t", {})
    assert passed(lambda more=1, **every: (more, every)) == (1, {"task": "t", "seed": 3})
    assert passed(lambda task, seed, /: (task, seed)) == ("t", 3)
    for function, named in (
        (lambda prompt, rng: 0, "s `prompt` and `rng`,"),
        (lambda task, rng: 0, " `rng`,"),
        (lambda *, prompt: 0, " `prompt`,"),
    ):
        with pytest.raises(
            InvalidEnvironment, match=f"opening has the parameter{named} and may have: task,"
        ):
            passed(function)
    assert bind_arguments("close", parameters_of(lambda *several: 0), {}) == ([], {})
    with pytest.raises(
        InvalidEnvironment, match="close has the parameter `now`, and may have: none"
    ):
        bind_arguments("close", parameters_of(lambda now: 0), {})


@pytest.mark.parametrize(
    ("method", "meant"),
    [
        ("openning(self, task, seed): ...", "opening"),
        ("Opening(self, seed): ...", "opening"),
        ("verdit(self): ...", "verdict"),
        ("veredict(self, messages): ...", "verdict"),
        ("replyy(self, text): ...", "reply"),
        ("closse(self): ...", "close"),
        ("open(self, task, seed): ...", ""),
        ("opening_hours(self): ...", ""),
        ("openings(self): ...", ""),
        ("verdicts(self, number, answers): ...", ""),
        ("replay(self): ...", ""),
        ("clone(self): ...", ""),
        ("verdicts(self): ...\n    def verdict(self): ...", ""),
    ],
)
def test_a_method_that_is_misspelt_is_no_tool(method: str, meant: str) -> None:
    made: dict[str, Any] = {}
    exec(f"class Shop:\n    def {method}", made)
    if meant:
        with pytest.raises(
            InvalidEnvironment, match=f"would be a tool of the policy; did you mean `{meant}`"
        ):
            methods_of(made["Shop"]())
    else:
        assert len(methods_of(made["Shop"]())) == 1


class Counts:
    done: Any = False

    def left(self, over: Any, fail: bool = False) -> str:
        """What is left."""
        self.done = over
        if fail:
            raise ValueError("no")
        return "none"


def test_an_environment_may_know_how_long_a_call_may_take() -> None:
    class Knows(Counts):
        call_s = 0.0

        def left(self, over: Any, fail: bool = False) -> str:
            return f"{self.call_s} s"

    for found, said in ((Knows(), "9 s"), (Counts(), "none")):
        inside = Episode()
        inside._environment = Object(found, methods_of(found))
        asked = {"do": "call", "name": "left", "arguments": {"over": False}, "call_s": 9}
        assert inside.answer(asked)["text"] == said
        assert hasattr(found, "call_s") is isinstance(found, Knows)


def test_numpys_bools_end_an_episode_and_what_is_none_is_refused() -> None:
    def called(**arguments: Any) -> dict[str, Any]:
        inside, found = Episode(), Counts()
        inside._environment = Object(found, methods_of(found))
        return inside.answer({"do": "call", "name": "left", "arguments": arguments, "call_s": 9})

    for fail in (False, True):
        for over in (True, np.array([3]).any()):
            assert called(over=over, fail=fail)["done"] is True
        for over in (False, np.bool_(False), None):
            assert called(over=over, fail=fail)["done"] is False
        for over in (1, "yes", np.ones(1)):
            with pytest.raises(
                EnvironmentGone, match=r"`done` is .*, must be True or False; write `self.don"
            ):
                called(over=over, fail=fail)
    found = Counts()
    found.done = 0
    with pytest.raises(EnvironmentGone, match=r"`done` is 0 \(int\)"):
        Object(found, {}).opening({"messages": []}, 1)

    class Late:
        @property
        def done(self) -> bool:
            raise IndexError("no move yet")

    Object(Late(), {}).opening({"messages": []}, 1)

    class Says(Counts):
        def done(self) -> str:  # type: ignore[override]
            """The policy says so."""
            return "fine"

    assert Object(Says(), methods_of(Says())).call("done", {}) == {"text": "fine", "done": False}


@pytest.mark.e2e
@pytest.mark.parametrize("target", ["shop:add", "tools_of_mine", "shop:several"])
def test_functions(target: str, tmp_path: Path) -> None:
    source = (Path(__file__).parent / "shop.py").read_text()
    (tmp_path / "shop.py").write_text(f"{source}\nseveral = [add, greet]\n")
    (tmp_path / "tools_of_mine.py").write_text(
        "from json import dumps\nfrom shop import Shop\n"
        "def add(a: int, b: int) -> int:\n    'Add two numbers.'\n    return a + b\n"
        "def _hidden(): ...\n"
    )

    async def play() -> None:
        environment = Hosted(program(target, folder=tmp_path))
        opening = await environment.open(TASK, seed=3)
        assert opening.messages == TASK.messages
        names = [tool.name for tool in opening.tools]
        assert names == (["add", "greet"] if target == "shop:several" else ["add"])
        assert opening.tools[0].description == "Add two numbers."
        assert (await use(environment, "add", a=2, b=3)).text == "5"
        assert await environment.reply({"role": "assistant", "content": "5"}) is None
        assert await environment.verdict(transcript()) == Verdict(parts={})
        await environment.close()

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize("preload", [False, True])
def test_a_file_may_be_named_as_a_module_that_others_import(preload: bool, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Sum:\n    a: int = 1\n"
        "def add(a: int) -> str:\n    'Add.'\n"
        "    import random, tempfile\n"
        "    return f'{random.Random(3).randint(a, a)} {Sum(a).a} {tempfile.gettempprefix()}'\n"
    )
    given = program(f"{tmp_path / 'random.py'}:add", preload=preload)

    async def play() -> None:
        parent = fork_server_for(given)
        environment = Hosted(given, parent=parent)
        await environment.open(TASK, seed=3)
        assert (await use(environment, "add", a=2)).text == "2 2 tmp"
        assert (parent is None) is not preload and (parent is None or not parent.why_not)
        await environment.close()
        if parent is not None:
            await parent.close()

    run(play())


@pytest.mark.e2e
def test_an_environment_decides_what_it_offers() -> None:
    async def play() -> None:
        environment = Hosted(program("shop:Offers", arguments={"offered": ["two"]}))
        opening = await environment.open(TASK, seed=3)
        assert [tool.name for tool in opening.tools] == ["two"]
        assert opening.messages == TASK.messages
        assert (await use(environment, "one")).failed
        await environment.close()
        with pytest.raises(
            EnvironmentLost, match="`offered` has 'three', and the tools are one, t"
        ):
            async with episode("shop:Offers", arguments={"offered": ["three"]}):
                pass

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("target", "arguments", "why"),
    [
        (
            "shop:Opens",
            {"said": [{"role": "human", "content": "Buy."}]},
            "a role is one of system, .*, tool, not 'human'",
        ),
        (
            "shop:Offers",
            {"offered": [{"name": "three", "parameters": "none"}]},
            "tool three: parameters must be an object, is 'none'",
        ),
    ],
)
def test_what_no_template_would_show_is_refused(
    target: str, arguments: dict[str, Any], why: str
) -> None:
    async def play() -> None:
        with pytest.raises(EnvironmentLost, match=why):
            async with episode(target, arguments=arguments):
                pass

    run(play())


@pytest.mark.e2e
def test_a_gymnasium_game_is_played_by_a_tool() -> None:
    async def play() -> list[str]:
        environment = Hosted(program("shop:Guess"))
        opening = await environment.open(TASK, seed=3)
        assert opening.messages[0]["content"] == "Guess from 1 to 8."
        (tool,) = opening.tools
        action = {"type": "integer", "minimum": 1, "maximum": 8}
        assert tool.parameters["properties"] == {"action": action}
        assert "maximum" in (await use(environment, "play", action=9)).text
        said: list[str] = []
        low, high, done = 1, 8, False
        while not done:
            middle = (low + high) // 2
            result = await use(environment, "play", action=middle)
            said.append(result.text)
            done = result.done
            low, high = (middle + 1, high) if result.text == "Higher." else (low, middle - 1)
        verdict = await environment.verdict(transcript())
        assert isinstance(verdict, Verdict)
        won = float(said[-1] == "Right.")
        assert verdict.parts == {"correct": won, "score": won}
        assert verdict.facts == {"return": won, "moves": len(said)}
        assert (await use(environment, "play", action=1)).text == "The game is over."
        await environment.close()
        return said

    assert run(play()) == run(play())


@pytest.mark.e2e
def test_a_game_is_played_by_what_is_said() -> None:
    async def play() -> None:
        arguments = {"play_by": "text", "scale": [0, 2]}
        async with episode("shop:Guess", arguments=arguments) as environment:
            said = {"role": "assistant", "content": "I think of\nseven"}
            reply = await environment.reply(said)
            assert reply is not None and "whole number from 1 to 8" in reply["content"]
            won = 0.0
            for guess in (2, 4, 7, 1):
                said = {"role": "assistant", "content": f"So I say\n{guess}"}
                reply = await environment.reply(said)
                if reply is None:
                    break
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict) and verdict.facts["moves"] <= 3
            won = verdict.facts["return"]
            assert verdict.parts == {"correct": 0.0, "score": won / 2}

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize("play_by", ["tool", "text"])
def test_a_textarena_game(play_by: str) -> None:
    async def play() -> None:
        for right in (True, False):
            environment = Hosted(program("shop:Echo", arguments={"play_by": play_by}))
            opening = await environment.open(TASK, seed=3)
            first = opening.messages[0]["content"]
            assert first.startswith("Say [") and first.endswith("\n(it is your turn)")
            word = first.split("[")[1].split("]")[0] if right else "dog"
            for _ in range(1 if right else 2):
                if play_by == "tool":
                    result = await use(environment, "play", action=f"[{word}]")
                    over = result.done
                    # Only what is new.
                    assert result.text.startswith("The game is over." if over else "That was no")
                else:
                    said = {"role": "assistant", "content": f"[{word}]"}
                    over = await environment.reply(said) is None
            assert over
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict)
            assert verdict.parts == {"correct": float(right), "score": float(right)}
            await environment.close()

    run(play())


def test_the_inside_needs_python_3_9_and_the_standard_library_alone() -> None:
    """Its syntax and what it imports; the annotations are never evaluated."""
    import ast  # noqa: PLC0415

    for path in sorted((ROOT / "agents" / "env_runtime").glob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith("keel.agents.env_runtime.")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)


@pytest.mark.e2e
def test_an_interpreter_of_its_own_that_has_no_keel(tmp_path: Path) -> None:
    """Isolated, without site-packages: nothing of this process's path."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    python.chmod(0o755)
    bare = subprocess.run([python, "-c", "import keel"], capture_output=True, cwd=tmp_path)
    assert b"ModuleNotFoundError" in bare.stderr

    async def play() -> None:
        async with episode(python=str(python)) as environment:
            assert (await use(environment, "call")).text == "fine"

    run(play())
