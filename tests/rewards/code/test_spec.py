"""Specs of programming tasks, the program in an answer, and comparison of outputs."""

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.rewards.code import verifier
from keel.rewards.code.call_driver import _find, _to_jsonable, from_jsonable
from keel.rewards.code.verifier import _same_text, _same_value, code_blocks, read_task
from keel.rewards.sandbox.sandbox import Limits
from tests.rewards.code.hostile import ADD_CALL, ADD_STDIN

BLOCKS = {
    "```\na\n```": "a\n",
    "```python\na\n\nb\n```\nDone.": "a\n\nb\n",
    "```\na\n```\nthen\n```\nb\n```": "b\n",
    "~~~\na\n```\n~~~": "a\n```\n",
    "````\na\n```\nb\n````": "a\n```\nb\n",
    "1. so:\n   ```py\n   if a:\n       b\n   ```": "if a:\n    b\n",
    "```\r\na\r\n```\r\n": "a\n",
    "```\na\u2028b\n```": "a\u2028b\n",
    **dict.fromkeys(("```\na\n```\n```\nb", "```\na", "`a`", "```a```", "", "```\n" * 100_001)),
}


def test_the_last_code_block_is_the_program() -> None:
    for text, code in BLOCKS.items():
        assert code_blocks(text)[-1:] == ([code] if code else [])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        *(({}, "tests"), ({"tests": []}, "tests"), ({"tests": [ADD_STDIN, 3]}, r"tests\[1\]")),
        ({"tests": [{"stdin": "1", "stdou": "1"}]}, r"tests\[0\]"),
        ({"tests": [{"call": "f", "args": [1]}]}, "returns"),
        ({"tests": [ADD_STDIN | {"stdin": "\ud800"}]}, r"tests\[0\].*surrogates"),
        ({"tests": [{"call": "f", "args": 1, "returns": 1}]}, "args"),
        ({"tests": [{"call": "os.system('x')", "args": [], "returns": 1}]}, "call"),
        ({"tests": [ADD_CALL], "language": "c++"}, "Python"),
        ({"tests": [ADD_STDIN], "language": "cobol"}, "language"),
        ({"tests": [ADD_STDIN], "partial": 1}, "partial"),
        ({"tests": [ADD_STDIN], "time_limit_s": -1}, "time_s"),
        ({"tests": [ADD_STDIN], "memory_mib": 0.5}, "memory_mib"),
        ({"tests": [ADD_STDIN], "time_limit": 1}, "time_limit"),
        ({"tests": [ADD_STDIN | {"subtask": "a"}]}, "subtasks"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 0}}, r"subtasks\.a"),
        ({"tests": [ADD_STDIN], "subtasks": {"a": 1}}, "differ in a$"),
        ({"tests": [ADD_STDIN | {"subtask": "b"}], "subtasks": {"a": 1}}, "differ in a, b$"),
        ({"tests": [ADD_STDIN, ADD_CALL | {"subtask": "a"}], "subtasks": {"a": 1}}, "tests"),
    ],
)
def test_bad_specs_are_refused(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_task({"kind": "code", **fields})


def test_a_prompt_may_set_limits() -> None:
    task = read_task({"kind": "code", "tests": [ADD_STDIN], "time_limit_s": 5, "memory_mib": 64})
    assert task.limits(Limits()) == Limits(time_s=5, memory_mib=64)


def test_the_driver_encodes_values() -> None:
    value = {"t": (1, ("a",)), "s": {1}, "d": {1: "x", (1, 2): [None]}, "~set": 1.5}
    assert from_jsonable(_to_jsonable(value)) == value
    with pytest.raises(TypeError, match="object"):
        _to_jsonable([object()])
    assert _find("str.upper", {"str": str})() == ""


LOW = 1.0 - 1e-12
NUMBERS = st.sampled_from([0, 1, 1.0, 1.004, 1.008, 1.012, 2.0, 2.009, math.nan])
ITEMS = st.one_of(NUMBERS, st.tuples(NUMBERS, NUMBERS).map(list))


def a_set(*items: Any) -> dict[str, Any]:
    return {"~set": list(items)}


SAME: list[tuple[Any, Any]] = [
    *((1, 1), (1, 1.0), (0.1 + 0.2, 0.3), (10**400, 10**400), (math.nan, math.nan)),
    *(([1, [2]], {"~tuple": [1, {"~tuple": [2]}]}), ({"a": 1}, {"~dict": [["a", 1]]})),
    *((a_set(1, 2), a_set(2, 1)), (a_set(10.0, 5.0), a_set(9.999999999999998, 5.0))),
    (a_set([10.0, "a"], [5, "b"]), a_set([9.999999999999998, "a"], [5, "b"])),
    (a_set(a_set("a", "z"), a_set("b")), a_set(a_set("z", "a"), a_set("b"))),
    (a_set(1, "1", None, [1]), a_set({"~tuple": [1]}, None, "1", 1)),
    *((a_set(math.nan, 2), a_set(2, math.nan)), ({"a": 1, "b": [2]}, {"b": [2], "a": 1})),
    ({"~dict": [[1, "a"]]}, {"~dict": [[1, "a"]]}),
    # Rounding may change the order.
    (a_set([1.0, 7], [1.0, 5]), a_set([1.0000000001, 5], [1.0, 7])),
    (a_set(math.nan, math.inf), a_set(math.inf, math.nan)),
    (a_set([1, 2], a_set(1, 2)), a_set(a_set(2, 1), [1, 2])),
    ({"~dict": [[[1.0, 1], "a"], [[1.0, 0], "b"]]}, {"~dict": [[[LOW, 1], "a"], [[1.0, 0], "b"]]}),
    (
        a_set([1.0, a_set([1.0, 2], [1.0, 1])], [1.0, a_set()]),
        a_set([LOW, a_set([LOW, 2], [1.0, 1])], [1.0, a_set()]),
    ),
]
DIFFERENT: list[tuple[Any, Any]] = [
    *((1, True), (0, None), (0, False), ("1", 1), (1, 2), (10**400, 1.0), (math.inf, 1e308)),
    *(([1], [1, 1]), ([], {}), ([], None), (a_set(1, 2), [1, 2]), ({"1": 1}, {"~dict": [[1, 1]]})),
    *(({"a": 1}, {"~dict": [["a"]]}), ({"a": 1}, {"~dict": 3}), ({"a": 1}, {"a": {"~any": []}})),
    (a_set([1.0, 7], [1.0, 5]), a_set([1.0000000001, 5], [1.0, 5])),
    (a_set([1, 7], [1, 5]), a_set([1, 5], [1, 6])),
    *(({"~set": 5}, bad) for bad in ({"~dict": 7}, {"~tuple": "x"}, {"~set": 5})),
]


def test_values() -> None:
    for expected, value in SAME:
        assert _same_value(expected, value) is True, (expected, value)
    for expected, value in DIFFERENT:
        assert _same_value(expected, value) is False, (expected, value)


def test_tolerance() -> None:
    assert not _same_value([0.5], [0.501]) and _same_value([0.5], [0.501], 0.01)
    # In order of the rounded values, the pairs are others.
    expected, value = a_set([1.0, 5], [1.001, 7]), a_set([1.001, 5], [1.0, 7])
    assert _same_value(expected, value, 0.01) and not _same_value(expected, value)
    assert not _same_value(expected, a_set([1.001, 5], [1.0, 8]), 0.01)
    assert _same_text("0.5 x\n", " 0.501  x", 0.01) and not _same_text("0.5 x", "0.5 y", 0.01)
    assert not _same_text("0.5", "nan", 0.01) and not _same_text("0.5", "0.5 0.5", 0.01)
    assert _same_text("a \nb\n", "a\nb\n\n") and not _same_text("a b", "a  b")
    assert not _same_text("a\nb", "ab") and not _same_text("a", " a")


@pytest.mark.parametrize("value", ["１２", "1_2", "1_2.0", "٣٤"])
def test_python_only_numbers_are_text(value: str) -> None:
    assert not _same_text("12", value, 1e-6) and not _same_text("34", value, 1e-6)
    assert _same_text("12", "12.0000001", 1e-6) and _same_text(value, value, 1e-6)


@given(st.lists(st.tuples(ITEMS, ITEMS), max_size=5), st.booleans(), st.randoms())
def test_sets_are_equal_in_some_order(
    pairs: list[tuple[Any, Any]], shuffled: bool, random: Any
) -> None:
    expected = [one for one, _ in pairs]
    value = [two if shuffled else one for one, two in pairs][::-1]
    orders = (zip(expected, order, strict=True) for order in itertools.permutations(value))
    right = any(all(_same_value(a, b, 0.005) for a, b in order) for order in orders)
    assert right or not _same_value(a_set(*expected), a_set(*value), 0.005)
    value = [json.loads(json.dumps(one), parse_float=lambda x: float(x) * LOW) for one in expected]
    random.shuffle(value)
    assert _same_value(a_set(*expected), a_set(*value))


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    close = verifier._numbers_match

    def counted(*numbers: Any) -> bool:
        nonlocal compared
        compared += 1
        return close(*numbers)

    monkeypatch.setattr(verifier, "_numbers_match", counted)
    monkeypatch.setattr(verifier, "_MAX_COMPARISONS", 5_000)
    expected = [[1.0, number] for number in range(2_000)]
    reversed_ = [[1.004 - number * 2e-6, number] for number in range(2_000)]
    for value in (reversed_, [[LOW, 0.5]] * 2_000):
        compared = 0
        assert not _same_value(a_set(*expected), a_set(*value), 0.01)
        assert compared < 2 * len(expected) + 5_000


def test_large_sets_match() -> None:
    expected = [[float(number // 4), number] for number in range(2_000)]
    value = [[one * (1 - number * 1e-14), number] for one, number in expected]
    assert _same_value(a_set(*expected), a_set(*value))
    value[7][1] = 8
    assert not _same_value(a_set(*expected), a_set(*value))


def test_integers_have_absolute_tolerance() -> None:
    assert not _same_value(1000000007, 1000000007.9) and _same_value(1000000007, 1000000007.0)
    assert not _same_value(1000000006, 1000000506.0, 1e-6) and _same_value(3, 3.0000000001)
    assert not _same_value(5, 1e9, 0.9) and not _same_value(5.0, 1e9, 0.9)
    assert not _same_text("1000000006", "1000000506", 1e-6)
    assert not _same_text("1000000006", "1000000506.0", 1e-6)
    assert _same_text("1000000006.0", "1000000506", 1e-6) and _same_value(0.1, 0.1000000001, 1e-6)
    assert not _same_value(float("inf"), -float("inf"), 0.5) and _same_text("inf", "Infinity", 0.1)
