"""The record of a synthesis in its folder: what became of each task, and what it cost; read again
by the next start, which goes on from there.

outcomes.jsonl   a line for each task that was kept or refused: {"key", "outcome", "gate", "reason",
                 "seconds", "drafts"}
usage.jsonl      a line for each call of a model: {"model", "purpose", "prompt_tokens", …}
settings.json    what the tasks depend on
report.json      made, kept, refused by each gate and why, drafts too, tokens and money by purpose
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keel.configs.work_folder import WorkFolder
from keel.synthesis.author import Usage

REASONS = 5
"""Of each gate, that are listed."""
MOST_SAID = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a task."""

    key: str
    outcome: Literal["kept", "refused"]
    gate: str = ""
    """What refused it."""
    reason: str = ""
    seconds: float = 0.0
    drafts: Sequence[Sequence[str]] = ()
    """(gate, reason) of what was thrown away on the way: the author wrote it again, or did
    without."""


class Refused(Exception):
    """A gate's word: the task is thrown away. Nothing went wrong with the pipeline."""

    def __init__(self, gate: str, reason: str) -> None:
        super().__init__(f"{gate}: {reason}")
        self.gate, self.reason = gate, reason
        self.drafts: Sequence[Refused] = ()
        """Thrown away before it."""


class Ledger:
    """Open as a context: creates the folder, refuses another synthesis's, and holds it."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """settings: what the tasks depend on, as JSON has it."""
        self.folder = folder
        self._settings = settings
        self.outcomes: dict[str, Outcome] = {}
        self.spent: list[Usage] = []

    def __enter__(self) -> Self:
        """Raises ConfigError if the folder cannot be written, is in use, or is another's."""
        with ExitStack() as stack:
            folder = stack.enter_context(WorkFolder(self.folder, "dir", "synthesis"))
            self._outcomes, self._usage = map(folder.lines, ("outcomes.jsonl", "usage.jsonl"))
            try:
                outcomes = [Outcome(**line) for line in self._outcomes.read()]
                self.spent = [Usage(**line) for line in self._usage.read()]
            except (ValueError, TypeError) as error:
                raise folder.error(f"cannot be read: {error}") from error
            self.outcomes = {outcome.key: outcome for outcome in outcomes}
            # A start that was refused before it made anything, for a corpus that is not there say,
            # has claimed nothing.
            if self.outcomes or self.spent:
                if changed := folder.changed(self._settings):
                    raise folder.error(
                        f"was made with other settings: {', '.join(changed)}; choose another folder"
                    )
            else:
                folder.claim(self._settings)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def used(self, usage: Usage) -> None:
        """Keeps what a call took."""
        self.spent.append(usage)
        self._usage.add(asdict(usage))

    def add(self, outcome: Outcome) -> None:
        """Keeps what became of a task. What it left in the folder is there already."""
        self._outcomes.add(asdict(outcome))
        self.outcomes[outcome.key] = outcome

    def report(self) -> dict[str, Any]:
        """Also written to report.json."""
        by_gate: dict[str, Counter[str]] = {}
        for outcome in self.outcomes.values():
            if outcome.outcome == "refused":
                by_gate.setdefault(outcome.gate, Counter())[outcome.reason[:MOST_SAID]] += 1
        drafts = Counter(gate for each in self.outcomes.values() for gate, _ in each.drafts)
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
                gate: {"tasks": reasons.total(), "reasons": dict(reasons.most_common(REASONS))}
                for gate, reasons in sorted(by_gate.items())
            },
            "drafts": dict(drafts.most_common()),
            "cost": purposes,
            "authors": sorted({usage.model for usage in self.spent}),
        }
        text = json.dumps(report, indent=2, ensure_ascii=False)
        (self.folder / "report.json").write_bytes((text + "\n").encode(errors="replace"))
        return report
