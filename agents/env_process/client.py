"""An environment in a process of its own, seen from Keel."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import keel
from keel.agents.env_process.fork_server import ForkServer
from keel.agents.env_process.process import (
    MOST_BYTES,
    LineProcess,
    Wrap,
    line_of,
    not_wrapped,
    within,
)
from keel.agents.schemas import Arguments, arguments_of
from keel.agents.types import EnvironmentLost, Fault, Opening, ToolResult, Transcript, Unscored
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.rl.types import Prompt, Verdict

KEEL = Path(keel.__file__).resolve().parent  # not through a link: the sandbox has the folder
START = KEEL / "agents" / "env_runtime" / "start.py"
READABLE = tuple(dict.fromkeys((KEEL, START.resolve().parents[1])))
"""What any interpreter needs of Keel: in a checkout, `agents` is a link out of `keel`."""
ANSWERS = ("open", "reply", "verdict")
"""What has a deadline of its own among a source's `environment` knobs."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Of messages. Many chat templates leave out those of others."""
MOST_S = 1e9
"""JSON has no infinity."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONUTF8": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. A call's own comes with the call."""

    open_s: float = 60.0
    """Starting the process, importing, setting up."""
    reply_s: float = 30.0
    verdict_s: float = 60.0
    close_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("open_s", "reply_s", "verdict_s", "close_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"deadlines: {name} = {getattr(self, name)} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What an environment is made from, the same for every episode."""

    target: str
    """`my_env:Shop`, `my_tools` (a module of functions), or `/path/to/file.py:Shop`; of OpenEnv's
    servers, `http://…`."""
    kind: Literal["auto", "class", "functions", "game", "openenv"] = "auto"
    """auto: a server's address or a class of OpenEnv's is openenv, a class with `reset` and `step`
    a game, any other class has its public methods as tools, and what is left are functions."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the class, by name; a game's also `play_by`, `scale`, `rules` and `score`
    (`keel.agents.env_runtime.games`, `keel.agents.env_runtime.openenv`)."""
    python: str = sys.executable
    """The interpreter, 3.9 or later. Needs nothing of Keel's."""
    folder: Path | None = None
    """Where it runs and where its modules are looked for first. None: here."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, added to the few that every environment gets."""
    preload: bool = True
    """Whether `parent_of` may load it once and fork a process for each episode."""
    memory_mib: int | None = 4096
    """Address space of each of its processes. None: no limit."""
    readable: Sequence[Path] = ()
    """Files and folders that it reads in a sandbox, beside `folder` and its interpreter."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    wrap: Wrap = not_wrapped

    def __post_init__(self) -> None:
        if not self.target or self.target.startswith(":"):
            raise ValueError(f"environment: target = {self.target!r}; write module:name")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"environment {self.target}: there is no folder {self.folder}")
        try:
            line_of(self.arguments)
        except ValueError as error:
            raise ValueError(f"environment {self.target}: arguments: {error}") from error
        if self.memory_mib is not None and self.memory_mib < 64:
            raise ValueError(
                f"environment {self.target}: memory_mib = {self.memory_mib} must be at least 64; "
                "an interpreter alone takes that"
            )

    @property
    def where(self) -> Path:
        return self.folder or Path.cwd()

    @property
    def needed(self) -> tuple[Path, ...]:
        """What it reads in a sandbox beside its interpreter."""
        return (*READABLE, self.where, *_file_of(self.target, self.where), *self.readable)


def fork_server_for(program: Program) -> ForkServer | None:
    """What forks the program's episodes; None where they are not to be forked. To be closed."""
    if not program.preload:
        return None
    load = {
        "do": "load",
        "target": program.target,
        "action": program.arguments.get("action") if program.kind in ("auto", "openenv") else None,
        "paths": [str(program.where.absolute())],
        "memory_mib": program.memory_mib,
    }
    return ForkServer(
        [program.python, str(START), "parent"],
        load,
        env={**ENVIRONMENT, **program.env},
        folder=program.where,
        wrap=program.wrap,
        readable=program.needed,
        timeout_s=program.deadlines.open_s,
    )


class Hosted:
    """One episode of a `Program`. Implements `keel.agents.types.Environment`.

    starting: held while a process starts, so that hundreds of them do not take each other's time.
    parent: of the program, forks its process. None: it is started by itself.
    """

    def __init__(
        self,
        program: Program,
        *,
        starting: asyncio.Semaphore | None = None,
        parent: ForkServer | None = None,
    ) -> None:
        self._program = program
        self._starting = starting
        self._parent = parent
        self._process: LineProcess | None = None
        self._arguments: Arguments | None = None
        self._lost: EnvironmentLost | None = None
        self._closed = False
        self.grades = True
        """Whether it has a verdict of its own, known once it is open."""
        self._scratch = ""
        self._requests = 0
        self._turn = asyncio.Lock()

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        if self._starting is None:
            return await self._open(task, seed)
        async with self._starting:
            return await self._open(task, seed)

    async def _open(self, task: Prompt, seed: int) -> Opening:
        if self._process is not None or self._closed:
            raise EnvironmentLost("closed", "open", "an environment serves one episode")
        program = self._program
        own: dict[str, str] = {}
        if program.wrap is not_wrapped:  # a sandbox has a private one
            self._scratch = tempfile.mkdtemp(prefix="keel-")
            own = {"TMPDIR": self._scratch, **program.env}
        if self._parent is not None:
            self._process = await self._parent.fork(own)
        if self._process is None:
            self._process = await LineProcess.start(
                [program.python, str(START)],
                env={**ENVIRONMENT, **own, **program.env},
                folder=program.where,
                wrap=program.wrap,
                readable=program.needed,
            )
        request = {
            "do": "open",
            "target": program.target,
            "kind": program.kind,
            "arguments": dict(program.arguments),
            "paths": [str(program.where.absolute())],
            "seed": seed,
            "memory_mib": program.memory_mib,
            "task": {
                "prompt_id": task.prompt_id,
                "domain": task.domain,
                "messages": [dict(message) for message in task.messages],
                "tools": [dict(tool) for tool in task.tools],
                "thinking": task.thinking,
                "reward": dict(task.reward),
            },
        }
        reply = await self._ask("open", request, program.deadlines.open_s)
        try:
            tools = tuple(map(_tool, _list_of(reply, "tools")))
            messages = reply.get("messages")
            messages = task.messages if messages is None else _messages(messages)
            self._arguments = arguments_of(tools)
            self.grades = reply.get("grades") is not False
        except ValueError as error:
            raise await self._fail("start", "open", f"{program.target}: {error}") from error
        return Opening(messages=tuple(messages), tools=tools)

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        if self._arguments is None:
            raise self._lost or EnvironmentLost("closed", "call", "it was not opened")
        if complaint := self._arguments.complaint(call):
            return ToolResult(text=complaint, failed=True)
        request = {
            "do": "call",
            "name": call.name,
            "arguments": dict(call.arguments),
            "call_s": min(timeout_s, MOST_S),
        }
        try:
            reply = await self._ask("call", request, timeout_s, name=f"call of {call.name}")
        except ValueError as error:  # NaN is no JSON
            return ToolResult(text=f"{call.name}: the call {error}", failed=True)
        text = reply.get("text")
        if not isinstance(text, str):
            raise await self._fail("garbage", "call", f"{call.name} returned no text")
        return ToolResult(
            text=text, failed=reply.get("failed") is True, done=reply.get("done") is True
        )

    async def reply(self, said: Message) -> Message | None:
        request = {"do": "reply", "said": dict(said)}
        reply = await self._ask("reply", request, self._program.deadlines.reply_s)
        message = reply.get("message")
        if message is None:
            return None
        try:
            return _messages([message])[0]
        except ValueError as error:
            raise await self._fail("garbage", "reply", str(error)) from error

    async def verdict(self, transcript: Transcript) -> Verdict | Unscored:
        request = {
            "do": "verdict",
            "messages": [dict(message) for message in transcript.messages],
            "finish_reason": transcript.finish_reason,
        }
        try:
            reply = await self._ask("verdict", request, self._program.deadlines.verdict_s)
            return verdict_of(reply)
        except EnvironmentLost as error:
            return Unscored(reason=str(error), fault=error.fault)
        except ValueError as error:
            return Unscored(reason=str(error))

    async def close(self) -> None:
        self._closed = True
        process = self._process
        try:
            if process is not None and self._lost is None:
                await self._ask("close", {"do": "close"}, self._program.deadlines.close_s)
        except EnvironmentLost:
            pass
        finally:
            if process is not None:
                await process.end()
            self._tidy()

    def _tidy(self) -> None:
        scratch, self._scratch = self._scratch, ""
        if not scratch:
            return
        try:
            os.rmdir(scratch)
        except OSError:  # it left something there
            shutil.rmtree(scratch, ignore_errors=True)

    async def _ask(
        self, during: str, request: Mapping[str, Any], timeout_s: float, *, name: str = ""
    ) -> dict[str, Any]:
        """One exchange. Whatever goes wrong ends the process, and EnvironmentLost is raised.
        Raises ValueError for a request that is no JSON, which is not sent."""
        async with self._turn:
            process = self._process
            if self._lost is not None:
                raise EnvironmentLost("closed", during, f"lost before this: {self._lost}")
            if process is None or (self._closed and during != "close"):
                raise EnvironmentLost("closed", during, "is not open")
            self._requests += 1
            number = self._requests
            line = line_of({"id": number, **request})
            try:
                reply = await within(timeout_s, _exchange(process, line))
            except TimeoutError as error:
                knob = f" (environment.{during}_s)" if during in ANSWERS else ""
                knob = " (agents.call_s)" if during == "call" else knob
                why = f"{name or during} did not end within {timeout_s:g} s{knob}"
                raise await self._fail("hang", during, why) from error
            except asyncio.CancelledError:
                # Its reply may come later, as if to the next request.
                self._lost = await process.lost("closed", during, "was given up by the caller")
                raise
            except (EOFError, OSError) as error:
                raise await self._fail("exit", during, "") from error
            except ValueError as error:
                why = f"a message of more than {MOST_BYTES >> 20} MiB"
                raise await self._fail("large", during, why) from error
        if isinstance(reply, str) or reply.get("id") != number:
            why = f"said what is no reply: {str(reply)[:200]!r}"
            raise await self._fail("garbage", during, why)
        if "memory" in reply:
            most = self._program.memory_mib
            raise await self._fail("memory", during, f"out of memory (memory_mib = {most})")
        if "refused" in reply:
            raise await self._fail("start", during, str(reply["refused"]))
        if "raised" in reply:
            at = f" ({reply['at']})" if reply.get("at") else ""
            raise await self._fail("raised", during, f"{reply['raised']}{at}")
        if not isinstance(reply.get("is"), dict):
            raise await self._fail("garbage", during, f"replied {str(reply)[:200]!r}")
        return reply["is"]

    async def _fail(self, fault: Fault, during: str, message: str) -> EnvironmentLost:
        assert self._process is not None
        if during == "open":
            message = f"{self._program.target}: {message}" if message else message
        self._lost = await self._process.lost(fault, during, message)
        return self._lost


async def _exchange(process: LineProcess, line: bytes) -> dict[str, Any] | str:
    await process.send(line)
    return await process.receive()


def _file_of(target: str, folder: Path) -> list[Path]:
    """Where a target is given by its file."""
    name = target.partition(":")[0]
    return [folder / name] if name.endswith(".py") and (folder / name).is_file() else []


def _tool(given: Any) -> ToolSpec:
    if not isinstance(given, dict):
        raise ValueError(f"a tool must be an object, is {str(given)[:200]!r}")
    tool = cast(dict[str, Any], given)
    name, parameters = str(tool.get("name", "")), tool.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ValueError(f"tool {name}: parameters must be an object, is {parameters!r:.200}")
    about = str(tool.get("description") or "")
    return ToolSpec(name=name, description=about, parameters=cast(dict[str, Any], parameters))


def _list_of(reply: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(found := reply.get(name), list):
        raise ValueError(f"{name} must be a list, is {str(found)[:200]!r}")
    return cast(list[Any], found)


def _messages(given: Any) -> tuple[Message, ...]:
    messages = cast(list[Any], given) if isinstance(given, list) else []
    if not messages:
        raise ValueError(f"messages must be a list of them, is {str(cast(Any, given))[:200]!r}")
    for message in messages:
        fields = cast(dict[str, Any], message) if isinstance(message, dict) else {}
        if not isinstance(fields.get("role"), str) or not isinstance(fields.get("content"), str):
            said = str(cast(Any, message))[:200]
            raise ValueError(f"a message has a role and a content, not {said!r}")
        if fields["role"] not in ROLES:
            raise ValueError(f"a role is one of {', '.join(ROLES)}, not {fields['role']!r:.50}")
    return tuple(messages)


def verdict_of(reply: Mapping[str, Any]) -> Verdict:
    """`parts` and `facts`. Raises ValueError for what is no verdict."""
    parts, facts = reply.get("parts"), reply.get("facts", {})
    if not isinstance(parts, dict) or not isinstance(facts, dict):
        raise ValueError(f"the verdict is {str(reply)[:200]!r}; numbers by name are wanted")
    numbers: dict[str, float] = {}
    for name, value in cast(dict[str, Any], parts).items():
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"the verdict's {name} is {value!r}, must be a number from 0 to 1")
        numbers[name] = float(value)
    return Verdict(parts=numbers, facts=cast(dict[str, Any], facts))
