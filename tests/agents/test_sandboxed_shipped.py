"""Shipped environments in the sandbox: trip planner, game, MCP server, and a recipe's search."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.program import KEEL, Program
from keel.agents.environments.trip.environment import make_task, solve
from keel.agents.environments.trip.tasks import LEVELS
from keel.agents.mcp_client import McpEpisode, McpServer
from keel.configs.schema import Config, ConfigError, DataConfig, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rl.types import Verdict
from keel.trainer.build_agents import environment_spec
from tests.agents.environments.search.corpus import write_corpus
from tests.agents.episodes import HERE, TASK, asynchronous, transcript, use
from tests.agents.sandboxes import wrap_of

SHIPPED = "keel.agents.environments"


@pytest.mark.e2e
@asynchronous
async def test_shipped_environments_run_concurrently() -> None:
    wrap = wrap_of()

    async def trip() -> None:
        _, task = make_task(3, LEVELS[5])
        prompt = replace(TASK, reward={"trip": {"level": 5, "seed": 3}})
        target = f"{SHIPPED}.trip.environment:Trip"
        environment = Hosted(Program(target=target, folder=KEEL, wrap=wrap))
        (message,) = (await environment.open(prompt, seed=0)).messages
        assert message["content"] == task.text()
        calls = solve(task)
        name, arguments = next(calls)
        with suppress(StopIteration):
            while True:
                name, arguments = calls.send((await use(environment, name, **arguments)).text)
        verdict = await environment.verdict(transcript())
        assert isinstance(verdict, Verdict) and verdict.parts["correct"] == 1.0
        await environment.close()

    async def server() -> None:
        command = (sys.executable, "mcp_shop.py", "{seed}")
        environment = McpEpisode(McpServer(command=command, folder=HERE, wrap=wrap))
        assert (await environment.open(TASK, seed=3)).tools
        await environment.close()

    await asyncio.gather(trip(), server())


def recipe(folder: Path, tasks: Path) -> Config:
    arguments = {"corpus": str(folder / "corpus"), "index": str(folder / "index")}
    target = f"{SHIPPED}.search.environment:Search"
    source = SourceConfig(
        name="search",
        source="jsonl",
        path=str(tasks),
        environment=EnvironmentConfig(target=target, arguments=arguments),
        rewards={"correct": 0.9, "citations": 0.1},
    )
    return Config(data=DataConfig(sources=(source,)))


@pytest.mark.e2e
@asynchronous
async def test_search_can_read_only_the_index(tmp_path: Path) -> None:
    wrap_of()  # skips without a sandbox
    write_corpus(tmp_path / "corpus")
    spec = {"evidence": ["bridge.md"]}
    line = {"prompt": "Who designed it?", "answer": "Mirela Dancu", "match": "exact"}
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({**line, "environment": spec}))
    config = recipe(tmp_path, tasks)
    (source,) = config.data.sources
    (item,) = load_jsonl(source, check_spec).items
    made = environment_spec(config, source)
    assert isinstance(made, Program)
    (tmp_path / "corpus").rename(tmp_path / "gone")

    environment = Hosted(made)
    await environment.open(item.prompt, seed=1)
    assert "Mirela Dancu" in (await use(environment, "search", query="Halvorsen")).text
    assert (await use(environment, "open", document=str(tasks))).failed
    await use(environment, "open", document="bridge.md")
    answer = '<answer>Mirela Dancu</answer> [[bridge.md: "designed by the engineer"]]'
    verdict = await environment.verdict(transcript({"role": "assistant", "content": answer}))
    assert isinstance(verdict, Verdict)
    assert verdict.parts == {"citations": 1.0, "evidence": 1.0}
    await environment.close()


def test_a_corpus_with_its_tasks_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = recipe(tmp_path, corpus / "tasks.jsonl")
    (corpus / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b", "text": "c"}')
    with pytest.raises(ConfigError, match="search"):
        environment_spec(config, config.data.sources[0])
