"""Prompts from a JSONL file: a line has one chat prompt, and what its completions are judged by.

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
files of the task, documents that the answer rests on. Other keys are for functions of one's own,
which find them in `prompt.reward["columns"]`; where the source weighs such a function, a line may
have an answer of none of these kinds. Without one other keys are ignored.
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, SourceConfig
from keel.data.items import Item, Loaded, told
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
_HALF = re.compile(r"[\ud800-\udfff]|\\u[dD][89a-fA-F]")
ROLES = ("system", "user", "assistant", "tool")


class BadLine(ValueError):
    """Why a line cannot be used."""


def load_jsonl(
    source: SourceConfig, check_reward: Callable[[Mapping[str, Any]], None] | None = None
) -> Loaded:
    """The prompts of `source.path`, at most `source.size` lines (0: all). Blank lines are free.

    check_reward: raises ValueError for a reward spec that could not be judged.
    Raises ConfigError naming file:line and the reason for a malformed line, unless
    `on_bad_line: skip`; and for a file that is missing or holds no prompt.
    """
    path = data_path(source.path)
    items: list[Item] = []
    skipped: list[str] = []
    seen: dict[str, int] = {}
    for count, (number, line) in enumerate(lines_of(path, f"data.sources[{source.name}].path")):
        if source.size and count == source.size:
            break
        try:
            prompt = _prompt(line, number, source)
            _check_reward(prompt, check_reward)
            if prompt.prompt_id in seen:
                first = seen[prompt.prompt_id]
                raise BadLine(f"id {prompt.prompt_id!r} is already taken by line {first}")
        except BadLine as error:
            if source.on_bad_line == "error":
                raise ConfigError(
                    f"{path}:{number}: {error} (data.sources[{source.name}]; repair the line, or "
                    "set on_bad_line: skip to leave such lines out)"
                ) from error
            skipped.append(f"{path}:{number}: {error}")
            continue
        seen[prompt.prompt_id] = number
        items.append(Item(prompt=prompt, origin=f"{path}:{number}"))
    if not items:
        why = f"all {len(skipped)} lines are malformed; {skipped[0]}" if skipped else "it is empty"
        raise ConfigError(f"data.sources[{source.name}].path = {source.path!r}: {why}")
    return Loaded(items=tuple(items), skipped=tuple(skipped))


def lines_of(path: Path, knob: str) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines with their numbers, from 1. Raises ConfigError naming `knob`."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        near = [p.name for p in path.parent.glob("*.json*")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, near, n=1, cutoff=0.5)
        hint = f"; did you mean {path.parent / close[0]}?" if close else ""
        raise ConfigError(
            f"{knob} = {str(path)!r}: {what} (looked in {path.parent.resolve()}){hint}"
        )
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{knob} = {str(path)!r}: {error}") from error


def object_of(line: bytes, *, halves: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A line's object, and the same with its numbers as they are written: an answer of 0.10 is not
    0.1 to `match: exact`. halves: those of surrogate pairs, which a policy may sample, are read as
    replacement characters, as tokenizers read them (`keel.rollout.chat.encoding`). Raises
    BadLine."""
    try:
        text = line.decode(errors="surrogatepass") if halves else line.decode()
        if halves:
            text = _without_halves(text)
        record = json.loads(text)
        as_text = json.loads(text, parse_int=str, parse_float=str)
    except UnicodeDecodeError as error:
        raise BadLine(f"not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} (column {error.colno})") from error
    except ValueError as error:  # integers of thousands of digits
        raise BadLine(f"not JSON: {error}") from error
    except RecursionError as error:
        raise BadLine("nested too deeply") from error
    if not isinstance(record, dict):
        raise BadLine(f"must be an object, is {kind_of(record)}")
    _check_encodable(record)
    return cast(dict[str, Any], record), as_text


def _prompt(line: bytes, number: int, source: SourceConfig) -> Prompt:
    record, as_text = object_of(line)
    label = as_text.get("id", str(number))
    if not isinstance(label, str) or not label:
        raise BadLine(f"`id` must be text or a number, is {kind_of(label)}")
    environment = source.name if source.environment.given else ""
    own_functions = any("." in part for part in source.rewards)
    if own_functions and not source.environment.given and not set(REWARD_KEYS) & set(record):
        reward: dict[str, Any] = {"kind": FUNCTIONS}
    else:
        reward = _reward(record, as_text, alone=not source.environment.grades)
    if own_functions and (columns := {k: record[k] for k in record if k not in KNOWN}):
        reward["columns"] = columns
    if environment and (own := record.get(FOR_ENVIRONMENT)) is not None:
        if not isinstance(own, dict):
            raise BadLine(f"`{FOR_ENVIRONMENT}` must be an object, is {kind_of(own)}")
        reward[FOR_ENVIRONMENT] = own
    messages = _messages(record, source)
    return Prompt(
        prompt_id=f"{source.name}/{label}",
        domain=source.domain_name,
        messages=messages,
        thinking=source.thinking,
        reward=reward,
        kl_coef=source.kl_coef,
        environment=environment,
    )


def _reward(record: dict[str, Any], as_text: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """`alone`: no environment sees the task, and grades where the line says nothing else."""
    given = [key for key in REWARD_KEYS if key in record]
    if not given and not alone:
        return {"kind": ENVIRONMENT}
    if len(given) > 1:
        raise BadLine(f"has {' and '.join(f'`{key}`' for key in given)}; keep one")
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
        if not isinstance(answer, dict):
            raise BadLine(f"`answer` must be a JSON schema, an object, is {kind_of(answer)}")
    else:
        answer = _text(as_text, "answer")
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


def _messages(record: dict[str, Any], source: SourceConfig) -> tuple[Mapping[str, Any], ...]:
    if "messages" not in record:
        messages = [{"role": "user", "content": _text(record, "prompt")}]
    elif "prompt" in record:
        raise BadLine("has both `prompt` and `messages`; keep one")
    else:
        messages = _chat(record["messages"])
    if source.system and messages[0]["role"] == "system":
        raise BadLine(f"has a system message, and so has data.sources[{source.name}].system")
    return told(source, messages)


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
        if not isinstance(message.get("content"), str):
            raise BadLine(f"`{at}.content` must be text, is {kind_of(message.get('content'))}")
        chat.append(message)
    if chat[-1]["role"] not in ("user", "tool"):
        raise BadLine(f"the last message is from the {chat[-1]['role']}: nothing to answer")
    return chat


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        near = difflib.get_close_matches(key, record, n=1)
        raise BadLine(f"no `{key}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise BadLine(f"`{key}` must be text that is not blank, is {kind_of(value)}")
    return value


def _without_halves(text: str) -> str:
    """Of JSON: as they are, and as it spells them."""
    if _HALF.search(text) is None:
        return text
    whole = json.dumps(json.loads(text), ensure_ascii=False)
    return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _check_encodable(record: dict[str, Any]) -> None:
    r"""`\ud800` alone is legal JSON and no character: no tokenizer takes it."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadLine("holds half of a surrogate pair (\\ud800 … \\udfff)") from error


def kind_of(value: object) -> str:
    if value is None:
        return "missing or null"
    if isinstance(value, str):
        return "text" if value.strip() else "blank"
    kinds: dict[type, str] = {bool: "true or false", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
