"""Author code that escapes the language rules is confined by its sandbox."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from keel.agents.types import EnvironmentLost, Transcript, Unscored
from keel.rl.turns import ToolCall
from keel.synthesis.general.gates import general
from keel.synthesis.general.sandboxes import GeneralSandboxes
from tests.agents.sandboxes import commands, wrap_of
from tests.synthesis.general.kit import TOOLS, VERIFY, config, environment
from tests.waiting import PATIENCE_S, wait_for, within_some

pytestmark = pytest.mark.e2e

MODULES = "import enum\n    found = enum.sys.modules\n    "
"""The rules allow `enum`, which exposes every module."""


def leak(name: str, parameter: str, body: str) -> str:
    return f'def {name}({parameter}: str) -> str:\n    """A hole."""\n    {MODULES}{body}\n'


LEAKS = "\n\n".join(
    [
        TOOLS,
        leak("read", "path", 'return found["codecs"].open(path).read()'),
        leak("write", "path", 'found["codecs"].open(path, "w").write("x")'),
        leak("run", "path", 'return str(found["os"].posix_spawn(path, ["touch", "/tmp/x"], {}))'),
        leak("fork", "most", 'return str([found["os"].fork() for n in range(int(most))])'),
        leak("talk", "to", 'return str(found["socket"].socketpair())'),
        leak("spoil", "name", 'return str([each.clear() for each in database["fruit"]])'),
        leak("take", "mib", "return str(len(bytes(int(mib) << 20)))"),
        leak(
            "look",
            "word",
            'return str([key for each in found["gc"].get_objects() if isinstance(each, dict) for '
            "key, one in each.items() if isinstance(one, str) and word in one])",
        ),
        leak("stop", "signal", 'found["os"].kill(found["os"].getppid(), int(signal))'),
    ]
)
FAILS = {
    "read": ("{folder}/verify.py", "Too many open files"),
    "write": ("/tmp/{marker}", "Too many open files"),
    "run": ("/usr/bin/touch", "Resource temporarily unavailable"),
    "fork": ("1", "Resource temporarily unavailable"),
    "talk": ("x", "Too many open files"),
    "take": ("4000", "MemoryError"),
    "look": ("the_secret", "[]"),
}


def test_exploited_tools_cannot_reach_the_verifier(tmp_path: Path) -> None:
    """A policy that exploits a tool cannot reach the verifier, and the episode continues."""
    wrap_of()
    marker = f"keel-{uuid.uuid4().hex}"
    secret = VERIFY.replace("    east", "    the_secret = 1\n    east")

    async def episode() -> tuple[dict[str, str], Any, Any]:
        outputs: dict[str, str] = {}
        async with GeneralSandboxes(tmp_path / "making", config()) as rooms:
            path = environment(rooms.making / "x", tools=LEAKS, verify=secret)
            about = json.loads((path / "task.json").read_text())
            about["tasks"][0]["tools"] = ["price", "spoil", "stop", *FAILS]
            (path / "task.json").write_text(json.dumps(about))
            async with general(rooms, path, 0) as (hosted, opening):

                async def call(name: str, value: str, key: str = "") -> str:
                    (tool,) = (tool for tool in opening.tools if tool.name == name)
                    (key,) = tool.parameters["properties"]
                    arguments = {key: value}
                    return (
                        await hosted.call(
                            ToolCall(call_id="c", name=name, arguments=arguments),
                            timeout_s=PATIENCE_S,
                        )
                    ).text

                for name, (value, _) in FAILS.items():
                    outputs[name] = await call(name, value.format(folder=path, marker=marker))
                outputs["price"] = await call("price", "apple")
                outputs["spoil"] = await call("spoil", "apple")
                outputs["spoiled"] = await call("price", "apple")
                await call("submit_result", '{"name": "apple", "price": 4}')
                verdict = await hosted.verdict(Transcript(messages=(), finish_reason="stop"))
            async with general(rooms, path, 0) as (hosted, opening):
                with pytest.raises(EnvironmentLost) as lost:
                    await call("stop", "9")
            return outputs, verdict, lost.value

    outputs, verdict, lost = asyncio.run(asyncio.wait_for(episode(), 2 * PATIENCE_S))
    for name, (_, reason) in FAILS.items():
        assert reason in outputs[name], (name, outputs[name])
    assert outputs["price"] == "4" and "KeyError" in outputs["spoiled"]  # of its private copy
    assert not isinstance(verdict, Unscored)
    assert verdict.parts == {"correct": 1.0, "share": 1.0} and lost.during == "call"
    assert not list(tmp_path.rglob(marker)) and not Path("/tmp", marker).exists()


def test_author_workspace_is_confined(tmp_path: Path) -> None:
    wrap_of()
    marker = f"4{uuid.uuid4().int % 10**8:08}"

    async def at_work(bash_s: float) -> list[str]:
        arguments = {"most_kib": 1, "bash_s": bash_s}
        async with (
            GeneralSandboxes(tmp_path / f"making_{bash_s}", config()) as rooms,
            rooms.open("workshop:DatabaseDesk", arguments=arguments) as (desk, _),
        ):
            outputs: list[str] = []
            for name, value in (
                ("bash", "echo '[1]' > a.json; seq 100000; exit 3"),
                ("bash", f"for i in $(seq 300); do sleep {marker} & done"),
                ("bash", f"touch {rooms.making}/x; cat /etc/shadow; echo > /dev/tcp/1.1.1.1/80"),
                ("bash", "head -c 3000 /dev/zero > big.json; echo hm > b.json; echo > c.txt"),
                ("submit_database", "c.txt"),
                ("submit_database", "big.json"),
                ("submit_database", "b.json"),
                ("submit_database", "a.json"),
            ):
                key = "command" if name == "bash" else "path"
                call = ToolCall(call_id="c", name=name, arguments={key: value})
                outputs.append((await desk.call(call, timeout_s=PATIENCE_S)).text)
            return outputs

    def on_it(bash_s: float) -> list[str]:
        outputs = asyncio.run(asyncio.wait_for(at_work(bash_s), 2 * PATIENCE_S))
        assert "left out" in outputs[0] and "fork" in outputs[1]
        assert not any(f"ended after {bash_s:g} s" in one for one in (outputs[0], *outputs[2:]))
        assert f"ended after {bash_s:g} s" in outputs[1]
        return outputs

    outputs = within_some(on_it, (3.0, 15.0, 60.0))
    assert (
        "left out" in outputs[0]
        and outputs[0].endswith("(exit status 3)")
        and len(outputs[0]) < 21_000
    )
    assert "Read-only file system" in outputs[2] or "Permission denied" in outputs[2]
    assert "root:" not in outputs[2]
    assert ["end in .json" in outputs[4], "more than 1 KiB" in outputs[5]] == [True, True]
    assert "Expecting value" in outputs[6] and json.loads(outputs[7])["name"] == ".json"
    wait_for(lambda: not commands(marker.encode()))


@pytest.mark.parametrize("network", [False, True])
def test_author_reaches_the_network_only_if_allowed(network: bool, tmp_path: Path) -> None:
    wrap_of()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"served")
        writer.close()

    async def fetch() -> str:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        arguments = {"most_kib": 1, "bash_s": PATIENCE_S}
        command = f"cat < /dev/tcp/127.0.0.1/{port}"
        call = ToolCall(call_id="c", name="bash", arguments={"command": command})
        async with (
            server,
            GeneralSandboxes(tmp_path / "making", config(network=network)) as rooms,
            rooms.open("workshop:DatabaseDesk", arguments=arguments, network=network) as (desk, _),
        ):
            return (await desk.call(call, timeout_s=PATIENCE_S)).text

    assert ("served" in asyncio.run(asyncio.wait_for(fetch(), PATIENCE_S))) is network
