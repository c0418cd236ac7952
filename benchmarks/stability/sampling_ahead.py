"""What waiting for long completions costs, and what not waiting does: a simulation, in no time.

    python -m benchmarks.stability.sampling_ahead

Runs `keel.rl.buffer.GroupBuffer`, as it is, against groups of lognormal durations, and beside it
the rule that takes whatever is ready first and drops what has grown older than the lag. Engines
have room for all slots at one speed, new weights take no time, and a step takes the trainer as long
as a group takes on average. Units are that average.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keel.rl.buffer import Batch, GroupBuffer, Lag
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory

LONG = 0.05
"""Share of all groups that count as long."""
SIGMAS, LAGS = (0.6, 1.0, 1.5), (1, 2, 4)
RULES = ("in order", "as ready")


class AsReady(GroupBuffer):
    """The first groups that are ready, without those that have grown stale: short ones."""

    def __init__(self, *, batch: int, lag: Lag, steps: int) -> None:
        super().__init__(batch=batch, lag=lag, steps=steps)
        self._size, self._bound, self._step = batch, lag.versions, 0
        self._engines: dict[int, int] = {}
        self._there: dict[int, ScoredGroup] = {}

    def submitted(self, prompt: Prompt) -> int:
        number = super().submitted(prompt)
        self._engines[number] = self._adopted
        return number

    def arrived(self, number: int, group: ScoredGroup) -> None:
        self._there[number] = group

    def ready(self) -> bool:
        for number in [n for n in self._there if self._engines[n] < self._step - self._bound]:
            del self._there[number]
            self._submitted -= 1
        return len(self._there) >= self._size

    def take(self) -> Batch:
        self._step += 1
        first = sorted(self._there)[: self._size]
        return Batch(groups=tuple(self._there.pop(number) for number in first))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run; durations in units of their mean, in no particular order."""

    sampled: np.ndarray
    trained: np.ndarray
    step: float
    """Mean duration of a step."""

    def mean(self) -> float:
        """Of what was trained on, relative to what was sampled."""
        return float(self.trained.mean() / self.sampled.mean())

    def long(self) -> float:
        """Share of the longest `LONG` of all that is sampled, among what was trained on."""
        return float((self.trained >= np.quantile(self.sampled, 1 - LONG)).mean()) / LONG


def simulate(
    make: Callable[..., GroupBuffer],
    *,
    lag: int,
    sigma: float,
    useless: float = 0.0,
    batch: int = 16,
    steps: int = 400,
    train: float = 1.0,
    seed: int = 0,
) -> Outcome:
    """A run of `steps`; `train`: what a step takes the trainer; `useless`: share of groups that
    teach nothing, whatever their length."""
    random = np.random.default_rng(seed)
    buffer = make(batch=batch, lag=Lag(batches=lag), steps=steps)
    durations: list[float] = []
    teaches: list[bool] = []
    flights: list[tuple[float, int, Prompt]] = []
    now = 0.0

    def fill() -> None:
        for _ in range(buffer.room()):
            durations.append(float(random.lognormal(-(sigma**2) / 2, sigma)))
            teaches.append(random.random() >= useless)
            name = str(len(durations) - 1)
            prompt = Prompt(prompt_id=name, domain="", messages=({"role": "user"},))
            ends = now + durations[-1]
            heapq.heappush(flights, (ends, buffer.submitted(prompt), prompt))

    def land() -> float:
        ends, number, prompt = heapq.heappop(flights)
        buffer.arrived(number, _scored(prompt, teaches=teaches[int(prompt.prompt_id)]))
        return ends

    trained: list[float] = []
    for step in range(1, steps + 1):
        fill()
        while not buffer.ready():
            fill()  # in the place of what was dropped
            now = max(now, land())
        groups = buffer.take().groups
        trained += [durations[int(group.group.prompt.prompt_id)] for group in groups]
        now += train
        while flights and flights[0][0] <= now:
            land()
        buffer.adopted(step)
    return Outcome(np.array(durations), np.array(trained), now / steps)


def _scored(prompt: Prompt, *, teaches: bool) -> ScoredGroup:
    return ScoredGroup(
        group=Group(prompt=prompt, trajectories=_ANSWERS),
        rewards_G=np.array([teaches, 0], np.float32),
        parts_G=({"correct": float(teaches)}, {"correct": 0.0}),
        advantages_G=np.array([0.5, -0.5], np.float32) * np.float32(teaches),
    )


def _answer(sibling: int) -> Trajectory:
    segment = Segment(
        prompt_id="any",
        token_ids_T=np.zeros(2, np.int32),
        trainable_T=np.array([False, True]),
        logp_old_T=np.zeros(2, np.float32),
        version_T=np.zeros(2, np.int32),
    )
    return Trajectory(
        prompt_id="any", sibling=sibling, segments=(segment,), finish_reason="stop", messages=()
    )


_ANSWERS = (_answer(0), _answer(1))
"""Of every group: nothing here looks at what they say."""


def table() -> str:
    """Markdown: mean duration and share of the longest trained on, and what a step takes."""
    lines = [
        "| σ | max_lag | rule | mean duration trained | longest 5 % trained | step |",
        "|---|---|---|---|---|---|",
    ]
    for sigma in SIGMAS:
        for lag in (0, *LAGS):
            for rule in RULES if lag else RULES[:1]:
                found = simulate(GroupBuffer if rule == RULES[0] else AsReady, lag=lag, sigma=sigma)
                lines.append(
                    f"| {sigma:g} | {lag} | {rule} | {found.mean():.2f} | {found.long():.0%} | "
                    f"{found.step:.2f} |"
                )
    return "\n".join(lines)


def longest_of(batch: int, sigma: float) -> float:
    """Mean of the longest of a batch."""
    random = np.random.default_rng(1)
    return float(np.exp(random.normal(-(sigma**2) / 2, sigma, (4000, batch))).max(1).mean())


if __name__ == "__main__":
    print(table())
    for sigma in SIGMAS:
        print(f"longest of 16 groups, σ {sigma:g}: {longest_of(16, sigma):.1f}")
