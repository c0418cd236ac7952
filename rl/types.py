"""The data types that the pipeline stages exchange, in this order:

Prompt → Group of Trajectories (of Segments) → ScoredGroup → TrainBatch (`keel.rl.packing`) →
StepResult

All types are frozen and hold numpy arrays in host memory. A later type wraps an earlier one and
never modifies it. Only the weights and their version are passed back.

Alignment: entry t of `token_ids_T`, `trainable_T`, `logp_old_T`, `version_T` and `sampling_mask`
describes token t (target-aligned). Row t of `routes_TLK` has the experts that processed token t as
*input* (input-aligned), so the last token of a segment has no route.
`keel.trainer.engine.policy` converts between the two: `HeadInputs` for log-probabilities, and
`token_numbers` for routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from keel.rl.metrics import Metric
from keel.rl.recordings import Recordings, SamplingMasks, StoredRecordings, join_recordings

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
"""Whether trajectories are sampled for training or for evaluation."""
ENVIRONMENT = "environment"
"""Reward kind of prompts whose environment determines the reward."""
FUNCTIONS = "functions"
"""Reward kind of prompts without a reference answer. `correct` is the weighted mean of the domain's
reward functions, which receive the prompt's line of the data file as `columns`."""
PROGRAM = "program"
"""The `name` of assistant messages written by an agent program instead of the policy."""
LOST = "environment, at "
"""Text that occurs in the drop reason of a trajectory whose environment crashed, hung or exited."""
CUT_OFF = "cut off, and its domain has length.truncated: drop"
"""Drop reason of a completion that reached its token or time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A task for the policy, along with the data needed to score its completions."""

    prompt_id: str
    """Id that is unique within the data source and the same in every run."""
    domain: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages (`role`, `content`, …) before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    """If True, the chat template asks the policy to write `<think>…</think>` before its answer."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Data for computing the reward, such as a reference answer, a verifier's entry, tests or a
    rubric."""
    kl_coef: float = 0.0
    """KL coefficient β of the prompt's domain."""
    environment: str = ""
    """Data source whose environment the policy acts in. If empty, the policy writes a single
    completion without tools."""
    raw: bool = False
    """If True, the text of the only message is used as is, without a chat template."""

    @property
    def expected(self) -> str:
        """The reference answer as text, or "" without one."""
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


_PER_TOKEN = (
    *("trainable_T", "logp_old_T", "version_T"),
    *("routes_TLK", "sampling_mask", "selected_TLb"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens that the policy saw as one context. See the module docstring for how the
    arrays are aligned."""

    prompt_id: str
    token_ids_T: NDArray[np.int32]
    trainable_T: NDArray[np.bool_]
    """True for tokens that the policy sampled, False for the prompt, tool output and padding."""
    logp_old_T: NDArray[np.float32]
    """log π_old from the engine, after temperature and truncation, or 0 for tokens that were not
    sampled."""
    version_T: NDArray[np.int32]
    """Version of the weights that sampled each token, or −1 if it was not sampled."""
    routes_TLK: NDArray[np.int16] | None = None
    """[T, L, K] Experts used in each MoE layer, input-aligned. Dense layers are not included. A row
    of −1 means that nothing was recorded, which is always the case for the last row. None if the
    model has no router."""
    sampling_mask: SamplingMasks | None = None
    """Mask of each sampled token; all other tokens have an empty mask. None if sampling was not
    truncated."""
    selected_TLb: NDArray[np.uint8] | None = None
    """[T, L, b] Positions in this segment that sparse attention selected, input-aligned, as
    bitmaps: bit j % 8 of byte j // 8 is set if the token attends to position j. A row of zeros
    means that nothing was recorded for that token. None if nothing was recorded at all."""
    stored: StoredRecordings | None = None
    """Locations of the three arrays above, or None if they are stored here."""

    def __post_init__(self) -> None:
        tokens, owner = len(self.token_ids_T), f"segment of {self.prompt_id}"
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(f"{owner}: {name} has {len(value)} entries for {tokens} tokens")
            if name.endswith(("_TLK", "_TLb")) and value is not None and value.ndim != 3:
                raise ValueError(f"{owner}: {name} must have 3 dimensions, has shape {value.shape}")
        if tokens == 0 or self.trainable_T[0]:
            raise ValueError(
                f"{owner}: needs tokens, and the first cannot be trainable, since no context "
                "precedes it"
            )
        sampled = self.logp_old_T[self.trainable_T]
        if not np.isfinite(sampled).all() or (sampled > 1e-3).any():
            raise ValueError(f"{owner}: logp_old_T of sampled tokens must be finite and <= 0")

    @property
    def routes_shape(self) -> tuple[int, ...] | None:
        """Shape (L, K) of each token's recorded routes, or None without routes."""
        if self.stored is not None:
            return self.stored.routes
        return None if self.routes_TLK is None else self.routes_TLK.shape[1:]

    @property
    def selected_shape(self) -> tuple[int, ...] | None:
        """Shape (L, b) of each token's recorded selections, or None without selections."""
        if self.stored is not None:
            return self.stored.selected
        return None if self.selected_TLb is None else self.selected_TLb.shape[1:]

    @property
    def mask_sizes_T(self) -> NDArray[Any] | None:
        """Number of ids in each sampling mask, [T], or None if there are no masks."""
        if self.stored is not None:
            return self.stored.mask_sizes_T
        return None if self.sampling_mask is None else self.sampling_mask.sizes()

    @property
    def recording_refs(self) -> list[Any]:
        """References to the segment's stored recordings."""
        parts = () if self.stored is None else self.stored.parts
        return [part for _, part in parts if not isinstance(part, Recordings)]

    def loaded(self, recordings: Mapping[Any, Recordings]) -> Segment:
        """Return the segment with its stored recordings, looked up by reference. Raises LookupError
        if one is missing."""
        if self.stored is None:
            return self
        if not set(self.recording_refs) <= recordings.keys():
            raise LookupError(f"segment of {self.prompt_id}: its recordings are lost")
        turns = [
            (start, part if isinstance(part, Recordings) else recordings[part])
            for start, part in self.stored.parts
        ]
        return replace(self, stored=None, **join_recordings(turns, len(self.token_ids_T)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The score that an environment gives a trajectory."""

    parts: Mapping[str, float]
    """Parts of the reward by name, each between 0 and 1. `correct` is 1 if the task was
    fully solved."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Extra data to save with the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources used by a trajectory with an environment or an agent program: tool calls, tokens
    and seconds."""

    turns: int = 1
    calls: int = 0
    """Number of tool calls, including malformed ones."""
    failed_calls: int = 0
    """Number of tool calls that failed because they could not be parsed, did not match the tool's
    schema, exceeded the call budget, or returned an error."""
    malformed_calls: int = 0
    """Number of tool calls that could not be parsed."""
    rewrites: int = 0
    """Number of times the context was rewritten because the window was full."""
    contexts_extended: int = 0
    """Number of agent program turns whose context exactly continued the recorded tokens."""
    contexts_branched: int = 0
    """Number of agent program turns that continued recorded tokens that another turn had already
    continued."""
    contexts_rendered: int = 0
    """Number of agent program turns whose context had to be rendered from messages, because the
    conversation was new or its history had been modified."""
    contexts_refused: int = 0
    """Number of agent program requests rejected because of a limit or an unsupported field."""
    repeated_tokens: int = 0
    """Number of context tokens that an earlier turn had already computed."""
    cached_tokens: int = 0
    """Number of repeated tokens read from the prefix cache."""
    sampling_s: float = 0.0
    tools_s: float = 0.0

    def plus(self, **amounts: float) -> Usage:
        """Return a copy with the given amounts added."""
        return replace(self, **{name: getattr(self, name) + n for name, n in amounts.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """An agent program's append-only conversation, with a fixed set of tools."""

    messages: tuple[Mapping[str, Any], ...]
    sampled: frozenset[int]
    """Indices of the messages that the policy sampled in this conversation. Other assistant
    messages are only context: the program wrote them, or they belong to another conversation."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools in the format of chat templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A complete attempt at a prompt, across all turns, with a single reward."""

    prompt_id: str
    sibling: int
    """Index of the trajectory in its group, from 0 to G−1."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...]
    """The policy's message, with `content` and, if it thought, `reasoning_content`. With an
    environment, this is the complete transcript, including the messages before the policy's first
    turn."""
    opening: int = 0
    """Number of `messages` before the policy's first turn."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The environment's tools in the format of chat templates."""
    dialogues: tuple[Dialogue, ...] = ()
    """Conversations of an agent program. `messages` contains the messages of all of them, in the
    order of the turns."""
    verdict: Verdict | None = None
    """The environment's score, or None without an environment."""
    usage: Usage | None = None
    """Tool calls, tokens and seconds used, or None for a single completion."""

    def __post_init__(self) -> None:
        if self.sampled_tokens == 0:
            raise ValueError(f"trajectory {self.prompt_id}/{self.sibling}: no sampled token")

    @property
    def cut(self) -> bool:
        """True if the trajectory was ended by a limit or a crash. Rewards treat all limits the same
        but handle crashes differently (see `FinishReason`)."""
        return self.finish_reason != "stop"

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens across all segments, |o_i|."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories sampled for one prompt, along with the reasons why any others are
    missing."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[str, ...] = ()
    """Why each missing trajectory was dropped."""
    node: str = field(default="", compare=False)
    """Ray's id of the node on which an engine sampled the group, or "" if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group along with its rewards and advantages."""

    group: Group
    rewards_G: NDArray[np.float32]
    parts_G: tuple[Mapping[str, float], ...]
    """Parts of each trajectory's reward by name, before weighting."""
    advantages_G: NDArray[np.float32]
    left_out: tuple[Trajectory, ...] = ()
    """Sampled trajectories that were dropped, either because of their score or because scoring
    failed. The reasons are in `Group.dropped`."""
    notes_G: tuple[Mapping[str, str], ...] = ()
    """Comments on each score, such as a judge's reasons or a verifier's error, by reward part
    or criterion. May be empty."""

    def __post_init__(self) -> None:
        count, owner = len(self.group.trajectories), f"group of {self.group.prompt.prompt_id}"
        for name in ("rewards_G", "parts_G", "advantages_G", *["notes_G"] * bool(self.notes_G)):
            entries = len(getattr(self, name))
            if entries != count:
                raise ValueError(f"{owner}: {name} has {entries} entries for {count} trajectories")
        for name in ("rewards_G", "advantages_G"):
            numbers = getattr(self, name)
            if not np.isfinite(numbers).all():
                raise ValueError(f"{owner}: {name} must be finite, is {numbers}")

    @property
    def recording_refs(self) -> set[Any]:
        """References to the stored recordings of all trajectories in the group."""
        segments = (s for one in self.group.trajectories for s in one.segments)
        return {ref for segment in segments for ref in segment.recording_refs}

    @property
    def uniform(self) -> bool:
        """True if the group has completions and all their advantages are 0."""
        return len(self.advantages_G) > 0 and not self.advantages_G.any()

    @property
    def idle(self) -> bool:
        """True if the group contributes no gradient, because it is uniform and has no KL term."""
        return self.uniform and self.group.prompt.kl_coef == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """The trainer's per-token diagnostics for a segment. Values that were not computed are NaN."""

    logp_T: NDArray[np.float32]
    """log π_θ of each sampled token, before the optimizer step."""
    overlap_T: NDArray[np.float32]
    """Fraction of the preceding token's recorded experts that the trainer's own router also
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
    """The result of training on one batch for `algorithm.updates_per_batch` optimizer steps."""

    version: int
    """Version of the weights after the last optimizer step."""
    metrics: Mapping[str, Metric]
    findings: tuple[str, ...] = ()
    """Explanations of a non-finite gradient, for the user."""
    gave_up: str = ""
    """Reason to end the run, or "" to continue."""
