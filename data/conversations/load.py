"""Load conversation sources: read and render conversations, remove duplicates, and hold some
out."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.files import read_rows, read_trajectories
from keel.data.conversations.forms import Example, ReadSource, Render
from keel.data.conversations.text import Encoded, generate_texts, read_text
from keel.data.items import digest, first_lines
from keel.data.procedural import build_task
from keel.data.stream import Stream
from keel.rl.sft import SftExample


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Counts of conversations and tokens in a source."""

    lessons: Sequence[SftExample]
    """Conversations to train on."""
    heldout: int
    documents: int
    """Number of documents with training windows (text sources only)."""
    sampled: int
    """Number of conversations that keep the exact tokens sampled by a policy."""
    left_out: Mapping[str, int]
    """Number of excluded conversations for each reason."""
    skipped: Sequence[str]
    unread: frozenset[str]

    @property
    def learned(self) -> int:
        return len(self.lessons)

    @property
    def longest(self) -> int:
        return max((lesson.longest for lesson in self.lessons), default=0)

    def lines(self, name: str) -> Iterator[str]:
        kind = "windows" if self.documents else "conversations"
        line = f"{name}: {self.learned:,} {kind} to learn from, {self.heldout:,} held out"
        if self.documents:
            line += f"; of {self.documents:,} documents"
        if self.lessons:
            learned = sum(lesson.learned_tokens for lesson in self.lessons)
            tokens = sum(lesson.total_tokens for lesson in self.lessons)
            contexts = sum(len(lesson.segments) for lesson in self.lessons)
            line += f"; {learned:,} of {tokens:,} tokens learned, in {contexts:,} contexts "
            line += f"of at most {self.longest:,}"
        if self.sampled:
            line += f"; {self.sampled:,} with the exact tokens that were sampled"
        yield line
        if self.left_out:
            yield "  left out: " + ", ".join(f"{n:,} {why}" for why, n in self.left_out.items())
        yield from (f"  skipped: {line}" for line in first_lines(self.skipped))
        if self.unread:
            yield f"  unknown keys: {', '.join(sorted(self.unread))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    train: Stream[SftExample]
    heldout: Mapping[str, tuple[SftExample, ...]]
    """Held-out conversations by source name, without sources that hold none out."""
    report: Mapping[str, _Report]


class _Usable(NamedTuple):
    lesson: SftExample
    example: Example
    question: str
    key: str
    """Identifies the unit that is held out as a whole: a question, or one window of a text."""


class _Part(NamedTuple):
    usable: list[_Usable]
    left_out: Mapping[str, int]
    skipped: list[str]
    held: set[str]


def load_lessons(
    config: SftConfig,
    *,
    seed: int,
    render: Render,
    solve: _Solve,
    tokenizer: str,
    encoded: Encoded | None = None,
    hub_answers: Callable[[], bool] = lambda: True,
    reserved: Collection[str] = (),
    reserved_ids: Collection[str] = (),
) -> Lessons:
    """Read every source, remove duplicates, and split off the held-out conversations.

    A question held out by one source is not trained on in any other. If a document is too long for
    the held-out set, only its last windows are held out. Prompts held out by the recipe are
    excluded by question (`reserved`) and by ID (`reserved_ids`), because an environment may change
    the first message. `tokenizer` is a digest of the model's tokenizer, and `encoded` tokenizes
    text sources. If `hub_answers` returns False, no hub is contacted.

    Raises ConfigError if a source is empty or cannot be read, or if a conversation cannot be
    rendered with the chat template or is too long (under `long_conversations: error`).
    """

    def read(source: ConversationsConfig) -> ReadSource:
        if source.source == "trajectories":
            return read_trajectories(source, tokenizer=tokenizer)
        if source.source == "solutions":
            return _worked_solutions(source, solve, seed=seed)
        if not source.is_text:
            return read_rows(source, hub_answers)
        assert encoded is not None
        if source.source == "text":
            return read_text(source, encoded, window=config.max_context_tokens)
        return generate_texts(source, encoded, seed=seed)

    sources = {source.name: read(source) for source in config.sources}
    parts = {s.name: _part(s, config, sources[s.name], render, seed) for s in config.sources}
    every_held = {key for part in parts.values() for key in part.held}
    train: dict[str, list[SftExample]] = {}
    heldout: dict[str, tuple[SftExample, ...]] = {}
    report: dict[str, _Report] = {}
    for source in config.sources:
        part = parts[source.name]
        own = tuple(one.lesson for one in part.usable if one.key in part.held)
        not_held = [one for one in part.usable if one.key not in every_held]
        kept = [
            one
            for one in not_held
            if one.question not in reserved and one.example.prompt_id not in reserved_ids
        ]
        counts = {
            **part.left_out,
            "held out by another source": len(part.usable) - len(own) - len(not_held),
            "held out by data.sources": len(not_held) - len(kept),
        }
        counts = {why: count for why, count in counts.items() if count}
        if source.repeat > 0 and not kept:
            whys = [f"{count:,} {why}" for why, count in {**counts, "held out": len(own)}.items()]
            raise ConfigError(
                f"sft.sources[{source.name}]: nothing is left to learn from ({', '.join(whys)}). "
                f"Add conversations, or lower holdout = {source.holdout}"
                + "".join(f"; the first malformed one: {line}" for line in part.skipped[:1])
            )
        train[source.name] = [one.lesson for one in kept] if source.repeat > 0 else []
        if own:
            heldout[source.name] = own
        report[source.name] = _Report(
            lessons=train[source.name],
            heldout=len(own),
            documents=len({one.question for one in kept}) if source.is_text else 0,
            sampled=sum(bool(e.segments) and not e.document for _, e, _, _ in kept),
            left_out=counts,
            skipped=part.skipped,
            unread=frozenset(key for e in sources[source.name].examples for key in e.unread),
        )

    def content(lesson: SftExample) -> str:
        """Return a text that changes whenever the tokens of the conversation change."""
        tokens = hashlib.blake2b(digest_size=16)
        for segment in lesson.segments:
            tokens.update(segment.token_ids_T.tobytes())
            tokens.update(segment.trainable_T.tobytes())
        return f"{lesson.prompt_id} {tokens.hexdigest()}"

    shares = {s.name: s.repeat * len(train[s.name]) for s in config.sources}
    stream = Stream(train, weights=shares, seed=seed, content=content)
    return Lessons(train=stream, heldout=heldout, report=report)


def _part(
    source: ConversationsConfig, config: SftConfig, read: ReadSource, render: Render, seed: int
) -> _Part:
    knob = f"sft.sources[{source.name}]"
    skipped = list(read.skipped)
    distinct: dict[str, Example] = {}
    for example in read.examples:
        distinct.setdefault(example.content, example)
    usable: list[_Usable] = []
    long = beyond = 0
    # The origins taken for each prompt. One trajectory of an agent program may have several
    # conversations.
    most, taken = source.most_per_prompt, defaultdict[str, set[str]](set)
    for content, example in distinct.items():
        if most and source.size and len(usable) >= source.size:
            break
        prompt = example.prompt_id or example.question
        if most and len(taken[prompt] - {example.origin}) >= most:
            beyond += 1
            continue
        try:
            segments = tuple(example.segments or render(example))
        except ValueError as error:
            why = f"{example.origin}: {error}"
            if source.on_bad_line == "error":
                raise ConfigError(
                    f"{why} ({knob}; set thinking: with or without, or on_bad_line: skip to leave "
                    "such conversations out)"
                ) from error
            skipped.append(why)
            continue
        lesson = SftExample(prompt_id=f"{source.name}/{content}", segments=segments)
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
        key = content if example.document else example.question
        usable.append(_Usable(lesson, example, example.question, key))
    left_out = {
        **read.unselected,
        "malformed": len(skipped),
        "repeated": len(read.examples) - len(distinct),
        f"beyond {most} of a prompt": beyond,
        "too long": long,
    }
    return _Part(usable, left_out, skipped, _choose_holdout(source, usable, skipped, seed))


def _choose_holdout(
    source: ConversationsConfig, usable: list[_Usable], skipped: list[str], seed: int
) -> set[str]:
    """Choose the `_Usable.key` values to hold out.

    Take whole questions and documents in seeded order while they fit, then fill the held-out set
    with the end of one more document, or add the remaining question with the fewest conversations.
    """
    missing = source.holdout
    if missing > len(usable):
        raise ConfigError(
            f"sft.sources[{source.name}].holdout = {missing}: there are only {len(usable)} "
            f"usable {'windows' if source.is_text else 'conversations'} and {len(skipped)} "
            f"malformed ones{''.join(f' ({one})' for one in skipped[:1])}; lower it"
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
            held.clear()  # otherwise no conversation would be left to learn
        held.update(fewest)
    return held


_SEED_OFFSET = 1 << 41
"""Added to the seed so that the generated questions differ from those used as prompts."""
_SEED_STRIDE = 1 << 20
"""Distance between the task seeds of consecutive run seeds."""
_Solve = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""Return the assistant's message for an entry of a task, or None if the solution is unknown."""


def _worked_solutions(source: ConversationsConfig, solve: _Solve, *, seed: int) -> ReadSource:
    knob = f"sft.sources[{source.name}]"
    task_seed = _SEED_OFFSET + seed * _SEED_STRIDE
    entries = list(build_task(source.task, source.params, source.size, task_seed, knob))
    examples: list[Example] = []
    for index, entry in enumerate(entries):
        solution = solve(source.task, entry)
        if solution is None:
            continue
        if source.thinking == "without":
            solution = {k: value for k, value in solution.items() if k != "reasoning_content"}
        messages = [{"role": "user", "content": str(entry["question"])}]
        if source.system:
            messages.insert(0, {"role": "system", "content": source.system})
        examples.append(
            Example(
                origin=f"{source.task}, question {index}",
                messages=(*messages, solution),
                trained=(len(messages),),
                thinking=source.thinking != "without",
            )
        )
    if not examples:
        raise ConfigError(
            f"{knob}.task = {source.task!r}: no worked solutions of this task exist "
            "(model/tiny/cold_start.py has a few tasks); choose another task, or use a file"
        )
    return ReadSource(
        examples=tuple(examples), unselected={"not taught": len(entries) - len(examples)}
    )
