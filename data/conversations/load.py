"""All sources of conversations: read, rendered, deduplicated, and split into those that are learned
and those that are held out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.files import read_rows, read_trajectories
from keel.data.conversations.solutions import Solve, worked_solutions
from keel.data.conversations.text import Encoded, made_texts, read_text
from keel.data.conversations.types import Example, Read, Render
from keel.data.items import digest, first_of
from keel.data.stream import Stream
from keel.rl.sft import SftExample


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a source, and what it is made of."""

    learned: int
    heldout: int
    tokens: int
    """Of the learned ones, context included."""
    learned_tokens: int
    contexts: int
    longest: int
    documents: int
    """Of text: those that the learned windows are of."""
    sampled: int
    """Conversations whose tokens are those that a policy sampled."""
    left_out: Mapping[str, int]
    """Why → how many."""
    skipped: tuple[str, ...]
    unread: frozenset[str]

    def lines(self, name: str) -> Iterator[str]:
        """For people. name: of the source."""
        what = "windows" if self.documents else "conversations"
        said = f"{name}: {self.learned:,} {what} to learn from, {self.heldout:,} held out"
        if self.documents:
            said += f"; of {self.documents:,} documents"
        if self.learned:
            said += (
                f"; {self.learned_tokens:,} of {self.tokens:,} tokens learned, in "
                f"{self.contexts:,} contexts of at most {self.longest:,}"
            )
        if self.sampled:
            said += f"; {self.sampled:,} by the very tokens that were sampled"
        yield said
        if self.left_out:
            yield "  left out: " + ", ".join(f"{n:,} {why}" for why, n in self.left_out.items())
        yield from (f"  skipped: {line}" for line in first_of(self.skipped))
        if self.unread:
            yield f"  keys that mean nothing here: {', '.join(sorted(self.unread))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    train: Stream[SftExample]
    heldout: Mapping[str, tuple[SftExample, ...]]
    """Source name → its held-out conversations, for sources that have any."""
    report: Mapping[str, Report]


def load_lessons(
    config: SftConfig,
    *,
    seed: int,
    render: Render,
    solve: Solve,
    tokenizer: str,
    encoded: Encoded | None = None,
    hub_answers: Callable[[], bool] = lambda: True,
    reserved: Collection[str] = (),
    reserved_ids: Collection[str] = (),
) -> Lessons:
    """Read every source and set its held-out conversations aside.

    A conversation is kept once, and a question that any source holds out is learned in none; of a
    document that does not fit into what is held out, that goes for the windows at its end.
    reserved: further questions that are not (`Example.question`): those of the recipe's prompts
    that are held out. reserved_ids: names of these prompts: an environment opens its conversations
    in its own words, and trajectories are known by the prompt that they answer. tokenizer: digest
    of the model's. solve: see `solutions`. encoded: how text becomes tokens, for sources of text.
    hub_answers: whether a hub can be asked; else what was downloaded before is read.

    Raises ConfigError for sources that cannot be read, conversations that are too long (under
    `long_conversations: error`) or cannot be shown by the model's template, and sources of which
    nothing is left.
    """

    def read(source: ConversationsConfig) -> Read:
        if source.source in ("jsonl", "file", "hub"):
            return read_rows(source, hub_answers)
        return _read(source, config, seed, solve, tokenizer, encoded)

    parts = [_part(source, config, read(source), seed, render) for source in config.sources]
    held = {key for part in parts for key in part.held}
    train: dict[str, list[SftExample]] = {}
    report: dict[str, Report] = {}
    for source, part in zip(config.sources, parts, strict=True):
        spared = [one for one in part.usable if one.key not in held]
        kept = [
            one
            for one in spared
            if one.question not in reserved and one.prompt_id not in reserved_ids
        ]
        elsewhere = len(part.usable) - len(part.heldout) - len(spared)
        left = {**part.left_out, "held out by another source": elsewhere}
        left["held out by data.sources"] = len(spared) - len(kept)
        left = {why: count for why, count in left.items() if count}
        if source.repeat > 0 and not kept:
            raise _nothing_left(source, part, left)
        lessons = [one.lesson for one in kept] if source.repeat > 0 else []
        train[source.name] = lessons
        report[source.name] = Report(
            learned=len(lessons),
            heldout=len(part.heldout),
            tokens=sum(lesson.total_tokens for lesson in lessons),
            learned_tokens=sum(lesson.learned_tokens for lesson in lessons),
            contexts=sum(len(lesson.segments) for lesson in lessons),
            longest=max((lesson.longest for lesson in lessons), default=0),
            documents=len({one.question for one in kept}) if source.is_text else 0,
            sampled=sum(one.sampled for one in kept),
            left_out=left,
            skipped=part.read.skipped,
            unread=frozenset(key for one in part.read.examples for key in one.unread),
        )
    shares = {s.name: s.repeat * len(train[s.name]) for s in config.sources}
    return Lessons(
        train=Stream(train, weights=shares, seed=seed, content=content_of),
        heldout={
            source.name: tuple(one.lesson for one in part.heldout)
            for source, part in zip(config.sources, parts, strict=True)
            if part.heldout
        },
        report=report,
    )


def content_of(lesson: SftExample) -> str:
    """By which a resumed run knows its data again."""
    tokens = hashlib.blake2b(digest_size=16)
    for segment in lesson.segments:
        tokens.update(segment.token_ids_T.tobytes())
        tokens.update(segment.trainable_T.tobytes())
    return f"{lesson.prompt_id} {tokens.hexdigest()}"


@dataclass(frozen=True, slots=True)
class _Usable:
    lesson: SftExample
    question: str
    key: str
    """By which it is held out: the question, or of text the window."""
    prompt_id: str
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One source on its way."""

    read: Read
    usable: list[_Usable]
    held: set[str]
    """`_Usable.key`."""
    left_out: Mapping[str, int]

    @property
    def heldout(self) -> list[_Usable]:
        return [one for one in self.usable if one.key in self.held]


def _read(
    source: ConversationsConfig,
    config: SftConfig,
    seed: int,
    solve: Solve,
    tokenizer: str,
    encoded: Encoded | None,
) -> Read:
    if source.source == "trajectories":
        return read_trajectories(source, tokenizer=tokenizer)
    if source.source == "solutions":
        return worked_solutions(source, solve, seed=seed)
    assert encoded is not None
    if source.source == "text":
        return read_text(source, encoded, window=config.max_context_tokens)
    return made_texts(source, encoded, seed=seed)


def _part(
    source: ConversationsConfig, config: SftConfig, read: Read, seed: int, render: Render
) -> _Part:
    knob = f"sft.sources[{source.name}]"
    skipped = list(read.skipped)
    distinct: dict[str, Example] = {}
    for example in read.examples:
        distinct.setdefault(example.content, example)
    usable: list[_Usable] = []
    long = beyond = 0
    most, taken = source.most_per_prompt, defaultdict[str, set[str]](set)
    """Trajectories taken of each prompt; one of an agent program may be several conversations."""
    for example in distinct.values():
        if most and source.size and len(usable) >= source.size:
            break
        prompt = example.prompt_id or example.question
        if most and len(taken[prompt] - {example.origin}) >= most:
            beyond += 1
            continue
        try:
            lesson = _lesson(source.name, example, render)
        except ValueError as error:
            why = f"{example.origin}: {error}"
            if source.on_bad_line == "error":
                raise ConfigError(
                    f"{why} ({knob}; set {_other_mode(example, render)}on_bad_line: skip to leave "
                    "such conversations out)"
                ) from error
            skipped.append(why)
            continue
        if lesson.longest > config.max_context_tokens:
            if config.long_conversations == "error":
                raise ConfigError(
                    f"{example.origin} has {lesson.longest} tokens, more than "
                    f"sft.max_context_tokens = {config.max_context_tokens} ({knob}): raise it, or "
                    "set sft.long_conversations: drop to leave such conversations out"
                )
            long += 1
            continue
        taken[prompt].add(example.origin)
        sampled = bool(example.segments) and not example.document
        question = example.question
        key = example.content if example.document else question
        usable.append(_Usable(lesson, question, key, example.prompt_id, sampled))
    return _Part(
        read=Read(examples=read.examples, skipped=tuple(skipped)),
        usable=usable,
        held=_held(source, usable, seed, skipped),
        left_out={
            **read.unselected,
            "malformed": len(skipped),
            "repeated": len(read.examples) - len(distinct),
            f"beyond {most} of a prompt": beyond,
            "too long": long,
        },
    )


def _other_mode(example: Example, render: Render) -> str:
    """The mode of the chat template in which the conversation can be told, where it cannot in the
    one that it is asked for."""
    try:
        render(replace(example, thinking=not example.thinking))
    except ValueError:
        return ""
    if not example.thinking:
        return "thinking: with, in which it can be told, or "
    reasons = any("reasoning_content" in message for message in example.messages)
    return f"thinking: without, in which it can be told{', less its reasoning' * reasons}, or "


def _held(
    source: ConversationsConfig, usable: list[_Usable], seed: int, skipped: Sequence[str]
) -> set[str]:
    """What `holdout` takes, by `_Usable.key`: questions and documents in an order drawn by the
    seed, each whole, as long as they fit; then the end of one more document, or the question with
    the fewest conversations. Raises ConfigError where there are not so many."""
    knob, missing = f"sft.sources[{source.name}].holdout", source.holdout
    if missing > len(usable):
        raise ConfigError(
            f"{knob} = {missing}: there are only {len(usable)} usable {_called(source)}s"
            f"{_first(skipped)}; lower it, or add more"
        )
    groups: dict[str, list[str]] = {}
    for one in usable:
        groups.setdefault(one.question, []).append(one.key)
    order = sorted(groups, key=lambda question: digest(f"{seed}/{source.name}/{question}"))
    held: set[str] = set()
    larger: list[list[str]] = []
    for keys in (groups[question] for question in order):
        if len(keys) > missing:
            larger.append(keys)
            continue
        held.update(keys)
        missing -= len(keys)
    if missing and source.is_text:
        held.update(larger[0][-missing:])
    elif missing:
        fewest = min(larger, key=len)
        if len(larger) == 1 and len(fewest) >= source.holdout:
            held.clear()  # else nothing would be left to learn
        held.update(fewest)
    return held


def _nothing_left(source: ConversationsConfig, part: _Part, left: Mapping[str, int]) -> ConfigError:
    knob = f"sft.sources[{source.name}]"
    counts = {**left, "held out": len(part.heldout)}
    why = ", ".join(f"{count:,} {why}" for why, count in counts.items() if count) or "it is empty"
    said = f"{knob}: no {_called(source)} is left to learn from ({why}){_first(part.read.skipped)}"
    if part.heldout:
        whole = "" if source.is_text else " (those with the same question go together)"
        said += f"; lower {knob}.holdout = {source.holdout}, or add more to learn from{whole}"
    return ConfigError(said)


def _called(source: ConversationsConfig) -> str:
    return "window" if source.is_text else "conversation"


def _first(skipped: Sequence[str]) -> str:
    return f"; the first that is malformed: {skipped[0]}" if skipped else ""


def _lesson(name: str, example: Example, render: Render) -> SftExample:
    segments = example.segments or render(example)
    return SftExample(prompt_id=f"{name}/{example.content}", segments=tuple(segments))
