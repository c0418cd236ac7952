"""Reads prompts from the rows of data files.

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
user's reward functions in `prompt.reward["columns"]`. A source with such a function needs no other
way to judge completions. Keys that nothing uses are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.conversations.forms import ROLES, calls_of, entries_of, text_of
from keel.data.items import MAX_MALFORMED, Item, Loaded, malformed, with_source_system
from keel.data.rows.columns import WRITTEN_BY_KEEL, Columns, KeyedRow, parse_json
from keel.data.rows.places import files_of
from keel.data.rows.read import BadLine, Row, kind_of, rows_of_files, rows_of_lines
from keel.rl.types import ENVIRONMENT, FUNCTIONS, Prompt

_CheckReward = Callable[[Mapping[str, Any]], None]
_MATCHES = {"math": ("tolerance",), "exact": (), "choice": ("choices",), "schema": (), "regex": ()}
"""For each value of `match`, the keys that it uses in addition to `answer`."""
_CODE_KEYS = (
    *("tests", "subtasks", "reference", "language", "partial"),
    *("time_limit_s", "memory_mib", "tolerance"),
)
_REWARD_KEYS = ("answer", "criteria", "tests", "refuse", "reward")
"""Keys that say how to judge a completion. Each row has exactly one of them."""
_KNOWN = frozenset(
    ("id", "prompt", "messages", "match", "environment", *_REWARD_KEYS, *_CODE_KEYS)
) | frozenset(key for keys in _MATCHES.values() for key in keys)


def load_jsonl(
    source: SourceConfig,
    check_reward: _CheckReward = lambda spec: None,
    hub_answers: Callable[[], bool] = lambda: True,
) -> Loaded:
    """Read up to `source.size` prompts from `source.path`. A size of 0 reads all of them.

    `check_reward` raises ValueError for an invalid reward spec. If `hub_answers` returns False, the
    hub's local cache is read. Raises ConfigError if the file is missing or has no prompt, or for
    malformed lines, unless `on_bad_line: skip` is set.
    """
    knob = f"data.sources[{source.name}]"
    if source.source == "jsonl":
        rows = rows_of_lines(data_path(source.path), f"{knob}.path")
    else:
        rows = rows_of_files(files_of(source, hub_answers), f"{knob}.path")
    columns, strict = Columns(source, _KNOWN), source.on_bad_line == "error"
    items: dict[str, Item] = {}
    skipped: list[str] = []
    for count, row in enumerate(rows):
        if (source.size and count == source.size) or (strict and len(skipped) == MAX_MALFORMED):
            break
        try:
            item = _item(row, columns, source, check_reward)
            name = item.prompt.prompt_id
            if name in items:
                raise BadLine(f"id {name!r} is already used at {items[name].origin}")
            items[name] = item
        except BadLine as error:
            skipped.append(f"{row.at}: {error}")
    if skipped and strict:
        raise malformed(skipped, knob)
    if not items:
        reason = f"its split {source.split!r} is empty" if source.split else "it is empty"
        if skipped:
            reason = f"all {len(skipped)} lines are malformed; {skipped[0]}"
        raise ConfigError(f"{knob}.path = {source.path!r}: {reason}")
    columns.check_seen()
    return Loaded(items=tuple(items.values()), skipped=tuple(skipped), unread=columns.unread)


def _item(row: Row, columns: Columns, source: SourceConfig, check_reward: _CheckReward) -> Item:
    """Build a prompt from a row. Raises BadLine if the row is malformed."""
    keyed = columns.keyed(row)
    record = keyed.known
    label = keyed.as_text.get("id", str(row.number))
    if not isinstance(label, str) or not label:
        raise BadLine(f"`id` must be text or a number, is {kind_of(label)}")
    functions = any("." in part for part in source.rewards)
    environment = source.name if source.environment.enabled else ""
    if functions and not environment and not set(_REWARD_KEYS) & set(record):
        if mapped := [key for key in _REWARD_KEYS if source.columns.get(key)]:
            raise columns.missing(mapped[0], keyed)
        reward: dict[str, Any] = {"kind": FUNCTIONS}
    else:
        reward = _reward(keyed, columns, source)
    used = {"reward"} if "reward" in record else set(reward)
    used |= {"id", "prompt", "messages", *(["environment"] if environment else [])}
    if functions and (further := columns.further(keyed, used)):
        if "reward" in record:  # kept by `keel filter`, it has its columns already
            further = {k: v for k, v in further.items() if k not in WRITTEN_BY_KEEL}
            further = {**reward.get("columns", {}), **further}
        reward["columns"] = further
    if environment and (value := record.get("environment")) is not None:
        if not isinstance(value, dict):
            raise BadLine(f"`environment` must be an object, is {kind_of(value)}")
        reward["environment"] = value
    bare = _messages(keyed, columns, source)
    messages = _in_template(keyed, columns, bare) if source.template else bare
    if not functions:
        columns.note_unread(keyed, row.at)
    try:
        check_reward(reward)
    except ValueError as error:
        raise BadLine(str(error)) from error
    prompt = Prompt(
        prompt_id=f"{source.name}/{label}",
        domain=source.domain_name,
        messages=with_source_system(source, messages),
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=environment,
        raw=source.raw,
    )
    # A template that adds nothing of the row leaves the question the same.
    same = bool(source.template) and columns.only_prompt
    return Item(prompt=prompt, origin=row.at, bare=tuple(bare) if same else ())


def _reward(row: KeyedRow, columns: Columns, source: SourceConfig) -> dict[str, Any]:
    """Build a row's reward spec. It may be absent if an environment grades the row."""
    record = row.known
    graded = source.environment.grades
    keys = [key for key in _REWARD_KEYS if key in record]
    if not keys and graded:
        return {"kind": ENVIRONMENT}
    if len(keys) > 1:
        raise BadLine(
            f"has {' and '.join(f'`{key}`' for key in keys)}; keep one, or exclude a column by "
            f"data.sources[{source.name}].columns: {{{keys[1]}: ''}}"
        )
    if keys == ["reward"]:
        reward = record["reward"]
        if not isinstance(reward, dict):
            raise BadLine(f"`reward` must be an object, is {kind_of(reward)}")
        kind = {"kind": ENVIRONMENT} if graded else {}
        return {**kind, **cast(dict[str, Any], reward)}
    if keys == ["tests"]:
        return {"kind": "code", **{key: record[key] for key in _CODE_KEYS if key in record}}
    if keys == ["criteria"]:
        present = [key for key in ("criteria", "reference") if key in record]
        return {"kind": "rubric", **{key: record[key] for key in present}}
    if keys == ["refuse"]:
        return {"kind": "refusal", "refuse": record["refuse"]}
    match = record.get("match", "math")
    if not isinstance(match, str) or match not in _MATCHES:
        raise BadLine(f"`match` is {match!r}, must be one of {', '.join(_MATCHES)}")
    if match == "schema":
        answer = record.get("answer")
        if isinstance(answer, str) and row.of_table:
            answer = parse_json("answer", answer)
        if not isinstance(answer, dict):
            raise BadLine(f"`answer` must be a JSON schema, an object, is {kind_of(answer)}")
    else:
        answer = _text(row, row.as_text, "answer", columns)
        if mark := source.answer_after:
            answer = answer.rpartition(mark)[2].strip() if mark in answer else ""
            if not answer:
                raise BadLine(f"`answer` has nothing after {mark!r} ({_knob(source)}.answer_after)")
    more = {key: record[key] for key in _MATCHES[match] if key in record}
    if "choices" in more:
        more["choices"] = row.as_text["choices"]
    return {"kind": "answer", "answer": answer, "match": match, **more}


def _knob(source: SourceConfig) -> str:
    return f"data.sources[{source.name}]"


def _messages(row: KeyedRow, columns: Columns, source: SourceConfig) -> list[dict[str, Any]]:
    """Return a row's messages, or an empty list if the template replaces a missing prompt."""
    record = row.known
    prompt = record.get("prompt")
    if "messages" in record and "prompt" in record:
        raise BadLine("has both `prompt` and `messages`; keep one")
    if "messages" in record or isinstance(prompt, list):
        messages = _chat(record.get("messages", prompt))
    elif "prompt" not in record and source.template:
        return []
    else:
        messages = [{"role": "user", "content": _text(row, record, "prompt", columns)}]
    if source.raw and (len(messages) != 1 or messages[0]["role"] != "user"):
        raise BadLine(f"has a conversation, but {_knob(source)}.raw needs one text in `prompt`")
    if source.system and messages[0]["role"] == "system":
        raise BadLine(f"has a system message, but {_knob(source)}.system is set too")
    return messages


def _in_template(
    row: KeyedRow, columns: Columns, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Insert the last message, which must be the user's, into the source's template. Without
    messages, the filled template becomes the user message."""
    if not messages:
        return [{"role": "user", "content": columns.fill_template(row, None)}]
    *before, last = messages
    if last["role"] != "user":
        raise BadLine(f"ends with a message of the {last['role']}; a template needs the user's")
    return [*before, {**last, "content": columns.fill_template(row, last["content"])}]


def _chat(messages: Any) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    for message, at in entries_of(messages, "messages"):
        if message.get("role") not in ROLES:
            raise BadLine(
                f"`{at}.role` is {message.get('role')!r}, must be one of {', '.join(ROLES)}"
            )
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise BadLine(f"`{at}.content` must be text, is {kind_of(content)}")
        message = {**message, "content": text_of(content, f"{at}.content")}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = calls_of(calls, f"{at}.tool_calls")
        chat.append(message)
    if chat[-1]["role"] not in ("user", "tool", "developer"):
        raise BadLine(f"the last message is the {chat[-1]['role']}'s, so nothing is to be answered")
    return chat


def _text(row: KeyedRow, values: dict[str, Any], key: str, columns: Columns) -> str:
    if key not in values:
        raise columns.missing(key, row)
    value = values[key]
    if not isinstance(value, str):
        raise BadLine(f"{columns.label(key)} must be text, is {kind_of(value)}")
    if not value.strip():
        raise BadLine(f"{columns.label(key)} is empty")
    return value
