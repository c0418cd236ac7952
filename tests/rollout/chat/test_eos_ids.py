"""Tests turns that end with a token at which the engine stops but which the chat format does not
write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from keel.configs.schema import ConfigError
from keel.rl.turns import ToolCall
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import Marks
from keel.rollout.chat.eos_ids import ends_of
from keel.rollout.chat.template_checks import check_prefix_law
from tests.rollout.chat.families import CITY, tokenizer_of

USER = [{"role": "user", "content": "Where to?"}]
ANSWER = {"role": "tool", "content": "1", "name": "city", "tool_call_id": "call_0_0"}
CASES = {
    "qwen3": ("<|endoftext|>", '<tool_call>{"name": "city"}</tool_call>'),
    "llama3": ("<|end_of_text|>", '{"name": "city", "parameters": {}}'),
    "harmony": (
        "<|endoftext|>",
        "<|channel|>commentary to=functions.city<|message|>{}",
    ),
}


def chat_with(name: str) -> TemplateChat:
    tokenizer = tokenizer_of(name)
    return TemplateChat(tokenizer, ends=[tokenizer.convert_tokens_to_ids(CASES[name][0]), 10**6])


def ids_of(chat: TemplateChat, text: str) -> list[int]:
    return chat.encoder.encode(text, Marks("", ""))


@pytest.mark.parametrize("name", CASES)
def test_other_ends_close_the_turn(name: str) -> None:
    (end, call), chat = CASES[name], chat_with(name)
    check_prefix_law(chat, modes=(False,))
    assert chat.ends[end] in chat.stop_ids
    said = "<|channel|>final<|message|>4" if name == "harmony" else "4"
    parsed = chat.parse(ids_of(chat, said + end), [CITY], thinking=False, turn=0)
    assert (parsed.content, parsed.closed) == ("4", True)
    parsed = chat.parse(ids_of(chat, call + end), [CITY], thinking=False, turn=0)
    assert parsed.calls == (ToolCall(call_id="call_0_0", name="city", arguments={}),)
    assert (parsed.content, parsed.closed) == ("", True)


@pytest.mark.parametrize("name", CASES)
def test_sampled_ids_stay_or_a_segment_begins(name: str) -> None:
    (end, call), chat = CASES[name], chat_with(name)
    ids = [*chat.opening(USER, [CITY], thinking=False), *ids_of(chat, call + end)]
    extended = chat.extend(ids, [ANSWER], thinking=False)
    if name == "llama3":  # whose ends stand for each other
        assert extended is not None and extended[: len(ids)] == ids
    else:
        assert extended is None


@pytest.mark.parametrize(
    ("written", "ends"), [({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": 7}, (7,)), ({}, ())]
)
def test_ends_are_those_of_the_generation_config(
    tmp_path: Path, written: dict[str, object], ends: tuple[int, ...]
) -> None:
    LlamaConfig(eos_token_id=3).save_pretrained(tmp_path)
    assert ends_of(str(tmp_path)) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    assert ends_of(str(tmp_path)) == ends


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config"):
        ends_of(str(tmp_path))
