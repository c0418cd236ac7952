"""Adjusts rewards for the length of completions, and handles truncated completions.

There are two length penalties, in units of reward. With n tokens sampled in all turns:

    linear:    linear · max(0, n − target) / (limit − target)
    overlong:  overlong · clip((n − (limit − margin)) / margin, 0, 1)

`linear` is centred over the right completions of a group: c_i = mean(penalty) − penalty_i. With
`wrong_too`, it is also centred over the wrong ones. Centring leaves the mean reward of right and of
wrong completions unchanged, and changes nothing if all completions of a group have the same length.

`overlong` is the soft overlong punishment of DAPO (arXiv 2503.14476, Eq. 13), with L_max = limit
and L_cache = margin. DAPO subtracts it from every completion. `overlong_charges: all` centres it
over the whole group, which gives the same advantages. `overlong_charges: right` is not in DAPO. It
centres the penalty like `linear`, so that a wrong completion loses nothing by being truncated.

If necessary, all adjustments c of a group are then scaled down until every right completion keeps
half of its lead over each wrong one. This is not in DAPO either. With `may_outweigh`, nothing is
scaled, and both penalties are centred over the whole group. A short wrong completion can then beat
a long right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from keel.configs.sections.data import LengthConfig
from keel.rewards.compose import Score
from keel.rl.types import Trajectory

_Floats = NDArray[np.float64]
_KEPT_LEAD = 0.5
"""The fraction of its lead over wrong completions that a right completion always keeps."""
_LENGTH, _LENGTH_COST = "length", "length_cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule(LengthConfig):
    """A domain's length penalties with their limit and margin in tokens."""

    limit: int = 1
    margin: int = 1

    def check(self) -> None:
        self.require(self.target < self.limit, "target", f"must be below limit = {self.limit}")
        ok = 1 <= self.margin <= self.limit
        self.require(ok, "margin", f"must be from 1 to limit = {self.limit}")

    @staticmethod
    def from_knobs(knobs: LengthConfig, *, limit: int) -> LengthRule:
        """Create the rule from a source's knobs. `limit` is used if they set none."""
        fields = asdict(knobs)
        fields["limit"] = fields["limit"] or limit
        fields["margin"] = fields["margin"] or max(1, fields["limit"] // 5)
        return LengthRule(**fields)

    @property
    def active(self) -> bool:
        return self.linear > 0 or self.overlong > 0

    def penalty(self, tokens_G: NDArray[np.int64]) -> _Floats:
        """Return the sum of each completion's linear and overlong penalties: [G], in units of
        reward, all ≥ 0."""
        linear, overlong = self._penalties(tokens_G)
        return linear + overlong

    def _penalties(self, tokens_G: NDArray[np.int64]) -> tuple[_Floats, _Floats]:
        above = np.maximum(0.0, tokens_G - np.float64(self.target))
        late = (tokens_G - np.float64(self.limit - self.margin)) / self.margin
        linear = self.linear * above / (self.limit - self.target)
        return linear, self.overlong * np.clip(late, 0.0, 1.0)

    def adjustment(
        self, rewards_G: _Floats, correct_G: _Floats, tokens_G: NDArray[np.int64]
    ) -> _Floats:
        """Return how much to add to each reward, [G]. `correct_G` holds each completion's reward
        part `correct`, from 0 to 1."""
        right = correct_G >= self.correct_threshold
        every = np.ones_like(right)
        if self.may_outweigh:
            return _centre_penalties(self.penalty(tokens_G), every)
        to_all = self.overlong_charges == "all"
        linear, overlong = self._penalties(tokens_G)
        cost = linear if to_all else linear + overlong
        added = _centre_penalties(cost, right)
        if self.wrong_too:
            added += _centre_penalties(cost, ~right)
        if to_all:
            added += _centre_penalties(overlong, every)
        lead = rewards_G[right][:, None] - rewards_G[~right][None, :]
        lost = added[~right][None, :] - added[right][:, None]
        excessive = (lead > 0) & (lost > (1 - _KEPT_LEAD) * lead)
        if excessive.any():
            added *= ((1 - _KEPT_LEAD) * lead[excessive] / lost[excessive]).min()
        return added


def apply_length_rule(
    scores: Sequence[Score], trajectories: Sequence[Trajectory], rule: LengthRule
) -> list[Score]:
    """Apply a length rule to a group's scores, and add the parts `length` and `length_cost` to
    them."""
    tokens = np.array([trajectory.sampled_tokens for trajectory in trajectories], np.int64)
    crashed = np.array([each.finish_reason == "crash" for each in trajectories], np.bool_)
    tokens[crashed] = tokens.max(initial=0)  # a crash must not gain by being short
    added = rule.adjustment(
        np.array([score.value for score in scores], np.float64),
        np.array([score.parts["correct"] for score in scores], np.float64),
        tokens,
    )
    return [
        Score(score.value + more, {**score.parts, _LENGTH: more, _LENGTH_COST: cost})
        for score, more, cost in zip(
            scores, added.tolist(), rule.penalty(tokens).tolist(), strict=True
        )
    ]


def _centre_penalties(cost: _Floats, members: NDArray[np.bool_]) -> _Floats:
    added = np.zeros_like(cost)
    if members.any():
        inside = cost[members]
        # Relative to the first, so that equal costs give exactly 0.
        above = inside - inside[0]
        added[members] = above.mean() - above
    return added
