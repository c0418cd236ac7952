"""What an engine is asked for: a group of completions, or one turn of a conversation; and who is
asked, as a Protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rl.types import Group, Prompt, Trajectory
from keel.rollout.engine.conversion import (
    RenderedPrompt,
    build_segment,
    build_trajectory,
)
from keel.rollout.recording.base import Recording, Wanted
from keel.rollout.spec import LostTurn
from keel.weights.buckets import Bucket
from keel.weights.channel import Rendezvous

Result = Group | TurnResult | LostTurn
"""A turn's error is data: raised in a step, it would end the engine."""
Ids = Sequence[int] | NDArray[np.int32]


class SamplingEngine(Protocol):
    """What the thread drives; see `keel.rollout.engine.vllm_engine.VllmEngine`."""

    version: int
    sampled_tokens: int
    steps: int

    @property
    def fast_steps(self) -> int: ...

    @property
    def busy(self) -> bool:
        """Whether a step would get on with a completion."""
        ...

    @property
    def whole(self) -> bool:
        """Whether its weights are, so that completions can be begun."""
        ...

    @property
    def recordings(self) -> int: ...
    def add(
        self,
        job: int,
        prompt: Prompt,
        *,
        group_size: int,
        sampling: SamplingConfig,
        record: bool,
        draw: int,
    ) -> None: ...
    def add_turn(
        self, job: int, request: TurnRequest, *, sampling: SamplingConfig, record: bool
    ) -> None: ...
    def step(self) -> Iterable[tuple[int, Result]]: ...
    def abort(self, job: int) -> None: ...
    def cut(self, job: int) -> Iterable[tuple[int, Result]]: ...
    def give_up(self, job: int) -> Iterable[tuple[int, Result]]: ...
    def gpus(self) -> list[str]: ...
    def join(self, rendezvous: Rendezvous, name: str) -> None: ...
    def sleep(self) -> Iterable[tuple[int, Result]]: ...
    def begin_update(self) -> Iterable[tuple[int, Result]]: ...
    def load_bucket(self, bucket: Bucket) -> None: ...
    def finish_update(self, version: int, checksum: int | None) -> None: ...


NOT_FINITE = (
    "not finite: a token's log-probability is not a number; the model's logits may overflow in "
    "rollout.dtype"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one request came to: N tokens."""

    ids: Sequence[int]
    text: str
    """Without special tokens; empty for a turn, which its chat format reads."""
    recording: Recording
    versions: NDArray[np.int32]
    """[N] of the weights that sampled each token."""
    finish_reason: Literal["stop", "length", "deadline"]
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Job(ABC):
    """One or several requests that go back together."""

    label: str
    """For messages."""
    context: Ids
    sampling: SamplingConfig
    wanted: Wanted
    stop_ids: tuple[int, ...] = ()
    conversation: str = ""
    """Of a turn."""
    read: bool = True
    """Whether the texts are wanted."""
    requests: dict[str, int] = field(default_factory=dict[str, int])
    """Sibling of each unfinished request, by the name given to vLLM."""
    dropped: list[str] = field(default_factory=list[str])
    cut: bool = False
    """Whether what was unfinished at its deadline is to end with the next token."""

    @abstractmethod
    def take(self, sibling: int, sampled: Sampled) -> None: ...

    @abstractmethod
    def result(self) -> Result: ...


@dataclass(slots=True, kw_only=True)
class GroupJob(Job):
    prompt: Prompt
    rendered: RenderedPrompt
    done: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])

    def take(self, sibling: int, sampled: Sampled) -> None:
        if not np.isfinite(sampled.recording.logp).all():
            self.dropped.append(NOT_FINITE)
            return
        segment = build_segment(
            self.prompt.prompt_id,
            self.context,
            sampled.ids,
            logp=sampled.recording.logp,
            versions=sampled.versions,
            sampling_mask=sampled.recording.sampling_mask,
            routes=sampled.recording.routes,
        )
        self.done[sibling] = build_trajectory(
            sibling,
            segment,
            sampled.text,
            thinking=self.rendered.thinking,
            finish_reason=sampled.finish_reason,
        )

    def result(self) -> Group:
        whole = tuple(self.done[sibling] for sibling in sorted(self.done))
        return Group(prompt=self.prompt, trajectories=whole, dropped=tuple(self.dropped))


@dataclass(slots=True, kw_only=True)
class TurnJob(Job):
    done: TurnResult | LostTurn | None = None

    def take(self, sibling: int, sampled: Sampled) -> None:
        if not np.isfinite(sampled.recording.logp).all():
            self.done = LostTurn(NOT_FINITE)
            return
        self.done = TurnResult(
            token_ids_N=np.array(sampled.ids, np.int32),
            logp_old_N=sampled.recording.logp,
            version_N=sampled.versions,
            finish_reason=sampled.finish_reason,
            routes_RLK=sampled.recording.routes,
            sampling_mask=sampled.recording.sampling_mask,
            cached_tokens=sampled.cached_tokens,
        )

    def result(self) -> TurnResult | LostTurn:
        """With no token where its time was up before the first one."""
        return self.done or TurnResult(
            token_ids_N=np.zeros(0, np.int32),
            logp_old_N=np.zeros(0, np.float32),
            version_N=np.zeros(0, np.int32),
            finish_reason="deadline",
        )


def group_job(
    prompt: Prompt, rendered: RenderedPrompt, sampling: SamplingConfig, wanted: Wanted
) -> GroupJob:
    return GroupJob(
        label=f"prompt {prompt.prompt_id}",
        context=rendered.token_ids,
        sampling=sampling,
        wanted=wanted,
        prompt=prompt,
        rendered=rendered,
    )


def turn_job(request: TurnRequest, sampling: SamplingConfig, wanted: Wanted) -> TurnJob:
    return TurnJob(
        label=f"conversation {request.conversation}",
        context=request.token_ids_T,
        sampling=replace(sampling, max_tokens=request.max_tokens),
        wanted=replace(wanted, routes_from=request.routes_from if wanted.routes else 0),
        stop_ids=request.stop_ids,
        conversation=request.conversation,
        read=False,
    )
