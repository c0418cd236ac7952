"""Numbers that go wrong: counting steps that were skipped, and finding the token that is to blame.

On a trainer's rank. Knows neither DeepSpeed nor Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from keel.rl.packing import MicroBatch
from keel.rl.sft import SftExample
from keel.rl.types import ScoredGroup, Segment

if TYPE_CHECKING:  # the driver, which hands findings on, does without
    from torch import Tensor, nn

SAID = 3
"""Findings about a step that people are told."""
MOST = 3
"""Findings of a micro-batch that are handed on: what follows the first has caught it from that."""


class Skips:
    """Optimizer steps without a finite gradient: the same on all ranks, as the norm is."""

    def __init__(self, most: int) -> None:
        """most: so many in a row end the run."""
        self._most, self._in_a_row = most, 0
        self.gave_up = ""
        """Why no step is to follow; "" while one is."""

    def count(self, norm: float, version: int) -> bool:
        """Whether the step to `version` was skipped for its gradient norm."""
        skipped = not math.isfinite(norm)
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= self._most:
            self.gave_up = (
                f"the gradient norm was {norm} in {self._in_a_row} optimizer steps in a row, the "
                f"last to version {version} (run.max_skipped_steps); weights are as before them. "
                "A lower trainer.lr or grad_clip, a smaller kl_coef or smaller rewards may cure it"
            )
        return skipped


def sound(loss: Tensor) -> Tensor:
    """1 for a loss that is finite, else NaN: a factor that takes it into every gradient, so that
    the norm, which all ranks know, tells them all to skip the step."""
    return loss.detach() * 0 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What about a token is not finite."""

    what: str
    token: int
    """Position in its context."""
    token_ids_T: NDArray[np.int32]
    """All tokens of that context."""
    certain: bool = True
    """Whether a number is not finite, or only larger than others."""

    def said(self, names: Mapping[bytes, str]) -> str:
        """names: as of `names_of`."""
        name = names.get(self.token_ids_T.tobytes(), "a context of no completion")
        return f"{name}, token {self.token} (id {self.token_ids_T[self.token]}): {self.what}"


def said_of(
    findings: Sequence[Finding], groups: Sequence[ScoredGroup | SftExample]
) -> tuple[str, ...]:
    """A line for each of the findings of all ranks that explain something."""
    names = names_of(groups)
    chosen = [finding for finding in findings if finding.certain] or findings
    return tuple(dict.fromkeys(finding.said(names) for finding in chosen))


def names_of(groups: Sequence[ScoredGroup | SftExample]) -> dict[bytes, str]:
    """Contexts, by their tokens → whose they are."""
    return {
        np.ascontiguousarray(segment.token_ids_T, np.int32).tobytes(): (
            name + (f", context {index + 1}" if len(segments) > 1 else "")
        )
        for group in groups
        for name, segments in _named(group)
        for index, segment in enumerate(segments)
    }


def _named(group: ScoredGroup | SftExample) -> list[tuple[str, Sequence[Segment]]]:
    if isinstance(group, SftExample):
        return [(f"conversation {group.prompt_id}", group.segments)]
    return [
        (f"{trajectory.prompt_id}, completion {trajectory.sibling + 1}", trajectory.segments)
        for trajectory in group.group.trajectories
    ]


class Look:
    """Watches micro-batches on their way through the network and back."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """layers: decoder layers, first to last; none where hooks would disturb what they are
        compiled to."""
        self._layers = layers
        self.found: list[Finding] = []
        self._factor = 1.0
        self._clear()

    def _clear(self) -> None:
        self._bad_layer: tuple[int, Tensor] | None = None
        """The first whose output is not finite, and in which rows."""
        self._bad_gradient: tuple[int, Tensor] | None = None
        """The last whose output's gradient is not finite, and in which rows."""
        self._loss = 0.0
        self._values: list[tuple[str, Tensor]] = []
        """Name and [R] values about sampled tokens, in the order that they depend on each other."""
        self._slope: Tensor | None = None
        """[R]: the last of them, once it is known."""

    @contextmanager
    def at(self, batch: MicroBatch, start: int) -> Iterator[None]:
        """Within it the micro-batch goes through. start: of this rank's part of its tokens."""
        self._clear()
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers):
                handle = layer.register_forward_hook(self._hook(index))
                stack.callback(handle.remove)
            yield
        self.found += self._findings(batch, start)[:MOST]

    def saw(
        self, logp_R: Tensor, reference_R: Tensor | None, kl_coef_R: Tensor, loss: Tensor
    ) -> float:
        """Before the backward pass: the policy's and the reference's log-probabilities. Returns
        what to multiply the loss with."""
        self._loss = float(loss.detach())
        self._values.append(("log-probability", logp_R.detach()))
        if reference_R is not None:
            used = reference_R.where(kl_coef_R > 0, 0.0)
            self._values.append(("the reference's log-probability", used))
        if logp_R.requires_grad:  # no loss that has it, else: `trainer.attention: warm-up`
            logp_R.register_hook(self._sloped)
        return self._factor

    def spoiling(self) -> Self:
        """From now on no gradient is finite, whatever it was made of."""
        self._factor = math.nan
        return self

    def _sloped(self, gradient: Tensor) -> None:
        self._slope = gradient.detach()
        self._values.append(("slope of the loss", self._slope))

    def _hook(self, index: int) -> Any:
        def seen(module: nn.Module, inputs: Any, output: Any) -> None:
            hidden: Tensor = output[0] if isinstance(output, tuple) else output
            if self._bad_layer is None and (rows := _bad_rows(hidden)) is not None:
                self._bad_layer = index, rows
            if hidden.requires_grad:
                hidden.register_hook(back)

        def back(gradient: Tensor) -> None:
            if self._bad_gradient is None and (rows := _bad_rows(gradient)) is not None:
                self._bad_gradient = index, rows

        return seen

    def _findings(self, batch: MicroBatch, start: int) -> list[Finding]:
        sampled = np.flatnonzero(batch.trainable_N)
        if self._bad_layer is not None:
            index, rows = self._bad_layer
            what = f"not finite from the output of layer {index} on"
            return [_finding(batch, start + int(row), what) for row in rows]
        for name, values in self._values:
            bad = (~values.isfinite()).nonzero().flatten().tolist()
            if bad:
                return [
                    _finding(batch, int(sampled[r]), f"{name} is {float(values[r])}") for r in bad
                ]
        if self._bad_gradient is not None:
            index, rows = self._bad_gradient
            what = f"its gradient is not finite behind layer {index}"
            return [_finding(batch, start + int(row), what) for row in rows]
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


def _bad_rows(values: Tensor) -> Tensor | None:
    """Of [1, T, d]: rows that are not finite; None where all are."""
    bad = (~values.detach().isfinite()).any(-1).flatten().nonzero().flatten()
    return bad.cpu() if len(bad) else None


def _finding(batch: MicroBatch, row: int, what: str, *, certain: bool = True) -> Finding:
    row = min(row, len(batch.token_ids_N) - 1)  # filling behind the end
    mine = batch.context_rows(int(batch.segment_N[row]))
    return Finding(
        what=what,
        token=int(batch.position_N[row]),
        token_ids_T=batch.token_ids_N[mine],
        certain=certain,
    )
