"""Hints and docstrings of functions become schemas of tools, and arguments what they hint at."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.agents.env_process.process import how_it_ended
from keel.agents.env_runtime.episode import Episode
from keel.agents.env_runtime.errors import InvalidEnvironment
from keel.agents.env_runtime.tool_objects import Object, Tool
from keel.agents.env_runtime.type_schemas import described, schema_of, value_of
from keel.agents.schemas import Arguments, arguments_of
from keel.rl.turns import ToolCall, ToolSpec

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


@settings(max_examples=30, deadline=None)
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

    with pytest.raises(
        InvalidEnvironment, match=r"tool fly: parameter when has the type <class 'complex'>"
    ):
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


def test_a_number_that_no_float_holds_is_a_wrong_argument() -> None:
    price = {"type": "object", "properties": {"price": {"type": "number", "multipleOf": 0.01}}}
    tools = (ToolSpec(name="pay", description="", parameters=price),)
    call = ToolCall(call_id="1", name="pay", arguments={"price": 10**400})
    assert "too large" in arguments_of(tools).complaint(call)
    assert not arguments_of(tools).complaint(
        ToolCall(call_id="1", name="pay", arguments={"price": 1.25})
    )


def test_a_tool_that_raises_may_have_ended_the_episode() -> None:
    class Duel:
        done = False

        def strike(self) -> str:
            self.done = True
            raise ValueError("you lost")

    duel, episode = Duel(), Episode()
    episode._environment = Object(duel, {"strike": duel.strike})
    said = episode.answer({"do": "call", "name": "strike", "arguments": {}, "call_s": 9.0})
    assert said == {"text": "ValueError: you lost", "failed": True, "done": True}


def test_a_signal_without_a_name_has_its_number() -> None:
    assert how_it_ended(-40) == "was ended by signal 40"
    assert how_it_ended(-9) == how_it_ended(137) == "was ended by SIGKILL"
