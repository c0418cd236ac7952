"""`keel sft` and `keel pretrain`: conversations and text to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from keel.configs.sections.base import require

TEXT = ("text", "retrieval")
"""Sources of plain text. What a source calls a conversation is a window of tokens there."""
NEEDED = {"solutions": "task", "retrieval": "length"}
"""What a source cannot do without; the others: `path`."""
OF_TRAJECTORIES = ("least_reward", "reward", "cut", "most_per_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationsConfig:
    """One source of conversations, or of text."""

    name: str
    """Name of the source; its held-out loss appears as `eval/<name>/loss`."""
    source: Literal["jsonl", "file", "hub", "trajectories", "solutions", "text", "retrieval"]
    """jsonl: chats, a line each (docs/sft.md has the forms). file: a file of any kind, or a folder
    of them; hub: a dataset of the Hugging Face hub (docs/data.md). trajectories: what a run of Keel
    has sampled. solutions: worked answers to questions of reasoning_gym, of the tasks that the
    tiny model's cold start teaches. text: documents, cut into windows (docs/pretrain.md).
    retrieval: synthetic text in which digits have to be found again; those are learned."""
    path: str = ""
    """jsonl: the file. file: a `.jsonl`, `.json`, `.csv`, `.tsv`, `.parquet` or `.arrow` file, or a
    folder as the hub has it or `save_to_disk` writes it. hub: owner/name. trajectories: a run
    folder, the folder of a `keel eval`, or a file of either. text: a `.txt` or `.md` file, rows of
    any kind with a column `text`, or a folder of both."""
    split: str = ""
    """file, hub: the split of a folder or dataset; empty: train."""
    subset: str = ""
    """file, hub: the subset of a folder or dataset that has several."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """jsonl, file, hub: key → column, such as `{prompt: instruction, completion: output}`; a dot
    looks into an object. '': the key is not in the file, whatever a column is called."""
    task: str = ""
    """solutions: a task of reasoning_gym."""
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """solutions: parameters of the task. retrieval: `letters` and `digits`, how many there are."""
    length: int = 0
    """retrieval: characters of a text."""
    size: int = 0
    """Conversations to read (0: all), or to make; of text: documents. With `most_per_prompt`: to
    keep."""
    holdout: int = 0
    """Conversations that are never learned, and whose loss is measured (`run.eval_every`). Those
    with the same question go together, so there may be a few more. Of text: windows, of whole
    documents and of the end of one more."""
    repeat: float = 1.0
    """How often each is seen in an epoch, on average. 0: held out alone."""
    thinking: Literal["as-written", "with", "without"] = "as-written"
    """The mode that the chat template is asked for. as-written: with, where a line says `thinking:
    true`, or says nothing and any of its messages has reasoning. without: reasoning is left out."""
    system: str = ""
    """A system message for conversations that have none."""
    on_bad_line: Literal["error", "skip"] = "error"
    """What to do with a malformed line. Skipped lines are counted and reported."""
    least_reward: float = 1.0
    """trajectories: those worth at least so much, by `reward`."""
    reward: str = "correct"
    """trajectories: the part of the reward that counts; `reward`: all of it."""
    cut: bool = False
    """trajectories: those as well that were cut off."""
    most_per_prompt: int = 0
    """trajectories: so many of each prompt, the first that were sampled of those that can be
    learned; 0: all."""

    def __post_init__(self) -> None:
        knob = f"sft.sources[{self.name}]"
        require(bool(self.name), "sft.sources[].name", self.name, "must not be empty")
        wanted = NEEDED.get(self.source, "path")
        given = getattr(self, wanted)
        require(bool(given), f"{knob}.{wanted}", given, f"{self.source} needs it; name one")
        for name, of in (
            ("task", ("solutions",)),
            ("params", ("solutions", "retrieval")),
            ("length", ("retrieval",)),
            ("split", ("file", "hub")),
            ("subset", ("file", "hub")),
            ("columns", ("jsonl", "file", "hub")),
        ):
            require(
                self.source in of or not getattr(self, name),
                f"{knob}.{name}",
                getattr(self, name),
                f"is for source: {' and '.join(of)} alone; leave it out",
            )
        unknown = sorted({*self.params} - {"letters", "digits"})
        require(
            self.source != "retrieval" or not unknown,
            f"{knob}.params",
            unknown,
            "retrieval has letters and digits alone",
        )
        require(
            not self.system or not self.is_text,
            f"{knob}.system",
            self.system,
            f"is for conversations, not for source: {self.source}; leave it out",
        )
        require(
            self.source not in ("solutions", "retrieval") or self.size > 0,
            f"{knob}.size",
            self.size,
            "must be at least 1: how many to make",
        )
        for name in ("size", "holdout", "repeat", "most_per_prompt", "length"):
            value = getattr(self, name)
            require(value >= 0, f"{knob}.{name}", value, "must not be negative")
        for one in fields(self):
            value = getattr(self, one.name)
            require(
                self.source == "trajectories"
                or one.name not in OF_TRAJECTORIES
                or value == one.default,
                f"{knob}.{one.name}",
                value,
                "is for source: trajectories alone; leave it out",
            )
        require(
            self.repeat > 0 or self.holdout > 0,
            f"{knob}.repeat",
            self.repeat,
            "is for sources that are held out alone: set holdout, too, or leave the source out",
        )

    @property
    def is_text(self) -> bool:
        return self.source in TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning, and pre-training on text. `run`, `model`, `trainer` and `alarms`
    count as in `keel train`."""

    sources: tuple[ConversationsConfig, ...] = ()
    max_context_tokens: int = 4096
    """Longest context of a conversation, in tokens; text is cut into windows of so many."""
    long_conversations: Literal["error", "drop"] = "error"
    """What becomes of a conversation with a longer one."""
    conversations_per_step: int = 32
    """Conversations in a step, or windows of text."""
    tokens_per_step: int = 0
    """Most tokens in a step, contexts included: it takes conversations until the next one would
    make them more. 0: `conversations_per_step` conversations, whatever their length."""
    epochs: float = 0.0
    """How often the conversations are seen; `run.steps` does not count then. 0: `run.steps`
    steps."""
    mean: Literal["tokens", "conversations"] = "tokens"
    """What the loss is a mean over, in a step: its learned tokens, or its conversations, each of
    them the mean over its own."""

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        require(len(set(names)) == len(names), "sft.sources", names, "names must differ")
        require(
            not self.sources or any(source.repeat > 0 for source in self.sources),
            "sft.sources",
            names,
            "at least one needs a repeat above 0",
        )
        for name in ("max_context_tokens", "conversations_per_step"):
            require(getattr(self, name) >= 1, f"sft.{name}", getattr(self, name), "must be >= 1")
        for name in ("tokens_per_step", "epochs"):
            value = getattr(self, name)
            require(value >= 0, f"sft.{name}", value, "must not be negative")

    @property
    def step_contexts(self) -> int:
        """Of a step, every one at its limit."""
        if self.tokens_per_step:
            return max(1, self.tokens_per_step // self.max_context_tokens)
        return self.conversations_per_step

    @property
    def only_text(self) -> bool:
        """Nothing but text: what `keel pretrain` is for."""
        return bool(self.sources) and all(source.is_text for source in self.sources)
