"""Read conversations from files: chats, or trajectories from Keel's runs and evaluations."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.forms import (
    KNOWN,
    Example,
    ReadSource,
    is_thinking,
    parse_conversation,
    parse_tools,
    unused_keys,
)
from keel.data.eval_store import to_trajectory_record
from keel.data.items import MAX_MALFORMED, malformed_error
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
from keel.rl.evaluation import FAIL
from keel.rl.records import recorded_segments

_TRAJECTORY_KEYS = KNOWN | {
    *("step", "domain", "sibling", "finish_reason", "reward", "parts", "tokenizer", "segments"),
    *("variant", "source", "digest", "samples", "missing", "prompt", "specialist"),
    "other_conversations",
}
"""Keys of a record in a trajectory or evaluation file."""
_PARSED = frozenset({"messages", "conversations", "tools"})
"""Keys whose values may be stored as JSON text in a table."""
R = TypeVar("R")
_Placed = tuple[str, dict[str, Any]]
"""An object read from a file, and its location (such as `file:line`)."""


def read_rows(
    source: ConversationsConfig, hub_answers: Callable[[], bool] = lambda: True
) -> ReadSource:
    """Read chats from a file, a folder or a hub dataset. Raises ConfigError with the location of a
    malformed row, unless `on_bad_line: skip` is set."""
    knob = f"sft.sources[{source.name}]"
    check_keys(source.columns, KNOWN, knob)
    placed = ((row.at, row) for row in read_source_rows(source, hub_answers, f"{knob}.path"))
    return _read_conversations(source, placed, lambda at, row: [(at, _keyed(row, source.columns))])


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


def read_trajectories(source: ConversationsConfig, *, tokenizer: str) -> ReadSource:
    """Read the trajectories of a run (`trajectories/`) or evaluation (`samples.jsonl`), keeping
    those that pass the source's filters, such as `least_reward`.

    A trajectory is rendered again from its messages if it was sampled in a different thinking mode,
    without the source's system message or with a different tokenizer. `tokenizer` is the digest of
    the learner's tokenizer.

    Raises ConfigError if there is nothing to read. A malformed trajectory also raises ConfigError,
    with its location, unless `on_bad_line: skip` is set.
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

    def is_learnable(conversation: Mapping[str, Any]) -> bool:
        """Return whether a conversation has an assistant message to train on. Malformed ones also
        pass and are rejected later."""
        messages = conversation.get("messages")
        return not isinstance(messages, list) or any(
            not isinstance(m, dict) or (m.get("role") == "assistant" and m.get("weight") != 0)
            for m in cast(list[Any], messages)
        )

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
            others = record.get("other_conversations", [])
            learnable = [{**record, **one} for one in (record, *others) if is_learnable(one)]
            dropped["no whole turn"] += not learnable
            for conversation in learnable:
                yield place, conversation

    lines = (
        (f"{path}:{number}", line) for path in files for number, line in read_lines(path, knob)
    )
    read = _read_conversations(source, lines, selected)
    return ReadSource(examples=read.examples, skipped=read.skipped, unselected=dropped)


def _read_conversations(
    source: ConversationsConfig,
    rows: Iterable[tuple[str, R]],
    records: Callable[[str, R], Iterable[_Placed]],
) -> ReadSource:
    """Read conversations from (location, row) pairs. `records` returns the conversations in a row,
    or raises BadLine if the row is malformed."""
    # `size` counts the conversations that a limit per prompt leaves.
    size = 0 if source.most_per_prompt else source.size
    strict = source.on_bad_line == "error"
    examples: list[Example] = []
    skipped: list[str] = []
    for at, row in rows:
        if (size and len(examples) >= size) or (strict and len(skipped) == MAX_MALFORMED):
            break
        try:
            examples += [_example(place, record, source) for place, record in records(at, row)]
        except BadLine as error:
            skipped.append(f"{at}: {error}")
    if skipped and strict:
        raise malformed_error(skipped, f"sft.sources[{source.name}]")
    return ReadSource(examples=tuple(examples[: size or None]), skipped=tuple(skipped))


def _example(at: str, record: Mapping[str, Any], source: ConversationsConfig) -> Example:
    segments, is_sampled = (), source.source == "trajectories"
    if is_sampled and record.get("segments"):
        try:
            segments = recorded_segments(record, at)
        except ValueError as error:
            raise BadLine(str(error)) from error
    messages, learned = parse_conversation(record, source.system, rendered=not segments)
    return Example(
        origin=at,
        messages=tuple(messages),
        trained=tuple(learned),
        tools=tuple(parse_tools(record)),
        thinking=is_thinking(record, messages, source.thinking),
        segments=segments,
        prompt_id=str(record.get("id") or "") if is_sampled else "",
        unread=unused_keys(record, _TRAJECTORY_KEYS if is_sampled else KNOWN),
    )


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
