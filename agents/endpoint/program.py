"""Runs an agent program as a process that knows its trajectory's endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from keel.agents.endpoint.server import Address
from keel.agents.env_process.client import ENVIRONMENT, READABLE, START, verdict_of
from keel.agents.env_process.process import LineProcess, Wrap, encode_line, not_wrapped
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.types import Prompt, Verdict

_RESERVED_ENV = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "KEEL_MCP_URL"),
)
_SEND_S = 60.0
"""Seconds for the process to start and receive its command."""
_FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """An agent program, the same for every trajectory."""

    command: Sequence[str]
    """Command line (`command_of`). `{prompt}` in it becomes the task's last user message,
    `{prompt_file}` the path of a file that holds it."""
    open_s: float = 60.0
    """Seconds until its first request."""
    python: str = sys.executable
    """Interpreter (3.9 or later) of the process that supervises it; a sandbox must have it. The
    program's own is the one that `command` names."""
    folder: Path | None = None
    """Working directory. None: the current one."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, added to the few that it gets. `OPENAI_MODEL` may be among them."""
    memory_mib: int | None = None
    """Address space of each of its processes. None: no limit."""
    wrap: Wrap = not_wrapped
    """A sandbox. It need not have a network, and must allow the program to open sockets."""
    readable: Sequence[Path] = ()
    """Paths that the program needs in a sandbox: its interpreter, its packages."""
    tells_reward: bool = False
    """Include the inputs of the reward in KEEL_TASK, such as a reference answer. The policy can
    read it if the program lets it run commands."""
    drop_failures: bool = False
    """Drop trajectories whose program fails after a turn of the policy, instead of counting them as
    failures with the lowest reward."""
    judges: bool = True
    """Use the program's own verdict. If the policy can run commands as the program's user, it can
    write one, too."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("agent program: command is empty")
        if reserved := [name for name in self.env if name in _RESERVED_ENV]:
            raise ValueError(f"agent program: env must not set {reserved[0]}, which Keel sets")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"agent program {self.name}: folder {self.folder} does not exist")

    @property
    def is_function(self) -> bool:
        return str(START) in self.command

    @property
    def name(self) -> str:
        return self.command[-1] if self.is_function else self.command[0]


def command_of(program: str, *, python: str, folder: Path) -> list[str]:
    """Return the command line of a recipe's `program`: a command line, whose first word is looked
    up in `folder`, next to the interpreter `python` and on the PATH; or `module:function`, which
    that interpreter calls. Raises ValueError if it is not found."""
    if _FUNCTION.fullmatch(program):
        return [python, str(START), "call", program]
    first, *rest = shlex.split(program)
    scripts = Path(shutil.which(python) or python).parent
    path = os.pathsep.join([str(folder), str(scripts), os.environ.get("PATH", os.defpath)])
    place = shutil.which(folder / first if os.sep in first else first, path=path)
    if place is None:
        raise ValueError(
            f"agent program: no executable {first} in {folder}, next to {python} or on the PATH. "
            "Give its path, or set python to the interpreter next to which it is installed"
        )
    return [os.path.abspath(place), *rest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Outcome of a program, with its verdict on its trajectory."""

    failed: str = ""
    """Why it failed; "" if it exited with status 0."""
    output: str = ""
    """Tail of its output."""
    timed_out: bool = False
    """True if the program was killed after its time limit."""
    verdict: Verdict | Unscored | None = None
    """None if the program gave no verdict or its verdict is ignored."""
    answer: str | None = None
    """Its answer to the task, if it gave one."""

    def describe(self, program: AgentProgram) -> str:
        tail = f"; its last words: {self.output}" if self.output else ""
        return f"agent program {program.name} {self.failed or 'ended'}{tail}"


async def run_program(
    program: AgentProgram,
    task: Prompt,
    address: Address,
    *,
    seed: int,
    until: Coroutine[Any, Any, str],
) -> ProgramResult:
    """Run a program to its end, or until `until` returns why its time is up. All its processes are
    gone afterwards.

    Its result is the content of the file `KEEL_VERDICT`, or else the last line that a command
    prints if that is such an object: `{"parts": {"correct": 1.0}, "facts": {…}}`, its own verdict;
    `{"answer": "…"}`, for another grader; or both.
    """
    is_wrapped = program.wrap is not not_wrapped
    folder = program.folder or Path.cwd()
    scratch = "" if is_wrapped else tempfile.mkdtemp(prefix="keel-")  # a sandbox has its own
    described: dict[str, Any] = {
        "prompt_id": task.prompt_id,
        "domain": task.domain,
        "messages": [dict(message) for message in task.messages],
        "tools": [dict(tool) for tool in task.tools],
    }
    if program.tells_reward:
        described["reward"] = dict(task.reward)
    prompts = [message["content"] for message in task.messages if message["role"] == "user"]
    request = {
        "command": list(program.command),
        "env": {
            **ENVIRONMENT,
            "PYTHONHASHSEED": str(seed % 2**32),
            "KEEL_SEED": str(seed),
            # A cache in a shared home would answer one trajectory with another's turns.
            **({"TMPDIR": scratch, "HOME": scratch} if scratch else {}),
            **address.env,
            **program.env,
        },
        "prompt": str(prompts[-1] if prompts else task.messages[-1]["content"]),
        "task": described,
        "socket": str(address.socket) if is_wrapped else None,
        "memory_mib": program.memory_mib,
    }
    process: LineProcess | None = None
    late = asyncio.ensure_future(until)
    reply: dict[str, Any] | str | None = None
    try:
        line = encode_line(request)
        process = await LineProcess.start(
            [program.python, str(START), "drive"],
            env={"TMPDIR": scratch} if scratch else {},
            folder=folder,
            wrap=program.wrap,
            readable=(*READABLE, folder, address.socket, *program.readable),
        )
        async with asyncio.timeout(_SEND_S):
            await process.send(line)
        received = asyncio.ensure_future(process.receive())
        try:
            await asyncio.wait({received, late}, return_when=asyncio.FIRST_COMPLETED)
            reply = received.result() if received.done() else None
        finally:
            received.cancel()
        failed = late.result() if reply is None else _failure(reply)
    except EOFError:  # the whole sandbox is gone, usually over its memory
        assert process is not None
        reply, failed = "", (await process.lost("exit", "run", "")).detail
    except (TimeoutError, OSError, ValueError, EnvironmentLost) as error:
        reply, failed = "", f"could not be run: {error}"
    finally:
        late.cancel()
        # Must finish even if this task is cancelled.
        await asyncio.shield(asyncio.ensure_future(_clean_up(process, scratch)))
    if isinstance(reply, dict) and program.is_function:
        reply.pop("last", None)  # a function's prints may be the policy's words
    verdict, answer = _parse_result(reply, judges=program.judges)
    return ProgramResult(
        failed=failed,
        output=process.output if process is not None else "",
        timed_out=reply is None,
        verdict=verdict,
        answer=answer,
    )


async def _clean_up(process: LineProcess | None, scratch: str) -> None:
    if process is not None:
        await process.end()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _failure(reply: dict[str, Any] | str) -> str:
    if isinstance(reply, str) or "cannot" in reply:
        text = reply if isinstance(reply, str) else str(reply["cannot"])
        return f"could not be run: {text[:500]}"
    code = reply.get("exit")
    if isinstance(code, int) and code < 0:
        return f"was ended by signal {-code}"
    return "" if code == 0 else f"exited with status {code}"


def _parse_result(
    reply: dict[str, Any] | str | None, *, judges: bool
) -> tuple[Verdict | Unscored | None, str | None]:
    """Return the verdict and the answer that a program gave."""
    if not isinstance(reply, dict):
        return None, None
    written = reply.get("verdict")
    try:
        value = json.loads(written if isinstance(written, str) else str(reply.get("last", "")))
    except (ValueError, RecursionError):
        value = None
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    answer = str(fields["answer"]) if "answer" in fields else None
    if not judges or ("parts" not in fields and (written is None or answer is not None)):
        return None, answer
    if "parts" not in fields:
        reason = f"it wrote no verdict to KEEL_VERDICT but {str(written)[:200]!r}"
        return Unscored(reason=reason), answer
    try:
        return verdict_of(fields), answer
    except ValueError as error:
        return Unscored(reason=str(error)), answer
