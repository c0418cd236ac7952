"""The table of `keel filter`: one JSON line per prompt with the results of its completions.

    {"id": "sums/7", "source": "sums", "domain": "maths", "samples": 100, "passes": 12,
     "pass_rate": 0.12, "score": 0.15, "unscored": 1, "dropped": {"late: …": 1}, "digest": "…"}

`passes` and `unscored` follow `keel.rl.evaluation`: a missing or unscored completion does not pass.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.data.items import digest
from keel.rl.evaluation import evaluation
from keel.rl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRate:
    """The pass rate of one prompt."""

    id: str
    """`Prompt.prompt_id`."""
    source: str
    domain: str
    samples: int
    """Completions requested."""
    passes: int
    score: float | None
    """Mean of `correct` over the completions, as in `evaluation`; None without a completion."""
    unscored: int
    dropped: Mapping[str, int]
    """Reason → missing completions."""
    digest: str
    """Digest of the messages and the reward spec."""

    def __post_init__(self) -> None:
        if not 0 <= self.passes <= self.samples or self.samples < 1:
            raise ValueError(f"{self.id}: {self.passes} passes of {self.samples} completions")

    @property
    def rate(self) -> float:
        return self.passes / self.samples

    @property
    def known(self) -> bool:
        """True if any completion has a score; otherwise a rate of 0 says nothing."""
        return self.unscored < self.samples

    def within(self, least: float, most: float) -> bool:
        """True if the prompt can be solved and its rate is in the range to train on."""
        return self.passes > 0 and least <= self.rate <= most

    def line(self) -> dict[str, Any]:
        return {**asdict(self), "pass_rate": self.rate}


def pass_rate_of(prompt: Prompt, source: str, groups: Sequence[ScoredGroup]) -> PassRate:
    """Compute the pass rate of a prompt over all groups of its completions."""
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
    request: list[Any] = [[dict(message) for message in prompt.messages], dict(prompt.reward)]
    return digest(json.dumps(request, sort_keys=True, default=str))


def read_pass_rates(path: Path) -> dict[str, PassRate]:
    """Prompt id → its last line, without an unfinished line at the end.

    Raises ValueError naming file and line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    rates: dict[str, PassRate] = {}
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line.decode("utf-8", "surrogatepass"))
            record.pop("pass_rate", None)
            rate = PassRate(**record)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a line of pass rates: {error}") from error
        rates[rate.id] = rate
    return rates


def check_same(prompt: Prompt, rate: PassRate, path: Path) -> None:
    """Raises ValueError if the rate belongs to another prompt with the same id."""
    if rate.digest != digest_of(prompt):
        raise ValueError(
            f"{path}: the pass rate of {prompt.prompt_id} belongs to another prompt: the data "
            "(or run.seed) has changed since it was sampled. Restore it, or run keel filter again"
        )
