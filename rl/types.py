"""The types that pass between the stages, in order:

Prompt → Group of Trajectories (of Segments) → ScoredGroup → TrainBatch (`keel.rl.packing`) →
StepResult

All types are frozen and hold numpy arrays in host memory. A later stage wraps an earlier one and
never modifies it. Only weights and their version travel back.

Alignment: entry t of `token_ids_T`, `trainable_T`, `logp_old_T`, `version_T` and `sampling_mask`
describes token t (target-aligned). Row t of `routes_TLK` has the experts that processed token t as
*input* (input-aligned), so the last token of a segment has no route. `model/logprobs.py` has the
one shift between the two.
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
length    token limit (`rollout.sampling.max_tokens`, `agents.max_sampled_tokens`)
deadline  time limit (`rollout.timeout_s`)
turns     turn limit (`agents.max_turns`)
window    the context filled the window (`agents.window`)
crash     the policy crashed its environment (`on_crash: zero`), or the agent program failed
          (`on_failure: zero`); gets the lowest possible reward
"""
Purpose = Literal["train", "eval"]
"""Purpose that trajectories are sampled and scored for."""
ENVIRONMENT = "environment"
"""Kind of reward spec that takes the environment's verdict as the reward."""
FUNCTIONS = "functions"
"""Kind of reward spec without a reference answer: `correct` is the weighted mean of the domain's
reward functions, which get the prompt's data line in `columns`."""
PROGRAM = "program"
"""`name` of an assistant message that an agent program wrote; it was not sampled."""
NO_ROUTE = -1
"""Fill value of a routes row that was not recorded; the trainer uses its live router there."""
LOST = "environment, at "
"""Part of the drop reason of a trajectory whose environment crashed, hung or exited."""
CUT_OFF = "cut off, and its domain has length.truncated: drop"
"""Drop reason of a completion that reached its token or time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, with the data to score a completion."""

    prompt_id: str
    """Unique within a data source and stable across runs."""
    domain: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages (`role`, `content`, …) before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    """Ask for `<think>…</think>` before the answer, through the chat template."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Inputs of the reward: a reference answer, a verifier's entry, tests, a rubric."""
    kl_coef: float = 0.0
    """KL coefficient β of the prompt's domain."""
    environment: str = ""
    """Data source whose environment the policy acts in. Empty: one completion, no tools."""
    raw: bool = False
    """Use the text of the only message verbatim, without a chat template."""

    @property
    def expected(self) -> str:
        """Reference answer as text; empty if `reward` has none."""
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
    """Token ids that truncated sampling kept, one span per token. An empty span: not truncated."""

    ids: NDArray[np.int32]
    """[nnz] concatenated spans."""
    offsets: NDArray[np.int64]
    """[T+1]: the span of token t is `ids[offsets[t]:offsets[t+1]]`."""

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
        """Return [T] span lengths; 0 where sampling was not truncated."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> SamplingMasks:
        """Return the spans of tokens start … stop−1."""
        first, last = self.offsets[start], self.offsets[stop]
        return SamplingMasks(
            ids=self.ids[first:last], offsets=self.offsets[start : stop + 1] - first
        )

    @staticmethod
    def from_lists(spans: Sequence[Sequence[int] | NDArray[Any]]) -> SamplingMasks:
        """Build from one list of ids per token."""
        sizes = np.fromiter((len(span) for span in spans), np.int64, len(spans))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        parts = [np.asarray(span, np.int32) for span in spans if len(span)]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return SamplingMasks(ids=ids, offsets=offsets)

    @staticmethod
    def empty(tokens: int) -> SamplingMasks:
        """Return empty spans for `tokens` tokens."""
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
    """One contiguous context of the policy. See the module docstring for alignment."""

    prompt_id: str
    token_ids_T: NDArray[np.int32]
    trainable_T: NDArray[np.bool_]
    """True for tokens that the policy sampled; False for prompt, tool output and padding."""
    logp_old_T: NDArray[np.float32]
    """log π_old from the engine, with temperature and truncation applied; 0 if not sampled."""
    version_T: NDArray[np.int32]
    """Version of the weights that sampled the token; −1 if not sampled."""
    routes_TLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[T, L, K] experts of each MoE layer (without dense layers), input-aligned. Rows of −1, always
    including the last, were not recorded. None: the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """Sampling mask of each sampled token; empty spans elsewhere. None: sampling was not
    truncated."""
    selected_TLk: NDArray[np.int32] | None = None
    """[T, L, k] positions in this segment that sparse attention selected, input-aligned and padded
    with −1. Rows of −1 were not recorded. None: nothing was recorded."""

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
        """Return `selected_TLk` padded with −1 to [T, layers, width].

        Raises `ValueError` if the number of layers differs or k exceeds `width`.
        """
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
    """An environment's score of a trajectory."""

    parts: Mapping[str, float]
    """Named parts of the reward, 0 … 1 each; `correct` is 1 if the task is completely solved."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra data for the trajectory's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resource usage of a trajectory with an environment or an agent program."""

    turns: int = 1
    calls: int = 0
    """Tool calls, including malformed ones."""
    failed_calls: int = 0
    """Calls that violated the tool's schema or that the tool answered with an error."""
    malformed_calls: int = 0
    """Calls that could not be parsed."""
    rewrites: int = 0
    """Rewrites of the context because the window was full."""
    contexts_extended: int = 0
    """Agent program turns whose context extended recorded tokens exactly."""
    contexts_branched: int = 0
    """Agent program turns that extended recorded tokens already extended by another turn."""
    contexts_rendered: int = 0
    """Agent program turns whose context was rendered from messages: the first of each conversation,
    and those with a modified history."""
    contexts_refused: int = 0
    """Agent program requests answered with an error, because of a limit or an unsupported field."""
    repeated_tokens: int = 0
    """Context tokens that an earlier turn already computed."""
    cached_tokens: int = 0
    """Repeated tokens that came from the prefix cache."""
    sampling_s: float = 0.0
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One append-only conversation of an agent program, with a fixed set of tools."""

    messages: tuple[Mapping[str, Any], ...]
    sampled: frozenset[int]
    """Indices of the messages that the policy sampled in this conversation. Other assistant
    messages are context: the program wrote them, or another conversation contains them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the format of chat templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One completion of a prompt, over all turns, with one reward."""

    prompt_id: str
    sibling: int
    """Index in the group, 0 … G−1."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...]
    """The policy's message: `content`, and `reasoning_content` if it thought. With an environment,
    the whole transcript including the opening."""
    opening: int = 0
    """Number of `messages` before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The environment's tools, in the format of chat templates."""
    dialogues: tuple[Dialogue, ...] = ()
    """Conversations of an agent program; `messages` has their messages in the order of turns."""
    verdict: Verdict | None = None
    """Score by the environment, if there is one."""
    usage: Usage | None = None
    """Resource usage, if there is an environment."""

    def __post_init__(self) -> None:
        if self.sampled_tokens == 0:
            raise ValueError(f"trajectory {self.prompt_id}/{self.sibling}: no sampled token")

    @property
    def cut(self) -> bool:
        """True if a limit or a crash ended the trajectory; rewards treat all of them alike."""
        return self.finish_reason != "stop"

    @property
    def sampled_tokens(self) -> int:
        """|o_i|: number of tokens that the policy sampled, over all segments."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories of one prompt, with a reason for each missing one."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[str, ...] = ()
    """One reason for each requested trajectory that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its rewards and advantages."""

    group: Group
    rewards_G: NDArray[np.float32]
    parts_G: tuple[Mapping[str, float], ...]
    """Named parts of each reward, before weighting."""
    advantages_G: NDArray[np.float32]
    left_out: tuple[Trajectory, ...] = ()
    """Trajectories dropped after sampling, for their score or the lack of one; see `dropped`."""
    notes_G: tuple[Mapping[str, str], ...] = ()
    """Comments on each score by part or criterion, such as a judge's reasons or a verifier's error.
    Empty: no comments."""

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
        """True if the group has completions and all of them have an advantage of 0."""
        return len(self.advantages_G) > 0 and not self.advantages_G.any()

    @property
    def idle(self) -> bool:
        """True if the group adds no gradient to the loss: uniform, and without a KL term."""
        return self.uniform and self.group.prompt.kl_coef == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """Per-token diagnostics of a segment from the trainer. NaN: not computed."""

    logp_T: NDArray[np.float32]
    """log π_θ of each sampled token before the optimizer step."""
    overlap_T: NDArray[np.float32]
    """Fraction of the experts recorded for the preceding token that the trainer's live router also
    selects."""

    @staticmethod
    def merged(parts: Sequence[TokenNumbers]) -> TokenNumbers:
        """Merge the diagnostics of one segment from several ranks."""
        return TokenNumbers(
            logp_T=np.fmax.reduce([part.logp_T for part in parts]),
            overlap_T=np.fmax.reduce([part.overlap_T for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of an optimizer step."""

    version: int
    """Version of the weights after the step."""
    metrics: Mapping[str, Metric]
    findings: tuple[str, ...] = ()
    """Human-readable causes of a non-finite gradient."""
    gave_up: str = ""
    """Reason to end the run; empty to continue."""
