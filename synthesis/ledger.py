"""Records the progress of a synthesis in its folder, so that the next start can continue it.

outcomes.jsonl   one line per finished task (`TaskOutcome`)
usage.jsonl      one line per model call: {"model", "purpose", "prompt_tokens", …}
settings.json    the settings that affect the tasks
report.json      totals: made, kept, rejected by gate with reasons, tokens and money by purpose
"""

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keel.configs.work_folder import WorkFolder
from keel.synthesis.author import CallUsage

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


class Ledger:
    """Records outcomes and usage in a folder, which it creates and locks. Folders that belong to
    another synthesis are rejected."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self._settings = settings
        self.outcomes: dict[str, TaskOutcome] = {}
        self.spent: list[CallUsage] = []

    def __enter__(self) -> Self:
        """Open the folder. Raises ConfigError if it is in use, can't be written to, or was created
        with other settings."""
        with ExitStack() as stack:
            folder = stack.enter_context(WorkFolder(self.folder, "dir", "synthesis"))
            self._outcomes, self._usage = map(folder.lines, ("outcomes.jsonl", "usage.jsonl"))
            try:
                outcomes = [TaskOutcome(**line) for line in self._outcomes.read()]
                self.spent = [CallUsage(**line) for line in self._usage.read()]
            except (ValueError, TypeError) as error:
                raise folder.error(f"cannot be read: {error}") from error
            self.outcomes = {outcome.key: outcome for outcome in outcomes}
            # A start that failed before it made anything has not claimed the folder.
            if self.outcomes or self.spent:
                if changed := folder.changed(self._settings):
                    reason = f"was made with other settings: {', '.join(changed)}"
                    raise folder.error(f"{reason}. Choose another folder")
            else:
                folder.claim(self._settings)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def used(self, usage: CallUsage) -> None:
        self.spent.append(usage)
        self._usage.add(asdict(usage))

    def add(self, outcome: TaskOutcome) -> None:
        """Record a task's outcome. The task's files must already be in the folder."""
        self._outcomes.add(asdict(outcome))
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
        (self.folder / "report.json").write_bytes((text + "\n").encode(errors="replace"))
        return report
