"""Sources of conversations, loaded with every letter as a token."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from keel.configs.schema import ConversationsConfig, SftConfig
from keel.data.conversations.forms import Example
from keel.data.conversations.load import SftData, load_sft_data
from keel.rl.sft import supervised_segment
from keel.rl.types import Segment


def chat(asked: str, said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": messages, **more}


def write(path: Path, *records: Mapping[str, Any] | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def letters(example: Example) -> list[Segment]:
    """Every letter is a token, and the last message is learned."""
    if "untellable" in str(example.messages):
        raise ValueError("the template has no word for it")
    if example.thinking and "unthinkable" in str(example.messages):
        raise ValueError("the template shows no reasoning")
    if not example.thinking and "always" in str(example.messages):
        raise ValueError("the template opens the thinking")
    said = str(example.messages[-1]["content"])
    asked = "".join(str(m["content"]) for m in example.messages[:-1])
    ids = [ord(letter) for letter in asked + said]
    return [supervised_segment(example.origin, ids, [i >= len(asked) for i in range(len(ids))])]


def solve(task: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    if task != "spell_backward" or "a" in entry["answer"]:
        return None
    return {"role": "assistant", "content": entry["answer"], "reasoning_content": "letters"}


def load(
    *sources: ConversationsConfig,
    reserved: Collection[str] = (),
    reserved_ids: Collection[str] = (),
    **config: Any,
) -> SftData:
    return load_sft_data(
        SftConfig(sources=sources, **config),
        seed=0,
        render=letters,
        solve=solve,
        tokenizer="mine",
        reserved=reserved,
        reserved_ids=reserved_ids,
    )


def source(path: str, **knobs: Any) -> ConversationsConfig:
    return ConversationsConfig(**{"name": "s", "source": "jsonl", "path": path, **knobs})


def said(examples: Any) -> set[str]:
    return {
        "".join(chr(int(token)) for token in example.segments[0].token_ids_T[one.trainable_T])
        for example in examples
        for one in example.segments[:1]
    }
