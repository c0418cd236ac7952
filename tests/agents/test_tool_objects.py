"""Classes, functions and games become environments; hints and docstrings become schemas."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.env_process.client import Hosted, fork_server_for
from keel.agents.env_runtime.episode import _Episode
from keel.agents.env_runtime.errors import EnvironmentGone, InvalidEnvironment
from keel.agents.env_runtime.tool_objects import (
    Object,
    Tool,
    bind_arguments,
    methods_of,
    parameters_of,
)
from keel.agents.env_runtime.type_schemas import docstring_parts, schema_of, value_of
from keel.agents.schemas import Arguments, arguments_of
from keel.agents.types import EnvironmentLost
from keel.rl.turns import ToolCall, ToolSpec
from keel.rl.types import Verdict
from tests.agents.episodes import TASK, episode, program, run, transcript, use

ROOT = Path(__file__).parents[2]


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Leg:
    to: str
    km: float = 0.0
    stops: list[str] = field(default_factory=list)


@dataclass
class Trip:
    legs: list[Leg]
    size: Size = Size.SMALL


def test_hints_become_schemas() -> None:
    def plan(
        trip: Trip,
        days: int,
        pair: tuple[int, str],
        prices: dict[str, float],
        how: Literal["car", "train"],
        hotel: Optional[str] = None,  # noqa: UP045
        either: int | list[int] = 3,
        rating: Annotated[float, "Stars."] = 4.0,
        rest: Any = None,
    ) -> None:
        """Plan a trip.

        In one step.

        Args:
            days: Their number.
            prices (dict): Cost
                by thing.

        Returns:
            Nothing.
        """

    leg = {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "km": {"type": "number"},
            "stops": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["to"],
        "additionalProperties": False,
    }
    spec = Tool("plan", plan).spec
    assert spec["description"] == "Plan a trip.\n\nIn one step."
    assert spec["parameters"]["required"] == ["trip", "days", "pair", "prices", "how"]
    assert spec["parameters"]["properties"] == {
        "trip": {
            "type": "object",
            "properties": {"legs": {"type": "array", "items": leg}, "size": {"enum": ["s", "l"]}},
            "required": ["legs"],
            "additionalProperties": False,
        },
        "days": {"type": "integer", "description": "Their number."},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "prices": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "Cost by thing.",
        },
        "how": {"enum": ["car", "train"]},
        "hotel": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {
            "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}],
            "default": 3,
        },
        "rating": {"type": "number", "description": "Stars.", "default": 4.0},
        "rest": {},
    }


@pytest.mark.parametrize(
    ("text", "description", "parameters"),
    [
        ("", "", {}),
        ("One.\n\nTwo.", "One.\n\nTwo.", {}),
        ("Do.\n\n:param int x: the x\n    of it\n:returns: y", "Do.", {"x": "the x of it"}),
        (
            "Do.\n\nArgs:\n  x: a: b\n  y:\n    later\n\nMore.",
            "Do.\n\nMore.",
            {"x": "a: b", "y": "later"},
        ),
        ("Do.\n\nRaises:\n    x: not a parameter", "Do.", {}),
    ],
)
def test_docstring_is_split(text: str, description: str, parameters: dict[str, str]) -> None:
    assert docstring_parts(text) == (description, parameters)


HINTS = st.recursive(
    st.sampled_from([str, int, float, bool, None, Literal["a", 1], Size, Leg]),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),
        inner.map(lambda one: dict[str, one]),
        inner.map(lambda one: tuple[one, ...]),
        st.tuples(inner, inner).map(lambda pair: tuple[pair[0], pair[1]]),
        st.tuples(inner, inner).map(lambda pair: Union[pair[0], pair[1]]),  # noqa: UP007
    ),
    max_leaves=5,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Draw JSON values that fit a hint."""
    origin, inner = getattr(hint, "__origin__", None), get_args(hint)
    plain = {
        str: st.text(max_size=3),
        int: st.integers(-9, 9),
        float: st.integers(-9, 9) | st.floats(-9, 9),
        bool: st.booleans(),
    }
    if hint in plain:
        return plain[hint]
    if hint is None or hint is type(None):
        return st.none()
    if origin is Literal:
        return st.sampled_from(inner)
    if hint is Size:
        return st.sampled_from(["s", "l"])
    if hint is Leg:
        return st.fixed_dictionaries(
            {"to": st.text(max_size=3)}, optional={"km": plain[float], "stops": values(list[str])}
        )
    if origin is list or (origin is tuple and Ellipsis in inner):
        return st.lists(values(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, inner)).map(list)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), values(inner[1]), max_size=3)
    return st.one_of(*map(values, inner))


def has_type(hint: Any, value: Any) -> bool:
    origin, inner = getattr(hint, "__origin__", None), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(has_type(inner[0], one) for one in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        hints = [inner[0]] * len(value) if Ellipsis in inner else inner
        return len(hints) == len(value) and all(map(has_type, hints, value))
    if origin is dict:
        return isinstance(value, dict) and all(has_type(inner[1], one) for one in value.values())
    if origin is not None or inner:
        return any(has_type(one, value) for one in inner)
    return value is None if hint in (None, type(None)) else type(value) is hint


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_valid_arguments_arrive_as_hinted(data: st.DataObject) -> None:
    hint = data.draw(HINTS)
    value = data.draw(values(hint))
    shape = {"type": "object", "properties": {"x": schema_of(hint, "x")}}
    known = Arguments([ToolSpec(name="t", description="", parameters=shape)])
    assert known.complaint(ToolCall(call_id="1", name="t", arguments={"x": value})) == ""
    assert has_type(hint, value_of(hint, value)), (hint, value, value_of(hint, value))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("a b", {"type": "object"}),
        ("t", {"type": "string"}),
        ("t", {"type": "object", "properties": {"x": {"type": "strng"}}}),
        ("t", {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}),
        ("t", {"type": "object", "$ref": "http://example.org/x"}),
    ],
)
def test_broken_schema_is_refused(name: str, parameters: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Arguments([ToolSpec(name=name, description="", parameters=parameters)])


def test_extreme_arguments_get_a_complaint() -> None:
    tool = ToolSpec(name="t", description="", parameters={"type": "object"})
    with pytest.raises(ValueError, match="tool t"):
        Arguments([tool, tool])
    assert arguments_of([tool]) is arguments_of([tool])
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    nested: dict[str, Any] = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}
    nested["$defs"] = {"n": {"anyOf": [{"type": "string"}, {"items": {"$ref": "#/$defs/n"}}]}}
    known = Arguments([ToolSpec(name="t", description="", parameters=nested)])
    assert "too deeply" in known.complaint(ToolCall(call_id="1", name="t", arguments={"x": deep}))
    price = {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}}
    known = Arguments([ToolSpec(name="pay", description="", parameters=price)])
    for value, failed in ((10**400, True), (1.25, False)):
        call = ToolCall(call_id="1", name="pay", arguments={"price": value})
        assert bool(known.complaint(call)) is failed


def test_functions_get_the_parameters_they_declare() -> None:
    def passed(function: Any) -> Any:
        values = {"task": "t", "seed": 3}
        positional, named = bind_arguments("opening", parameters_of(function), values)
        return function(*positional, **named)

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
    for function in (lambda prompt, rng: 0, lambda task, rng: 0, lambda *, prompt: 0):
        with pytest.raises(InvalidEnvironment, match="task, seed"):
            passed(function)
    assert bind_arguments("close", parameters_of(lambda *several: 0), {}) == ([], {})
    with pytest.raises(InvalidEnvironment, match="`now`"):
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
def test_misspelt_method_is_no_tool(method: str, meant: str) -> None:
    names: dict[str, Any] = {}
    exec(f"class Shop:\n    def {method}", names)
    if meant:
        with pytest.raises(InvalidEnvironment, match=f"`{meant}`"):
            methods_of(names["Shop"]())
    else:
        assert len(methods_of(names["Shop"]())) == 1


class Counts:
    done: Any = False

    def stock(self, over: Any, fail: bool = False) -> str:
        """The stock."""
        self.done = over
        if fail:
            raise ValueError("no")
        return "none"


def served(target: Any) -> _Episode:
    served_episode = _Episode()
    served_episode._environment = Object(target, methods_of(target))
    return served_episode


def call_request(**arguments: Any) -> dict[str, Any]:
    return {"do": "call", "name": "stock", "arguments": arguments, "call_s": 9}


def test_call_time_is_set_if_declared() -> None:
    class Timed(Counts):
        call_s = 0.0

        def stock(self, over: Any, fail: bool = False) -> str:
            return f"{self.call_s} s"

    for target, text in ((Timed(), "9 s"), (Counts(), "none")):
        assert served(target).answer(call_request(over=False))["text"] == text
        assert hasattr(target, "call_s") is isinstance(target, Timed)


def test_done_must_be_a_bool() -> None:
    for fail in (False, True):  # a failed call may end the episode, too
        for over in (True, np.array([3]).any()):
            assert served(Counts()).answer(call_request(over=over, fail=fail))["done"] is True
        for over in (False, np.bool_(False), None):
            assert served(Counts()).answer(call_request(over=over, fail=fail))["done"] is False
        for over in (1, "yes", np.ones(1)):
            with pytest.raises(EnvironmentGone):
                served(Counts()).answer(call_request(over=over, fail=fail))
    target = Counts()
    target.done = 0
    with pytest.raises(EnvironmentGone):
        Object(target, {}).opening({"messages": []}, 1)

    class Late:
        @property
        def done(self) -> bool:
            raise IndexError("no move yet")

    Object(Late(), {}).opening({"messages": []}, 1)

    class AsTool(Counts):
        def done(self) -> str:  # type: ignore[override]
            """Finish."""
            return "fine"

    expected = {"text": "fine", "done": False}
    assert Object(AsTool(), methods_of(AsTool())).call("done", {}) == expected


@pytest.mark.e2e
@pytest.mark.parametrize("target", ["shop:add", "tools_of_mine", "shop:several"])
def test_functions_are_an_environment(target: str, tmp_path: Path) -> None:
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
def test_file_may_shadow_a_module_name(preload: bool, tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Sum:\n    a: int = 1\n"
        "def add(a: int) -> str:\n    'Add.'\n"
        "    import random, tempfile\n"
        "    return f'{random.Random(3).randint(a, a)} {Sum(a).a} {tempfile.gettempprefix()}'\n"
    )
    spec = program(f"{tmp_path / 'random.py'}:add", preload=preload)

    async def play() -> None:
        server = fork_server_for(spec)
        environment = Hosted(spec, fork_server=server)
        await environment.open(TASK, seed=3)
        assert (await use(environment, "add", a=2)).text == "2 2 tmp"
        assert (server is None) is not preload and (server is None or not server.disabled_reason)
        await environment.close()
        if server is not None:
            await server.close()

    run(play())


@pytest.mark.e2e
def test_offered_selects_the_tools() -> None:
    async def play() -> None:
        environment = Hosted(program("shop:Offers", arguments={"offered": ["two"]}))
        opening = await environment.open(TASK, seed=3)
        assert [tool.name for tool in opening.tools] == ["two"]
        assert opening.messages == TASK.messages
        assert (await use(environment, "one")).failed
        await environment.close()
        broken = {"name": "three", "parameters": "none"}
        for target, arguments in (
            ("shop:Offers", {"offered": ["three"]}),
            ("shop:Offers", {"offered": [broken]}),
            ("shop:Opens", {"observations": [{"role": "human", "content": "Buy."}]}),
        ):
            with pytest.raises(EnvironmentLost) as caught:
                async with episode(target, arguments=arguments):
                    pass
            assert caught.value.fault == "start"

    run(play())


@pytest.mark.e2e
def test_game_is_played_by_tool() -> None:
    async def play() -> list[str]:
        environment = Hosted(program("shop:Guess"))
        opening = await environment.open(TASK, seed=3)
        assert opening.messages[0]["content"] == "Guess from 1 to 8."
        (tool,) = opening.tools
        action = {"type": "integer", "minimum": 1, "maximum": 8}
        assert tool.parameters["properties"] == {"action": action}
        assert (await use(environment, "play", action=9)).failed
        texts: list[str] = []
        low, high, done = 1, 8, False
        while not done:
            middle = (low + high) // 2
            result = await use(environment, "play", action=middle)
            texts.append(result.text)
            done = result.done
            low, high = (middle + 1, high) if result.text == "Higher." else (low, middle - 1)
        verdict = await environment.verdict(transcript())
        assert isinstance(verdict, Verdict)
        won = float(texts[-1] == "Right.")
        assert verdict.parts == {"correct": won, "score": won}
        assert verdict.facts == {"return": won, "moves": len(texts)}
        assert (await use(environment, "play", action=1)).text == "The game is over."
        await environment.close()
        return texts

    assert run(play()) == run(play())


@pytest.mark.e2e
def test_game_is_played_by_text() -> None:
    async def play() -> None:
        arguments = {"play_by": "text", "scale": [0, 2]}
        async with episode("shop:Guess", arguments=arguments) as environment:
            reply = await environment.reply({"role": "assistant", "content": "I think of\nseven"})
            assert reply is not None and "1 to 8" in reply["content"]
            for guess in (2, 4, 7, 1):
                turn = {"role": "assistant", "content": f"So I say\n{guess}"}
                if await environment.reply(turn) is None:
                    break
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict) and verdict.facts["moves"] <= 3
            assert verdict.parts == {"correct": 0.0, "score": verdict.facts["return"] / 2}

    run(play())


@pytest.mark.e2e
@pytest.mark.parametrize("play_by", ["tool", "text"])
def test_textarena_game_shows_only_new_text(play_by: str) -> None:
    async def play() -> None:
        for right in (True, False):
            environment = Hosted(program("shop:Echo", arguments={"play_by": play_by}))
            opening = await environment.open(TASK, seed=3)
            first = opening.messages[0]["content"]
            assert first.startswith("Say [") and first.endswith("\n(it is your turn)")
            word = first.split("[")[1].split("]")[0] if right else "dog"
            over = False
            for _ in range(1 if right else 2):
                if play_by == "tool":
                    result = await use(environment, "play", action=f"[{word}]")
                    over = result.done
                    assert result.text.startswith("The game is over." if over else "That was no")
                else:
                    turn = {"role": "assistant", "content": f"[{word}]"}
                    over = await environment.reply(turn) is None
            assert over
            verdict = await environment.verdict(transcript())
            assert isinstance(verdict, Verdict)
            assert verdict.parts == {"correct": float(right), "score": float(right)}
            await environment.close()

    run(play())


def test_runtime_needs_only_python_3_9() -> None:
    """Check syntax and imports; annotations are never evaluated."""
    for path in sorted((ROOT / "agents" / "env_runtime").glob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                is_ours = name.startswith("keel.agents.env_runtime")
                assert is_ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)


@pytest.mark.e2e
def test_interpreter_without_keel(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S "$@"\n')
    python.chmod(0o755)
    bare = subprocess.run([python, "-c", "import keel"], capture_output=True, cwd=tmp_path)
    assert b"ModuleNotFoundError" in bare.stderr

    async def play() -> None:
        async with episode(python=str(python)) as environment:
            assert (await use(environment, "call")).text == "fine"

    run(play())
