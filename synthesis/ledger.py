"""Records the progress of a synthesis in its folder, so that the next start can continue it.

outcomes.jsonl   one line per finished task (`TaskOutcome`)
usage.jsonl      one line per model call: {"model", "purpose", "prompt_tokens", …}
settings.json    the settings that affect the tasks
report.json      totals: made, kept, rejected by gate with reasons, tokens and money by purpose
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from keel.configs.work_folder import WorkFolder
from keel.synthesis.author import CallUsage

_OUTCOMES, _USAGE = "outcomes.jsonl", "usage.jsonl"
_MAX_REASONS = 5
_MAX_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    key: str
    outcome: Literal["kept", "refused"]
    gate: str = ""
    reason: str = ""
    seconds: float = 0.0


class Rejected(Exception):
    """Raised when a gate rejects a task. This is a normal outcome."""

    def __init__(self, gate: str, reason: str) -> None:
        super().__init__(f"{gate}: {reason}")
        self.gate, self.reason = gate, reason


class Ledger(WorkFolder):
    """Records outcomes and usage in a folder, which it creates and locks. Folders that belong to
    another synthesis are rejected."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(folder, "dir", "synthesis")
        self._settings = settings
        self.outcomes: dict[str, TaskOutcome] = {}
        self.spent: list[CallUsage] = []

    def resume(self) -> None:
        """Read the folder. Raises ConfigError if it was created with other settings."""
        outcomes = self.records(_OUTCOMES, lambda line: TaskOutcome(**line))
        self.spent = self.records(_USAGE, lambda line: CallUsage(**line))
        self.outcomes = {outcome.key: outcome for outcome in outcomes}
        # A start that failed before it made anything has not claimed the folder.
        if not self.outcomes and not self.spent:
            self.claim(self._settings)
        elif changed := self.changed(self._settings):
            reason = f"was made with other settings: {', '.join(changed)}"
            raise self.error(f"{reason}. Choose another folder")

    def used(self, usage: CallUsage) -> None:
        self.spent.append(usage)
        self.append(_USAGE, asdict(usage))

    def add(self, outcome: TaskOutcome) -> None:
        """Record a task's outcome. The task's files must already be in the folder."""
        self.append(_OUTCOMES, asdict(outcome))
        self.outcomes[outcome.key] = outcome

    def report(self) -> dict[str, Any]:
        by_gate: dict[str, Counter[str]] = {}
        for outcome in self.outcomes.values():
            if outcome.outcome == "refused":
                by_gate.setdefault(outcome.gate, Counter())[outcome.reason[:_MAX_REASON]] += 1
        purposes: dict[str, dict[str, float]] = {}
        for usage in self.spent:
            of = purposes.setdefault(usage.purpose, {"calls": 0, "tokens": 0, "usd": 0.0})
            of["calls"] += 1
            of["tokens"] += usage.tokens
            of["usd"] += usage.usd
        report = {
            "made": len(self.outcomes),
            "kept": sum(outcome.outcome == "kept" for outcome in self.outcomes.values()),
            "refused": {
                gate: {"tasks": reasons.total(), "reasons": dict(reasons.most_common(_MAX_REASONS))}
                for gate, reasons in sorted(by_gate.items())
            },
            "cost": purposes,
            "authors": sorted({usage.model for usage in self.spent}),
        }
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (self.path / "report.json").write_bytes((text + "\n").encode(errors="replace"))
        return report
