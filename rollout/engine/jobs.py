"""The jobs of an engine: a group of completions, or one turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnResult
from keel.rl.types import NO_ROUTE, Group, Prompt, SamplingMasks, Segment, Trajectory
from keel.rollout.engine.conversion import split_message
from keel.rollout.recording.base import Recording, RecordingOptions
from keel.rollout.spec import LostTurn

Result = Group | TurnResult | LostTurn
"""The result of a job. An error in a turn is returned as a value, because raising it during a step
would stop the engine."""
NOT_FINITE = (
    "not finite: a token's log-probability is not a number. The model's logits may overflow in "
    "rollout.dtype"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The N tokens sampled for one request."""

    ids: Sequence[int]
    text: str
    """Decoded text without special tokens. Empty for a turn, which is decoded by the chat format
    instead."""
    recording: Recording
    versions: NDArray[np.int32]
    """[N] weight version with which each token was sampled."""
    finish_reason: Literal["stop", "length", "deadline"]
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class _Job:
    """One or more requests that together produce one result."""

    label: str
    """Name of the job, for log messages."""
    context: Sequence[int] | NDArray[np.int32]
    sampling: SamplingConfig
    recording: RecordingOptions
    stop_ids: tuple[int, ...] = ()
    conversation: str = ""
    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Maps the name of each unfinished request to its number within the group."""
    dropped: list[str] = field(default_factory=list[str])
    cut: bool = False
    """True if the job has reached its deadline. Each unfinished request then ends with its next
    token."""


@dataclass(slots=True, kw_only=True)
class GroupJob(_Job):
    prompt: Prompt
    thinking: bool
    done: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])

    def add(self, sibling: int, completion: Completion) -> None:
        """Add a completion as a trajectory with one segment of P prompt and G sampled tokens.
        Raises ValueError if the lengths of the recorded arrays do not match."""
        recording, prompt_id = completion.recording, self.prompt.prompt_id
        prompt = len(self.context)
        if not np.isfinite(recording.logp).all():
            self.dropped.append(NOT_FINITE)
            return
        routes, masks = recording.routes, recording.sampling_mask
        if routes is not None:  # [P+G−1, L, K], aligned with the input: the last token has none
            routes = np.concatenate([routes, np.full((1, *routes.shape[1:]), NO_ROUTE, np.int16)])
        if masks is not None:
            masks = SamplingMasks.concat([SamplingMasks.empty(prompt), masks])
        segment = Segment(
            prompt_id=prompt_id,
            token_ids_T=np.array([*self.context, *completion.ids], np.int32),
            trainable_T=np.arange(prompt + len(completion.ids)) >= prompt,
            logp_old_T=np.concatenate([np.zeros(prompt, np.float32), recording.logp]),
            version_T=np.concatenate([np.full(prompt, -1, np.int32), completion.versions]),
            routes_TLK=routes,
            sampling_mask=masks,
        )
        self.done[sibling] = Trajectory(
            prompt_id=prompt_id,
            sibling=sibling,
            segments=(segment,),
            finish_reason=completion.finish_reason,
            messages=(split_message(completion.text, thinking=self.thinking),),
        )

    def result(self) -> Group:
        trajectories = tuple(self.done[sibling] for sibling in sorted(self.done))
        return Group(prompt=self.prompt, trajectories=trajectories, dropped=tuple(self.dropped))


@dataclass(slots=True, kw_only=True)
class TurnJob(_Job):
    done: TurnResult | LostTurn | None = None

    def add(self, sibling: int, completion: Completion) -> None:
        recording = completion.recording
        if not np.isfinite(recording.logp).all():
            self.done = LostTurn(NOT_FINITE)
            return
        self.done = TurnResult(
            token_ids_N=np.array(completion.ids, np.int32),
            logp_old_N=recording.logp,
            version_N=completion.versions,
            finish_reason=completion.finish_reason,
            routes_RLK=recording.routes,
            sampling_mask=recording.sampling_mask,
            cached_tokens=completion.cached_tokens,
        )

    def result(self) -> TurnResult | LostTurn:
        """Return the turn. It has no tokens if the deadline passed before the first token was
        sampled."""
        return self.done or TurnResult(
            token_ids_N=np.zeros(0, np.int32),
            logp_old_N=np.zeros(0, np.float32),
            version_N=np.zeros(0, np.int32),
            finish_reason="deadline",
        )


Job = GroupJob | TurnJob
