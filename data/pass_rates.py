"""Computes pass rates and reads the table of `keel filter`, which has one JSON line per prompt.

    {"id": "sums/7", "source": "sums", "domain": "maths", "samples": 100, "passes": 12,
     "pass_rate": 0.12, "score": 0.15, "unscored": 1, "dropped": {"late: …": 1}, "digest": "…"}

`passes` and `unscored` are counted as in `keel.rl.evaluation`, where a missing or unscored
completion does not pass.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.data.items import digest, read_records
from keel.rl.evaluation import evaluation
from keel.rl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """How often the policy solves one prompt."""

    id: str
    source: str
    domain: str
    samples: int
    """Number of completions requested."""
    passes: int
    score: float | None
    """Mean of `correct` over the completions, or None if there are none."""
    unscored: int
    dropped: Mapping[str, int]
    """Number of missing completions for each reason."""
    digest: str
    """A digest of the prompt's messages and reward spec."""

    @property
    def rate(self) -> float:
        return self.passes / self.samples

    @property
    def known(self) -> bool:
        """Whether any completion has a score. If none has, a pass rate of 0 says nothing about the
        prompt."""
        return self.unscored < self.samples

    def within(self, least: float, most: float) -> bool:
        """Return whether the prompt was solved at least once and its pass rate is within bounds."""
        return self.passes > 0 and least <= self.rate <= most

    def line(self) -> dict[str, Any]:
        return {**asdict(self), "pass_rate": self.rate}


def pass_rate_of(prompt: Prompt, source: str, groups: Sequence[ScoredGroup]) -> PassRate:
    """Compute a prompt's pass rate from all of its completion groups."""
    result = evaluation(groups)
    score, passes = result["score"].value, result["pass@1"]
    samples = sum(len(group.parts_G) + len(group.group.dropped) for group in groups)
    return PassRate(
        id=prompt.prompt_id,
        source=source,
        domain=prompt.domain,
        samples=samples,
        passes=round(passes.value * samples),
        score=score if score == score else None,
        unscored=round(result["unscored"].value),
        dropped=dict(Counter(reason for group in groups for reason in group.group.dropped)),
        digest=digest_of(prompt),
    )


def digest_of(prompt: Prompt) -> str:
    content: list[Any] = [[dict(message) for message in prompt.messages], dict(prompt.reward)]
    return digest(json.dumps(content, sort_keys=True, default=str))


def read_pass_rates(path: Path) -> dict[str, PassRate]:
    """Read the table of pass rates. If an ID appears more than once, its last line is used. Raises
    ConfigError with the file and line number of a malformed line."""

    def parse(line: dict[str, Any]) -> PassRate:
        line.pop("pass_rate", None)
        return PassRate(**line)

    return {rate.id: rate for rate in read_records(path, parse, "pass rates")}


def check_same(prompt: Prompt, rate: PassRate, path: Path) -> None:
    """Raise ValueError if the pass rate was measured on a different prompt with the same ID."""
    if rate.digest != digest_of(prompt):
        raise ValueError(
            f"{path}: the pass rate of {prompt.prompt_id} belongs to another prompt: the data "
            "(or run.seed) has changed since it was sampled. Restore it, or run keel filter again"
        )
