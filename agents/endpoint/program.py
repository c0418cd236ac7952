"""Runs an agent program as a process that samples turns from its trajectory's endpoint."""

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
from keel.agents.env_process.client import task_fields, verdict_of
from keel.agents.env_process.process import ChildProcess, EnvSandbox, encode_line, launch
from keel.agents.env_process.program import ENVIRONMENT, READABLE, START
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.types import Prompt, Verdict

_RESERVED_ENV = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "KEEL_MCP_URL"),
)
_SEND_S = 60.0
_FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """Settings for running an agent program. All trajectories share them."""

    command: Sequence[str]
    """The command line. `{prompt}` is replaced by the last user message, and `{prompt_file}` by the
    path of a file that contains it."""
    open_s: float = 60.0
    """Time limit in seconds for the program's first request."""
    python: str = sys.executable
    folder: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    memory_mib: int | None = None
    wrap: EnvSandbox | None = None
    """Runs the program in a sandbox in which it can still open sockets."""
    readable: Sequence[Path] = ()
    """Paths that the program needs to read in a sandbox, such as its interpreter and packages."""
    tells_reward: bool = False
    """Include the inputs of the reward, such as the right answer, in KEEL_TASK. The policy may be
    able to read them there."""
    drop_failures: bool = False
    """Drop the trajectory if its program fails. Otherwise, this counts as a failure of the
    policy."""
    judges: bool = True
    """Use the verdict that the program writes. A policy that can run commands could forge it."""

    def __post_init__(self) -> None:
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
    """Return the command line for a recipe's `program`, which is either a command line or the name
    of a function (`module:function`). The executable is looked up in `folder`, next to `python` and
    on the PATH."""
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
    """The exit of a program, with the verdict or answer that it returned."""

    failed: str = ""
    """Reason for the program's failure, or "" if it exited with status 0."""
    output: str = ""
    verdict: Verdict | Unscored | None = None
    """The program's verdict. None if it returned none or if its verdict is ignored."""
    answer: str | None = None

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
    """Run a program until it exits or `until` returns a reason to stop it, then kill all its
    processes. The result is the JSON that the program wrote to the file KEEL_VERDICT or as the last
    line of its output."""
    folder = program.folder or Path.cwd()
    scratch = "" if program.wrap else tempfile.mkdtemp(prefix="keel-")  # a sandbox has its own
    reward = {"reward": dict(task.reward)} if program.tells_reward else {}
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
        "task": {**task_fields(task), **reward},
        "socket": str(address.socket) if program.wrap else None,
        "memory_mib": program.memory_mib,
    }
    process: ChildProcess | None = None
    late = asyncio.ensure_future(until)
    reply: dict[str, Any] | str | None = None
    try:
        line = encode_line(request)
        process = await launch(
            [program.python, str(START), "drive"],
            env={"TMPDIR": scratch} if scratch else {},
            folder=folder,
            wrap=program.wrap,
            readable=(*READABLE, folder, address.socket, *program.readable),
        ).connect()
        async with asyncio.timeout(_SEND_S):
            await process.send(line)
        received = asyncio.ensure_future(process.receive())
        try:
            await asyncio.wait({received, late}, return_when=asyncio.FIRST_COMPLETED)
            reply = received.result() if received.done() else None
        finally:
            received.cancel()
        if reply is None:
            failed = late.result()
        elif isinstance(reply, str) or "cannot" in reply:
            text = reply if isinstance(reply, str) else str(reply["cannot"])
            failed = f"could not be run: {text[:500]}"
        else:
            code = reply.get("exit")
            failed = "" if code == 0 else f"exited with status {code}"
            if isinstance(code, int) and code < 0:
                failed = f"was ended by signal {-code}"
    except EOFError:  # the whole sandbox is gone, usually over its memory
        assert process is not None
        failed = (await process.lost("exit", "run", "")).detail
    except (TimeoutError, OSError, ValueError, EnvironmentLost) as error:
        failed = f"could not be run: {error}"
    finally:
        late.cancel()

        async def clean_up() -> None:
            if process is not None:
                await process.end()
            if scratch:
                shutil.rmtree(scratch, ignore_errors=True)

        # Must finish even if this task is cancelled.
        await asyncio.shield(asyncio.ensure_future(clean_up()))
    verdict, answer = _parse_result(program, reply) if isinstance(reply, dict) else (None, None)
    output = process.output if process is not None else ""
    return ProgramResult(failed=failed, output=output, verdict=verdict, answer=answer)


def _parse_result(
    program: AgentProgram, reply: dict[str, Any]
) -> tuple[Verdict | Unscored | None, str | None]:
    written = reply.get("verdict")
    # A function's prints may be the policy's words.
    last = "" if program.is_function else str(reply.get("last", ""))
    try:
        value = json.loads(written if isinstance(written, str) else last)
    except (ValueError, RecursionError):
        value = None
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    answer = str(fields["answer"]) if "answer" in fields else None
    if not program.judges or ("parts" not in fields and (written is None or answer is not None)):
        return None, answer
    if "parts" not in fields:
        reason = f"it wrote no verdict to KEEL_VERDICT but {str(written)[:200]!r}"
        return Unscored(reason=reason), answer
    try:
        return verdict_of(fields), answer
    except ValueError as error:
        return Unscored(reason=str(error)), answer
