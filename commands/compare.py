"""`keel compare`: compare two evaluations prompt by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keel.configs.schema import ConfigError
from keel.data.eval_store import read_evaluation
from keel.data.results import align_columns, sets_of

_RESAMPLES = 4000  # number of bootstrap resamples, and of sign flips
_CHUNK = 1 << 22  # maximum number of random numbers to draw at once


def compare(first: str, second: str) -> str:
    """Compare pass@1 on the prompts that two `keel eval` folders have in common, and return a
    table. Raises ConfigError if they share no prompts, or if prompts with the same name differ."""
    before, after = (read_evaluation(Path(folder)) for folder in (first, second))
    earlier = {(one.variant, one.id): one for one in before}
    pairs = [(earlier[key], one) for one in after if (key := (one.variant, one.id)) in earlier]
    both = f"{first}, {second}"
    if not pairs:
        raise ConfigError(
            f"{both}: the two evaluations have no prompt of the same variant in common"
        )
    for one, other in pairs:
        if one.digest != other.digest:
            raise ConfigError(f"{both}: the two evaluations have different prompts called {one.id}")
    rows = [["", "pairs", "pass@1", "95 %", "p"]]
    variants = dict.fromkeys(other.variant for _, other in pairs)
    for variant in variants:
        chosen = [pair for pair in pairs if pair[1].variant == variant]
        rates = [[one.passes / one.number for one in pair] for pair in chosen]
        for name, places in sets_of([other for _, other in chosen]).items():
            of = _paired_difference(*zip(*(rates[n] for n in places), strict=True))
            title = f"{variant}: {name}" if len(variants) > 1 else name
            interval = f"{of.low:+.3f} … {of.high:+.3f}"
            rows.append([title, f"{len(places):,}", f"{of.mean:+.3f}", interval, f"{of.p:.4f}"])
    return "\n".join([f"{second} − {first}:", *align_columns(rows)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The difference between two measurements on the same prompts: second mean minus first mean."""

    mean: float
    low: float
    high: float  # upper end of the 95 % bootstrap interval over prompts; `low` is the lower end
    p: float  # P-value of the sign-flip permutation test over prompts


def _paired_difference(first_P: Sequence[float], second_P: Sequence[float]) -> _Difference:
    """Compare two measurements on the same prompts. The result is deterministic."""
    d_P = np.asarray(second_P, float) - np.asarray(first_P, float)
    rng, prompts, mean = np.random.default_rng(0), len(d_P), float(d_P.mean())
    means, flipped = list[float](), list[float]()
    while len(means) < _RESAMPLES:
        draws = min(_RESAMPLES - len(means), max(1, _CHUNK // prompts))
        means += d_P[rng.integers(0, prompts, (draws, prompts))].mean(1).tolist()
        signs = rng.integers(0, 2, (draws, prompts)) * 2 - 1
        flipped += (signs * d_P).mean(1).tolist()
    low, high = np.quantile(means, (0.025, 0.975))
    extreme = int((np.abs(flipped) >= abs(mean) - 1e-12).sum())
    return _Difference(
        mean=mean, low=float(low), high=float(high), p=(1 + extreme) / (1 + _RESAMPLES)
    )
