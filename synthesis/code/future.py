"""A change that lies in what was installed, or in files that the set-up made: a prefix is made of
one commit, and serves others of the same manifests, earlier ones too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from keel.synthesis.code.candidate import Candidate
from keel.synthesis.code.draft import Built
from keel.synthesis.code.filters import TELLING, added_and_removed
from keel.synthesis.ledger import Refused

LEAST = 3
"""Lines of a change that are no chance where they stand together."""
MOST_BYTES = 8 << 20
"""Of a file that is looked through."""


def look(candidate: Candidate, built: Built, prefix: Path, most: float) -> None:
    """most: share of the change's telling lines that one file may have. Raises Refused."""
    lines = _telling(candidate)
    if len(lines) < LEAST:
        return
    for path, (kind, data) in built.generated.items():
        if kind != "l" and _has(data, lines, most):
            raise Refused("future", f"the set-up left {path} in the repository, with the change")
    for folder, _, names in os.walk(prefix):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
                continue
            if _has(path.read_bytes(), lines, most):
                name = path.relative_to(prefix)
                raise Refused("future", f"{name} was installed, with the change")


def _telling(candidate: Candidate) -> Sequence[bytes]:
    """Lines that the change adds and that were nowhere in the repository before."""
    added, _ = added_and_removed(candidate.patch(list(candidate.gold)))
    found = {line.strip().encode() for line in added if len(line.strip()) >= TELLING}
    before = [entry[1] for entry in candidate.base.values()]
    return [line for line in sorted(found) if not any(line in data for data in before)]


def _has(data: bytes, lines: Sequence[bytes], most: float) -> bool:
    count = sum(line in data for line in lines)
    return count >= LEAST and count > most * len(lines)
