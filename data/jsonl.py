"""Read prompts from the rows of data files.

Each row has one prompt, and the answer, tests or criteria used to judge completions.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"messages": [{"role": "user", "content": "…"}], "answer": "B", "match": "exact", "id": "a7"}
    {"prompt": "…", "answer": "B", "match": "choice", "choices": ["Paris", "Rome", "Bern"]}
    {"prompt": "…", "answer": "[0-9]{4}-[0-9]{2}", "match": "regex"}
    {"prompt": "…", "answer": {"type": "object", "required": ["name"]}, "match": "schema"}
    {"prompt": "…", "criteria": [{"name": "cause", "text": "Names the cause.", "weight": 1}]}
    {"prompt": "…", "tests": [{"stdin": "1 2", "stdout": "3"}], "reference": "print(3)"}
    {"prompt": "…", "refuse": true}
    {"prompt": "…", "reward": {"kind": "proof"}}

docs/data.md, docs/rewards.md and docs/rubrics.md describe the keys. The object `environment` is
passed only to the source's environment. All other keys are available to templates, and to the
user's reward functions in `prompt.reward["columns"]`. With such a function, a row needs no other
way to judge completions, unless `correct` has a weight.
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

from keel.configs.schema import ConfigError, SourceConfig
from keel.data.conversations.forms import parse_chat
from keel.data.items import (
    Item,
    Loaded,
    add_source_system,
    make_prompt,
    malformed_error,
)
from keel.data.rows import (
    BadLine,
    check_keys,
    drop_nulls,
    json_type,
    look_up,
    parse_json,
    read_source_rows,
    select_columns,
)
from keel.data.rows import Row as ReadRow
from keel.rl.types import ENVIRONMENT, FUNCTIONS

_CheckReward = Callable[[Mapping[str, Any]], None]
_MATCHES = {"math": ("tolerance",), "exact": (), "choice": ("choices",), "schema": (), "regex": ()}
"""Maps each value of `match` to the keys that it needs in addition to `answer`."""
_CODE_KEYS = (
    *("tests", "subtasks", "reference", "language", "partial"),
    *("time_limit_s", "memory_mib", "tolerance"),
)
_SPECS = {
    "tests": ("code", _CODE_KEYS),
    "criteria": ("rubric", ("criteria", "reference")),
    "refuse": ("refusal", ("refuse",)),
}
"""Maps a key to the kind of its reward spec and the keys that become part of it."""
_REWARD_KEYS = ("answer", "criteria", "tests", "refuse", "reward")
"""Keys that define how to judge a completion. Each row has exactly one of them."""
_KNOWN = frozenset(
    ("id", "prompt", "messages", "match", "environment", *_REWARD_KEYS, *_CODE_KEYS)
) | frozenset(key for keys in _MATCHES.values() for key in keys)


_WRITTEN_BY_KEEL = frozenset(("pass_rate", "provenance"))
"""Columns that Keel writes but never reads."""
_PARSED = frozenset(
    (
        *("messages", "choices", "tests", "subtasks", "criteria", "reward", "environment"),
        *("tolerance", "partial", "refuse", "time_limit_s", "memory_mib"),
    )
)
"""Keys with structured values, which a table may store as JSON text."""
_PLACEHOLDER = re.compile(r"\{\{(\w[\w .-]*)\}\}|\{(\w[\w .-]*)\}")


def load_jsonl(
    source: SourceConfig,
    check_reward: _CheckReward = lambda spec: None,
) -> Loaded:
    """Read up to `source.size` prompts from `source.path`, or all of them if the size is 0.

    `check_reward` raises ValueError if a reward spec is invalid. Raises ConfigError if the file is
    missing or contains no prompts. A malformed line also raises ConfigError, unless
    `on_bad_line: skip` is set.
    """
    knob = f"data.sources[{source.name}]"
    rows = read_source_rows(source, f"{knob}.path")
    reader = _Reader(source, check_reward)
    items: dict[str, Item] = {}
    skipped: list[str] = []
    for row in islice(rows, source.size or None):
        try:
            item = reader.item(row)
            name = item.prompt.prompt_id
            if name in items:
                raise BadLine(f"id {name!r} is already used at {items[name].origin}")
            items[name] = item
        except BadLine as error:
            skipped.append(f"{row.at}: {error}")
            if source.on_bad_line == "error":
                raise malformed_error(skipped[0], knob) from error
    if not items:
        reason = (
            f"all {len(skipped)} lines are malformed; {skipped[0]}" if skipped else "it is empty"
        )
        raise ConfigError(f"{knob}.path = {source.path!r}: {reason}")
    for key, name in source.columns.items():
        if name and key not in reader.seen:
            raise ConfigError(
                f"{knob}.columns.{key} = {name!r}: no row of {source.path} has this column"
            )
    return Loaded(items=tuple(items.values()), skipped=tuple(skipped))


class _Row(NamedTuple):
    known: dict[str, Any]
    as_text: dict[str, Any]  # values of the known keys, with numbers written as in the file
    unmapped: dict[str, Any]  # columns that are not mapped to any key
    record: dict[str, Any]  # the whole row for templates, with numbers written as in the file
    of_table: bool


class _Reader:
    def __init__(self, source: SourceConfig, check_reward: _CheckReward) -> None:
        self._source, self._check_reward = source, check_reward
        self._knob = f"data.sources[{source.name}]"
        check_keys(source.columns, _KNOWN, self._knob)
        self._column = {key: source.columns.get(key, key) for key in sorted(_KNOWN)}
        self._taken = set(self._column.values())
        names = (m[2] for m in _PLACEHOLDER.finditer(source.template_text) if m[2])
        template = {name.partition(".")[0] for name in names}
        # A template that adds nothing of the row leaves the question the same.
        only_prompt = template <= {"prompt", self._column["prompt"]}
        self._keeps_question = bool(source.template) and only_prompt
        self.seen: set[str] = set()  # keys found so far

    def item(self, read: ReadRow) -> Item:
        source, row = self._source, self._keyed(read)
        record = row.known
        label = row.as_text.get("id", str(read.number))
        if not isinstance(label, str) or not label:
            raise BadLine(f"`id` must be text or a number, is {json_type(label)}")
        functions = any("." in part for part in source.rewards)
        environment = source.environment.enabled
        if functions and not environment and not set(_REWARD_KEYS) & set(record):
            if mapped := [key for key in _REWARD_KEYS if source.columns.get(key)]:
                raise self._no_text(row, mapped[0])
            if source.rewards.get("correct"):
                raise BadLine(
                    f"has no `answer`, but `correct` has a weight in {self._knob}.rewards; the row "
                    f"has {', '.join(row.record)}. {self._knob}.columns can name another column; "
                    "without answers, weight functions alone"
                )
            reward: dict[str, Any] = {"kind": FUNCTIONS}
        else:
            reward = self._reward(row)
        used = {"reward"} if "reward" in record else set(reward)
        used |= {"id", "prompt", "messages", *(["environment"] if environment else [])}
        unused = {self._column[key]: value for key, value in record.items() if key not in used}
        unmapped = row.unmapped | {name: v for name, v in unused.items() if name in row.record}
        if functions and unmapped:
            if "reward" in record:  # kept by `keel filter`, it has its columns already
                unmapped = {k: v for k, v in unmapped.items() if k not in _WRITTEN_BY_KEEL}
                unmapped = {**reward.get("columns", {}), **unmapped}
            reward["columns"] = unmapped
        if environment and (value := record.get("environment")) is not None:
            if not isinstance(value, dict):
                raise BadLine(f"`environment` must be an object, is {json_type(value)}")
            reward["environment"] = value
        bare = self._messages(row)
        messages = self._fill_template(row, bare) if source.template else bare
        try:
            self._check_reward(reward)
        except ValueError as error:
            raise BadLine(str(error)) from error
        prompt = make_prompt(source, label, add_source_system(source, messages), reward)
        return Item(prompt=prompt, origin=read.at, bare=tuple(bare) if self._keeps_question else ())

    def _keyed(self, row: ReadRow) -> _Row:
        if isinstance(row.record, BadLine):
            raise row.record
        known = select_columns(row.record, self._column)
        if row.written is not None:
            as_text, record = select_columns(row.written, self._column), row.written
        else:
            known = {key: _parse_cell(key, v) for key, v in known.items() if v != ""}
            as_text, record = _numbers_as_text(known), _numbers_as_text(row.record)
        self.seen |= known.keys()
        unmapped = {key: row.record[key] for key in row.record if key not in self._taken}
        return _Row(known, as_text, unmapped, record, row.written is None)

    def _no_text(self, row: _Row, key: str, value: Any = None) -> BadLine:
        name = self._column[key]
        label = f"`{key}`" + f" ({self._knob}.columns.{key} = {name!r})" * (name != key)
        return BadLine(
            f"{label} must be text, is {json_type(value)}; the row has {', '.join(row.record)}. "
            f"{self._knob}.columns can name another column"
        )

    def _text(self, row: _Row, values: dict[str, Any], key: str) -> str:
        value = values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self._no_text(row, key, value)
        return value

    def _reward(self, row: _Row) -> dict[str, Any]:
        record, graded = row.known, self._source.environment.grades
        keys = [key for key in _REWARD_KEYS if key in record]
        if not keys and graded:
            return {"kind": ENVIRONMENT}
        if len(keys) > 1:
            raise BadLine(
                f"has {' and '.join(f'`{key}`' for key in keys)}; keep one, or exclude a column by "
                f"{self._knob}.columns: {{{keys[1]}: ''}}"
            )
        if keys == ["reward"]:
            reward = record["reward"]
            if not isinstance(reward, dict):
                raise BadLine(f"`reward` must be an object, is {json_type(reward)}")
            kind = {"kind": ENVIRONMENT} if graded else {}
            return {**kind, **cast(dict[str, Any], reward)}
        if keys and keys[0] in _SPECS:
            kind, own = _SPECS[keys[0]]
            return {"kind": kind, **{key: record[key] for key in own if key in record}}
        match = record.get("match", "math")
        if not isinstance(match, str) or match not in _MATCHES:
            raise BadLine(f"`match` is {match!r}, must be one of {', '.join(_MATCHES)}")
        if match == "schema":
            answer = record.get("answer")
            if isinstance(answer, str) and row.of_table:
                answer = parse_json("answer", answer)
            if not isinstance(answer, dict):
                raise BadLine(f"`answer` must be a JSON schema, an object, is {json_type(answer)}")
        else:
            answer = self._text(row, row.as_text, "answer")
            if mark := self._source.answer_after:
                answer = answer.rpartition(mark)[2].strip() if mark in answer else ""
                if not answer:
                    raise BadLine(
                        f"`answer` has nothing after {mark!r} ({self._knob}.answer_after)"
                    )
        more = {key: record[key] for key in _MATCHES[match] if key in record}
        if "choices" in more:
            more["choices"] = row.as_text["choices"]
        return {"kind": "answer", "answer": answer, "match": match, **more}

    def _messages(self, row: _Row) -> list[dict[str, Any]]:
        record, source = row.known, self._source
        prompt = record.get("prompt")
        if "messages" in record and "prompt" in record:
            raise BadLine("has both `prompt` and `messages`; keep one")
        if "messages" in record or isinstance(prompt, list):
            messages = parse_chat(record.get("messages", prompt))
        elif "prompt" not in record and source.template:
            return []
        else:
            messages = [{"role": "user", "content": self._text(row, record, "prompt")}]
        if source.raw and (len(messages) != 1 or messages[0]["role"] != "user"):
            raise BadLine(f"has a conversation, but {self._knob}.raw needs one text in `prompt`")
        if source.system and messages[0]["role"] == "system":
            raise BadLine(f"has a system message, but {self._knob}.system is set too")
        return messages

    def _fill_template(self, row: _Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Fill in the prompt template with the last message and the row's columns, and replace that
        message with the result. Raises BadLine if the last message isn't a user message."""
        *before, last = messages or [{"role": "user", "content": None}]
        if last["role"] != "user":
            raise BadLine(f"ends with a message of the {last['role']}; a template needs the user's")

        def replacement(match: re.Match[str]) -> str:
            if match[1]:
                return f"{{{match[1]}}}"
            name = match[2]
            value = look_up(row.record, name)
            if name == "prompt" and last["content"] is not None:
                value = last["content"]
            elif value is None:
                value = row.as_text.get(name)
            if value is None:
                raise BadLine(
                    f"has no column {name!r} for {self._knob}.template; it has "
                    f"{', '.join(row.record)} (write {{{{{name}}}}} for literal braces)"
                )
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        content = _PLACEHOLDER.sub(replacement, self._source.template_text)
        return [*before, {**last, "content": content}]


def _parse_cell(key: str, value: Any) -> Any:
    if key in _PARSED and isinstance(value, str):
        value = parse_json(key, value.lower() if value in ("True", "False") else value)
    return drop_nulls(value)


def _numbers_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers_as_text(each) for key, each in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        return [_numbers_as_text(each) for each in cast(list[Any], value)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return json.dumps(value) if number else value
