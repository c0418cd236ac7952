"""Scripted conversations: tokenised as in rollouts, with errors that name the script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from keel.agents.environments.demonstrations import trip_demonstrations
from keel.configs.schema import Config, DataConfig, EnvironmentConfig, SourceConfig
from keel.model.tiny.demonstrations import conversation_ids, demonstrate
from keel.model.tiny.tokenizer import TURN_END, build_tokenizer
from keel.rollout.chat.chat import TemplateChat
from tests.agents.test_environments_guide import BLOCK, GUIDE

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(("thinking", "inside"), [(True, False), (False, False), (True, True)])
def test_ids_equal_those_of_a_rollout(thinking: bool, inside: bool) -> None:
    chat = TemplateChat(TOKENIZER, tools_in_thinking=inside)
    for level in (0, 1):
        for pair in trip_demonstrations(5, seed=2, arguments={"level": level}):
            ids, learned = conversation_ids(
                TOKENIZER, pair.worked, pair.tools, thinking=thinking, tools_in_thinking=inside
            )
            context = chat.opening(pair.worked[:1], pair.tools, thinking=thinking)
            results = [message for message in pair.worked if message["role"] == "tool"]
            turns = [message for message in pair.worked if message["role"] == "assistant"]
            end = 0
            for turn in range(len(results) + 1):
                start = len(context)
                assert ids[:start] == context and not learned[start - 1] and learned[start]
                end = start + learned[start:].index(False) if False in learned[start:] else len(ids)
                sampled = ids[start:end]
                assert TOKENIZER.decode(sampled[-1]) == TURN_END
                parsed = chat.parse(
                    sampled, pair.tools, thinking=thinking, turn=turn, inside=inside and turn > 0
                )
                assert parsed.inside == inside
                function = turns[turn]["tool_calls"][0]["function"]
                (call,) = parsed.calls
                assert call.name == function["name"]  # pyright: ignore
                assert call.arguments == function["arguments"]  # pyright: ignore
                if turn < len(results):
                    extended = chat.extend([*context, *sampled], [results[turn]], thinking=thinking)
                    assert extended is not None
                    context = extended
            assert end == len(ids)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of docs/environments.md."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def config_of(folder: Path, demonstrations: str = "demos:shopping") -> Config:
    environment = EnvironmentConfig(
        target="shop:Shop",
        demonstrations=demonstrations,
        folder=str(folder),
        arguments={"stalls": 4},
    )
    source = SourceConfig(name="shop", source="environment", size=9, environment=environment)
    return Config(data=DataConfig(sources=(source,)))


def test_the_documented_script(folder: Path) -> None:
    pairs = demonstrate(config_of(folder), "shop", 3)
    assert len(pairs) == 3
    for pair in pairs:
        assert sorted(tool.name for tool in pair.tools) == ["ask", "buy"]
        turns = [message for message in pair.worked if message["role"] == "assistant"]
        names = [turn["tool_calls"][0]["function"]["name"] for turn in turns]
        assert names == [*4 * ["ask"], "buy"]
        prices = [int(each["content"]) for each in pair.worked if each["role"] == "tool"]
        bought = turns[-1]["tool_calls"][0]["function"]["arguments"]["stall"]
        assert bought == f"stall {prices.index(min(prices))}"
        assert len(pair.hasty) == 2
