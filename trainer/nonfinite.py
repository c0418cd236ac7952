"""Count steps with non-finite gradients and find the tokens that caused them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing import MicroBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, Segment

if TYPE_CHECKING:
    from torch import Tensor, nn  # learner imports this module without torch

SHOWN_FINDINGS = 3  # the maximum number of findings printed per step
_FINDINGS_PER_BATCH = 3
"""Maximum number of findings per micro-batch. Any further ones are consequences of the first."""


class SkipCounter:
    """Counts optimizer steps skipped because of a non-finite gradient. The gradient norm is global,
    so the count is the same on all ranks."""

    def __init__(self, limit: int) -> None:
        self._limit, self._in_a_row = limit, 0
        self.gave_up = ""  # the reason the run must end, or an empty string while it can continue

    def count(self, norm: float, version: int) -> bool:
        """Count the optimizer step that produces `version` of the weights. Returns True if the step
        was skipped because `norm` isn't finite."""
        skipped = not math.isfinite(norm)
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= self._limit:
            self.gave_up = (
                f"the gradient norm was {norm} in {self._in_a_row} optimizer steps in a row, the "
                f"last to version {version} (run.max_skipped_steps). The weights are unchanged. "
                "Try a lower trainer.lr or grad_clip, a smaller kl_coef or smaller rewards"
            )
        return skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A token with a non-finite value."""

    what: str
    token: int  # position of the token in its context
    token_ids_T: NDArray[np.int32]  # all token ids of that context
    certain: bool = True
    """False if the value is finite and is reported only because it is the largest."""


def describe_findings(
    findings: Sequence[Finding], groups: Sequence[ScoredGroup | SftExample]
) -> tuple[str, ...]:
    """Describe each finding in a single line that names its completion. Uncertain findings are
    listed only if there are no certain ones."""
    names: dict[bytes, str] = {}

    def add(name: str, segments: Sequence[Segment]) -> None:
        for index, segment in enumerate(segments, 1):
            context = f", context {index}" if len(segments) > 1 else ""
            key = np.ascontiguousarray(segment.token_ids_T, np.int32).tobytes()
            names[key] = name + context

    for group in groups:
        if isinstance(group, SftExample):
            add(f"conversation {group.prompt_id}", group.segments)
            continue
        for one in group.group.trajectories:
            add(f"{one.prompt_id}, completion {one.sibling + 1}", one.segments)

    def describe(finding: Finding) -> str:
        name = names.get(finding.token_ids_T.tobytes(), "a context of no completion")
        token_id = finding.token_ids_T[finding.token]
        return f"{name}, token {finding.token} (id {token_id}): {finding.what}"

    chosen = [finding for finding in findings if finding.certain] or findings
    return tuple(dict.fromkeys(map(describe, chosen)))


class NanTracer:
    """Finds the first non-finite value in the forward and backward passes of micro-batches."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """`layers` are the decoder layers in order, or an empty list if they are compiled."""
        self._layers = layers
        self.findings: list[Finding] = []
        self.factor = 1.0
        """Factor applied to the loss. Set it to NaN to make every gradient NaN."""

    @contextmanager
    def trace(self, batch: MicroBatch, start: int) -> Iterator[None]:
        """Return a context that traces the micro-batch run inside it. `start` is the index of the
        first token in this rank's shard of the micro-batch."""
        self._start = start
        self._outputs: list[tuple[int, str]] = []
        """Rows of the first non-finite layer output, each with a description."""
        self._gradients: list[tuple[int, str]] = []
        """Rows of the last layer output with a non-finite gradient, each with a description."""
        self._values: list[tuple[str, Tensor]] = []
        """Names and values [R] for the sampled tokens, in the order of computation."""
        self._loss = 0.0
        self._slope: Tensor | None = None
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                stack.callback(layer.register_forward_hook(self._hook(index)).remove)
            yield
        self.findings += self._find(batch)[:_FINDINGS_PER_BATCH]

    def observe(
        self, logp_R: Tensor, reference_R: Tensor | None, kl_coef_R: Tensor, loss: Tensor
    ) -> None:
        self._loss = float(loss.detach())
        self._values.append(("log-probability", logp_R.detach()))
        if reference_R is not None:
            used = reference_R.where(kl_coef_R > 0, 0.0)
            self._values.append(("the reference's log-probability", used))

        def take_slope(gradient: Tensor) -> None:
            self._slope = gradient.detach()
            self._values.append(("slope of the loss", self._slope))

        if logp_R.requires_grad:  # not with `trainer.attention: warm-up`
            logp_R.register_hook(take_slope)

    def _hook(self, index: int) -> Any:
        def forward(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            what = f"not finite from the output of layer {index} on"
            self._outputs = self._outputs or self._bad_rows(hidden, what)
            if hidden.requires_grad:
                hidden.register_hook(backward)

        def backward(gradient: Tensor) -> None:
            what = f"its gradient is not finite behind layer {index}"
            self._gradients = self._gradients or self._bad_rows(gradient, what)

        return forward

    def _bad_rows(self, values: Tensor, what: str) -> list[tuple[int, str]]:
        bad = (~values.detach().isfinite()).any(-1).flatten().nonzero().flatten()
        return [(self._start + row, what) for row in bad.tolist()]

    def _find(self, batch: MicroBatch) -> list[Finding]:
        sampled = np.flatnonzero(batch.trainable_N)
        values = [
            [(int(sampled[r]), f"{name} is {float(values_R[r])}") for r in bad.tolist()]
            for name, values_R in self._values
            for bad in ((~values_R.isfinite()).nonzero().flatten(),)
        ]
        for bad in (self._outputs, *values, self._gradients):
            if bad:
                return [_finding(batch, row, what) for row, what in bad]
        if not self._values or not len(sampled):
            return []
        row, what = 0, f"the loss of its micro-batch is {self._loss:.3g}"
        if (slope := self._slope) is not None:
            row = int(slope.abs().argmax())
            what += (
                f", steepest here, with a slope of {float(slope[row]):.3g} and an advantage of "
                f"{float(batch.advantage_N[sampled[row]]):.3g}"
            )
        certain = not math.isfinite(self._loss)
        return [_finding(batch, int(sampled[row]), what, certain=certain)]


def _finding(batch: MicroBatch, row: int, what: str, *, certain: bool = True) -> Finding:
    row = min(row, len(batch.token_ids_N) - 1)  # padding
    rows = batch.context_rows(int(batch.segment_N[row]))
    return Finding(
        what=what,
        token=int(batch.position_N[row]),
        token_ids_T=batch.token_ids_N[rows],
        certain=certain,
    )
