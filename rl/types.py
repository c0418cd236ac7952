"""What passes between the stages, in the order it flows:

Prompt → Group of Trajectories (of Segments) → ScoredGroup → TrainBatch (`keel.rl.packing`) →
StepResult

Every type is frozen and holds numpy arrays in host memory. A later stage wraps an earlier one
and never fills holes in it. Only weights and their version travel back.

Alignment: entry t of `token_ids_T`, `trainable_T`, `logp_old_T`, `version_T` and `sampling_mask` is
about token t (target-aligned). Row t of `routes_TLK` says where token t was sent when it was the
*input* (input-aligned), so the last token of a segment has no route. The one shift between the
two is in `model/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from keel.rl.metrics import Metric

FinishReason = Literal["stop", "length", "deadline", "turns", "window", "crash"]
"""The policy (or its environment) ended it, or it was cut: at its budget of tokens
(`rollout.sampling.max_tokens`, `agents.max_sampled_tokens`), of seconds (`rollout.timeout_s`), of
turns (`agents.max_turns`), or where its context filled the window (`agents.window`). `crash`: its
environment was lost over what the policy did (`on_crash: zero`), or the agent program that drove it
failed (`on_failure: zero`); its reward is the least there is."""
Purpose = Literal["train", "eval"]
"""What trajectories are sampled and scored for."""
ENVIRONMENT = "environment"
"""Kind of reward spec of a prompt whose environment's verdict is the reward."""
FUNCTIONS = "functions"
"""Kind of reward spec of a prompt without an answer: the functions that its domain weighs are all
there is, and `correct` is their weighted mean. `columns` has the rest of its line."""
PROGRAM = "program"
"""`name` of an assistant's message that an agent program wrote, its answer among them: nobody
sampled it."""
NO_ROUTE = -1
"""A routes row filled with this value was not recorded: the trainer uses its live router there."""
LOST = "environment, at "
"""Stands in the reason for a missing trajectory whose environment crashed, hung or ended."""
CUT_OFF = "cut off, and its domain has length.truncated: drop"
"""Why a completion is missing that was as long as it may be, or took as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, and what a completion of it will be scored by."""

    prompt_id: str
    """Unique within a data source and stable across runs."""
    domain: str
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages (`role`, `content`, …) up to where the policy speaks."""
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    """Whether the chat template asks for `<think>…</think>` before the answer."""
    reward: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the reward needs: a reference answer, a verifier's entry, tests, a rubric."""
    kl_coef: float = 0.0
    """β of this prompt's domain."""
    environment: str = ""
    """Name of the source whose environment the policy works in. Empty: one completion, no tools."""
    raw: bool = False
    """The text of the one message is all that the policy is given: no chat template."""

    @property
    def expected(self) -> str:
        """The reference answer as text; empty if `reward` has none."""
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
    """The ids that truncated sampling kept, one span a token. An empty span: not truncated."""

    ids: NDArray[np.int32]
    """[nnz], the spans one after the other."""
    offsets: NDArray[np.int64]
    """[T+1]: token t kept `ids[offsets[t]:offsets[t+1]]`."""

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
        """[T] number of ids kept for each token; 0 where sampling was not truncated."""
        return np.diff(self.offsets)

    def slice(self, start: int, stop: int) -> SamplingMasks:
        """The spans of tokens start … stop−1."""
        first, last = self.offsets[start], self.offsets[stop]
        return SamplingMasks(
            ids=self.ids[first:last], offsets=self.offsets[start : stop + 1] - first
        )

    @staticmethod
    def from_lists(spans: Sequence[Sequence[int] | NDArray[Any]]) -> SamplingMasks:
        """One span of ids a token."""
        sizes = np.fromiter((len(span) for span in spans), np.int64, len(spans))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        parts = [np.asarray(span, np.int32) for span in spans if len(span)]
        ids = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return SamplingMasks(ids=ids, offsets=offsets)

    @staticmethod
    def empty(tokens: int) -> SamplingMasks:
        """`tokens` spans without truncation."""
        return SamplingMasks(ids=np.zeros(0, np.int32), offsets=np.zeros(tokens + 1, np.int64))

    @staticmethod
    def concat(parts: Sequence[SamplingMasks]) -> SamplingMasks:
        """The spans of all parts, in order."""
        if not parts:
            return SamplingMasks.empty(0)
        starts = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=False)]
        return SamplingMasks(
            ids=np.concatenate([part.ids for part in parts]),
            offsets=np.concatenate([np.zeros(1, np.int64), *offsets]),
        )


PER_TOKEN = (
    "trainable_T",
    "logp_old_T",
    "version_T",
    "routes_TLK",
    "sampling_mask",
    "selected_TLk",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One contiguous context the policy was run on. See the module's note on alignment."""

    prompt_id: str
    token_ids_T: NDArray[np.int32]
    trainable_T: NDArray[np.bool_]
    """True where the policy sampled the token; never on prompt, tool output or padding."""
    logp_old_T: NDArray[np.float32]
    """log π_old as the engine returned it, under temperature and truncation; 0 if not sampled."""
    version_T: NDArray[np.int32]
    """Version of the weights that sampled the token; −1 where not sampled."""
    routes_TLK: NDArray[np.int16] | NDArray[np.uint8] | None = None
    """[T, L, K] experts of each MoE layer (dense layers left out), input-aligned. Rows of −1
    (always the last) were not recorded. None: the model has no router."""
    sampling_mask: SamplingMasks | None = None
    """Sampling mask of each sampled token, spans empty elsewhere. None: sampling was not
    truncated."""
    selected_TLk: NDArray[np.int32] | None = None
    """[T, L, k] positions in this segment that sparse attention selected for each token in each
    layer, input-aligned; −1 where fewer were. Rows of −1 were not recorded. None: none was."""

    def __post_init__(self) -> None:
        tokens = len(self.token_ids_T)
        for name in PER_TOKEN:
            value = getattr(self, name)
            if value is not None and len(value) != tokens:
                raise ValueError(
                    f"segment of {self.prompt_id}: {name} has {len(value)} entries for {tokens} "
                    "tokens"
                )
        if tokens == 0 or self.trainable_T[0]:
            raise ValueError(
                f"segment of {self.prompt_id}: the first token has nothing before it to be sampled "
                "from"
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
        """`selected_TLk` as [T, layers, width]; −1 where nothing was recorded. Raises ValueError if
        it is of another number of layers."""
        tokens, known = len(self.token_ids_T), self.selected_TLk
        whole = np.full((tokens, layers, width), -1, np.int32)
        if known is not None:
            if known.shape[1] != layers or known.shape[2] > width:
                raise ValueError(
                    f"segment of {self.prompt_id}: selected_TLk has (L, k) = {known.shape[1:]}, "
                    f"others have {(layers, width)}"
                )
            whole[..., : known.shape[2]] = known
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an environment makes of a trajectory."""

    parts: Mapping[str, float]
    """Named parts of the reward, 0 … 1 each; `correct` is 1 where the task is wholly done."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further things worth keeping in the trajectory's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a trajectory of several turns took."""

    turns: int = 1
    calls: int = 0
    """Tool calls, malformed ones included."""
    failed_calls: int = 0
    """Calls that a tool answered with an error, or that broke its schema."""
    malformed_calls: int = 0
    """What set out to be a call and could not be read as one."""
    rewrites: int = 0
    """How often its context was rewritten because its window was full."""
    contexts_extended: int = 0
    """Turns of an agent program whose context extended recorded tokens exactly."""
    contexts_branched: int = 0
    """Turns of an agent program from recorded tokens that another turn had extended before."""
    contexts_rendered: int = 0
    """Turns of an agent program whose context the chat template rendered from messages: the first
    of each conversation, and those whose history the program had changed."""
    contexts_refused: int = 0
    """Requests of an agent program that got an error, for a limit or a field not supported."""
    repeated_tokens: int = 0
    """Context tokens that an earlier turn had computed already."""
    cached_tokens: int = 0
    """Those of them that came from the prefix cache."""
    sampling_s: float = 0.0
    tools_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One of an agent program's conversations: messages that only grew, under the same tools."""

    messages: tuple[Mapping[str, Any], ...]
    sampled: frozenset[int]
    """Indices of the messages that the policy sampled here, in full. Other messages of the
    assistant are context: the program wrote them, or another conversation has them."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As chat templates have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One completion of a prompt: all turns, one reward."""

    prompt_id: str
    sibling: int
    """Index inside its group, 0 … G−1."""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...]
    """What the policy said, as text: `content`, and `reasoning_content` where it thought. With an
    environment: all that was said, from its opening on."""
    opening: int = 0
    """How many of `messages` stood there before the policy first spoke."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """With an environment: its tools, as chat templates have them."""
    dialogues: tuple[Dialogue, ...] = ()
    """Its conversations where an agent program drove it, which may hold several; `messages` has
    their messages in the order of the turns."""
    verdict: Verdict | None = None
    """The environment's, where there is one."""
    usage: Usage | None = None
    """Where there is an environment."""

    def __post_init__(self) -> None:
        if self.sampled_tokens == 0:
            raise ValueError(f"trajectory {self.prompt_id}/{self.sibling}: no sampled token")

    @property
    def cut(self) -> bool:
        """Whether the policy had not ended it; rewards make no difference between the limits."""
        return self.finish_reason != "stop"

    @property
    def sampled_tokens(self) -> int:
        """|o_i|: tokens the policy sampled, over all segments."""
        return sum(int(segment.trainable_T.sum()) for segment in self.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(segment.token_ids_T) for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The G trajectories of one prompt, and why any of them is missing."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    dropped: tuple[str, ...] = ()
    """One reason for each trajectory that was asked for and did not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group with its rewards and advantages."""

    group: Group
    rewards_G: NDArray[np.float32]
    parts_G: tuple[Mapping[str, float], ...]
    """Named parts of each reward, before weighting."""
    advantages_G: NDArray[np.float32]
    left_out: tuple[Trajectory, ...] = ()
    """What was sampled too, and dropped for its score or for want of one (reasons: `dropped`)."""
    notes_G: tuple[Mapping[str, str], ...] = ()
    """What is said of each score, by part or criterion: a judge's reasons, a verifier's error.
    Empty: nothing of any."""

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
        """Whether the group has completions, but none better than another."""
        return len(self.advantages_G) > 0 and not self.advantages_G.any()

    @property
    def idle(self) -> bool:
        """Whether nothing of the loss has a gradient in it: it is uniform, and has no KL term."""
        return self.uniform and self.group.prompt.kl_coef == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNumbers:
    """What the trainer saw of each token of a segment, for people to look at. NaN: nothing."""

    logp_T: NDArray[np.float32]
    """log π_θ of each sampled token, before the optimizer step."""
    overlap_T: NDArray[np.float32]
    """Share of the experts recorded for the token before it, which it was predicted from, that the
    trainer's own router chooses too."""

    @staticmethod
    def merged(parts: Sequence[TokenNumbers]) -> TokenNumbers:
        """Of one segment, from ranks that have seen parts of it."""
        return TokenNumbers(
            logp_T=np.fmax.reduce([part.logp_T for part in parts]),
            overlap_T=np.fmax.reduce([part.overlap_T for part in parts]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an optimizer step leaves behind."""

    version: int
    """Version of the weights after the step."""
    metrics: Mapping[str, Metric]
    findings: tuple[str, ...] = ()
    """What kept a gradient from being finite, for people. None: nothing did."""
    gave_up: str = ""
    """Why the run should end; "": it should not."""
