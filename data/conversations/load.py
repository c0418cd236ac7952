"""Load conversation sources: read chats, texts and trajectories, render them, remove duplicates,
and hold some out."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.forms import (
    KNOWN,
    Example,
    ReadSource,
    Render,
    parse_example,
)
from keel.data.conversations.text import Encoded, generate_texts, read_text
from keel.data.eval_store import to_trajectory_record
from keel.data.items import digest, first_lines, malformed_error
from keel.data.procedural import build_task
from keel.data.rows import (
    BadLine,
    Row,
    check_file,
    check_keys,
    drop_nulls,
    parse_json,
    parse_object,
    read_lines,
    read_source_rows,
    select_columns,
)
from keel.data.stream import Stream
from keel.rl.sft import SftExample
from keel.rl.summary import FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Conversation and token counts for a source."""

    trained: Sequence[SftExample]
    heldout: int
    documents: int  # number of documents with training windows (text sources only)
    sampled: int  # number of conversations that keep the exact tokens sampled by a policy
    left_out: Mapping[str, int]  # number of excluded conversations for each reason
    skipped: Sequence[str]

    @property
    def learned(self) -> int:
        return len(self.trained)

    @property
    def longest(self) -> int:
        return max((one.longest for one in self.trained), default=0)

    def lines(self, name: str) -> Iterator[str]:
        kind = "windows" if self.documents else "conversations"
        line = f"{name}: {self.learned:,} {kind} to learn from, {self.heldout:,} held out"
        if self.documents:
            line += f"; of {self.documents:,} documents"
        if self.trained:
            learned = sum(one.learned_tokens for one in self.trained)
            tokens = sum(one.total_tokens for one in self.trained)
            contexts = sum(len(one.segments) for one in self.trained)
            line += f"; {learned:,} of {tokens:,} tokens learned, in {contexts:,} contexts "
            line += f"of at most {self.longest:,}"
        if self.sampled:
            line += f"; {self.sampled:,} with the exact tokens that were sampled"
        yield line
        if self.left_out:
            yield "  left out: " + ", ".join(f"{n:,} {why}" for why, n in self.left_out.items())
        yield from (f"  skipped: {line}" for line in first_lines(self.skipped))


@dataclass(frozen=True, slots=True, kw_only=True)
class SftData:
    train: Stream[SftExample]
    heldout: Mapping[str, tuple[SftExample, ...]]
    """Held-out conversations by source name, without sources that hold none out."""
    report: Mapping[str, _Report]


class _Usable(NamedTuple):
    sft_example: SftExample
    example: Example
    question: str
    key: str  # identifies the unit that is held out as a whole: a question, or one window of a text


class _Part(NamedTuple):
    usable: list[_Usable]
    left_out: Mapping[str, int]
    skipped: list[str]
    held: set[str]


def load_sft_data(
    config: SftConfig,
    *,
    seed: int,
    render: Render,
    solve: _Solve,
    tokenizer: str,
    encoded: Encoded | None = None,
    reserved: Collection[str] = (),
    reserved_ids: Collection[str] = (),
) -> SftData:
    """Read every source, remove duplicates, and split off the held-out conversations.

    A question held out by one source isn't trained on in any other. If a document is too long for
    the held-out set, only its last windows are held out. Prompts held out by the recipe are
    excluded by question (`reserved`) and by ID (`reserved_ids`), because an environment may change
    the first message. `tokenizer` is a digest of the model's tokenizer, and `encoded` tokenizes
    text sources.

    Raises ConfigError if a source is empty or can't be read, or if a conversation can't be rendered
    with the chat template or is too long (under `long_conversations: error`).
    """

    def read(source: ConversationsConfig) -> ReadSource:
        if source.source == "solutions":
            return _worked_solutions(source, solve, seed=seed)
        if not source.is_text:
            return read_conversations(source, tokenizer=tokenizer)
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
        own = tuple(one.sft_example for one in part.usable if one.key in part.held)
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
        train[source.name] = [one.sft_example for one in kept] if source.repeat > 0 else []
        if own:
            heldout[source.name] = own
        report[source.name] = _Report(
            trained=train[source.name],
            heldout=len(own),
            documents=len({one.question for one in kept}) if source.is_text else 0,
            sampled=sum(bool(e.segments) and not e.document for _, e, _, _ in kept),
            left_out=counts,
            skipped=part.skipped,
        )

    def content(example: SftExample) -> str:
        """Return a text that changes whenever the conversation's tokens change."""
        tokens = hashlib.blake2b(digest_size=16)
        for segment in example.segments:
            tokens.update(segment.token_ids_T.tobytes())
            tokens.update(segment.trainable_T.tobytes())
        return f"{example.prompt_id} {tokens.hexdigest()}"

    shares = {s.name: s.repeat * len(train[s.name]) for s in config.sources}
    stream = Stream(train, weights=shares, seed=seed, content=content)
    return SftData(train=stream, heldout=heldout, report=report)


def _part(
    source: ConversationsConfig, config: SftConfig, read: ReadSource, render: Render, seed: int
) -> _Part:
    knob = f"sft.sources[{source.name}]"
    skipped = list(read.skipped)
    distinct: dict[str, Example] = {}
    for example in read.examples:
        distinct.setdefault(example.content, example)
    repeated = len(read.examples) - len(distinct)
    left_out = Counter({**read.unselected, "malformed": len(skipped), "repeated": repeated})
    usable: list[_Usable] = []
    # The origins taken for each prompt. One trajectory of an agent program may have several
    # conversations.
    most, taken = source.most_per_prompt, defaultdict[str, set[str]](set)
    for content, example in distinct.items():
        if most and source.size and len(usable) >= source.size:
            break
        prompt = example.prompt_id or example.question
        if most and len(taken[prompt] - {example.origin}) >= most:
            left_out[f"beyond {most} of a prompt"] += 1
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
            left_out["malformed"] += 1
            continue
        sft_example = SftExample(prompt_id=f"{source.name}/{content}", segments=segments)
        if sft_example.longest > config.max_context_tokens:
            if config.long_conversations == "error":
                raise ConfigError(
                    f"{example.origin} has {sft_example.longest} tokens, more than "
                    f"sft.max_context_tokens = {config.max_context_tokens} ({knob}): raise it, or "
                    "set sft.long_conversations: drop to leave such conversations out"
                )
            left_out["too long"] += 1
            continue
        taken[prompt].add(example.origin)
        key = content if example.document else example.question
        usable.append(_Usable(sft_example, example, example.question, key))
    return _Part(usable, left_out, skipped, _choose_holdout(source, usable, skipped, seed))


def _choose_holdout(
    source: ConversationsConfig, usable: list[_Usable], skipped: list[str], seed: int
) -> set[str]:
    """Choose which `_Usable.key` values to hold out.

    Take whole questions and documents in seeded order as long as they fit. Then fill up the
    held-out set with the end of one more document, or add whichever remaining question has the
    fewest conversations.
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
_SEED_STRIDE = 1 << 20  # distance between the task seeds of consecutive run seeds
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


# --- Reading chats and trajectories ---

_PARSED = frozenset({"messages", "conversations", "tools"})
"""Keys whose values may be stored as JSON text in a table."""
_R = TypeVar("_R")
_Placed = tuple[str, dict[str, Any]]
"""An object read from a file, and its location (such as `file:line`)."""


def read_conversations(
    source: ConversationsConfig,
    *,
    tokenizer: str = "",
) -> ReadSource:
    """Read trajectories, or chats from a file, a folder or a hub dataset. `tokenizer` is the digest
    of the learner's tokenizer. Raises ConfigError if there is nothing to read. A malformed row also
    raises ConfigError, with its location, unless `on_bad_line: skip` is set."""
    if source.source == "trajectories":
        return _read_trajectories(source, tokenizer=tokenizer)
    knob = f"sft.sources[{source.name}]"
    check_keys(source.columns, KNOWN, knob)
    placed = ((row.at, row) for row in read_source_rows(source, f"{knob}.path"))
    return _read_examples(source, placed, lambda at, row: [(at, _keyed(row, source.columns))])


def _keyed(row: Row, columns: Mapping[str, str]) -> dict[str, Any]:
    if isinstance(row.record, BadLine):
        raise row.record
    renamed = {*columns, *columns.values()}
    keyed = {key: value for key, value in row.record.items() if key not in renamed}
    keyed |= select_columns(row.record, columns)
    if row.written is not None:
        return keyed
    cells = {key: value for key, value in drop_nulls(keyed).items() if value != ""}
    for key, value in cells.items():
        if key in _PARSED and isinstance(value, str):
            cells[key] = parse_json(key, value)
        elif key == "thinking" and isinstance(value, str):
            cells[key] = {"true": True, "false": False}.get(value.strip().lower(), value)
    return cells


def _read_trajectories(source: ConversationsConfig, *, tokenizer: str) -> ReadSource:
    """Read the trajectories of a run (`trajectories/`) or evaluation (`samples.jsonl`), keeping
    those that pass the source's filters, such as `least_reward`.

    A trajectory is rendered again from its messages if it was sampled in a different thinking mode,
    without the source's system message or with a different tokenizer.
    """
    path, knob = data_path(source.path), f"sft.sources[{source.name}].path"
    if not path.is_dir():
        check_file(path, knob)
    files = [path]
    if path.is_dir():  # other files `step_*` were unpacked by `keel report`
        patterns = ("samples.jsonl", "trajectories/step_*.jsonl", "step_*.jsonl")
        found = (sorted(f for f in path.glob(p) if "." not in f.stem) for p in patterns)
        files = next(filter(None, found), [])
    if not files:
        raise ConfigError(
            f"{knob} = {source.path!r} has no trajectories; name the folder of a run "
            "(trajectories/*.jsonl), of `keel eval` (samples.jsonl), or a file"
        )
    dropped: Counter[str] = Counter()
    mode = {"as-written": None, "with": True, "without": False}[source.thinking]

    def selected(at: str, text: bytes) -> Iterator[_Placed]:
        line = parse_object(text, replace_surrogates=True)[0]
        of_evaluation = "samples" in line
        samples = map(to_trajectory_record, line["samples"]) if of_evaluation else [dict(line)]
        for number, record in enumerate(samples):
            if reason := _drop_reason(record, source):
                dropped[reason] += 1
                continue
            place = f"{at}, sample {number}" if of_evaluation else at
            same = record.get("tokenizer") == tokenizer and mode in (None, record.get("thinking"))
            if same and tokenizer and not source.system:  # learn exactly the sampled tokens
                yield place, record
                continue
            record.pop("segments", None)
            conversations = [record, *record.get("other_conversations", [])]
            learnable = [{**record, **one} for one in conversations if _is_learnable(one)]
            dropped["no whole turn"] += not learnable
            for conversation in learnable:
                yield place, conversation

    lines = (
        (f"{path}:{number}", line) for path in files for number, line in read_lines(path, knob)
    )
    return replace(_read_examples(source, lines, selected), unselected=dropped)


def _is_learnable(conversation: Mapping[str, Any]) -> bool:
    """Return whether a conversation has a message to train on, or is malformed."""
    messages = conversation.get("messages")
    return not isinstance(messages, list) or any(
        not isinstance(m, dict) or (m.get("role") == "assistant" and m.get("weight") != 0)
        for m in cast(list[Any], messages)
    )


def _read_examples(
    source: ConversationsConfig,
    rows: Iterable[tuple[str, _R]],
    records: Callable[[str, _R], Iterable[_Placed]],
) -> ReadSource:
    """Read conversations from (location, row) pairs. `records` returns the conversations in a row,
    or raises BadLine if the row is malformed."""
    # `size` counts the conversations that a limit per prompt leaves.
    size = 0 if source.most_per_prompt else source.size
    examples: list[Example] = []
    skipped: list[str] = []
    for at, row in rows:
        if size and len(examples) >= size:
            break
        try:
            examples += [parse_example(record, place, source) for place, record in records(at, row)]
        except BadLine as error:
            skipped.append(f"{at}: {error}")
            if source.on_bad_line == "error":
                raise malformed_error(skipped[0], f"sft.sources[{source.name}]") from error
    return ReadSource(examples=tuple(examples[: size or None]), skipped=tuple(skipped))


def _drop_reason(record: Mapping[str, Any], source: ConversationsConfig) -> str:
    parts = record.get("parts")
    if not isinstance(parts, dict) or "messages" not in record:
        raise BadLine("is not a trajectory: it needs `messages` and the `parts` of its reward")
    value = record.get("reward") if source.reward == "reward" else parts.get(source.reward)
    if not isinstance(value, int | float):
        raise BadLine(
            f"has no `{source.reward}` (sft.sources[{source.name}].reward); it has reward, "
            f"{', '.join(parts)}"
        )
    if value < source.least_reward - FAIL:
        return f"reward below {source.least_reward:g}"
    if not source.cut and record.get("finish_reason", "stop") != "stop":
        return "cut off"
    return ""
