"""An environment whose one tool takes its time. Imports nothing heavy: each has a process."""

from __future__ import annotations

import time

TOOL_S = 0.05
RESULT = "twenty tokens at all"
"""20 tokens: the embedded tokenizer has one a letter."""


class Look:
    def look(self) -> str:
        """Looks."""
        time.sleep(TOOL_S)
        return RESULT

    def verdict(self) -> float:
        return 0.0
