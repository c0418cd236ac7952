"""`sft`: the conversations and text for `keel sft` and `keel pretrain`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from keel.configs.sections.base import Section, knob, require, require_unique

TEXT = ("text", "retrieval")
"""Kinds of sources that contain plain text, where each conversation is a window of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationsConfig(Section, path="sft.sources[{self.name}]"):
    """Settings for a single source of conversations or text."""

    name: str
    """Name of the source. Its held-out loss is reported as `eval/<name>/loss`."""
    source: Literal["jsonl", "file", "hub", "trajectories", "solutions", "text", "retrieval"]
    """Kind of source. jsonl: one chat per line (docs/sft.md). file: a file of any supported kind or
    a folder of them; hub: a dataset of the Hugging Face hub (docs/data.md). trajectories: samples
    of a Keel run. solutions: worked solutions of reasoning_gym tasks that the tiny model's cold
    start supports. text: documents, cut into windows (docs/pretrain.md). retrieval: synthetic text
    with digits to be found again; only those are trained on."""
    path: str = ""
    """jsonl, file: path of the file or folder: `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet`,
    `.arrow`, or a folder as on the hub or from `save_to_disk`. hub: owner/name. trajectories: a run
    folder, a folder of `keel eval`, or a file of either. text: a `.txt` or `.md` file, rows with a
    column `text`, or a folder of these."""
    split: str = knob("", kinds=("file", "hub"))
    """file, hub: split of the dataset. Empty: train."""
    subset: str = knob("", kinds=("file", "hub"))
    """file, hub: subset of a dataset that has several."""
    columns: Mapping[str, str] = knob({}, kinds=("jsonl", "file", "hub"))
    """jsonl, file, hub: the column to read for each key, such as `{prompt: instruction, completion:
    output}`. A dot selects a field of an object. '': ignore the column that has the name of the
    key."""
    task: str = knob("", kinds=("solutions",))
    """solutions: name of the reasoning_gym task."""
    params: Mapping[str, Any] = knob({}, kinds=("solutions", "retrieval"))
    """solutions: parameters of the task. retrieval: `letters` and `digits`, the number of letters
    and of digits."""
    length: int = knob(0, ge=0, kinds=("retrieval",))
    """retrieval: number of characters per text."""
    size: int = knob(0, ge=0)
    """Number of conversations (documents of text) to read (0: all) or to generate. With
    `most_per_prompt`: to keep."""
    holdout: int = knob(0, ge=0)
    """Number of conversations to hold out for the evaluation loss (`run.eval_every`). Those with
    the same question stay together, so there may be a few more. Of text: windows, from whole
    documents and the end of one more."""
    repeat: float = knob(1.0, ge=0)
    """Average number of times each conversation is seen per epoch. 0: evaluate only."""
    thinking: Literal["as-written", "with", "without"] = "as-written"
    """Thinking mode of the chat template. as-written: with thinking if the line sets `thinking:
    true`, or if it sets nothing and a message has reasoning. without: remove the reasoning."""
    system: str = ""
    """System message for conversations that have none."""
    on_bad_line: Literal["error", "skip"] = "error"
    """Handling of malformed lines. Skipped lines are counted and reported."""
    least_reward: float = knob(1.0, kinds=("trajectories",))
    """trajectories: minimum value of the reward part named in `reward`."""
    reward: str = knob("correct", kinds=("trajectories",))
    """trajectories: reward part that `least_reward` applies to. `reward` is the whole reward."""
    cut: bool = knob(False, kinds=("trajectories",))
    """trajectories: whether to include truncated ones."""
    most_per_prompt: int = knob(0, ge=0, kinds=("trajectories",))
    """trajectories: maximum number per prompt, in sampling order. 0: all."""

    def check(self) -> None:
        self.require(bool(self.name), "name", "must not be empty")
        needed = {"solutions": "task", "retrieval": "length"}.get(self.source, "path")
        rule = f"is required for source: {self.source}"
        self.require(bool(getattr(self, needed)), needed, rule)
        self.require_kinds(self.source)
        if self.source == "retrieval":
            ok = {*self.params} <= {"letters", "digits"}
            self.require(ok, "params", "may set letters and digits")
        rule = "belongs to conversations, not text"
        self.require(not self.system or not self.is_text, "system", rule)
        if self.source in ("solutions", "retrieval"):
            self.require(self.size > 0, "size", f"must be at least 1 for source: {self.source}")
        rule = "is 0, so the source is neither trained nor evaluated. Set holdout"
        self.require(self.repeat > 0 or self.holdout > 0, "repeat", rule)

    @property
    def is_text(self) -> bool:
        return self.source in TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig(Section, path="sft"):
    """Settings for supervised fine-tuning and for pre-training on text. The sections `run`,
    `model`, `trainer` and `alarms` apply as in `keel train`."""

    sources: tuple[ConversationsConfig, ...] = ()
    max_context_tokens: int = knob(4096, ge=1)
    """Maximum length of a conversation's context in tokens. For text, the size of a window."""
    long_conversations: Literal["error", "drop"] = "error"
    """Handling of longer conversations. drop: leave them out and count them."""
    conversations_per_step: int = knob(32, ge=1)
    """Number of conversations, or windows of text, per step."""
    tokens_per_step: int = knob(0, ge=0)
    """Maximum number of tokens per step, contexts included. 0: `conversations_per_step`
    conversations of any length."""
    epochs: float = knob(0.0, ge=0, resumable=True)
    """Number of passes over the conversations, which replaces `run.steps`. 0: use `run.steps`."""
    mean: Literal["tokens", "conversations"] = "tokens"
    """How the loss is averaged in a step: over all trained tokens, or over conversations, each of
    which is averaged over its own tokens first."""

    def check(self) -> None:
        names = [source.name for source in self.sources]
        require_unique("sft.sources", names)
        trained = not names or any(source.repeat > 0 for source in self.sources)
        require(trained, "sft.sources", names, "at least one needs a repeat above 0")

    @property
    def step_contexts(self) -> int:
        if self.tokens_per_step:
            return max(1, self.tokens_per_step // self.max_context_tokens)
        return self.conversations_per_step

    @property
    def only_text(self) -> bool:
        return bool(self.sources) and all(source.is_text for source in self.sources)
