"""An agent program as a process: it is told where its trajectory's endpoint is, and left alone."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, cast

import keel
from keel.agents.endpoint.server import Address
from keel.agents.host.client import ENVIRONMENT, verdict_of
from keel.agents.host.process import LineProcess, Wrap, line_of, not_wrapped
from keel.agents.types import EnvironmentLost, Unscored
from keel.rl.types import Prompt, Verdict

DRIVE = (Path(keel.__file__).parent / "agents" / "inside" / "drive.py").resolve()
OURS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY")
SENDING_S = 60.0
"""For the process to start and take what it is to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProgram:
    """What is run, the same for every trajectory."""

    command: Sequence[str]
    """Command line. `{prompt}` in it becomes the task's last user message, `{prompt_file}` the path
    of a file that holds it."""
    deadline_s: float
    """Seconds until it is ended, with all it has started."""
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
    judges: bool = True
    """Whether the program's own verdict counts. Where the policy can run commands as the program's
    user, it can write one, too."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("agent program: command is empty")
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"agent program: deadline_s = {self.deadline_s} must be positive")
        if own := [name for name in self.env if name in OURS]:
            raise ValueError(f"agent program: env sets {own[0]}, which names its trajectory")
        if self.folder is not None and not self.folder.is_dir():
            raise ValueError(f"agent program {self.command[0]}: there is no folder {self.folder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    verdict: Verdict | Unscored | None
    """None: it ended well and gave none, or is not asked; the recipe's reward has the word."""
    words: str
    """The last that it printed."""
    took_s: float
    timed_out: bool = False
    """It was ended at its deadline."""


async def run_program(program: AgentProgram, task: Prompt, address: Address, *, seed: int) -> Ended:
    """Run a program to its end or its deadline. All its processes are gone afterwards.

    Its verdict is what it writes to the file `KEEL_VERDICT`, or else the last line that it prints
    if that is an object with `parts`: `{"parts": {"correct": 1.0}, "facts": {…}}`. One that does
    not exit with status 0, is not started or does not end in time is Unscored, whatever it said.
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
            **({"TMPDIR": scratch} if scratch else {}),
            **address.env,
            **program.env,
        },
        "prompt": _prompt_of(task),
        "task": _told(task, reward=program.tells_reward),
        "socket": str(address.socket) if wrapped else None,
        "memory_mib": program.memory_mib,
    }
    process: LineProcess | None = None
    timed_out = False
    verdict: Verdict | Unscored | None
    try:
        line = line_of(request)
        process = await LineProcess.start(
            [program.python, str(DRIVE)],
            env={"TMPDIR": scratch} if scratch else {},
            folder=folder,
            wrap=program.wrap,
            readable=(DRIVE, folder, address.socket.parent, *program.readable),
        )
        async with asyncio.timeout(SENDING_S):
            await process.send(line)
        async with asyncio.timeout(program.deadline_s):
            answer = await process.receive()
        words = await _end(process)
        verdict = _verdict(program, answer, words)
    except (TimeoutError, EOFError, OSError, ValueError, EnvironmentLost) as error:
        words = await _end(process) if process is not None else ""
        timed_out = isinstance(error, TimeoutError)
        why = (
            f"did not end within {program.deadline_s:g} s"
            if timed_out
            else f"could not be run: {error or 'the process that watches over it ended'}"
        )
        verdict = _unscored(program, why, words)
    finally:
        if process is not None:
            await process.end()
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
    return Ended(verdict=verdict, words=words, took_s=monotonic() - started, timed_out=timed_out)


async def _end(process: LineProcess) -> str:
    await process.end()
    return process.words


def _verdict(
    program: AgentProgram, answer: dict[str, Any] | str, words: str
) -> Verdict | Unscored | None:
    if isinstance(answer, str) or "cannot" in answer:
        said = answer if isinstance(answer, str) else str(answer["cannot"])
        return _unscored(program, said, words)
    code = answer.get("exit")
    if code != 0:
        ended = f"was ended by signal {-code}" if isinstance(code, int) and code < 0 else ""
        return _unscored(program, ended or f"exited with status {code}", words)
    if not program.judges:
        return None
    written, last = answer.get("verdict"), str(answer.get("last", ""))
    text = written if isinstance(written, str) else last
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or "parts" not in given:
        if written is None:
            return None
        return _unscored(program, f"wrote no verdict to KEEL_VERDICT but {text[:200]!r}", words)
    try:
        return verdict_of(cast(dict[str, Any], given))
    except ValueError as error:
        return _unscored(program, str(error), words)


def _unscored(program: AgentProgram, why: str, words: str) -> Unscored:
    said = f"; its last words: {words}" if words else ""
    return Unscored(reason=f"agent program {program.command[0]}: {why}{said}")


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
