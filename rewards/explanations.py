"""What judges and verifiers said of a score, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keel.rewards.judge.results import Failed, Judged
from keel.rewards.workers.pool import Verdict


def notes_of(
    count: int,
    judged: Mapping[str, Sequence[Judged | Failed]],
    verified: Mapping[str, Sequence[Verdict]],
) -> list[dict[str, str]]:
    """Of each of `count` trajectories: criterion → score and reason, part → the verifier's error.
    judged: by what stands before a criterion's name; verified: by part. Either may be empty."""
    notes: list[dict[str, str]] = [{} for _ in range(count)]
    for before, results in judged.items():
        for note, result in zip(notes, results, strict=False):
            for verdict in result.verdicts if isinstance(result, Judged) else ():
                note[before + verdict.name] = f"{verdict.score:g}: {verdict.reason}"
    for part, verdicts in verified.items():
        for note, verdict in zip(notes, verdicts, strict=False):
            if verdict.error:
                note[part] = f"error: {verdict.error}"
    return notes
