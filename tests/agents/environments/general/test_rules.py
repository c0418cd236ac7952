"""Checks of an author's code, and folders of environments."""

from typing import get_type_hints

import pytest

from keel.agents.env_runtime.tool_objects import InvalidEnvironment
from keel.agents.environments.general.author_code import (
    _compile_function,
    _parse_code,
    _Part,
    parse_answer,
)


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("solve", "import math"),
        ("solve", "tools.price.__wrapped__"),
        ("solve", "'{0.__class__}'.format(tools)"),
        ("solve", "(each for each in []).gi_frame"),
        ("solve", "f(__builtins__=1)"),
        ("solve", "f'{tools.__class__}'"),
        ("tools", "import os.path"),
        ("tools", "def f():\n    global database"),
        ("tools", "import random\nrandom._os"),
        ("tools", "from random import _os"),
        ("tools", "from statistics import mean, sys"),
        ("verify", "from statistics import random"),
        ("verify", "def f(a, b):\n    from random import random"),
        ("verify", "-" * 100_000 + "1"),
    ],
)
def test_forbidden_code_is_refused(part: _Part, source: str) -> None:
    with pytest.raises(InvalidEnvironment, match=part):
        _parse_code(source, part)


def test_only_listed_modules_are_imported_at_run_time() -> None:
    source = (
        "from collections import abc\nfrom datetime import datetime\n"
        "def verify_0(a, b: \"(__import__)('os')\"): return datetime.strptime(a, '%Y').year\n"
    )
    verify = _compile_function(source, "verify", "verify_0", 2)
    assert verify("2020", 0) == 2020
    with pytest.raises(ImportError, match="os"):
        get_type_hints(verify)


def test_a_function_includes_its_imports() -> None:
    source = (
        "import json\ndef verify_0(a, b): return pi\nfrom math import *\n"
        "def verify_1(a, b): return pi"
    )
    assert 3 < _compile_function(source, "verify", "verify_1", 2)(0, 0) < 4
    with pytest.raises(NameError):
        _compile_function(source, "verify", "verify_0", 2)(0, 0)
    for text, name in (
        (source, "verify_2"),
        (f"{source}\nx = 1", "verify_0"),
        (f"{source}\n@f\ndef verify_2(): pass", "verify_0"),
    ):
        with pytest.raises(InvalidEnvironment):
            _compile_function(text, "verify", name, 2)


def test_answers_are_parsed_as_json_or_text() -> None:
    assert parse_answer('{"a": [1, 2.5]}') == {"a": [1, 2.5]} and parse_answer('"x"') == "x"
    for text in ("NaN", "[1e999]", '"\\ud83d"', "1" * 60_000, "[" * 100_000, "Kesek Inn", ""):
        assert parse_answer(text) == text  # can be sent to a verifier
    assert parse_answer("\ud83d") == "?"
