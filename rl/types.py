"""The types that the stages exchange, in this order:

Prompt → Group of Trajectories (of Segments) → ScoredGroup → TrainBatch (`keel.rl.packing`) →
StepResult

All types are frozen and hold numpy arrays in host memory. A later stage wraps an earlier one and
never modifies it. Only the weights and their version are passed back.

Alignment: entry t of `token_ids_T`, `trainable_T`, `logp_old_T`, `version_T` and `sampling_mask`
describes token t (target-aligned). Row t of `routes_TLK` has the experts that processed token t as
*input* (input-aligned), so the last token of a segment has no route.
`keel.model.logprobs.head_inputs` shifts between the two for the log-probabilities, and
`seen_tokens` in `keel.trainer.engine.policy` for the routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from keel.rl.metrics import Metric

FinishReason = Literal["stop", "length", "deadline", "turns", "window", "crash"]
"""Why a trajectory ended.

stop      the policy or the environment ended it
length    it reached the token limit (`rollout.sampling.max_tokens`, `agents.max_sampled_tokens`)
deadline  it reached the time limit (`rollout.timeout_s`)
turns     it reached the turn limit (`agents.max_turns`)
window    the context filled the window (`agents.window`)
crash     the policy crashed its environment (`on_crash: zero`), or the agent program failed
          (`on_failure: zero`); gets the lowest possible reward
"""
Purpose = Literal["train", "eval"]
"""Whether trajectories are sampled and scored for training or for evaluation."""
ENVIRONMENT = "environment"
"""The reward kind for prompts whose environment determines the reward."""
FUNCTIONS = "functions"
"""The reward kind for prompts without a reference answer. `correct` is the weighted mean of the
domain's reward functions, which receive the prompt's data line as `columns`."""
PROGRAM = "program"
"""The `name` of assistant messages that were written by an agent program and not sampled from the
policy."""
NO_ROUTE = -1
"""Marks positions in `routes_TLK` whose experts were not recorded. The trainer lets its own router
choose the experts there."""
LOST = "environment, at "
"""Text that the drop reason contains if a trajectory's environment crashed, hung or exited."""
CUT_OFF = "cut off, and its domain has length.truncated: drop"
"""Drop reason for a completion that reached its token or time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task for the policy, together with the data needed to score a completion."""

    prompt_id: str
    """An id that is unique within a data source and does not change between runs."""
    domain: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages (`role`, `content`, …) before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    """True if the chat template asks the policy to write `<think>…</think>` before its answer."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The data that the reward needs, such as a reference answer, a verifier's entry, tests or a
    rubric."""
    kl_coef: float = 0.0
    """The KL coefficient β that is configured for the prompt's domain."""
    environment: str = ""
    """The data source that provides the environment in which the policy acts. If it is empty, the
    policy writes a single completion without tools."""
    raw: bool = False
    """True if the text of the only message is used unchanged, without a chat template."""

    @property
    def expected(self) -> str:
        """The reference answer as text, or an empty string if the prompt has no answer."""
        entry = self.reward.get("entry")
        answer = self.reward.get("answer")
        if answer is None and isinstance(entry, Mapping):
            answer = cast(Mapping[str, Any], entry).get("answer")
        return "" if answer is None else str(answer)

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"prompt {self.prompt_id}: messages is empty")
        if not self.kl_coef >= 0:
            raise ValueError(f"prompt {self.prompt_id}: kl_coef is {self.kl_coef}, must be >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMasks:
    """The token ids among which each token was sampled, when sampling was truncated (top-p or
    top-k). Each token has one span of ids. An empty span means that sampling was not truncated for
    this token."""

    ids: NDArray[np.int32]
    """[nnz] the concatenated spans."""
    offsets: NDArray[np.int64]
    """[T+1] the positions in `ids` where the spans start and end. The span of token t is
    `ids[offsets[t]:offsets[t+1]]`."""

    def __post_init__(self) -> None:
        offsets = self.offsets
        if (
            offsets.ndim != 1
            or len(offsets) == 0
            or offsets[0] != 0
            or offsets[-1] != len(self.ids)
        ):
            raise ValueError(
                f"sampling masks: offsets must run from 0 to len(ids) = {len(self.ids)}, got "
                f"{offsets[:3]}…"
            )
        if (np.diff(offsets) < 0).any():
            raise ValueError("sampling masks: offsets must not decrease")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def sizes(self) -> NDArray[np.int64]:
        """Return the span lengths as [T], with 0 where sampling was not truncated."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> SamplingMasks:
        """Return the spans of tokens start … stop−1."""
        first, last = self.offsets[start], self.offsets[stop]
        return SamplingMasks(
            ids=self.ids[first:last], offsets=self.offsets[start : stop + 1] - first
        )

    @staticmethod
    def from_lists(spans: Sequence[Sequence[int] | NDArray[Any]]) -> SamplingMasks:
        """Build the masks from a list that holds the ids for each token."""
        sizes = np.fromiter((len(span) for span in spans), np.int64, len(spans))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        parts = [np.asarray(span, np.int32) for span in spans if len(span)]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return SamplingMasks(ids=ids, offsets=offsets)

    @staticmethod
    def empty(tokens: int) -> SamplingMasks:
        """Return masks for `tokens` tokens whose sampling was not truncated."""
        return SamplingMasks(ids=np.zeros(0, np.int32), offsets=np.zeros(tokens + 1, np.int64))

    @staticmethod
    def concat(parts: Sequence[SamplingMasks]) -> SamplingMasks:
        if not parts:
            return SamplingMasks.empty(0)
        starts = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return SamplingMasks(
            ids=np.concatenate([part.ids for part in parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        )


_PER_TOKEN = (
    *("trainable_T", "logp_old_T", "version_T"),
    *("routes_TLK", "sampling_mask", "selected_TLk"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A contiguous sequence of tokens that the policy saw as one context. The module docstring
    explains how the arrays are aligned."""

    prompt_id: str
    token_ids_T: NDArray[np.int32]
    trainable_T: NDArray[np.bool_]
    """True for tokens that the policy sampled, False for the prompt, tool output and padding."""
    logp_old_T: NDArray[np.float32]
    """log π_old as reported by the engine, after temperature and truncation. It is 0 for tokens
    that were not sampled."""
    version_T: NDArray[np.int32]
    """Version of the weights that sampled each token, or −1 if the token was not sampled."""
    routes_TLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[T, L, K] the experts that each MoE layer used, input-aligned; dense layers are not included.
    A row of −1 means that nothing was recorded, which is always true of the last row. This is None
    if the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """The sampling mask of each sampled token, with empty spans for all other tokens. This is None
    if sampling was not truncated."""
    selected_TLk: NDArray[np.int32] | None = None
    """[T, L, k] the positions in this segment that sparse attention selected, input-aligned and
    padded with −1. A row of −1 means that nothing was recorded for that token. This is None if
    nothing was recorded at all."""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids_T)
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(
                    f"segment of {self.prompt_id}: {name} has {len(value)} entries for {tokens} "
                    "tokens"
                )
        if tokens == 0 or self.trainable_T[0]:
            raise ValueError(
                f"segment of {self.prompt_id}: needs tokens, and the first cannot be trainable, "
                "since no context precedes it"
            )
        sampled = self.logp_old_T[self.trainable_T]
        if not np.isfinite(sampled).all() or (sampled > 1e-3).any():
            raise ValueError(
                f"segment of {self.prompt_id}: logp_old_T of sampled tokens must be finite and <= 0"
            )
        for name in ("routes_TLK", "selected_TLk"):
            value = getattr(self, name)
            if value is not None and value.ndim != 3:
                raise ValueError(
                    f"segment of {self.prompt_id}: {name} must be [T, L, {name[-1]}], has shape "
                    f"{value.shape}"
                )

    def selection(self, layers: int, width: int) -> NDArray[np.int32]:
        """Return `selected_TLk` padded with −1 to [T, layers, width]. Raises `ValueError` if the
        number of layers differs or k exceeds `width`."""
        recorded = self.selected_TLk
        padded = np.full((len(self.token_ids_T), layers, width), -1, np.int32)
        if recorded is not None:
            if recorded.shape[1] != layers or recorded.shape[2] > width:
                raise ValueError(
                    f"segment of {self.prompt_id}: selected_TLk has (L, k) = {recorded.shape[1:]}, "
                    f"others have {(layers, width)}"
                )
            padded[..., : recorded.shape[2]] = recorded
        return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The score that an environment gave to a trajectory."""

    parts: Mapping[str, float]
    """Named parts of the reward, each between 0 and 1. `correct` is 1 if the task is completely
    solved."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additional data to save with the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts the tool calls, tokens and seconds of a trajectory with an environment or an agent
    program."""

    turns: int = 1
    calls: int = 0
    """Tool calls, including malformed ones."""
    failed_calls: int = 0
    """Calls that could not be parsed, did not match the tool's schema, were refused because the
    budget of calls was spent, or were answered with an error by the tool."""
    malformed_calls: int = 0
    """Calls that could not be parsed."""
    rewrites: int = 0
    """How often the context was rewritten because the window was full."""
    contexts_extended: int = 0
    """Turns by an agent program whose context continued the recorded tokens exactly."""
    contexts_branched: int = 0
    """Turns by an agent program that continued recorded tokens which another turn had already
    continued."""
    contexts_rendered: int = 0
    """Turns by an agent program whose context had to be rendered from messages, because the
    conversation was new or its history had been modified."""
    contexts_refused: int = 0
    """Requests by an agent program that were answered with an error, because of a limit or an
    unsupported field."""
    repeated_tokens: int = 0
    """Context tokens that had already been computed in an earlier turn."""
    cached_tokens: int = 0
    """Repeated tokens that were read from the prefix cache."""
    sampling_s: float = 0.0
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """A conversation held by an agent program, to which messages are only appended and whose tools
    do not change."""

    messages: tuple[Mapping[str, Any], ...]
    sampled: frozenset[int]
    """Indices of the messages that the policy sampled in this conversation. Other assistant
    messages only serve as context, because the program wrote them or because they belong to another
    conversation."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the format of chat templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A complete attempt at a prompt, over all turns, which receives one reward."""

    prompt_id: str
    sibling: int
    """Index of the trajectory in its group, from 0 to G−1."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...]
    """The message that the policy wrote, with `content` and, if it thought, `reasoning_content`. If
    the prompt has an environment, this is the whole transcript, including the messages before the
    policy's first turn."""
    opening: int = 0
    """How many `messages` come before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the environment offers, in the format of chat templates."""
    dialogues: tuple[Dialogue, ...] = ()
    """The conversations that an agent program held. `messages` contains all their messages in the
    order in which the turns took place."""
    verdict: Verdict | None = None
    """The score that the environment gave, if there is an environment."""
    usage: Usage | None = None
    """The calls, tokens and seconds of the trajectory. This is None for a single completion."""

    def __post_init__(self) -> None:
        if self.sampled_tokens == 0:
            raise ValueError(f"trajectory {self.prompt_id}/{self.sibling}: no sampled token")

    @property
    def cut(self) -> bool:
        """True if the trajectory was ended by a limit or a crash. Rewards treat all limits alike,
        and a crash differently (see `FinishReason`)."""
        return self.finish_reason != "stop"

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled over all segments, |o_i|."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories sampled for one prompt, with a reason for each one that is missing."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[str, ...] = ()
    """The reasons why requested trajectories are missing, one for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its rewards and advantages."""

    group: Group
    rewards_G: NDArray[np.float32]
    parts_G: tuple[Mapping[str, float], ...]
    """The named parts of each reward, before they are weighted."""
    advantages_G: NDArray[np.float32]
    left_out: tuple[Trajectory, ...] = ()
    """Trajectories that were sampled but then dropped, because of their score or because they could
    not be scored. `Group.dropped` has the reasons."""
    notes_G: tuple[Mapping[str, str], ...] = ()
    """Comments on each score, by part or criterion, such as a judge's reasons or a verifier's
    error. This is empty if there are no comments."""

    def __post_init__(self) -> None:
        count = len(self.group.trajectories)
        for name in ("rewards_G", "parts_G", "advantages_G"):
            if len(getattr(self, name)) != count:
                raise ValueError(
                    f"group of {self.group.prompt.prompt_id}: {name} has "
                    f"{len(getattr(self, name))} entries for {count} trajectories"
                )
        if self.notes_G and len(self.notes_G) != count:
            raise ValueError(
                f"group of {self.group.prompt.prompt_id}: notes_G has {len(self.notes_G)} entries "
                f"for {count} trajectories"
            )
        for name in ("rewards_G", "advantages_G"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(
                    f"group of {self.group.prompt.prompt_id}: {name} must be finite, is "
                    f"{getattr(self, name)}"
                )

    @property
    def uniform(self) -> bool:
        """True if the group has completions and all their advantages are 0."""
        return len(self.advantages_G) > 0 and not self.advantages_G.any()

    @property
    def idle(self) -> bool:
        """True if the group contributes no gradient to the loss, because it is uniform and has no
        KL term."""
        return self.uniform and self.group.prompt.kl_coef == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Diagnostics that the trainer computed for each token in a segment, with NaN where nothing was
    computed."""

    logp_T: NDArray[np.float32]
    """log π_θ of each sampled token before the optimizer step."""
    overlap_T: NDArray[np.float32]
    """Fraction of the experts recorded for the preceding token that the trainer's own router also
    selects."""

    @staticmethod
    def merged(parts: Sequence[TokenNumbers]) -> TokenNumbers:
        """Merge the diagnostics that several ranks computed for the same segment."""
        return TokenNumbers(
            logp_T=np.fmax.reduce([part.logp_T for part in parts]),
            overlap_T=np.fmax.reduce([part.overlap_T for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of training on one batch, in `algorithm.updates_per_batch` optimizer steps."""

    version: int
    """Version of the weights after the last optimizer step."""
    metrics: Mapping[str, Metric]
    findings: tuple[str, ...] = ()
    """Explanations of a non-finite gradient, written for the user."""
    gave_up: str = ""
    """Why the run should end, or an empty string if it should continue."""
