"""Suggests settings for a data source by looking at the first rows of a file.

Used by `keel new`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.places import rows_of
from keel.data.rows.read import BadLine, kind_of_file

Kind = Literal["jsonl", "file", "hub"]
Judged = Literal["maths", "text", "tests", "criteria", "refuse", "reward", "nothing"]
_MAX_ROWS = 2_000
"""Maximum number of rows to read."""
_PROMPTS = (
    *("prompt", "messages", "question", "problem", "query", "instruction", "input", "task"),
    *("conversation", "conversations", "text"),
)
"""Column names that probably contain the prompt, most likely first."""
_ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer"),
    *("target", "label", "solution", "gold", "output", "response", "completion", "reply"),
)
"""Column names that probably contain the answer, most likely first."""
JUDGED: tuple[Judged, ...] = ("tests", "criteria", "refuse", "reward")
"""Keys other than `answer` that can be used to judge a completion."""
_MARKS = ("####", "Answer:", "answer is")
"""Markers that precede the answer in worked solutions."""
_MIN_SHARE = 0.9
"""Minimum fraction of answers that must be mathematical or contain a marker."""
_PROSE_CHARACTERS = 100
"""Answers with at least this average length count as prose, which cannot be compared as text."""
_NUMBER = re.compile(
    r"[-+−$€£(\[{]*\s*(\\[a-zA-Z]+|\d|\.\d|[a-zA-Z](?![a-zA-Z])).{0,60}", flags=re.DOTALL
)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|frac|pi|sin|cos|tan|log|ln|exp|cm|km|kg)[^\W\d_]{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Suggested settings for a source, based on its first rows."""

    kind: Kind
    """Value for `data.sources[].source`."""
    columns: Mapping[str, str]
    """Maps keys to columns. Keys whose column has the same name are omitted."""
    answer_after: str
    judged: Judged
    """How to judge completions: by a kind of answer, by a key in `JUDGED`, or not at all."""
    environment: bool
    """True if rows have an `environment`."""
    boxed: bool
    """True if the prompts ask for a boxed answer."""
    longest: int
    """Length of the longest prompt in UTF-8 bytes."""
    rows: int
    whole: bool
    """True if `rows` counts all rows in the source."""
    names: Sequence[str]
    """Names of all columns."""


def propose(
    path: str,
    *,
    subset: str = "",
    prompt: str = "",
    answer: str = "",
    hub_answers: Callable[[], bool] = lambda: True,
) -> Proposal:
    """Suggest settings from the first rows of a file, a folder or a dataset on the hub.

    `prompt` and `answer` name the columns, if known. Raises ConfigError if nothing can be read, no
    column looks like a prompt, or a given column does not exist.
    """
    kind, knob = _kind(path), f"--data {path}"
    source = SourceConfig(name="data", source=kind, path=path, subset=subset)
    first = list(islice(rows_of(source, hub_answers, knob), _MAX_ROWS + 1))
    records = [_flat(r.record) for r in first[:_MAX_ROWS] if not isinstance(r.record, BadLine)]
    if not records:
        raise ConfigError(f"{knob}: no row of it can be read")
    names = list(dict.fromkeys(name for record in records for name in record))
    for flag, name in (("--prompt", prompt), ("--answer", answer)):
        if name and name not in names:
            raise ConfigError(f"{flag} {name}: {knob} has only the columns {', '.join(names)}")
    prompt = prompt or next((name for name in _PROMPTS if name in names), "")
    if not prompt:
        raise ConfigError(
            f"{knob}: no column looks like a prompt; it has {', '.join(names)}. Name one: --prompt "
            "COLUMN"
        )
    judged: Judged = "nothing"
    for key in JUDGED if not answer and "answer" not in names else ():
        if judged == "nothing" and names.count(key):
            judged = key
    column, mark = answer, ""
    if judged == "nothing":
        column = answer or next((name for name in _ANSWERS if name in names), "")
    if column:
        answers = [str(r[column]).strip() for r in records if r.get(column) is not None]
        mark = next((mark for mark in _MARKS if _mostly([mark in a for a in answers])), "")
        finals = [each.rpartition(mark)[2] if mark else each for each in answers]
        is_prose = sum(map(len, finals)) > _PROSE_CHARACTERS * len(finals)
        if _mostly([_is_maths(each) for each in finals]):
            judged = "maths"
        elif not is_prose:
            judged = "text"
        column = column if judged != "nothing" or answer else ""
    texts = [_text(record.get(prompt)) for record in records]
    columns = {} if prompt in ("prompt", "messages") else {"prompt": prompt}
    if column and column != "answer":
        columns["answer"] = column
    # A row has one prompt and one thing to be judged by: exclude other columns with such names.
    others = {"answer", *JUDGED} if column else set(JUDGED) - {judged}
    others |= {"messages"} - {prompt}
    if prompt == "messages" or "prompt" in columns:
        others |= {"prompt"}
    columns |= {key: "" for key in sorted(others - {*columns}) if key in names and key != column}
    return Proposal(
        kind=kind,
        columns=columns,
        answer_after=mark,
        judged=judged,
        environment="environment" in names,
        boxed=_mostly(["boxed" in text for text in texts]),
        longest=max(len(text.encode()) for text in texts),
        rows=min(len(first), _MAX_ROWS),
        whole=len(first) <= _MAX_ROWS,
        names=names,
    )


def _mostly(flags: Sequence[bool]) -> bool:
    return bool(flags) and sum(flags) >= _MIN_SHARE * len(flags)


def _is_maths(answer: str) -> bool:
    return bool(_NUMBER.fullmatch(answer.strip())) and not _WORD.search(answer)


def _kind(path: str) -> Kind:
    file = data_path(path)
    if file.is_dir() or kind_of_file(file):
        return "jsonl" if file.name.endswith((".jsonl", ".ndjson")) else "file"
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path)
    return "hub" if is_name and not file.exists() else "jsonl"


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Add the values of nested objects under dotted names such as `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": each
        for name, value in record.items()
        if isinstance(value, Mapping)
        for key, each in value.items()
    }
    return {**record, **inner}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(each.get("content") or "") for each in value if isinstance(each, dict))
    return str(value or "")
