"""OpenEnv environments, with a stand-in for the package."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.program import Program
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.types import Prompt, Verdict
from tests.agents import openenv_stand_in
from tests.agents.episodes import HERE, PATIENT, asynchronous, transcript, use

pytestmark = pytest.mark.e2e

TASK = Prompt(
    prompt_id="p",
    domain="shop",
    messages=({"role": "system", "content": "Be quick."}, {"role": "user", "content": "Shop."}),
    reward={"kind": "environment", "reset": {"split": "train", "index": 12}},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openenv")
    openenv_stand_in.install(folder)
    shutil.copy(HERE / "openenv_echo.py", folder / "echo.py")
    return folder


def hosted(folder: Path, target: str, **settings: Any) -> Hosted:
    return Hosted(Program(target=target, folder=folder, deadlines=PATIENT, **settings))


@asynchronous
async def test_openenv_class_is_recognized(folder: Path) -> None:
    environment = hosted(folder, "echo:Echo", arguments={"scale": [0, 2], "rules": "Speak."})
    opening = await environment.open(TASK, seed=3)
    system, first = opening.messages
    assert system["content"] == "Be quick."
    observation = {"said": "ready", "seed": 3, "where": "train 12"}
    assert first["content"] == f"Speak.\n\n{json.dumps(observation)}"
    (tool,) = opening.tools
    assert (tool.name, tool.description) == ("step", "Say something.")
    assert list(tool.parameters["properties"]) == ["message", "loud"]
    assert (await use(environment, "step", loud=True)).failed  # is not run
    assert (await use(environment, "step", message="a")).text == "a"
    failed = await use(environment, "step", message="raise")
    assert failed.failed and "no such word" in failed.text
    result = await use(environment, "step", message="bye", loud=True)
    assert result.done and result.text == "BYE"
    assert (await use(environment, "step", message="a")).failed
    verdict = await environment.verdict(transcript())
    assert isinstance(verdict, Verdict)
    assert verdict.parts == {"correct": 0.0, "score": 0.75}
    assert verdict.facts == {"return": 1.5, "steps": 2, "state": {"step_count": 3}}
    await environment.close()


@asynchronous
async def test_mcp_tools_are_offered(folder: Path) -> None:
    environment = hosted(folder, "echo:Tools")
    opening = await environment.open(TASK, seed=3)
    assert opening.messages == TASK.messages
    assert [tool.name for tool in opening.tools] == ["price"]
    assert (await use(environment, "price", fruit="apple")).text == "3"
    failed = await use(environment, "price", fruit="pear")
    assert (failed.text, failed.failed) == ("no pear", True)
    await environment.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve only the schemas; the client is a stand-in."""
    fields = {"message": {"type": "string"}}
    action = {"properties": fields, "required": ["message"]}
    (tmp_path / "schema").write_text(json.dumps({"action": action}))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join(10)


@asynchronous
async def test_lost_server_ends_the_episode(folder: Path, server: str) -> None:
    environment = hosted(folder, server.replace("http", "ws"))
    opening = await environment.open(TASK, seed=3)
    assert opening.messages[1]["content"] == "train 12"
    assert (await use(environment, "step", message="a")).text == "a"
    assert (await use(environment, "step", message="raise")).failed
    with pytest.raises(EnvironmentLost) as caught:
        await use(environment, "step", message="gone")
    assert caught.value.fault == "raised"
    assert isinstance(await environment.verdict(transcript()), Unscored)
    await environment.close()


@asynchronous
async def test_runtime_files_are_not_importable_by_name(tmp_path: Path) -> None:
    names = [path.stem for path in (HERE.parents[1] / "agents" / "env_runtime").glob("[a-z]*.py")]
    (tmp_path / "find.py").write_text(
        "from importlib.util import find_spec\n"
        f"def visible() -> list:\n    return [n for n in {names} if find_spec(n)]\n"
    )

    environment = hosted(tmp_path, "find")
    await environment.open(TASK, seed=3)
    assert "games" in names and (await use(environment, "visible")).text == "[]"
    await environment.close()
