"""The jobs of an engine.

A job samples either a group of completions or one turn of a conversation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import NO_ROUTE, Group, Prompt, SamplingMasks, Segment, Trajectory
from keel.rollout.engine.conversion import RenderedPrompt, split_message
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
class Job(ABC):
    """One or more requests that together produce one result."""

    label: str
    """Name of the job, for log messages."""
    context: Sequence[int] | NDArray[np.int32]
    sampling: SamplingConfig
    recording: RecordingOptions
    stop_ids: tuple[int, ...] = ()
    conversation: str = ""
    decode: bool = True
    """Decode completions to text."""
    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Maps the name of each unfinished request to its number within the group."""
    dropped: list[str] = field(default_factory=list[str])
    cut: bool = False
    """True if the job has reached its deadline. Each unfinished request then ends with its next
    token."""

    @abstractmethod
    def add(self, sibling: int, completion: Completion) -> None: ...

    @abstractmethod
    def result(self) -> Result: ...


@dataclass(slots=True, kw_only=True)
class GroupJob(Job):
    prompt: Prompt
    thinking: bool
    done: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        rendered: RenderedPrompt,
        sampling: SamplingConfig,
        recording: RecordingOptions,
    ) -> GroupJob:
        return cls(
            label=f"prompt {prompt.prompt_id}",
            context=rendered.token_ids,
            sampling=sampling,
            recording=recording,
            prompt=prompt,
            thinking=rendered.thinking,
        )

    def add(self, sibling: int, completion: Completion) -> None:
        recording, prompt_id = completion.recording, self.prompt.prompt_id
        if not np.isfinite(recording.logp).all():
            self.dropped.append(NOT_FINITE)
            return
        segment = build_segment(
            prompt_id,
            self.context,
            completion.ids,
            logp=recording.logp,
            versions=completion.versions,
            sampling_mask=recording.sampling_mask,
            routes=recording.routes,
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
class TurnJob(Job):
    done: TurnResult | LostTurn | None = None

    @classmethod
    def of(
        cls, request: TurnRequest, sampling: SamplingConfig, recording: RecordingOptions
    ) -> TurnJob:
        routes_from = request.routes_from if recording.routes else 0
        return cls(
            label=f"conversation {request.conversation}",
            context=request.token_ids_T,
            sampling=replace(sampling, max_tokens=request.max_tokens),
            recording=replace(recording, routes_from=routes_from),
            stop_ids=request.stop_ids,
            conversation=request.conversation,
            decode=False,
        )

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


def build_segment(
    prompt_id: str,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    sampled_ids: Sequence[int],
    *,
    logp: NDArray[np.float32],
    versions: NDArray[np.int32],
    sampling_mask: SamplingMasks | None = None,
    routes: NDArray[np.int16] | None = None,
) -> Segment:
    """Build the segment of one turn with P prompt tokens and G sampled tokens.

    Shapes: `logp` and `versions` [G], `sampling_mask` G spans, `routes` [P+G−1, L, K]. Routes are
    aligned with the input tokens, so the last token has none. Raises ValueError if the lengths do
    not match.
    """
    prompt, tokens = len(prompt_ids), len(prompt_ids) + len(sampled_ids)
    if routes is not None:
        routes = np.concatenate([routes, np.full((1, *routes.shape[1:]), NO_ROUTE, np.int16)])
    if sampling_mask is not None:
        sampling_mask = SamplingMasks.concat([SamplingMasks.empty(prompt), sampling_mask])
    return Segment(
        prompt_id=prompt_id,
        token_ids_T=np.array([*prompt_ids, *sampled_ids], np.int32),
        trainable_T=np.arange(tokens) >= prompt,
        logp_old_T=np.concatenate([np.zeros(prompt, np.float32), logp]),
        version_T=np.concatenate([np.full(prompt, -1, np.int32), versions]),
        routes_TLK=routes,
        sampling_mask=sampling_mask,
    )
