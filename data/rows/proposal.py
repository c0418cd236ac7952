"""What a recipe should say of a file of prompts, from its first rows: for `keel new`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.rows.lines import BadLine
from keel.data.rows.places import files_of
from keel.data.rows.read import kind_of_file, rows_of_files, rows_of_lines

Judged = Literal["maths", "text", "tests", "criteria", "refuse", "reward", "nothing"]
LOOKED = 2_000
"""Rows that are read."""
PROMPTS = (
    *("prompt", "messages", "question", "problem", "query", "instruction", "input", "task"),
    *("conversation", "conversations", "text"),
)
"""Columns that may be the prompt, the likeliest first."""
ANSWERS = (
    *("answer", "final_answer", "ground_truth", "reward_model.ground_truth", "expected_answer"),
    *("target", "label", "solution", "gold", "output", "response", "completion", "reply"),
)
"""Columns that may be the answer."""
JUDGED: tuple[Judged, ...] = ("tests", "criteria", "refuse", "reward")
"""Keys that say by themselves what a completion is judged by."""
MARKS = ("####", "Answer:", "answer is")
"""After which worked solutions have their answer."""
ENOUGH = 0.9
"""Share of the answers that have to be mathematics, or to hold a mark."""
PROSE = 100
"""Characters of an answer, on average, from which on it is a text to be judged by more than being
the same."""
_NUMBER = re.compile(
    r"[-+−$€£(\[{]*\s*(\\[a-zA-Z]+|\d|\.\d|[a-zA-Z](?![a-zA-Z])).{0,60}", flags=re.DOTALL
)
_WORD = re.compile(r"(?<!\\)\b(?!sqrt|frac|pi|sin|cos|tan|log|ln|exp|cm|km|kg)[^\W\d_]{3,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What was found in the first rows of a source."""

    kind: Literal["jsonl", "file", "hub"]
    """`data.sources[].source`."""
    columns: Mapping[str, str]
    """Key → column, where the names differ."""
    answer_after: str
    judged: Judged
    """What says whether a completion is right: an answer that is mathematics or another text, one
    of the keys of `JUDGED`, or nothing that was found."""
    environment: bool
    """Rows have what an environment reads."""
    boxed: bool
    """The prompts themselves ask for an answer in a box."""
    longest: int
    """Bytes of the longest prompt, in UTF-8."""
    rows: int
    whole: bool
    """`rows` are all there are."""
    names: Sequence[str]
    """Columns that were met."""


def propose(
    path: str,
    *,
    subset: str = "",
    prompt: str = "",
    answer: str = "",
    hub_answers: Callable[[], bool] = lambda: True,
) -> Proposal:
    """Read the first rows of a file, a folder or a dataset of the hub. prompt, answer: columns that
    are known already.

    Raises ConfigError where nothing can be read, no column looks like a prompt, or one that is
    named is not there.
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
    for row in islice(rows, LOOKED + 1):
        count += 1
        if not isinstance(row.record, BadLine) and count <= LOOKED:
            records.append(_flat(row.record))
    if not records:
        raise ConfigError(f"{knob}: no row of it can be read")
    names = list(dict.fromkeys(name for record in records for name in record))
    asked = _column(prompt, PROMPTS, names, knob, "--prompt")
    if not asked:
        raise ConfigError(
            f"{knob}: no column looks like a prompt; it has {', '.join(names)}. Name one: --prompt "
            "COLUMN"
        )
    judged, found = _judged(answer, names, knob)
    answers = [str(r[found]).strip() for r in records if found and r.get(found) is not None]
    mark = next((mark for mark in MARKS if answers and _share(answers, mark) >= ENOUGH), "")
    finals = [each.rpartition(mark)[2] if mark else each for each in answers]
    if judged == "maths" and not all_maths(finals):
        # Whole solutions say nothing of where their answer is.
        judged = "nothing" if sum(map(len, finals)) > PROSE * len(finals) else "text"
        found = found if judged == "text" or answer else ""
    texts = [_text(record.get(asked)) for record in records]
    columns = {} if asked in ("prompt", "messages") else {"prompt": asked}
    if found and found != "answer":
        columns["answer"] = found
    # A row has one of each: what else is called so is something else.
    others = {"messages"} - {asked} | ({"answer", *JUDGED} if found else set(JUDGED) - {judged})
    if asked == "messages" or "prompt" in columns:
        others |= {"prompt"}
    columns |= {key: "" for key in sorted(others - {*columns}) if key in names and key != found}
    return Proposal(
        kind=kind,
        columns=columns,
        answer_after=mark,
        judged=judged,
        environment="environment" in names,
        boxed=sum("boxed" in text for text in texts) >= ENOUGH * len(texts),
        longest=max(len(text.encode()) for text in texts),
        rows=min(count, LOOKED),
        whole=count <= LOOKED,
        names=names,
    )


def all_maths(answers: Sequence[str]) -> bool:
    """Whether nearly all of them are numbers or formulas and no prose."""
    good = sum(bool(_NUMBER.fullmatch(a.strip())) and not _WORD.search(a) for a in answers)
    return bool(answers) and good >= ENOUGH * len(answers)


def _kind(path: str) -> Literal["jsonl", "file", "hub"]:
    here = data_path(path)
    if here.is_dir() or kind_of_file(here):
        return "jsonl" if here.name.endswith((".jsonl", ".ndjson")) else "file"
    if not here.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path):
        return "hub"
    return "jsonl"  # whose errors say what is wrong with the path


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """With the columns of objects beside the objects: `reward_model.ground_truth`."""
    inner = {
        f"{name}.{key}": each
        for name, value in record.items()
        if isinstance(value, Mapping)
        for key, each in value.items()
    }
    return {**record, **inner}


def _column(given: str, likely: Sequence[str], names: Sequence[str], knob: str, flag: str) -> str:
    """The one that is named, or the likeliest that is there. Raises ConfigError."""
    if given and given not in names:
        raise ConfigError(f"{flag} {given}: {knob} has no such column; it has {', '.join(names)}")
    return given or next((name for name in likely if name in names), "")


def _judged(answer: str, names: Sequence[str], knob: str) -> tuple[Judged, str]:
    """What judges a completion, and the column of the answer. Keel's own keys come first."""
    for key in JUDGED:
        if key in names and not answer and "answer" not in names:
            return key, ""
    found = _column(answer, ANSWERS, names, knob, "--answer")
    return ("maths" if found else "nothing"), found


def _share(answers: Sequence[str], mark: str) -> float:
    return sum(mark in each for each in answers) / len(answers)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(str(each.get("content") or "") for each in value if isinstance(each, dict))
    return str(value or "")
