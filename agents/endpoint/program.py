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
from time import monotonic
from typing import Any, cast

import keel
from keel.agents.endpoint.server import Address
from keel.agents.env_process.client import ENVIRONMENT, READABLE, START, verdict_of
from keel.agents.env_process.process import LineProcess, Wrap, line_of, not_wrapped
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.types import Prompt, Verdict

DRIVE = (Path(keel.__file__).parent / "agents" / "env_runtime" / "drive.py").resolve()
OURS = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "KEEL_MCP_URL"),
)
SENDING_S = 60.0
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
    """An interpreter (3.9 or later) that watches over it; a sandbox must have it. The program's own
    is the one that `command` names."""
    folder: Path | None = None
    """Where it runs. None: here."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, added to the few that it gets. `OPENAI_MODEL` may be among them."""
    memory_mib: int | None = None
    """Address space of each of its processes. None: no limit."""
    wrap: Wrap = not_wrapped
    """A sandbox. It need not have a network, and must let the program open sockets."""
    readable: Sequence[Path] = ()
    """What the program needs in a sandbox beyond the system: its interpreter, its packages."""
    tells_reward: bool = False
    """Whether KEEL_TASK holds what the reward is computed from, a reference answer among it. The
    policy can read it wherever the program lets it run commands."""
    drop_failures: bool = False
    """Leave out trajectories whose program fails after a turn of the policy, and not count them as
    failures with the least reward."""
    judges: bool = True
    """Whether the program's own verdict counts. Where the policy can run commands as the program's
    user, it can write one, too."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("agent program: command is empty")
        if own := [name for name in self.env if name in OURS]:
            raise ValueError(f"agent program: env sets {own[0]}, which names its trajectory")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"agent program {self.name}: there is no folder {self.folder}")

    @property
    def is_function(self) -> bool:
        return str(START) in self.command

    @property
    def name(self) -> str:
        return self.command[-1] if self.is_function else self.command[0]


def command_of(program: str, *, python: str, folder: Path) -> list[str]:
    """Return the command line of a recipe's `program`: a command line itself, whose first word is
    looked up in `folder`, beside the interpreter `python` and on the PATH; or `module:function`,
    which that interpreter calls. Raises ValueError where there is nothing of that name."""
    if _FUNCTION.fullmatch(program):
        return [python, str(START), "call", program]
    first, *rest = shlex.split(program)
    beside = Path(shutil.which(python) or python).parent
    path = os.pathsep.join([str(folder), str(beside), os.environ.get("PATH", os.defpath)])
    place = shutil.which(folder / first if os.sep in first else first, path=path)
    if place is None:
        raise ValueError(
            f"agent program: there is no command {first} in {folder}, beside {python} or on the "
            "PATH that can be run; name it by its path, or set python to the interpreter beside "
            "which it is installed"
        )
    return [os.path.abspath(place), *rest]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program ended, and its verdict on its trajectory."""

    failed: str = ""
    """Why it did not end well; empty if it exited with status 0."""
    words: str = ""
    """The last of its output."""
    took_s: float
    timed_out: bool = False
    """Whether it was ended because its time was up."""
    verdict: Verdict | Unscored | None = None
    """None: it gave none, or its verdict does not count."""
    answer: str | None = None
    """Its answer to the task, if it gave one."""

    def why(self, program: AgentProgram) -> str:
        said = f"; its last words: {self.words}" if self.words else ""
        return f"agent program {program.name} {self.failed or 'ended'}{said}"


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

    What it says is what it writes to the file `KEEL_VERDICT`, or else the last line that a command
    prints if that is such an object: `{"parts": {"correct": 1.0}, "facts": {…}}`, its own verdict;
    `{"answer": "…"}`, for whoever grades; or both.
    """
    started = monotonic()
    wrapped = program.wrap is not not_wrapped
    folder = program.folder or Path.cwd()
    scratch = "" if wrapped else tempfile.mkdtemp(prefix="keel-")  # a sandbox has its own
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
        "prompt": _prompt_of(task),
        "task": _told(task, reward=program.tells_reward),
        "socket": str(address.socket) if wrapped else None,
        "memory_mib": program.memory_mib,
    }
    process: LineProcess | None = None
    late = asyncio.ensure_future(until)
    answer: dict[str, Any] | str | None = None
    try:
        line = line_of(request)
        process = await LineProcess.start(
            [program.python, str(DRIVE)],
            env={"TMPDIR": scratch} if scratch else {},
            folder=folder,
            wrap=program.wrap,
            readable=(DRIVE, *READABLE, folder, address.socket, *program.readable),
        )
        async with asyncio.timeout(SENDING_S):
            await process.send(line)
        heard = asyncio.ensure_future(process.receive())
        try:
            await asyncio.wait({heard, late}, return_when=asyncio.FIRST_COMPLETED)
            answer = heard.result() if heard.done() else None
        finally:
            heard.cancel()
        failed = late.result() if answer is None else _failure(answer)
    except EOFError:  # with all that was in the sandbox: its memory was too much, as a rule
        assert process is not None
        answer, failed = "", (await process.lost("exit", "run", "")).detail
    except (TimeoutError, OSError, ValueError, EnvironmentLost) as error:
        answer, failed = "", f"could not be run: {error}"
    finally:
        late.cancel()
        # To its end even where this is cancelled meanwhile.
        await asyncio.shield(asyncio.ensure_future(_tidy(process, scratch)))
    if isinstance(answer, dict) and program.is_function:
        answer.pop("last", None)  # what it prints may be the policy's words
    verdict, said = _given(answer, judges=program.judges)
    return ProgramResult(
        failed=failed,
        words=process.words if process is not None else "",
        took_s=monotonic() - started,
        timed_out=answer is None,
        verdict=verdict,
        answer=said,
    )


async def _tidy(process: LineProcess | None, scratch: str) -> None:
    if process is not None:
        await process.end()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _failure(answer: dict[str, Any] | str) -> str:
    if isinstance(answer, str) or "cannot" in answer:
        said = answer if isinstance(answer, str) else str(answer["cannot"])
        return f"could not be run: {said[:500]}"
    code = answer.get("exit")
    if isinstance(code, int) and code < 0:
        return f"was ended by signal {-code}"
    return "" if code == 0 else f"exited with status {code}"


def _given(
    answer: dict[str, Any] | str | None, *, judges: bool
) -> tuple[Verdict | Unscored | None, str | None]:
    """Return the verdict and the answer that a program gave."""
    if not isinstance(answer, dict):
        return None, None
    written = answer.get("verdict")
    try:
        given = json.loads(written if isinstance(written, str) else str(answer.get("last", "")))
    except (ValueError, RecursionError):
        given = None
    found = cast(dict[str, Any], given) if isinstance(given, dict) else {}
    said = str(found["answer"]) if "answer" in found else None
    if not judges or ("parts" not in found and (written is None or said is not None)):
        return None, said
    if "parts" not in found:
        return Unscored(
            reason=f"it wrote no verdict to KEEL_VERDICT but {str(written)[:200]!r}"
        ), said
    try:
        return verdict_of(found), said
    except ValueError as error:
        return Unscored(reason=str(error)), said


def _prompt_of(task: Prompt) -> str:
    said = [message["content"] for message in task.messages if message["role"] == "user"]
    return str(said[-1]) if said else str(task.messages[-1]["content"])


def _told(task: Prompt, *, reward: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "prompt_id": task.prompt_id,
        "domain": task.domain,
        "messages": [dict(message) for message in task.messages],
        "tools": [dict(tool) for tool in task.tools],
    }
    return told | ({"reward": dict(task.reward)} if reward else {})
