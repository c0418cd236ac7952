"""Recipes with environments: what is refused, and what the run makes of their budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import (
    AgentsConfig,
    Config,
    ConfigError,
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SourceConfig,
)
from keel.data.dataset import load_dataset

SHOP = EnvironmentConfig(target="shop:Shop")
SUMS = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)


def source(**fields: Any) -> SourceConfig:
    given = {"name": "shop", "source": "environment", "environment": SHOP, "size": 8, **fields}
    return SourceConfig(**given)


def config(*sources: SourceConfig, stop: tuple[str, ...] = (), **agents: Any) -> Config:
    return Config(
        model=ModelConfig(path="some/model"),
        data=DataConfig(sources=sources or (source(),), max_prompt_tokens=64),
        rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=100, stop=stop)),
        agents=AgentsConfig(**agents),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": EnvironmentConfig()}, r"sources\[shop\].environment .* name one"),
        ({"size": 0}, r"size = 0: must be at least 1 task"),
        ({"system": "Be kind."}, r"system .* opens the conversation itself"),
        ({"environment": EnvironmentConfig(url="http://x")}, "an MCP server .* grades none"),
        (
            {"system_template": "tools-in-thinking", "thinking": False},
            r"sources\[shop\].system_template .*asks the policy to think; set thinking: true",
        ),
        (
            {
                "source": "reasoning_gym",
                "task": "chain_sum",
                "environment": EnvironmentConfig(),
                "system_template": "tools",
            },
            "no tools without an environment",
        ),
    ],
)
def test_a_source_is_refused_with_the_knob(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "a:B", "url": "http://x"}, "name one of target, command and url"),
        ({"target": ":B"}, "write module:name"),
        ({"url": "http://x", "arguments": {"a": 1}}, "belongs to target"),
        ({"target": "a:B", "memory_mib": 8}, "memory_mib = 8: must be at least 64"),
        ({"target": "a:B", "open_s": 0.0}, "open_s = 0"),
        ({"url": "http://x", "on_crash": "zero"}, "on_crash .* share the server behind url"),
        ({"program": "agent", "on_crash": "zero"}, "on_crash .* no environment that could crash"),
        ({"program": "agent 'x"}, "program = .*No closing quotation"),
        ({"program": "  "}, "program = .*name a command line"),
        ({"target": "a:B", "tells_reward": True}, "tells_reward = True: belongs to program"),
    ],
)
def test_an_environment_is_refused_with_the_knob(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EnvironmentConfig(**fields)


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ({"max_turns": 0}, "agents.max_turns = 0"),
        ({"window": 100}, "agents.window = 100: must be above rollout.sampling.max_tokens"),
        ({"window": -1}, "agents.window = -1"),
        ({"context": "summary"}, "agents.summary_tokens = 1024: must be less than half"),
        ({"stop": ("x",)}, "rollout.sampling.stop"),
        ({"max_thinking_calls": 0}, "agents.max_thinking_calls = 0"),
    ],
)
def test_budgets_that_allow_nothing_are_refused(agents: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**agents)


def test_tools_in_the_thinking_want_thinking_and_their_prompt_wants_them() -> None:
    asked = source(system_template="tools-in-thinking")
    with pytest.raises(ConfigError, match=r"system_template .* agents.tools_in_thinking"):
        config(asked)
    assert config(asked, SUMS, tools_in_thinking=True).agents.max_thinking_calls == 20
    with pytest.raises(ConfigError, match=r"sources\[shop\].thinking = False: must be true"):
        config(source(thinking=False), tools_in_thinking=True)


def test_the_window_is_what_engines_and_trainer_are_planned_for() -> None:
    assert config().max_context == config().window == 164
    wide = config(window=4096)
    assert wide.max_context == 4096 and wide.max_context_said == "agents.window = 4096"
    assert config(source(), SUMS, window=120).max_context == 164
    assert config(SUMS, window=4096).max_context == 164, "no source has an environment"


def test_the_tiny_models_context_must_hold_the_window() -> None:
    with pytest.raises(ConfigError, match=r"max_context = 512: too short for agents.window = 600"):
        replace(config(window=600), model=ModelConfig(dtype="float32"))


def test_groups_may_take_as_long_as_their_environments() -> None:
    slow = source(environment=replace(SHOP, verdict_s=500.0))
    longer = config(slow, max_turns=2).group_timeout_s - config(max_turns=2).group_timeout_s
    assert longer == 500.0 - SHOP.verdict_s
    assert config().group_timeout_s > config(SUMS).group_timeout_s + config().rollout.timeout_s
    crowded = config(max_concurrent_episodes=1000)  # one engine with room for 128
    few = config(max_concurrent_episodes=100)
    assert crowded.group_timeout_s == few.group_timeout_s + 7 * few.rollout.timeout_s


@pytest.mark.parametrize("kind", ["reasoning_gym", "jsonl", "environment"])
def test_a_program_answers_prompts_of_every_source(kind: Any, tmp_path: Path) -> None:
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"prompt": "1 + 1?", "answer": "2"}\n{"prompt": "Judge yourself."}\n')
    fields = {
        "reasoning_gym": {"task": "chain_sum"},
        "jsonl": {"path": str(lines)},
        "environment": {},
    }[kind]
    driven = source(source=kind, environment=EnvironmentConfig(program="my_agent:f"), **fields)
    found = config(driven)
    assert found.with_agents and found.data.domains_with_environments == {"shop"}
    prompts = load_dataset(found.data, seed=0).train.sources["shop"]
    assert {prompt.environment for prompt in prompts} == {"shop"}
    kinds = {"environment": {"environment"}, "jsonl": {"answer", "environment"}}
    assert {p.reward["kind"] for p in prompts} == kinds.get(kind, {"reasoning_gym"})


def test_context_management_of_a_program_is_its_own() -> None:
    driven = source(name="driven", environment=EnvironmentConfig(program="my_agent:f"))
    with pytest.raises(ConfigError, match=r"agents\.context = 'discard-all': must be none"):
        config(driven, context="discard-all")
    assert config(driven, source(), context="discard-all").with_agents
