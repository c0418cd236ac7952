"""Environments and programs built from a recipe, and their checks before a run."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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
    TinyModelConfig,
)
from keel.data.dataset import load_dataset
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.build_agents import check_chat, check_environments, sandbox_for
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.e2e
SHOP = Path(__file__).parents[1] / "agents"
OPEN: Literal["none-i-trust-the-environments"] = "none-i-trust-the-environments"


def config(**environment: Any) -> Config:
    settings = {"target": "shop:Shop", "folder": str(SHOP), "isolation": OPEN, **environment}
    source = SourceConfig(
        name="shop",
        source="environment",
        environment=EnvironmentConfig(**settings),
        size=4,
        rewards={"correct": 1.0},
    )
    return Config(
        model=ModelConfig(dtype="float32", tiny=TinyModelConfig(max_context=2000)),
        data=DataConfig(sources=(source,), max_prompt_tokens=64),
        rollout=RolloutConfig(sampling=SamplingConfig(max_tokens=20)),
        agents=AgentsConfig(window=400),
    )


def checked(recipe: Config) -> dict[str, str]:
    chat = check_chat(recipe, build_tokenizer())
    return check_environments(recipe, chat, load_dataset(recipe.data, seed=0))


HEAD = "import os\nfrom http.client import HTTPConnection\n"
ASKS = """
def solve(task, prompt):
    host, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    link = HTTPConnection(host)
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % prompt.split()[0]
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    link.request("POST", f"/{path}/chat/completions", body, key)
    assert link.getresponse().status == 200
    return VERDICT
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (ASKS.replace("VERDICT", "1.0"), ""),
        ("", "has no 'solve'"),
        ("def solve(task): pass\n", "without a turn of the policy"),
        (ASKS.replace("VERDICT", "None"), "gave no verdict .*KEEL_VERDICT"),
    ],
)
def test_programs_are_tried_first(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "my_agent.py").write_text(HEAD + code)
    options = {"program": "my_agent:solve", "folder": str(tmp_path), "open_s": PATIENCE_S}
    recipe = config(target="", **options)
    if message:
        with pytest.raises(ConfigError, match=rf"(?s)sources\[shop\].environment: .*{message}"):
            checked(recipe)
    else:
        ((name, note),) = checked(recipe).items()
        assert name == "shop, its program" and "for 1 turns" in note and "WARNING" not in note


def test_weights_of_missing_parts_are_reported() -> None:
    recipe = config(open_s=PATIENCE_S)
    (source,) = recipe.data.sources
    source = replace(source, rewards={"correct": 1.0, "progres": 0.5})
    recipe = replace(recipe, data=replace(recipe.data, sources=(source,)))
    (note,) = checked(recipe).values()
    assert "WARNING: its verdict has correct" in note and "weights 'progres'" in note


def test_prompt_files_are_hidden_in_sandboxes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tasks, more = tmp_path / "tasks.jsonl", tmp_path / "more.txt"
    for file in (tasks, more):
        file.write_text('{"prompt": "?", "answer": "42"}\n')
    (tmp_path / "link").symlink_to(tasks)
    code = "import sys\nfor path in sys.argv[1:]:\n  try: print(open(path).read()[-5:-2])\n"
    code += "  except OSError: print('none')"

    def read(*readable: str) -> list[str]:
        environment = EnvironmentConfig(target="shop:Shop", readable=readable)
        path = str(tmp_path / "link")
        source = SourceConfig(name="s", source="jsonl", path=path, environment=environment)
        recipe = config()
        recipe = replace(recipe, data=replace(recipe.data, sources=(source,)))
        try:
            isolated = sandbox_for(recipe, source)
        except ValueError as error:
            pytest.skip(str(error))
        names = [str(path) for path in (tasks, tmp_path / "link", more)]
        command = [sys.executable, "-c", code, *names]
        with isolated(command, readable=[tmp_path]) as (words, env, fds):
            options: dict[str, Any] = {"env": dict(env), "pass_fds": fds}
            return subprocess.check_output(words, **options, text=True, timeout=PATIENCE_S).split()

    assert read() == ["none", "none", '42"']
    assert read(str(tasks)) == ['42"', '42"', '42"']
