"""Runs an agent program as a separate process that samples its turns from the trajectory's
endpoint."""

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keel.agents.endpoint.recorder import TrajectoryRecorder
from keel.agents.endpoint.server import Address, Endpoint, McpTools
from keel.agents.env_process.client import task_fields, verdict_of
from keel.agents.env_process.launch import (
    BASE_ENV,
    READABLE,
    START,
    AgentProgram,
    ChildProcess,
    encode_line,
    launch,
)
from keel.agents.episode import Episode
from keel.agents.types import EnvironmentLost
from keel.rl.types import ENVIRONMENT, PROGRAM, Prompt, Trajectory, Verdict

_FUNCTION = re.compile(r"[\w./-]+:[A-Za-z_][\w.]*")


def resolve_command(program: str, *, python: str, folder: Path) -> list[str]:
    """Resolve a recipe's `program` to a command line. Commands are looked up in `folder`, next to
    `python` and on the PATH. Functions are given as `module:function`."""
    if _FUNCTION.fullmatch(program):
        return [python, str(START), "server:call_function", program]
    first, *rest = shlex.split(program)
    scripts = Path(shutil.which(python) or python).parent
    path = os.pathsep.join([str(folder), str(scripts), os.environ.get("PATH", os.defpath)])
    place = shutil.which(folder / first if os.sep in first else first, path=path)
    if place is None:
        searched = f"{folder}, next to {python} and on the PATH"
        raise ValueError(f"agent program: no executable {first} in {searched}. Give its path")
    return [os.path.abspath(place), *rest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProgramResult:
    failed: str = ""
    output: str = ""
    verdict: Verdict | str | None = None
    """The verdict written by the program, or why it is invalid. None without one, or if `judges` is
    off."""
    answer: str | None = None

    def describe(self, program: AgentProgram) -> str:
        tail = f"; its output ends with: {self.output}" if self.output else ""
        return f"agent program {program.name} {self.failed or 'ended'}{tail}"


async def run_program(
    program: AgentProgram,
    task: Prompt,
    address: Address,
    *,
    seed: int,
    until: Coroutine[Any, Any, str],
) -> _ProgramResult:
    """Run a program until it exits or `until` returns a reason to stop it, then kill all of its
    processes. The result is the JSON in the file KEEL_VERDICT."""
    reward = {"reward": dict(task.reward)} if program.tells_reward else {}
    prompts = [message["content"] for message in task.messages if message["role"] == "user"]
    process: ChildProcess | None = None
    late = asyncio.ensure_future(until)
    reply: dict[str, Any] = {}
    try:
        process = await launch(
            [program.python, str(START), "drive:main"],
            program,
            env={},
            readable=(*READABLE, program.folder or Path.cwd(), address.socket),
        ).connect()
        request = {
            "command": list(program.command),
            "env": {
                **BASE_ENV,
                "PYTHONHASHSEED": str(seed % 2**32),
                "KEEL_SEED": str(seed),
                # A cache in a shared home would answer one trajectory with another's turns.
                **({"HOME": process.scratch} if process.scratch else {}),
                **address.env,
                **program.env,
            },
            "prompt": str(prompts[-1] if prompts else task.messages[-1]["content"]),
            "task": {**task_fields(task), **reward},
            "socket": str(address.socket) if program.sandbox else None,
            "memory_mib": program.memory_mib,
        }
        exchange = asyncio.ensure_future(process.exchange(encode_line(request)))
        try:
            await asyncio.wait({exchange, late}, return_when=asyncio.FIRST_COMPLETED)
            answered = exchange.result() if exchange.done() else {"failed": late.result()}
        finally:
            exchange.cancel()
        if isinstance(answered, str) or not isinstance(answered.get("failed"), str):
            raise ValueError(f"sent an invalid reply: {str(answered)[:500]!r}")
        reply, failed = answered, answered["failed"]
    except EOFError:  # the whole sandbox is gone, usually over its memory
        assert process is not None
        failed = (await process.lost("run")).detail
    except (OSError, ValueError, EnvironmentLost) as error:
        failed = f"could not be run: {error}"
    finally:
        late.cancel()
        if process is not None:  # must finish even if this task is cancelled
            await process.end()
    written = reply.get("verdict")
    verdict, answer = (None, None) if written is None else _parse_result(program, str(written))
    output = process.output if process is not None else ""
    return _ProgramResult(failed=failed, output=output, verdict=verdict, answer=answer)


def _parse_result(program: AgentProgram, written: str) -> tuple[Verdict | str | None, str | None]:
    try:
        fields: Any = json.loads(written)
        answer = str(fields["answer"]) if "answer" in fields else None
        is_judged = program.judges and (answer is None or "parts" in fields)
        return verdict_of(fields) if is_judged else None, answer
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"it wrote no verdict to KEEL_VERDICT but {written[:200]!r}: {error}"
        return reason if program.judges else None, None


@dataclass(kw_only=True)
class ProgramEpisode(Episode):
    """An episode driven by an agent program, which requests the turns. If the program fails after
    its first turn, the episode ends with `crash`. If the endpoint failed first, the episode is
    dropped."""

    endpoint: Endpoint
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Limits how many programs start up at the same time. A program is starting up until it
    requests its first turn."""
    ended: _ProgramResult | None = None
    recorder: TrajectoryRecorder | None = None

    @property
    def program(self) -> AgentProgram:
        assert self.settings.program is not None
        return self.settings.program

    async def _run(self) -> Trajectory | str:
        opening = await self._open()
        specs = tuple(tool.as_json() for tool in opening.tools)
        task = replace(self.task, messages=opening.messages, tools=specs or self.task.tools)
        tools = McpTools(self.environment, opening.tools, budget=self.budget)
        self.recorder = recorder = TrajectoryRecorder(
            name=self.name,
            prompt_id=self.task.prompt_id,
            chat=self.settings.chat,
            sample=self.sample,
            thinking=self.task.thinking,
            seed=self.seed,
            budget=self.budget,
            is_over=lambda: tools.over,
        )
        await self.starting.acquire()
        begun = asyncio.create_task(recorder.begun.wait())
        begun.add_done_callback(lambda _: self.starting.release())
        address = self.endpoint.add(recorder, tools if opening.tools else None)
        late, seed = recorder.overdue(self.program.open_s), self.environment_seed
        grace_s = 0.0
        try:
            ended = await run_program(self.program, task, address, seed=seed, until=late)
            self.ended = ended
            grace_s = 0.0 if recorder.engine_error is not None else self.budget.call_s
        finally:
            begun.cancel()
            await self.endpoint.finish(self.name)
            await tools.finish(grace_s)
        if recorder.engine_error is not None:
            raise recorder.engine_error
        self.usage = recorder.usage
        was_cut = recorder.finish_reason != "stop" or tools.done
        refusal = recorder.last_failure or recorder.last_refusal
        refusal = f"; the endpoint had refused: {refusal}" if refusal else ""
        if tools.lost is not None:
            raise tools.lost
        if not recorder.segments:
            return f"{ended.describe(self.program)}; without a turn of the policy{refusal}"
        if ended.failed and not was_cut:  # after a cut, its work counts however it took the error
            reason = f"{ended.describe(self.program)}{refusal}"
            if recorder.last_failure or self.program.drop_failures:
                return reason
            return self._crashed(reason)
        graded = await self._graded(recorder.finish_reason)
        return graded if isinstance(graded, str) else self._with_program_verdict(graded, ended)

    def _recorded(self) -> dict[str, Any]:
        assert self.ended is not None and self.recorder is not None
        index = self.recorder.index
        messages = [*index.opening, *index.messages]
        answer = self.ended.answer
        if answer is not None and answer != messages[-1]["content"]:
            # The message that rewards grade.
            messages.append({"role": "assistant", "content": answer, "name": PROGRAM})
        dialogues = index.dialogues
        return {
            "segments": self.recorder.segments,
            "messages": tuple(messages),
            "opening": len(index.opening),
            "tools": dialogues[0].tools,
            "dialogues": dialogues,
        }

    def _with_program_verdict(
        self, trajectory: Trajectory, ended: _ProgramResult
    ) -> Trajectory | str:
        verdict = trajectory.verdict or Verdict(parts={})
        if isinstance(ended.verdict, str):
            return f"agent program {self.program.name}: {ended.verdict}"
        if ended.verdict is not None:
            parts = {**ended.verdict.parts, **verdict.parts}
            verdict = Verdict(parts=parts, facts={**ended.verdict.facts, **verdict.facts})
        if self.task.reward.get("kind") == ENVIRONMENT and "correct" not in verdict.parts:
            return (
                f"{ended.describe(self.program)}; it gave no verdict with a part `correct`, and "
                "nothing else grades the task. Have it write {'parts': {'correct': …}} as JSON to "
                "the file KEEL_VERDICT, or give the prompts an answer, tests or criteria"
            )
        return replace(trajectory, verdict=verdict)
