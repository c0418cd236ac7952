"""The record of a synthesis in its folder: what became of each task, and what it cost; read again
by the next start, which goes on from there.

outcomes.jsonl   a line for each task that was kept or refused: {"key", "outcome", "gate", "reason",
                 "seconds", "drafts"}
usage.jsonl      a line for each call of a model: {"model", "purpose", "prompt_tokens", …}
settings.json    what the tasks depend on
report.json      made, kept, refused by each gate and why, drafts too, tokens and money by purpose
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from keel.configs.schema import ConfigError
from keel.tasks.author import Usage, usage_line

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
        self._settings = json.loads(json.dumps(settings))
        self.outcomes: dict[str, Outcome] = {}
        self.spent: list[Usage] = []

    def __enter__(self) -> Self:
        """Raises ConfigError if the folder cannot be written, is in use, or is another's."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"dir = {self.folder}: cannot be written ({error.strerror})"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line in _lines(self.folder / "outcomes.jsonl"):
                outcome = Outcome(**line)
                self.outcomes[outcome.key] = outcome
            self.spent = [Usage(**line) for line in _lines(self.folder / "usage.jsonl")]
            self._claim()
        except BlockingIOError as error:
            self._lock.close()
            raise ConfigError(
                f"dir = {self.folder}: another synthesis is running there; choose another folder"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            self._lock.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"dir = {self.folder}: cannot be read: {error}") from error
        self._outcomes = (self.folder / "outcomes.jsonl").open(
            "a", encoding="utf-8", errors="replace"
        )
        self._usage = (self.folder / "usage.jsonl").open("a", encoding="utf-8", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self._outcomes.close()
        self._usage.close()
        self._lock.close()

    def used(self, usage: Usage) -> None:
        """Keeps what a call took."""
        self.spent.append(usage)
        self._usage.write(usage_line(usage) + "\n")
        self._usage.flush()

    def add(self, outcome: Outcome) -> None:
        """Keeps what became of a task. What it left in the folder is there already."""
        self._outcomes.write(json.dumps(asdict(outcome), ensure_ascii=False) + "\n")
        self._outcomes.flush()
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

    def _claim(self) -> None:
        """A start that was refused before it made anything, for a corpus that is not there say, has
        claimed nothing."""
        path = self.folder / "settings.json"
        if not path.exists() or not (self.outcomes or self.spent):
            path.write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(
            name
            for name in {*before, *self._settings}
            if before.get(name) != self._settings.get(name)
        )
        if changed:
            said = ", ".join(
                f"{name} ({before.get(name)!r} → {self._settings.get(name)!r})" for name in changed
            )
            raise ConfigError(
                f"dir = {self.folder}: was made with other settings: {said}; choose another folder"
            )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Of a JSONL file that may not exist; a last line that was cut off is removed from it."""
    if not path.exists():
        return []
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        data = data[: data.rfind(b"\n") + 1]
        with path.open("r+b") as file:
            file.truncate(len(data))
    return [json.loads(line) for line in data.splitlines()]
