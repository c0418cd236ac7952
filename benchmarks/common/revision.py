"""Which source a figure was measured with."""

from __future__ import annotations

import os
import subprocess

VARIABLE = "KEEL_COMMIT"
"""Says it where git is not there to ask."""


def commit() -> str:
    """Short id of the commit, with a mark if files have changed since."""
    if given := os.environ.get(VARIABLE):
        return given
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip() or "unknown"
