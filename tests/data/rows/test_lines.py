"""Lines of JSON that are none."""

from __future__ import annotations

import pytest

from keel.data.rows.lines import BadLine, object_of


@pytest.mark.parametrize(
    ("line", "column"),
    [(b'{"a": 1\n', 8), (b'{"a": 1', 8), (b'{"a": 1  \r\n', 8), (b'{"a" 1}\n', 6), (b"x\n", 1)],
)
def test_the_place_of_what_is_missing_is_within_the_line(line: bytes, column: int) -> None:
    with pytest.raises(BadLine, match=rf"^not JSON: .* \(column {column}\)$"):
        object_of(line)
