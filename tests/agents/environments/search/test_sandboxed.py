"""A recipe's search source in the sandbox, which can read only the index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.agents.env_process.client import Hosted, Program
from keel.configs.schema import Config, ConfigError, DataConfig, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rl.types import Verdict
from keel.trainer.build_agents import environment_spec
from tests.agents.environments.search.corpus import write_corpus
from tests.agents.episodes import run, transcript, use
from tests.agents.sandboxes import wrap_of

TARGET = "keel.agents.environments.search.environment:Search"
CRITERIA = [{"name": "who", "text": "Names Mirela Dancu.", "weight": 1}]


def recipe(folder: Path, tasks: Path) -> Config:
    corpus, index = str(folder / "corpus"), str(folder / "index")
    environment_config = EnvironmentConfig(
        target=TARGET, arguments={"corpus": corpus, "index": index}
    )
    source = SourceConfig(
        name="search",
        source="jsonl",
        path=str(tasks),
        environment=environment_config,
        rewards={"correct": 0.9, "citations": 0.1},
    )
    return Config(data=DataConfig(sources=(source,)))


@pytest.mark.e2e
def test_an_episode_in_the_sandbox(tmp_path: Path) -> None:
    wrap_of()  # skips without a sandbox
    write_corpus(tmp_path / "corpus")
    spec = {"evidence": ["bridge.md"]}
    lines = [
        {"prompt": "Who designed it?", "answer": "Mirela Dancu", "match": "exact"},
        {"prompt": "Tell me about it.", "criteria": CRITERIA},
    ]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(json.dumps({**line, "environment": spec}) for line in lines))
    config = recipe(tmp_path, tasks)
    (source,) = config.data.sources
    rule, helpful = (item.prompt for item in load_jsonl(source, check_spec).items)
    assert (rule.reward["kind"], helpful.reward["kind"]) == ("answer", "rubric")
    made = environment_spec(config, source)
    assert isinstance(made, Program) and (tmp_path / "index").is_file()
    (tmp_path / "corpus").rename(tmp_path / "gone")

    async def play() -> None:
        environment = Hosted(made)
        await environment.open(rule, seed=1)
        assert "Mirela Dancu" in (await use(environment, "search", query="Halvorsen")).text
        assert (await use(environment, "open", document=str(tmp_path / "tasks.jsonl"))).failed
        await use(environment, "open", document="bridge.md")
        answer = '<answer>Mirela Dancu</answer> [[bridge.md: "designed by the engineer"]]'
        verdict = await environment.verdict(transcript({"role": "assistant", "content": answer}))
        assert isinstance(verdict, Verdict)
        assert verdict.parts == {"citations": 1.0, "evidence": 1.0}
        await environment.close()

    run(play())


def test_a_corpus_with_its_tasks_is_refused(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    config = recipe(tmp_path, corpus / "tasks.jsonl")
    (corpus / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b", "text": "c"}')
    with pytest.raises(ConfigError, match=r"sources\[search\].environment: .*has the answers"):
        environment_spec(config, config.data.sources[0])
