"""A task's files in the interpreter: each episode gets copies, and no answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from keel.agents.env_process.client import KEEL, Hosted, Program
from keel.agents.environments.interpreter import prepare, put_files
from keel.configs.schema import Config, ConfigError, DataConfig, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.data.procedural import load_reasoning_gym
from keel.rewards.checks import check_spec
from keel.rl.seeds import seed_of
from keel.trainer.build_agents import environment_spec
from tests.agents.episodes import run, use
from tests.agents.sandboxes import wrap_of
from tests.agents.test_interpreter import needs_jupyter

TARGET = "keel.agents.environments.interpreter:Interpreter"
GYM = Path(reasoning_gym.__file__).parent
SYSTEM = ("/proc", "/sys", "/usr", "/dev")
SECRET = ".".join(("4711", "0815"))
THIEF = f"""
import os
secret, seed = {SECRET[::-1]!r}[::-1].encode(), str({seed_of("x") + 1} - 1)
found = [line for line in In if seed in line]
for pid in [os.getppid(), *filter(str.isdigit, os.listdir("/proc"))]:
    if str(pid) == str(os.getpid()):
        continue
    for name in ("mem", "environ", "cmdline", "maps", "fd/0", "fd/3", "fd/4"):
        try:
            with open(f"/proc/{{pid}}/{{name}}", "rb") as file:
                found += [name] * (secret in file.read(1 << 20))
                found += ["reads " + name] * (name in ("mem", "fd/0", "fd/3", "fd/4"))
        except OSError:
            pass
for above, folders, names in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(above, name) not in {SYSTEM!r}]
    for name in names:
        try:
            if name.endswith((".json", ".jsonl")):
                with open(os.path.join(above, name), "rb") as file:
                    found += [name] * (secret in file.read())
        except OSError:
            pass
found
"""


def test_files_come_from_the_folder_or_task(tmp_path: Path) -> None:
    folder, where = tmp_path / "files", tmp_path / "work"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "b.csv").write_text("x\n1\n")
    (tmp_path / "secret").write_text("s")
    (folder / "link").symlink_to(tmp_path / "secret")
    assert put_files(["a/b.csv"], str(folder), str(where)) == ["a/b.csv (4 bytes)"]
    assert put_files({"c.csv": "ü\r\n"}, "", str(where)) == ["c.csv (4 bytes)"]
    assert (where / "c.csv").read_bytes() == "ü\r\n".encode()
    refused: list[tuple[Any, str]] = [
        ("a/b.csv", "must list names"),
        (["../secret"], r"has '\.\./secret'"),
        ([str(tmp_path / "secret")], "name a file in the folder"),
        (["a//b.csv"], "name a file in the folder"),
        (["link"], "not in the folder"),
        (["a"], "there is no such file"),
        ({"../x": "y"}, r"has '\.\./x'"),
        ({"a.json": {"x": 1}}, r"has a dict for 'a\.json', must give its text"),
        ({"a": None}, "has a NoneType for 'a'"),
    ]
    for environment_config, why in refused:
        with pytest.raises(ValueError, match=why):
            put_files(environment_config, str(folder), str(where))
    with pytest.raises(ValueError, match=r"not in the folder '' \(files\)"):
        put_files(["a/b.csv"], "", str(where))


def test_prepare_makes_the_folder_readable(tmp_path: Path) -> None:
    assert prepare({"cell_s": 5}, []) == ({"cell_s": 5}, [])
    assert prepare({"files": str(tmp_path)}, []) == ({"files": str(tmp_path)}, [tmp_path])
    with pytest.raises(ValueError, match="files = /nowhere: there is no such folder"):
        prepare({"files": "/nowhere"}, [])


def source(tmp_path: Path, *lines: dict[str, Any], **arguments: Any) -> SourceConfig:
    path = tmp_path / "files" / "tasks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    environment_config = EnvironmentConfig(target=TARGET, arguments=arguments)
    return SourceConfig(name="x", source="jsonl", path=str(path), environment=environment_config)


@pytest.mark.e2e
@needs_jupyter
def test_an_episode_sees_files_but_no_answer(tmp_path: Path) -> None:
    wrap_of()  # skips without a sandbox
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "sales.csv").write_text("day,units\n1,20\n2,22\n")
    config = source(
        tmp_path,
        {
            "prompt": "How many?",
            "answer": SECRET,
            "environment": {"files": ["sales.csv"]},
        },
        files=str(tmp_path / "files"),
    )
    (item,) = load_jsonl(config, check_spec).items
    made = environment_spec(Config(data=DataConfig(sources=(config,))), config)
    assert isinstance(made, Program)

    async def play() -> None:
        environment = Hosted(made)
        opening = await environment.open(item.prompt, seed=seed_of("x"))
        system, question = opening.messages
        assert (
            "has sales.csv (20 bytes)" in system["content"] and question["content"] == "How many?"
        )
        code = "import csv; sum(int(r['units']) for r in csv.DictReader(open('sales.csv')))"
        assert (await use(environment, "python", code=code)).text == "42"
        result = await use(environment, "python", code="open('sales.csv', 'w').write('mine')")
        assert result.text == "4"
        assert (await use(environment, "python", code=THIEF)).text == "[]"
        await environment.close()

    run(play())
    assert (tmp_path / "files" / "sales.csv").read_text().startswith("day")


def test_missing_files_fail_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    config = source(tmp_path, {"prompt": "a", "answer": "1"}, files=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"sources\[x\].environment: .*there is no such folder"):
        environment_spec(Config(data=DataConfig(sources=(config,))), config)


def procedural(**environment: Any) -> SourceConfig:
    return SourceConfig(
        name="x",
        source="reasoning_gym",
        task="chain_sum",
        size=4,
        environment=EnvironmentConfig(target=TARGET, **environment),
        system_template="tools",
    )


def test_procedural_tasks_with_the_interpreter() -> None:
    config = procedural()
    assert config.environment.enabled and Config(data=DataConfig(sources=(config,))).with_agents


MAKER = (KEEL / "examples" / "small" / "prices.py").resolve()
GENERATORS = f"""
import importlib.util, os
found = [name for name in ("math", "reasoning_gym") if importlib.util.find_spec(name).origin]
found + [path for path in [{str(MAKER)!r}] if os.path.exists(path)]
"""


@pytest.mark.e2e
@needs_jupyter
def test_task_generators_are_hidden_from_the_policy() -> None:
    """A visible generator would let the policy try seeds and read the answers."""
    wrap_of()  # skips without a sandbox
    (item,) = load_reasoning_gym(replace(procedural(), size=1), seed=3).items

    async def play() -> list[str]:
        result: list[str] = []
        for environment_config in (procedural(), procedural(readable=(str(GYM),))):
            made = environment_spec(
                Config(data=DataConfig(sources=(environment_config,))), environment_config
            )
            assert isinstance(made, Program)
            environment = Hosted(made)
            await environment.open(item.prompt, seed=1)
            result.append((await use(environment, "python", code=GENERATORS)).text)
            await environment.close()
        return result

    assert MAKER.is_file()
    assert run(play()) == ["['math']", "['math', 'reasoning_gym']"]
