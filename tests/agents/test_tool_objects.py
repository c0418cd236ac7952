"""Classes, functions and games become environments; hints and docstrings become schemas."""

import ast
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_runtime.tool_objects import (
    InvalidEnvironment,
    ObjectEnvironment,
    Tool,
    _docstring_parts,
    _schema_of,
    _value_of,
    bind_arguments,
    verdict_fields,
)
from keel.agents.types import ArgumentValidator
from keel.rl.turns import ToolCall, ToolSpec
from keel.rl.types import Verdict
from tests.agents.episodes import HERE, TASK, asynchronous, episode, program, use
from tests.waiting import PATIENCE_S


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Leg:
    to: str
    km: float = 0.0
    stops: list[str] = field(default_factory=list)


def test_hints_and_docstrings_become_schemas() -> None:
    def plan(leg: Leg, prices: dict[str, float], rating: Annotated[float, "Stars."] = 4.0) -> None:
        """Plan a trip.

        In one step.

        Args:
            prices (dict): Cost
                by thing.

        Returns:
            Nothing.
        """

    spec = Tool("plan", plan).spec
    assert spec["description"] == "Plan a trip.\n\nIn one step."
    assert spec["parameters"]["required"] == ["leg", "prices"]
    numbers = {"type": "object", "additionalProperties": {"type": "number"}}
    fields = {
        "to": {"type": "string"},
        "km": {"type": "number"},
        "stops": {"type": "array", "items": {"type": "string"}},
    }
    leg = {"type": "object", "properties": fields, "required": ["to"]}
    assert spec["parameters"]["properties"] == {
        "leg": {**leg, "additionalProperties": False},
        "prices": {**numbers, "description": "Cost by thing."},
        "rating": {"type": "number", "description": "Stars.", "default": 4.0},
    }
    text = "Do.\n\n:param int x: the x\n    of it\n:returns: y"
    assert _docstring_parts(text) == ("Do.", {"x": "the x of it"})


@pytest.mark.parametrize(
    ("hint", "value", "converted"),
    [
        (str, "a", "a"),
        (float, 3, 3.0),
        (int, 3.0, 3),
        (Literal["a", 1], 1, 1),
        (Size, "l", Size.LARGE),
        (Leg, {"to": "x", "km": 2}, Leg("x", 2.0)),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (dict[str, Size], {"a": "s"}, {"a": Size.SMALL}),
        (tuple[int, Leg], [1, {"to": "x"}], (1, Leg("x"))),
        (Union[int, str], "a", "a"),  # noqa: UP007
        (Union[str, float], 3, 3.0),  # noqa: UP007
        (Union[list[int], list[Size]], ["s"], [Size.SMALL]),  # noqa: UP007
        (Union[Size, Leg, None], {"to": "x"}, Leg("x")),  # noqa: UP007
        (Optional[Annotated[float, "Stars."]], 4, 4.0),  # noqa: UP045
    ],
)
def test_valid_arguments_arrive_as_hinted(hint: Any, value: Any, converted: Any) -> None:
    shape = {"type": "object", "properties": {"x": _schema_of(hint, "x")}}
    known = ArgumentValidator([ToolSpec(name="t", description="", parameters=shape)])
    assert known.explain_error(ToolCall(call_id="1", name="t", arguments={"x": value})) == ""
    result = _value_of(hint, value)
    assert result == converted and type(result) is type(converted)


def test_done_is_no_text() -> None:
    assert ObjectEnvironment(SimpleNamespace(done=1), {}).done
    with pytest.raises(InvalidEnvironment, match=r"self\.done = True"):
        _ = ObjectEnvironment(SimpleNamespace(done="False"), {}).done


def test_functions_get_the_parameters_they_declare() -> None:
    def passed(function: Any) -> Any:
        return function(**bind_arguments("opening", function, {"task": "t", "seed": 3}))

    assert passed(lambda: "nothing") == "nothing"
    assert passed(lambda seed: seed) == 3
    assert passed(lambda seed, task, more=1: (task, seed, more)) == ("t", 3, 1)
    assert passed(lambda **every: every) == {"task": "t", "seed": 3}
    assert passed(lambda task, **more: (task, more)) == ("t", {"seed": 3})
    for function in (lambda prompt, rng: 0, lambda task, rng: 0, lambda *, prompt: 0):
        with pytest.raises(InvalidEnvironment, match="task, seed"):
            passed(function)


@pytest.mark.e2e
@asynchronous
async def test_functions_are_an_environment(tmp_path: Path) -> None:
    (tmp_path / "tools_of_mine.py").write_text(
        "from json import dumps\n"
        "def add(a: int, b: int) -> int:\n    'Add two numbers.'\n    return a + b\n"
        "def _hidden(): ...\n"
    )
    environment = ProcessEnvironment(program("tools_of_mine", folder=tmp_path))
    opening = await environment.open(TASK, seed=3)
    assert opening.messages == TASK.messages and [t.name for t in opening.tools] == ["add"]
    assert (await use(environment, "add", a=2, b=3)).text == "5"
    assert await environment.reply({"role": "assistant", "content": "5"}) is None
    assert await environment.verdict((), "stop") == Verdict(parts={})
    await environment.close()


@pytest.mark.e2e
@asynchronous
async def test_game_is_played_by_tool_or_text() -> None:
    async with episode("shop:Guess") as environment:
        assert (await use(environment, "play", action=9)).failed
        texts: list[str] = []
        low, high, done = 1, 8, False
        while not done:
            middle = (low + high) // 2
            result = await use(environment, "play", action=middle)
            texts.append(result.text)
            done = result.done
            low, high = (middle + 1, high) if result.text == "Higher." else (low, middle - 1)
        won = float(texts[-1] == "Right.")
        facts = {"return": won, "moves": len(texts)}
        verdict = await environment.verdict((), "stop")
        assert verdict == Verdict(parts={"correct": won, "score": won}, facts=facts)
    arguments = {"play_by": "text", "scale": [0, 2]}
    async with episode("shop:Guess", arguments=arguments) as environment:
        reply = await environment.reply({"role": "assistant", "content": "I think of\nseven"})
        assert reply is not None and "1 to 8" in reply["content"]
        for guess in (2, 4, 7, 1):
            turn = {"role": "assistant", "content": f"So I say\n{guess}"}
            if await environment.reply(turn) is None:
                break
        verdict = await environment.verdict((), "stop")
        assert isinstance(verdict, Verdict) and verdict.facts["moves"] <= 3
        assert verdict.parts == {"correct": 0.0, "score": verdict.facts["return"] / 2}


def test_runtime_needs_only_python_3_9() -> None:
    for path in sorted((HERE.parents[1] / "agents" / "env_runtime").glob("*.py")):
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


def complaint(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    tool = ToolSpec(name="f", description="", parameters={"type": "object", **schema})
    return ArgumentValidator([tool]).explain_error(
        ToolCall(call_id="c", name="f", arguments=arguments)
    )


def test_slow_keywords_are_left_to_the_environment() -> None:
    slow, text = "^(a|aa)+$", "a" * 80 + "!"  # exponential backtracking
    schema = {
        "properties": {"a": {"pattern": slow, "uniqueItems": True}},
        "patternProperties": {slow: {}},
        "additionalProperties": False,
    }
    began = time.thread_time()
    many = [{"x": [i]} for i in range(10_000)]
    assert complaint(schema, {"a": text, text: 1}) == complaint(schema, {"a": many}) == ""
    assert time.thread_time() - began < 5
    assert complaint({"additionalProperties": {"type": "integer"}}, {"z": "2"})
    assert complaint({"additionalProperties": True}, {"z": "2"}) == ""


def test_invalid_schema_is_refused_or_left_to_the_environment() -> None:
    for schema in ({"$schema": []}, {"$schema": {}}, {"$id": []}, {"properties": {"a": 1}}):
        with pytest.raises(ValueError, match="tool f: its schema"):
            complaint(schema, {})
    nested: dict[str, Any] = {}
    for _ in range(300):
        nested = {"properties": {"a": nested}}
    for schema, reason in (
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, r"refers to '#/\$defs/no', which is not"),
        ({"allOf": [{"$ref": "https://example.org/a.json"}]}, "refers to 'https"),
        (nested, "is nested too deeply; flatten it"),
    ):
        with pytest.raises(ValueError, match=f"tool f: its schema {reason}"):
            complaint(schema, {})
    known = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    assert complaint(known, {"a": 1}) == "" and "not of type" in complaint(known, {"a": "x"})
    unmatched = {"patternProperties": {"(": {}}, "unevaluatedProperties": False}
    for schema in (unmatched, {"$dynamicRef": "#nowhere"}):
        assert complaint(schema, {"a": 1}) == ""


GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)


@pytest.mark.e2e
def test_guide_script(tmp_path: Path) -> None:
    for name, text in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / name).write_text(text)
    shown = "import demos; print(demos.shopping(1, seed=0, arguments={})[0].worked[-1])"
    outputs: list[str] = []
    for command in (["try_it.py"], ["-c", shown]):
        words = [sys.executable, *command]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert "['ask', 'buy']" in outputs[0] and "{'correct': 1.0, 'bought': 1.0}" in outputs[0]
    assert "'name': 'buy'" in outputs[1]


def test_a_verdict_is_a_number_or_a_dict() -> None:
    assert verdict_fields(True) == {"parts": {"correct": 1.0}, "facts": {}}
    assert verdict_fields(({"a": 1}, {"b": 2})) == {"parts": {"a": 1}, "facts": {"b": 2}}
    for wrong in ("nan", b"1", 10**400, None, [1.0]):
        with pytest.raises(TypeError, match="return a number or a dict of numbers"):
            verdict_fields(wrong)
