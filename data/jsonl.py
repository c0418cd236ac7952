"""Prompts from the rows of files. A row has one prompt, and the answer, tests or criteria that its
completions are judged by.

    {"prompt": "What is 2+2?", "answer": "4"}
    {"messages": [{"role": "user", "content": "…"}], "answer": "B", "match": "exact", "id": "a7"}
    {"prompt": "…", "answer": "B", "match": "choice", "choices": ["Paris", "Rome", "Bern"]}
    {"prompt": "…", "answer": "[0-9]{4}-[0-9]{2}", "match": "regex"}
    {"prompt": "…", "answer": {"type": "object", "required": ["name"]}, "match": "schema"}
    {"prompt": "…", "criteria": [{"name": "cause", "text": "Names the cause.", "weight": 1}]}
    {"prompt": "…", "tests": [{"stdin": "1 2", "stdout": "3"}], "reference": "print(3)"}
    {"prompt": "…", "refuse": true}
    {"prompt": "…", "reward": {"kind": "proof"}}

`match` says how the answer is compared: `math` (by value, the default; with `tolerance` between
numbers), `exact` (as text), `choice` (letter or text of one of `choices`), `regex` (matches all of
the pattern `answer`) or `schema` (JSON that is valid under the schema `answer`).
`criteria` may come with `reference` (docs/rubrics.md), and `tests` with the keys of CODE_KEYS
(docs/rewards.md); `refuse` says whether a completion has to decline (docs/rubrics.md); `reward`
is a whole reward spec. `environment`, an object, is what the source's environment alone reads:
files of the task, documents that the answer rests on. Other keys, and those of other kinds of
answers, are for functions of one's own, which find them in `prompt.reward["columns"]`, and for
templates; where the source weighs such a function, a line may have an answer of none of these
kinds. What nothing reads is named.

A prompt may be a list of messages, as in `messages`. Which columns these keys are, `keel.data.rows`
says, and which kinds of files there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.conversations.forms import ROLES, calls_of, text_of
from keel.data.items import COUNTED, Item, Loaded, malformed, told
from keel.data.rows.columns import WRITTEN, Columns, Given, parsed_json
from keel.data.rows.lines import BadLine, kind_of
from keel.data.rows.places import files_of
from keel.data.rows.read import Row, rows_of_files, rows_of_lines
from keel.rl.types import ENVIRONMENT, FUNCTIONS, Prompt

MATCHES = {
    "math": ("tolerance",),
    "exact": (),
    "choice": ("choices",),
    "schema": (),
    "regex": (),
}
"""`match` → the keys that it reads besides `answer`."""
CODE_KEYS = (
    "tests",
    "subtasks",
    "reference",
    "language",
    "partial",
    "time_limit_s",
    "memory_mib",
    "tolerance",
)
KNOWN = frozenset(
    ("id", "prompt", "messages", "match", "environment", "answer", "criteria", "refuse", "reward")
) | frozenset([*CODE_KEYS, *(key for keys in MATCHES.values() for key in keys)])
"""Keys with a meaning of their own."""
REWARD_KEYS = ("answer", "criteria", "tests", "refuse", "reward")
"""A line has exactly one of them."""
FOR_ENVIRONMENT = "environment"


def load_jsonl(
    source: SourceConfig,
    check_reward: Callable[[Mapping[str, Any]], None] | None = None,
    hub_answers: Callable[[], bool] = lambda: True,
) -> Loaded:
    """The prompts of `source.path`, at most `source.size` rows (0: all). Blank lines are free.

    check_reward: raises ValueError for a reward spec that could not be judged. hub_answers: whether
    a hub can be asked; else what was downloaded before is read.
    Raises ConfigError naming file:line and the reason for malformed lines, unless
    `on_bad_line: skip`; and for a file that is missing or holds no prompt.
    """
    knob = f"data.sources[{source.name}]"
    if source.source == "jsonl":
        rows = rows_of_lines(data_path(source.path), f"{knob}.path")
    else:
        rows = rows_of_files(files_of(source, hub_answers), f"{knob}.path")
    columns, refuses = Columns(source, KNOWN), source.on_bad_line == "error"
    functions = any("." in part for part in source.rewards)
    items: list[Item] = []
    skipped: list[str] = []
    seen: dict[str, str] = {}
    for count, row in enumerate(rows):
        if (source.size and count == source.size) or (refuses and len(skipped) == COUNTED):
            break
        try:
            given = columns.given(row)
            item = _item(given, columns, row, source, functions=functions)
            columns.check_read(given, row.at, functions=functions)
            prompt = item.prompt
            _check_reward(prompt, check_reward)
            if prompt.prompt_id in seen:
                raise BadLine(
                    f"id {prompt.prompt_id!r} is already taken by {seen[prompt.prompt_id]}"
                )
        except BadLine as error:
            skipped.append(f"{row.at}: {error}")
            continue
        except ConfigError:  # of columns, by the first rows, where lines are refused
            if skipped:
                raise malformed(skipped, knob) from None
            raise
        lines = row.at.endswith(f":{row.number}")
        seen[prompt.prompt_id] = f"{'line' if lines else 'row'} {row.number}"
        items.append(item)
    if skipped and refuses:
        raise malformed(skipped, knob)
    if not items:
        which = f"its split {source.split!r}" if source.split else "it"
        why = f"all {len(skipped)} lines are malformed; {skipped[0]}" if skipped else ""
        why = why or f"{which} is empty"
        raise ConfigError(f"{knob}.path = {source.path!r}: {why}")
    columns.check_found()
    alone = sum(item.prompt.reward.get("kind") == FUNCTIONS for item in items)
    return Loaded(
        items=tuple(items),
        skipped=tuple(skipped),
        unread=columns.unread,
        unanswered=alone if alone < len(items) else 0,
    )


def _item(
    given: Given, columns: Columns, row: Row, source: SourceConfig, *, functions: bool
) -> Item:
    """Build the item of a row. functions: the source weights custom functions. Raises BadLine."""
    record, as_text = given.known, given.as_text
    label = as_text.get("id", str(row.number))
    if not isinstance(label, str) or not label:
        raise BadLine(f"`id` must be text or a number, is {kind_of(label)}")
    environment = source.name if source.environment.enabled else ""
    if functions and not source.environment.enabled and not set(REWARD_KEYS) & set(record):
        if said := [key for key in REWARD_KEYS if source.columns.get(key)]:
            raise columns.missing(said[0])
        reward: dict[str, Any] = {"kind": FUNCTIONS}
    else:
        reward = _reward(given, columns, source)
    used = {"reward"} if "reward" in record else set(reward)
    used |= {"id", "prompt", "messages", *([FOR_ENVIRONMENT] if environment else [])}
    if functions and (further := {**given.further, **columns.unused(given, used)}):
        if "reward" in record:  # as `keel filter` keeps a prompt, it has them already
            further = {k: v for k, v in further.items() if k not in WRITTEN}
            further = {**reward.get("columns", {}), **further}
        reward["columns"] = further
    if environment and (own := record.get(FOR_ENVIRONMENT)) is not None:
        if not isinstance(own, dict):
            raise BadLine(f"`{FOR_ENVIRONMENT}` must be an object, is {kind_of(own)}")
        reward[FOR_ENVIRONMENT] = own
    bare = _messages(record, columns, source)
    asked = _in_template(given, columns, bare) if source.template else bare
    prompt = Prompt(
        prompt_id=f"{source.name}/{label}",
        domain=source.domain_name,
        messages=told(source, asked),
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=environment,
        raw=source.raw,
    )
    # A template that adds nothing of the row's leaves the question what it is.
    same = bool(source.template) and columns.only_prompt
    return Item(prompt=prompt, origin=row.at, bare=tuple(bare) if same else ())


def _reward(row: Given, columns: Columns, source: SourceConfig) -> dict[str, Any]:
    """Build the reward spec of a row, which may have none if an environment grades it."""
    record, as_text = row.known, row.as_text
    alone = not source.environment.grades
    given = [key for key in REWARD_KEYS if key in record]
    if not given and not alone:
        return {"kind": ENVIRONMENT}
    if len(given) > 1:
        both = " and ".join(f"`{key}`" for key in given)
        raise BadLine(
            f"has {both}; keep one, or say that a column is another thing by data.sources["
            f"{source.name}].columns: {{{given[1]}: ''}}"
        )
    if given == ["reward"]:
        reward = record["reward"]
        if not isinstance(reward, dict):
            raise BadLine(f"`reward` must be an object, is {kind_of(reward)}")
        kind = {} if alone else {"kind": ENVIRONMENT}
        return {**kind, **cast(dict[str, Any], reward)}
    if given == ["tests"]:
        return {"kind": "code", **{key: record[key] for key in CODE_KEYS if key in record}}
    if given == ["criteria"]:
        keys = [key for key in ("criteria", "reference") if key in record]
        return {"kind": "rubric", **{key: record[key] for key in keys}}
    if given == ["refuse"]:
        return {"kind": "refusal", "refuse": record["refuse"]}
    match = record.get("match", "math")
    if not isinstance(match, str) or match not in MATCHES:
        raise BadLine(f"`match` is {match!r}, must be one of {', '.join(MATCHES)}")
    if match == "schema":
        answer = record.get("answer")
        if isinstance(answer, str) and row.of_table:
            answer = parsed_json("answer", answer)
        if not isinstance(answer, dict):
            raise BadLine(f"`answer` must be a JSON schema, an object, is {kind_of(answer)}")
    else:
        answer = _after(_text(as_text, "answer", columns), source)
    more = {key: record[key] for key in MATCHES[match] if key in record}
    if "choices" in more:
        more["choices"] = as_text["choices"]
    return {"kind": "answer", "answer": answer, "match": match, **more}


def _check_reward(prompt: Prompt, check: Callable[[Mapping[str, Any]], None] | None) -> None:
    if check is None:
        return
    try:
        check(prompt.reward)
    except ValueError as error:
        raise BadLine(str(error)) from error


def _messages(
    record: dict[str, Any], columns: Columns, source: SourceConfig
) -> list[dict[str, Any]]:
    """Return the messages of a row; a row without a prompt is allowed if a template makes one."""
    prompt = record.get("prompt")
    if "messages" in record and "prompt" in record:
        raise BadLine("has both `prompt` and `messages`; keep one")
    if "messages" in record or isinstance(prompt, list):
        messages = _chat(record.get("messages", prompt))
    elif "prompt" not in record and source.template:
        return []
    else:
        messages = [{"role": "user", "content": _text(record, "prompt", columns)}]
    if source.raw and (len(messages) != 1 or messages[0]["role"] != "user"):
        raise BadLine(
            "has a conversation, and a raw prompt is one text, which no chat template writes: "
            f"leave data.sources[{source.name}].raw out, or give the text in `prompt`"
        )
    if source.system and messages[0]["role"] == "system":
        raise BadLine(f"has a system message, and so has data.sources[{source.name}].system")
    return messages


def _in_template(
    given: Given, columns: Columns, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Write the last user message, or the only one, by the source's template."""
    if not messages:
        return [{"role": "user", "content": columns.filled(given, None)}]
    *before, last = messages
    if last["role"] != "user":
        raise BadLine(f"ends with a message of the {last['role']}, and a template is for users'")
    return [*before, {**last, "content": columns.filled(given, last["content"])}]


def _after(answer: str, source: SourceConfig) -> str:
    """Return the answer after the last `answer_after` mark, if the source has one."""
    mark = source.answer_after
    _, found, final = answer.rpartition(mark) if mark else ("", "x", answer)
    if not found or not final.strip():
        what = "nothing after the last" if found else "no"
        raise BadLine(f"`answer` has {what} {mark!r} (data.sources[{source.name}].answer_after)")
    return final.strip() if mark else answer


def _chat(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise BadLine("`messages` must be a list of at least one message")
    chat: list[dict[str, Any]] = []
    for index, message in enumerate(cast(list[Any], messages)):
        at = f"messages[{index}]"
        if not isinstance(message, dict):
            raise BadLine(f"`{at}` must be an object, is {kind_of(message)}")
        message = cast(dict[str, Any], message)
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
        raise BadLine(f"the last message is from the {chat[-1]['role']}: nothing to answer")
    return chat


def _text(record: dict[str, Any], key: str, columns: Columns) -> str:
    if key not in record:
        raise columns.missing(key)
    value = record[key]
    what = columns.called(key)
    if not isinstance(value, str):
        raise BadLine(f"{what} must be text, is {kind_of(value)}")
    if not value.strip():
        raise BadLine(f"{what} is empty")
    return value
