"""Reads conversations from files: chats, and trajectories from Keel's runs and evaluations."""

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
from keel.data.conversations.types import Example, ReadSource
from keel.data.items import MAX_MALFORMED, malformed
from keel.data.rows.columns import MISSING, look_up, parse_json, without_nulls
from keel.data.rows.places import files_of
from keel.data.rows.proposal import ANSWERS, PROMPTS
from keel.data.rows.read import (
    BadLine,
    Row,
    check_file,
    lines_of,
    object_of,
    rows_of_files,
    rows_of_lines,
)
from keel.rl.evaluation import FAIL
from keel.rl.records import recorded_segments

_TRAJECTORY_KEYS = KNOWN | {
    *("step", "domain", "sibling", "finish_reason", "reward", "parts", "tokenizer", "segments"),
    *("variant", "source", "digest", "samples", "missing", "prompt", "specialist"),
    "other_conversations",
}
"""The keys by which trajectory and evaluation files are recognized."""
_PARSED = frozenset({"messages", "conversations", "tools"})
"""The keys whose values may be JSON text in a table."""
_BOOLEANS = {"true": True, "false": False}
_REQUIRED = frozenset({"messages", "conversations", "prompt", "completion"})
R = TypeVar("R")
_Line = tuple[str, dict[str, Any]]
"""A place such as `file:line`, and the object found there."""


def read_rows(
    source: ConversationsConfig, hub_answers: Callable[[], bool] = lambda: True
) -> ReadSource:
    """Read chats from a file, a folder or a dataset on the hub.

    Raises ConfigError with file and line for a malformed row, unless `on_bad_line: skip` is set.
    """
    knob = f"sft.sources[{source.name}]"
    for key in source.columns:
        if key not in KNOWN:
            near = difflib.get_close_matches(key, KNOWN, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(sorted(KNOWN))}"
            raise ConfigError(f"{knob}.columns.{key}: unknown key; {hint}")
    if source.source == "jsonl":
        rows = rows_of_lines(data_path(source.path), f"{knob}.path")
    else:
        rows = rows_of_files(files_of(source, hub_answers, "sft.sources"), f"{knob}.path")
    placed = ((row.at, (row, not index)) for index, row in enumerate(rows))
    return _read(source, placed, lambda at, one: [(at, _keyed(*one, source))])


def _keyed(row: Row, first: bool, source: ConversationsConfig) -> dict[str, Any]:
    """Rename a row's columns to the keys of a conversation.

    Raises BadLine for a bad row, or ConfigError if the first row shows that `columns` is wrong.
    """
    if isinstance(row.record, BadLine):
        raise row.record
    record, knob = row.record, f"sft.sources[{source.name}].columns"
    has, names = ", ".join(record), list(record)
    strict = first and source.on_bad_line == "error"
    values = {key: look_up(record, name) for key, name in source.columns.items() if name}
    for key, value in values.items():
        name = source.columns[key]
        if value is MISSING and key in _REQUIRED:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            if strict:
                raise ConfigError(
                    f"{knob}.{key} = {name!r}: {source.path} has no such column, it has {has}{hint}"
                )
            raise BadLine(f"no `{key}` ({knob}: {name!r}); it has {has}{hint}")
    taken = {*source.columns, *source.columns.values()}
    keyed = {key: value for key, value in record.items() if key not in taken}
    keyed |= {key: value for key, value in values.items() if value is not MISSING}
    forms = [key for key in FORMS if key in keyed]
    if strict and (not forms or (forms == ["prompt"] and "completion" not in keyed)):
        prompt = next((name for name in PROMPTS if name in names), "COLUMN")
        answer = next((name for name in ANSWERS if name in names), "COLUMN")
        problem = "a `prompt` and no `completion`" if forms else f"none of {', '.join(FORMS)}"
        columns = f"completion: {answer}" if forms else f"prompt: {prompt}, completion: {answer}"
        raise ConfigError(
            f"{source.path}: its first row has {problem}, only {has}. Name the columns: {knob}: "
            f"{{{columns}}}, or {{messages: …}}"
        )
    if row.written is not None:
        return keyed
    cells = without_nulls(keyed).items()
    return {key: _cell(key, value) for key, value in cells if value != ""}


def _cell(key: str, value: Any) -> Any:
    """Decode a table cell that may be plain text or JSON. Raises BadLine."""
    if not isinstance(value, str):
        return value
    if key == "thinking":
        return _BOOLEANS.get(value.strip().lower(), value)
    return parse_json(key, value) if key in _PARSED else value


def read_trajectories(source: ConversationsConfig, *, tokenizer: str) -> ReadSource:
    """Read the trajectories that meet the source's reward condition.

    They come from a run (`trajectories/`) or an evaluation (`samples.jsonl`). `tokenizer` is a
    digest of the learner's tokenizer. Trajectories that were sampled with a different tokenizer, in
    a different mode or without the source's system message are rendered again from their messages.

    Raises ConfigError like `read_rows`, and also if there is nothing to read.
    """
    path = data_path(source.path)
    if not path.is_dir():
        check_file(path, f"sft.sources[{source.name}].path")
    files = [path] if path.is_file() else _files(path)
    if not files:
        raise ConfigError(
            f"sft.sources[{source.name}].path = {source.path!r} has no trajectories; name the "
            "folder of a run (trajectories/*.jsonl), of `keel eval` (samples.jsonl), or a file"
        )
    dropped: Counter[str] = Counter()

    def selected(at: str, text: bytes) -> Iterator[_Line]:
        line = object_of(text, replace_surrogates=True)[0]
        samples = list(_of_evaluation(line)) if "samples" in line else [dict(line)]
        for number, record in enumerate(samples):
            if reason := _drop_reason(record, source):
                dropped[reason] += 1
                continue
            place = f"{at}, sample {number}" if "samples" in line else at
            if _as_sampled(record, source, tokenizer):
                yield place, record
                continue
            record.pop("segments", None)
            conversations = [record, *({**record, **other} for other in _others(record))]
            learnable = [one for one in conversations if _is_learnable(one["messages"])]
            if not learnable:
                dropped["no whole turn"] += 1
            for conversation in learnable:
                yield place, conversation

    knob = f"sft.sources[{source.name}].path"
    lines = ((f"{path}:{number}", line) for path in files for number, line in lines_of(path, knob))
    read = _read(source, lines, selected)
    return ReadSource(examples=read.examples, skipped=read.skipped, unselected=dropped)


def _others(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the other conversations that an agent program had. Raises BadLine."""
    others: Any = record.get("other_conversations", [])
    if not isinstance(others, list) or not all(
        isinstance(other, dict) and isinstance(cast(Any, other).get("messages"), list)
        for other in cast(list[Any], others)
    ):
        raise BadLine("`other_conversations` must be a list of objects with `messages`")
    return cast(list[dict[str, Any]], others)


def _is_learnable(messages: Any) -> bool:
    """Return whether a conversation has a message to learn. Malformed ones pass and fail later."""
    if not isinstance(messages, list):
        return True
    entries = (cast(dict[str, Any], m) for m in cast(list[Any], messages) if isinstance(m, dict))
    return any(one.get("role") == "assistant" and one.get("weight") != 0 for one in entries)


def _as_sampled(record: Mapping[str, Any], source: ConversationsConfig, tokenizer: str) -> bool:
    """Return whether to learn exactly the tokens that were sampled."""
    modes = {"as-written": None, "with": True, "without": False}
    mode = modes[source.thinking]
    same = record.get("tokenizer") and record["tokenizer"] == tokenizer
    return bool(same) and not source.system and mode in (None, record.get("thinking"))


def _read(
    source: ConversationsConfig,
    rows: Iterable[tuple[str, R]],
    records: Callable[[str, R], Iterable[_Line]],
) -> ReadSource:
    """Read the conversations in `rows`, each given with its place.

    `records` extracts the conversations from a row and may raise BadLine.
    """
    # With a limit per prompt, `size` applies after it.
    size = 0 if source.most_per_prompt else source.size
    strict = source.on_bad_line == "error"
    examples: list[Example] = []
    skipped: list[str] = []
    for at, row in rows:
        if (size and len(examples) >= size) or (strict and len(skipped) == MAX_MALFORMED):
            break
        try:
            new = [_example(place, record, source) for place, record in records(at, row)]
        except BadLine as error:
            skipped.append(f"{at}: {error}")
            continue
        examples += new
    if skipped and strict:
        raise malformed(skipped, f"sft.sources[{source.name}]")
    return ReadSource(examples=tuple(examples[: size or None]), skipped=tuple(skipped))


def _example(at: str, record: Mapping[str, Any], source: ConversationsConfig) -> Example:
    segments, is_sampled = (), source.source == "trajectories"
    if is_sampled and record.get("segments"):
        try:
            segments = recorded_segments(record, at)
        except ValueError as error:
            raise BadLine(str(error)) from error
    messages, learned = conversation_of(record, source.system, rendered=not segments)
    known = _TRAJECTORY_KEYS if is_sampled else KNOWN
    return Example(
        origin=at,
        messages=tuple(messages),
        trained=tuple(learned),
        tools=tuple(tools_of(record)),
        thinking=thinking_of(record, messages, source.thinking),
        segments=segments,
        prompt_id=str(record.get("id") or "") if is_sampled else "",
        unread=unread_of(record, known),
    )


def _files(folder: Path) -> list[Path]:
    """Return the files in a run or evaluation folder, ordered by step.

    Files that `keel report` unpacked are left out.
    """
    samples = folder / "samples.jsonl"
    if samples.is_file():
        return [samples]
    for pattern in ("trajectories/step_*.jsonl", "step_*.jsonl"):
        if files := sorted(path for path in folder.glob(pattern) if "." not in path.stem):
            return files
    return []


def _of_evaluation(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a record for each completion to an evaluated prompt. Raises BadLine."""
    for sample in cast(list[Any], line["samples"]):
        if not isinstance(sample, dict) or "record" not in sample:
            raise BadLine(
                "is of an evaluation by an older release, which did not store prompts; run `keel "
                "eval` again"
            )
        record = dict(sample["record"])
        prompt = record.pop("asked", [])
        messages = record.pop("messages", None) or [*prompt, *sample["messages"]]
        correct, parts = sample["correct"], sample.get("parts") or {}
        parts = {"correct": correct, **parts}
        yield {**record, "messages": messages, "parts": parts, "reward": correct}


def _drop_reason(record: Mapping[str, Any], source: ConversationsConfig) -> str:
    """Return why a trajectory is not learned, or "" if it is. Raises BadLine."""
    if "trajectories" in record and "messages" in record:
        raise BadLine(
            "is a group from a file for `keel report` (step_….tokens.jsonl.gz); read "
            "trajectories/step_….jsonl of the run instead"
        )
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
