"""Conversations from files: chats, and what runs of Keel have sampled."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.forms import (
    FORMS,
    KNOWN,
    conversation_of,
    thinking_of,
    tools_of,
    unread_of,
)
from keel.data.conversations.types import Example, Read
from keel.data.items import COUNTED, malformed
from keel.data.rows.columns import MISSING, looked_up, parsed_json, without_nulls
from keel.data.rows.lines import BadLine, check_file, lines_of, object_of
from keel.data.rows.places import files_of
from keel.data.rows.proposal import ANSWERS, PROMPTS
from keel.data.rows.read import Row, rows_of_files, rows_of_lines
from keel.rl.evaluation import FAIL
from keel.rl.records import recorded_segments

WRITTEN = KNOWN | {
    *("step", "domain", "sibling", "finish_reason", "reward", "parts", "tokenizer", "segments"),
    *("variant", "source", "digest", "samples", "missing", "prompt", "specialist"),
    "other_conversations",
}
"""Keys of what runs and evaluations write."""
PARSED = frozenset({"messages", "conversations", "tools"})
"""Keys that a table may have as JSON."""
TRUTHS = {"true": True, "false": False}
NEEDED = frozenset({"messages", "conversations", "prompt", "completion"})
R = TypeVar("R")
Line = tuple[str, dict[str, Any]]
"""`file:line`, and the object that stands there."""


def read_rows(source: ConversationsConfig, hub_answers: Callable[[], bool] = lambda: True) -> Read:
    """The chats of a file of JSON lines, of files of other kinds, or of a dataset of the hub, which
    is downloaded if it is not here yet. Raises ConfigError naming file:line, or row, unless
    `on_bad_line: skip`."""
    knob = f"sft.sources[{source.name}]"
    for key in source.columns:
        if key not in KNOWN:
            near = difflib.get_close_matches(key, KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"keys are {', '.join(sorted(KNOWN))}"
            raise ConfigError(f"{knob}.columns.{key}: there is no such key; {hint}")
    if source.source == "jsonl":
        rows = rows_of_lines(data_path(source.path), f"{knob}.path")
    else:
        rows = rows_of_files(files_of(source, hub_answers, "sft.sources"), f"{knob}.path")
    placed = ((row.at, (row, not index)) for index, row in enumerate(rows))
    return _read(source, placed, lambda at, one: [(at, _keyed(*one, source))])


def _keyed(row: Row, first: bool, source: ConversationsConfig) -> dict[str, Any]:
    """By the keys of conversations. Raises BadLine, or of the first row ConfigError, where what is
    wrong is `columns`."""
    if isinstance(row.record, BadLine):
        raise row.record
    record, knob = row.record, f"sft.sources[{source.name}].columns"
    has, names = ", ".join(record), list(record)
    blamed = first and source.on_bad_line == "error"
    found = {key: looked_up(record, name) for key, name in source.columns.items() if name}
    for key, value in found.items():
        name = source.columns[key]
        if value is MISSING and key in NEEDED:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            if blamed:
                raise ConfigError(
                    f"{knob}.{key} = {name!r}: {source.path} has no such column, it has {has}{hint}"
                )
            raise BadLine(f"no `{key}` ({knob}: {name!r}); it has {has}{hint}")
    taken = {*source.columns, *source.columns.values()}
    keyed = {key: value for key, value in record.items() if key not in taken}
    keyed |= {key: value for key, value in found.items() if value is not MISSING}
    forms = [key for key in FORMS if key in keyed]
    if blamed and (not forms or (forms == ["prompt"] and "completion" not in keyed)):
        asked = next((name for name in PROMPTS if name in names), "COLUMN")
        said = next((name for name in ANSWERS if name in names), "COLUMN")
        lacks = "a `prompt` and no `completion`" if forms else f"none of {', '.join(FORMS)}"
        columns = f"completion: {said}" if forms else f"prompt: {asked}, completion: {said}"
        raise ConfigError(
            f"{source.path}: its first row has {lacks}, it has {has}. Say which column is what: "
            f"{knob}: {{{columns}}}, or {{messages: …}}"
        )
    if row.written is not None:
        return keyed
    cells = without_nulls(keyed).items()
    return {key: _cell(key, value) for key, value in cells if value != ""}


def _cell(key: str, value: Any) -> Any:
    """Of a table, in which everything may be text. Raises BadLine."""
    if not isinstance(value, str):
        return value
    if key == "thinking":
        return TRUTHS.get(value.strip().lower(), value)
    return parsed_json(key, value) if key in PARSED else value


def read_trajectories(source: ConversationsConfig, *, tokenizer: str) -> Read:
    """What runs have written in `trajectories`, or evaluations in `samples.jsonl`, of the worth
    that the source asks for. tokenizer: digest of the one that learns: what was sampled with
    another, in another mode or without the source's system message is written again by its
    messages.

    Raises ConfigError as `read_rows`, and where there is nothing to read.
    """
    path = data_path(source.path)
    if not path.is_dir():
        check_file(path, f"sft.sources[{source.name}].path")
    files = [path] if path.is_file() else _files(path)
    if not files:
        raise ConfigError(
            f"sft.sources[{source.name}].path = {source.path!r}: holds no trajectories; name the "
            "folder of a run (trajectories/*.jsonl), of `keel eval` (samples.jsonl), or a file"
        )
    left: Counter[str] = Counter()

    def selected(at: str, text: bytes) -> Iterator[Line]:
        line = object_of(text, halves=True)[0]
        samples = list(_of_evaluation(line)) if "samples" in line else [dict(line)]
        for number, record in enumerate(samples):
            if why := _why_not(record, source):
                left[why] += 1
                continue
            place = f"{at}, sample {number}" if "samples" in line else at
            if _as_sampled(record, source, tokenizer):
                yield place, record
                continue
            record.pop("segments", None)
            conversations = [record, *({**record, **other} for other in _others(record))]
            learned = [one for one in conversations if _has_lesson(one["messages"])]
            if not learned:
                left["no whole turn"] += 1
            for one in learned:
                yield place, one

    knob = f"sft.sources[{source.name}].path"
    lines = ((f"{path}:{number}", line) for path in files for number, line in lines_of(path, knob))
    read = _read(source, lines, selected)
    return Read(examples=read.examples, skipped=read.skipped, unselected=left)


def _others(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the further conversations of an agent program. Raises BadLine."""
    others: Any = record.get("other_conversations", [])
    if not isinstance(others, list) or not all(
        isinstance(other, dict) and isinstance(cast(Any, other).get("messages"), list)
        for other in cast(list[Any], others)
    ):
        raise BadLine("`other_conversations` must be a list of objects with `messages`")
    return cast(list[dict[str, Any]], others)


def _has_lesson(messages: Any) -> bool:
    """Whether a conversation has a message to learn, or is malformed, which its reader reports."""
    if not isinstance(messages, list):
        return True
    written = (
        cast(dict[str, Any], message)
        for message in cast(list[Any], messages)
        if isinstance(message, dict)
    )
    return any(one.get("role") == "assistant" and one.get("weight") != 0 for one in written)


def _as_sampled(record: Mapping[str, Any], source: ConversationsConfig, tokenizer: str) -> bool:
    """Whether what is to be learned is what was sampled, id by id."""
    modes = {"as-written": None, "with": True, "without": False}
    mode = modes[source.thinking]
    same = record.get("tokenizer") and record["tokenizer"] == tokenizer
    return bool(same) and not source.system and mode in (None, record.get("thinking"))


def _read(
    source: ConversationsConfig,
    rows: Iterable[tuple[str, R]],
    records: Callable[[str, R], Iterable[Line]],
) -> Read:
    """rows: each with its place. records: what is to be learned of one; raises BadLine."""
    size = 0 if source.most_per_prompt else source.size  # of those that are kept of a prompt
    refuses = source.on_bad_line == "error"
    examples: list[Example] = []
    skipped: list[str] = []
    for at, row in rows:
        if (size and len(examples) >= size) or (refuses and len(skipped) == COUNTED):
            break
        try:
            found = [_example(place, record, source) for place, record in records(at, row)]
        except BadLine as error:
            skipped.append(f"{at}: {error}")
            continue
        examples += found
    if skipped and refuses:
        raise malformed(skipped, f"sft.sources[{source.name}]")
    return Read(examples=tuple(examples[: size or None]), skipped=tuple(skipped))


def _example(at: str, record: Mapping[str, Any], source: ConversationsConfig) -> Example:
    segments, written = (), source.source == "trajectories"
    if written and record.get("segments"):
        try:
            segments = recorded_segments(record, at)
        except ValueError as error:
            raise BadLine(str(error)) from error
    messages, learned = conversation_of(record, source.system, rendered=not segments)
    known = WRITTEN if written else KNOWN
    return Example(
        origin=at,
        messages=tuple(messages),
        trained=tuple(learned),
        tools=tuple(tools_of(record)),
        thinking=thinking_of(record, messages, source.thinking),
        segments=segments,
        prompt_id=str(record.get("id") or "") if written else "",
        unread=unread_of(record, known),
    )


def _files(folder: Path) -> list[Path]:
    """Of a run folder or an evaluation's, in the order of their steps. (Not what was unpacked there
    of `keel report`'s.)"""
    samples = folder / "samples.jsonl"
    if samples.is_file():
        return [samples]
    for there in ("trajectories/step_*.jsonl", "step_*.jsonl"):
        if found := sorted(path for path in folder.glob(there) if "." not in path.stem):
            return found
    return []


def _of_evaluation(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each completion of a prompt. Raises BadLine."""
    for sample in cast(list[Any], line["samples"]):
        if not isinstance(sample, dict) or "record" not in sample:
            raise BadLine(
                "is of an evaluation by an older release, which has not kept its prompts: run "
                "`keel eval` again"
            )
        record = dict(sample["record"])
        asked = record.pop("asked", [])
        messages = record.pop("messages", None) or [*asked, *sample["messages"]]
        worth, parts = sample["correct"], sample.get("parts") or {}
        yield {
            **record,
            "messages": messages,
            "parts": {"correct": worth, **parts},
            "reward": worth,
        }


def _why_not(record: Mapping[str, Any], source: ConversationsConfig) -> str:
    """Why a trajectory is not learned from, or nothing."""
    if "trajectories" in record and "messages" in record:
        raise BadLine(
            "is of a file that `keel report` reads (step_….tokens.jsonl.gz), a line a group; what "
            "is learned from lies in the trajectories/step_….jsonl of a run, a line a trajectory"
        )
    parts = record.get("parts")
    if not isinstance(parts, dict) or "messages" not in record:
        raise BadLine("is no trajectory: it needs `messages` and the `parts` of its reward")
    worth = record.get("reward") if source.reward == "reward" else parts.get(source.reward)
    if not isinstance(worth, int | float):
        raise BadLine(
            f"has no `{source.reward}` (sft.sources[{source.name}].reward); it has reward, "
            f"{', '.join(parts)}"
        )
    if worth < source.least_reward - FAIL:
        return f"worth less than {source.least_reward:g}"
    if not source.cut and record.get("finish_reason", "stop") != "stop":
        return "cut off"
    return ""
