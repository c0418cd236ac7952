"""Classes, functions and games become environments as they are."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.host.client import Hosted
from keel.agents.inside.errors import Refused
from keel.agents.inside.games import observed
from keel.agents.inside.hints import described, schema_of, value_of
from keel.agents.inside.kinds import Tool
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

        In one go.

        Args:
            days: How many.
            prices (dict): What
                things cost.

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
    assert spec["description"] == "Plan a trip.\n\nIn one go."
    assert spec["parameters"]["required"] == ["trip", "days", "pair", "prices", "how"]
    assert spec["parameters"]["properties"] == {
        "trip": {
            "type": "object",
            "properties": {"legs": {"type": "array", "items": leg}, "size": {"enum": ["s", "l"]}},
            "required": ["legs"],
            "additionalProperties": False,
        },
        "days": {"type": "integer", "description": "How many."},
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "prices": {
            "type": "object",
            "additionalProperties": {"type": "number"},
            "description": "What things cost.",
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
    ("text", "whole", "parameters"),
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
def test_docstrings(text: str, whole: str, parameters: dict[str, str]) -> None:
    assert described(text) == (whole, parameters)


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
    """JSON values that fit a hint."""
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


def made_as(hint: Any, value: Any) -> bool:
    origin, inner = getattr(hint, "__origin__", None), get_args(hint)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(made_as(inner[0], one) for one in value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        every = [inner[0]] * len(value) if Ellipsis in inner else inner
        return len(every) == len(value) and all(map(made_as, every, value))
    if origin is dict:
        return isinstance(value, dict) and all(made_as(inner[1], one) for one in value.values())
    if origin is not None or inner:
        return any(made_as(one, value) for one in inner)
    return value is None if hint in (None, type(None)) else type(value) is hint


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_fits_the_schema_arrives_as_what_the_hint_says(data: st.DataObject) -> None:
    hint = data.draw(HINTS)
    value = data.draw(values(hint))
    shape = {"type": "object", "properties": {"x": schema_of(hint, "x")}}
    known = Arguments([ToolSpec(name="t", description="", parameters=shape)])
    assert known.complaint(ToolCall(call_id="1", name="t", arguments={"x": value})) == ""
    assert made_as(hint, value_of(hint, value)), (hint, value, value_of(hint, value))


def test_a_type_without_a_schema_is_refused() -> None:
    def fly(when: complex) -> None: ...

    with pytest.raises(Refused, match=r"tool fly: parameter when has the type <class 'complex'>"):
        Tool("fly", fly)


@pytest.mark.parametrize(
    ("name", "parameters", "why"),
    [
        ("a b", {"type": "object"}, "a name is"),
        ("t", {"type": "string"}, "must be one of an object"),
        ("t", {"type": "object", "properties": {"x": {"type": "strng"}}}, "no JSON schema"),
        ("t", {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}, "nothing is fetched"),
        ("t", {"type": "object", "$ref": "http://example.org/x"}, "nothing is fetched"),
    ],
)
def test_broken_schemas_are_refused(name: str, parameters: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Arguments([ToolSpec(name=name, description="", parameters=parameters)])


def test_tools_of_one_name_are_refused_and_sets_shared() -> None:
    tool = ToolSpec(name="t", description="", parameters={"type": "object"})
    with pytest.raises(ValueError, match="two of that name"):
        Arguments([tool, tool])
    assert arguments_of([tool]) is arguments_of([tool])
    deep: Any = "x"
    for _ in range(3000):
        deep = [deep]
    nested = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}
    nested["$defs"] = {"n": {"anyOf": [{"type": "string"}, {"items": {"$ref": "#/$defs/n"}}]}}
    known = Arguments([ToolSpec(name="t", description="", parameters=nested)])
    assert "too deeply" in known.complaint(ToolCall(call_id="1", name="t", arguments={"x": deep}))


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


def test_observations_as_text() -> None:
    assert observed("a") == "a"
    assert observed(("a", {"lives": 3})) == "a"
    assert observed((0, "a")) == "a"
    assert observed([(-1, "a", 1), (0, "b", 2)]) == "a\nb"
    assert observed((1, 2, 3)) == "(1, 2, 3)"


def test_the_inside_needs_python_3_9_and_the_standard_library_alone() -> None:
    """Its syntax and what it imports; the annotations are never evaluated."""
    import ast  # noqa: PLC0415

    for path in sorted((ROOT / "agents" / "inside").glob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name.startswith("keel.agents.inside.")
                assert ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)


def test_an_interpreter_of_its_own_that_has_no_keel(tmp_path: Path) -> None:
    """Isolated, without site-packages: nothing of this process's path."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    bare = subprocess.run([python, "-c", "import keel"], capture_output=True, cwd=tmp_path)
    assert b"ModuleNotFoundError" in bare.stderr

    async def play() -> None:
        async with episode(python=str(python)) as environment:
            assert (await use(environment, "call")).text == "fine"

    run(play())
