"""Computes the expected recordings with transformers in float32."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from keel.configs.schema import SamplingConfig
from keel.rl.types import Group, Segment, Trajectory
from tests.rollout.tiny_model import DENSE_LAYER


@dataclass(frozen=True)
class Tolerance:
    logp: float = 1e-4
    tie: float = 1e-5
    """Two scores or probabilities that differ by less than this may be in either order."""
    rare: float = 2e-3
    """Largest fraction of ties that is accepted."""


@dataclass
class Report:
    routes: int = 0
    route_ties: int = 0
    kept: int = 0
    kept_ties: int = 0
    tokens: int = 0
    kept_sizes: list[int] = field(default_factory=list)
    surprise: float = 0.0
    """Sum of log p(token) minus its expectation; 0 on average if tokens are drawn from p."""
    surprise_variance: float = 0.0

    def assert_rare(self, tolerance: Tolerance) -> None:
        assert self.tokens > 0
        assert self.route_ties <= max(1, tolerance.rare * self.routes), self
        assert self.kept_ties <= max(1, tolerance.rare * self.kept), self


class Reference:
    """Computes expected recordings with transformers in float32, one trajectory at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.older: dict[int, PreTrainedModel] = {}
        """Earlier versions of the model, oldest first."""
        self.scores: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(model.model.layers):
            if index != DENSE_LAYER:
                layer.mlp.gate.register_forward_hook(
                    lambda gate, args, output, index=index: self._routed(index, gate, args)
                )

    def _routed(self, layer: int, gate: Any, args: Any) -> None:
        hidden = args[0].detach().reshape(-1, gate.weight.shape[1])
        self.scores[layer] = (hidden @ gate.weight.T).softmax(-1)

    @torch.no_grad()
    def check(
        self, trajectory: Trajectory, sampling: SamplingConfig, report: Report, tolerance: Tolerance
    ) -> None:
        """Check masks and log-probabilities against the weights that sampled each token. Routes are
        checked against the weights that sampled the next token."""
        for segment in trajectory.segments:
            self._check_segment(segment.loaded({}), sampling, report, tolerance)

    def _check_segment(
        self, segment: Segment, sampling: SamplingConfig, report: Report, tolerance: Tolerance
    ) -> None:
        ids = torch.from_numpy(segment.token_ids_T).long()
        sampled = np.flatnonzero(segment.trainable_T)
        versions = segment.version_T[sampled]
        used = {v: self.older.get(v, self.model) for v in sorted(set(versions.tolist()))}
        by_version: dict[int, torch.Tensor] = {}
        assert segment.routes_TLK is not None and (segment.routes_TLK[-1] == -1).all()
        after = np.searchsorted(sampled, np.arange(len(ids) - 1), side="right")
        next_version = versions[after]
        for version, model in used.items():
            by_version[version] = model(ids[None]).logits[0].float()
            rows = np.flatnonzero(next_version == version)
            self._check_routes(segment.routes_TLK, rows, report, tolerance)
        scaled = torch.stack(
            [
                by_version[int(v)][token - 1] / sampling.temperature
                for token, v in zip(sampled.tolist(), versions, strict=True)
            ]
        )
        for token, row in zip(sampled.tolist(), scaled, strict=True):
            kept = None
            if sampling.truncated:
                assert segment.sampling_mask is not None
                kept = torch.from_numpy(segment.sampling_mask[token]).long()
                self._check_kept(row, kept, sampling, report, tolerance)
            support = row if kept is None else row[kept]
            expected = float(row[ids[token]] - support.logsumexp(-1))
            assert abs(expected - segment.logp_old_T[token]) < tolerance.logp, (token, expected)
            report.tokens += 1
            logp = support.log_softmax(-1)
            mean = (logp.exp() * logp).sum()
            report.surprise += expected - float(mean)
            report.surprise_variance += float((logp.exp() * (logp - mean) ** 2).sum())
        if not sampling.truncated:
            assert segment.sampling_mask is None

    def _check_routes(
        self, routes: np.ndarray, rows: np.ndarray, report: Report, tolerance: Tolerance
    ) -> None:
        assert routes.shape[1] == len(self.scores)
        for row, layer in enumerate(sorted(self.scores)):
            scores = self.scores[layer][torch.from_numpy(rows)]
            recorded = torch.from_numpy(routes[rows, row].astype(np.int64))
            assert (recorded >= 0).all()
            width = recorded.shape[1]
            ranked = scores.topk(width + 1)
            same = (recorded.sort(-1).values == ranked.indices[:, :width].sort(-1).values).all(-1)
            tied = ranked.values[:, width - 1] - ranked.values[:, width] < tolerance.tie
            assert (same | tied).all(), f"layer {layer}: {int((~same & ~tied).sum())} wrong routes"
            report.routes += len(same)
            report.route_ties += int((~same).sum())

    @staticmethod
    def _check_kept(
        row: torch.Tensor,
        kept: torch.Tensor,
        sampling: SamplingConfig,
        report: Report,
        tolerance: Tolerance,
    ) -> None:
        report.kept += 1
        report.kept_sizes.append(len(kept))
        exact = _truncate(row, sampling.top_k, sampling.top_p, 0.0)
        recorded = torch.zeros_like(exact)
        recorded[kept] = True
        if (recorded != exact).any():
            report.kept_ties += 1
            least = _truncate(row, sampling.top_k, sampling.top_p, -tolerance.tie)
            most = _truncate(row, sampling.top_k, sampling.top_p, tolerance.tie)
            assert (recorded | ~least).all() and (most | ~recorded).all(), "wrong sampling mask"


def trajectory_of(segment: Segment) -> Trajectory:
    return Trajectory(
        prompt_id=segment.prompt_id,
        sibling=0,
        segments=(segment,),
        finish_reason="stop",
        messages=(),
    )


def _truncate(row: torch.Tensor, top_k: int, top_p: float, slack: float) -> torch.Tensor:
    """Return which ids are kept by top-k followed by top-p. A positive `slack` loosens both bounds,
    and a negative one tightens them. Ids within `slack` of a bound count as ties."""
    if top_k:
        row = row.masked_fill(row < row.topk(top_k).values[-1] - slack, -torch.inf)
    if top_p == 1:
        return row.isfinite()
    if slack:
        above = (row > row[:, None] + slack).fill_diagonal_(False)
        return ((above * row.softmax(-1)).sum(-1) < top_p + slack) & row.isfinite()
    ranked, order = row.sort(descending=True)
    share = ranked.softmax(-1)
    before = share.cumsum(-1) - share
    kept = torch.zeros_like(row, dtype=torch.bool)
    kept[order] = (before < top_p) & ranked.isfinite()
    return kept


def check_groups(
    groups: Sequence[Group], reference: Reference, sampling: SamplingConfig, tolerance: Tolerance
) -> Report:
    """Check all trajectories in the groups, and check that ties are rare."""
    report = Report()
    for group in groups:
        assert not group.dropped
        for trajectory in group.trajectories:
            reference.check(trajectory, sampling, report, tolerance)
    report.assert_rare(tolerance)
    return report
