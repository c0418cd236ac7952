"""The Python interpreter: a real kernel, its state, its files, and cells that go wrong."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_process.launch import KEEL, EnvironmentProgram
from keel.agents.env_runtime.processes import descendants
from keel.agents.environments.interpreter import _put_files
from keel.configs.schema import Config, DataConfig, EnvironmentConfig, SourceConfig
from keel.data.jsonl import load_jsonl
from keel.rewards.checks import check_spec
from keel.rl.turns import seed_of
from keel.trainer.build_agents import environment_spec
from tests.agents.episodes import TASK, alive, asynchronous, run, use
from tests.agents.sandboxes import wrap_of
from tests.waiting import wait_for, within_some

TARGET = "keel.agents.environments.interpreter:Interpreter"
needs_jupyter = pytest.mark.skipif(
    find_spec("jupyter_client") is None or find_spec("ipykernel") is None,
    reason="jupyter_client and ipykernel are not installed",
)
DEAF = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(1000)"


async def cell(environment: ProcessEnvironment, code: str) -> str:
    result = await use(environment, "python", code=code)
    assert not result.failed
    return result.text


@pytest.mark.e2e
@needs_jupyter
def test_kernel_in_the_sandbox() -> None:
    async def play(cell_s: float) -> None:
        arguments = {"cell_s": cell_s, "ending_s": cell_s}
        environment = ProcessEnvironment(
            EnvironmentProgram(target=TARGET, folder=KEEL, sandbox=wrap_of(), arguments=arguments)
        )
        await environment.open(TASK, seed=3)
        assert await cell(environment, "x = 6\nprint('a')\nx * 7") == "a\n42"
        code = "print('begun', flush=True)\nimport time; time.sleep(1000)"
        text = await cell(environment, code)
        assert text.startswith("begun") and "KeyboardInterrupt" in text
        # After an interrupt, later cells run and the state is kept.
        assert [await cell(environment, f"x + {one}") for one in range(3)] == ["6", "7", "8"]
        assert "not supported" in await cell(environment, "import socket; socket.socket()")
        code = "import os; open(f'/proc/{os.getppid()}/mem', 'r+b')"
        assert "PermissionError" in await cell(environment, code)
        assert await cell(environment, "!echo from a terminal") == "from a terminal"
        assert "all variables are gone" in await cell(environment, "os._exit(3)")
        assert "could not be interrupted" in await cell(environment, DEAF)
        assert await cell(environment, "1 + 1") == "2"
        assert environment._process is not None
        inside = descendants(environment._process.pid)
        assert len(inside) >= 3  # the kernel, its environment, and the sandbox
        await environment.close()
        wait_for(lambda: not any(map(alive, inside)))

    within_some(lambda cell_s: run(play(cell_s)), (1.0, 10.0, 60.0))


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
    hidden = ("/proc", "/sys", "/usr", "/dev")
    folders[:] = [name for name in folders if os.path.join(above, name) not in hidden]
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
    assert _put_files(["a/b.csv"], str(folder), str(where)) == ["a/b.csv (4 bytes)"]
    assert _put_files({"c.csv": "ü\r\n"}, "", str(where)) == ["c.csv (4 bytes)"]
    assert (where / "c.csv").read_bytes() == "ü\r\n".encode()
    refused: list[Any] = [["../secret"], [str(tmp_path / "secret")], ["a//b.csv"], ["link"], ["a"]]
    for files in [*refused, "a/b.csv", {"../x": "y"}]:
        with pytest.raises(ValueError, match="files"):
            _put_files(files, str(folder), str(where))


def source(tmp_path: Path, *lines: dict[str, Any], **arguments: Any) -> SourceConfig:
    path = tmp_path / "files" / "tasks.jsonl"
    path.parent.mkdir()
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = EnvironmentConfig(target=TARGET, arguments=arguments)
    return SourceConfig(name="x", source="jsonl", path=str(path), environment=settings)


@pytest.mark.e2e
@needs_jupyter
@asynchronous
async def test_an_episode_sees_files_but_no_answer(tmp_path: Path) -> None:
    wrap_of()  # skips without a sandbox
    line = {"prompt": "How many?", "answer": SECRET, "environment": {"files": ["sales.csv"]}}
    config = source(tmp_path, line, files=str(tmp_path / "files"))
    (tmp_path / "files" / "sales.csv").write_text("day,units\n1,20\n2,22\n")
    (item,) = load_jsonl(config, check_spec).items
    made = environment_spec(Config(data=DataConfig(sources=(config,))), config)
    assert isinstance(made, EnvironmentProgram)

    environment = ProcessEnvironment(made)
    opening = await environment.open(item.prompt, seed=seed_of("x"))
    system, question = opening.messages
    assert "sales.csv (20 bytes)" in system["content"] and question["content"] == "How many?"
    code = "import csv; sum(int(r['units']) for r in csv.DictReader(open('sales.csv')))"
    assert await cell(environment, code) == "42"
    assert await cell(environment, "open('sales.csv', 'w').write('mine')") == "4"
    assert await cell(environment, THIEF) == "[]"
    await environment.close()
    assert (tmp_path / "files" / "sales.csv").read_text().startswith("day")
