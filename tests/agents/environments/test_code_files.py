"""What the policy sees of a file, line by line."""

from __future__ import annotations

import pytest

from keel.agents.environments.code.files import edited, viewed


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a\nb", ["a", "b"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\n\n", ["a", ""]),
        ("a\f\x1cb\u2028c\x85\nd", ["a\f\x1cb\u2028c\x85", "d"]),
        ("", []),
    ],
)
def test_lines_are_those_that_compilers_and_tools_count(text: str, lines: list[str]) -> None:
    assert viewed(text, 0, 0) == "\n".join(f"{n:6}\t{line}" for n, line in enumerate(lines, 1))


def test_an_edit_shows_its_place_behind_form_feeds() -> None:
    text = "\f\n" * 20 + "here\n" + "after\n" * 20
    new, said = edited("a.py", text, "here", "there")
    assert new == text.replace("here", "there") and "    21\tthere" in said
