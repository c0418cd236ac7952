"""Suggests settings for a data source from the first rows in a file. Used by `keel new`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.places import files_of
from keel.data.rows.read import BadLine, kind_of_file, rows_of_files, rows_of_lines

Judged = Literal["maths", "text", "tests", "criteria", "refuse", "reward", "nothing"]
MAX_ROWS = 2_000
"""How many rows to read."""
PROMPTS = (
    *("prompt", "messages", "question", "problem", "query", "instruction", "input", "task"),
    *("conversation", "conversations", "text"),
)
"""Columns that are likely to contain the prompt, the most likely first."""
ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer"),
    *("target", "label", "solution", "gold", "output", "response", "completion", "reply"),
)
"""Columns that are likely to contain the answer, the most likely first."""
JUDGED: tuple[Judged, ...] = ("tests", "criteria", "refuse", "reward")
"""Keys other than an answer by which a completion can be judged."""
_MARKS = ("####", "Answer:", "answer is")
"""Marks that come before the answer in worked solutions."""
_MIN_SHARE = 0.9
"""The share of answers that must be mathematical, or contain a mark."""
_PROSE_CHARACTERS = 100
"""Answers with at least this mean length are prose, which cannot be compared as text."""
_NUMBER = re.compile(
    r"[-+−$€£(\[{]*\s*(\\[a-zA-Z]+|\d|\.\d|[a-zA-Z](?![a-zA-Z])).{0,60}", flags=re.DOTALL
)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|frac|pi|sin|cos|tan|log|ln|exp|cm|km|kg)[^\W\d_]{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Settings that suit the first rows in a source."""

    kind: Literal["jsonl", "file", "hub"]
    """The value for `data.sources[].source`."""
    columns: Mapping[str, str]
    """Maps keys to columns, where their names differ."""
    answer_after: str
    judged: Judged
    """How to judge completions: by a mathematical or textual answer, by a key in `JUDGED`, or not
    at all."""
    environment: bool
    """Whether rows have an `environment`."""
    boxed: bool
    """Whether the prompts ask for a boxed answer."""
    longest: int
    """The length of the longest prompt in UTF-8 bytes."""
    rows: int
    whole: bool
    """Whether `rows` counts all rows in the source."""
    names: Sequence[str]
    """The names of all columns."""


def propose(
    path: str,
    *,
    subset: str = "",
    prompt: str = "",
    answer: str = "",
    hub_answers: Callable[[], bool] = lambda: True,
) -> Proposal:
    """Suggest settings from the first rows in a file, a folder or a dataset on the hub.

    `prompt` and `answer` are the columns, if they are known. Raises ConfigError if nothing can be
    read, no column looks like a prompt, or a given column does not exist.
    """
    kind = _kind(path)
    source = SourceConfig(name="data", source=kind, path=path, subset=subset)
    knob = f"--data {path}"
    if kind == "jsonl":
        rows = rows_of_lines(data_path(path), knob)
    else:
        rows = rows_of_files(files_of(source, hub_answers), knob)
    records: list[Mapping[str, Any]] = []
    count = 0
    for row in islice(rows, MAX_ROWS + 1):
        count += 1
        if not isinstance(row.record, BadLine) and count <= MAX_ROWS:
            records.append(_flat(row.record))
    if not records:
        raise ConfigError(f"{knob}: no row of it can be read")
    names = list(dict.fromkeys(name for record in records for name in record))
    prompt_column = _column(prompt, PROMPTS, names, knob, "--prompt")
    if not prompt_column:
        raise ConfigError(
            f"{knob}: no column looks like a prompt; it has {', '.join(names)}. Name one: --prompt "
            "COLUMN"
        )
    judged, column = _judged(answer, names, knob)
    answers = [str(r[column]).strip() for r in records if column and r.get(column) is not None]
    mark = next((mark for mark in _MARKS if answers and _share(answers, mark) >= _MIN_SHARE), "")
    finals = [each.rpartition(mark)[2] if mark else each for each in answers]
    if judged == "maths" and not all_maths(finals):
        is_prose = sum(map(len, finals)) > _PROSE_CHARACTERS * len(finals)
        judged = "nothing" if is_prose else "text"
        column = column if judged == "text" or answer else ""
    texts = [_text(record.get(prompt_column)) for record in records]
    columns = {} if prompt_column in ("prompt", "messages") else {"prompt": prompt_column}
    if column and column != "answer":
        columns["answer"] = column
    # A row has one prompt and one thing to be judged by: exclude other columns with such names.
    others = {"answer", *JUDGED} if column else set(JUDGED) - {judged}
    others |= {"messages"} - {prompt_column}
    if prompt_column == "messages" or "prompt" in columns:
        others |= {"prompt"}
    columns |= {key: "" for key in sorted(others - {*columns}) if key in names and key != column}
    return Proposal(
        kind=kind,
        columns=columns,
        answer_after=mark,
        judged=judged,
        environment="environment" in names,
        boxed=sum("boxed" in text for text in texts) >= _MIN_SHARE * len(texts),
        longest=max(len(text.encode()) for text in texts),
        rows=min(count, MAX_ROWS),
        whole=count <= MAX_ROWS,
        names=names,
    )


def all_maths(answers: Sequence[str]) -> bool:
    """Return whether nearly all answers are numbers, or formulas without prose."""
    good = sum(bool(_NUMBER.fullmatch(a.strip())) and not _WORD.search(a) for a in answers)
    return bool(answers) and good >= _MIN_SHARE * len(answers)


def _kind(path: str) -> Literal["jsonl", "file", "hub"]:
    file = data_path(path)
    if file.is_dir() or kind_of_file(file):
        return "jsonl" if file.name.endswith((".jsonl", ".ndjson")) else "file"
    if not file.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        return "hub"
    return "jsonl"  # reports the wrong path


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys from nested objects under dotted names such as `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": each
        for name, value in record.items()
        if isinstance(value, Mapping)
        for key, each in value.items()
    }
    return {**record, **inner}


def _column(name: str, likely: Sequence[str], names: Sequence[str], knob: str, flag: str) -> str:
    """Return the given column, or the most likely one. Raises ConfigError if there is none."""
    if name and name not in names:
        raise ConfigError(f"{flag} {name}: {knob} has no such column; it has {', '.join(names)}")
    return name or next((each for each in likely if each in names), "")


def _judged(answer: str, names: Sequence[str], knob: str) -> tuple[Judged, str]:
    """Decide how to judge completions and which column has the answer.

    Keel's own keys come first.
    """
    for key in JUDGED:
        if key in names and not answer and "answer" not in names:
            return key, ""
    column = _column(answer, ANSWERS, names, knob, "--answer")
    return ("maths" if column else "nothing"), column


def _share(answers: Sequence[str], mark: str) -> float:
    return sum(mark in each for each in answers) / len(answers)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(each.get("content") or "") for each in value if isinstance(each, dict))
    return str(value or "")
