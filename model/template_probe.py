"""Tests chat templates under resource limits, because they are programs that come with a model."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from keel.configs.schema import ConfigError

CPU_S = 10
"""CPU time limit in seconds. Rendering a few short conversations takes milliseconds."""
WALL_S = 30.0
MEMORY = 2**30
"""Memory limit in bytes, in addition to what the process already uses."""
_MAX_TEXT = 2**20
"""Maximum total number of characters in the rendered conversations."""
_DONE, _FAILED, _MEMORY, _LONG = 0, 1, 3, 4
"""Exit codes of the child process."""

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_QUESTION = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello."}]
_TURNS = [*_QUESTION, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
_WITH_CALL = [
    *_QUESTION,
    {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "1"},
    {"role": "assistant", "content": "a"},
]
_CONVERSATIONS = (_QUESTION[1:], _QUESTION, _TURNS * 4, _WITH_CALL)


def check_template(tokenizer: Any, name: str) -> None:
    """Render a few conversations in a child process that has limited time, memory and text length.

    `name` describes where the template comes from. A template that raises an error passes this
    check. Raises ConfigError if the template exceeds a limit, and RuntimeError if the child process
    failed for another reason.
    """
    if reason := _run_limited(lambda: sum(map(len, _render_all(tokenizer)))):
        raise ConfigError(
            f"the chat template of {name} {reason} for a few short conversations. Set another one "
            "in model.chat_template, or use another model"
        )


def _render_all(tokenizer: Any) -> Iterator[str]:
    for conversation in _CONVERSATIONS:
        for tools in (None, [_TOOL]):
            for options in ({}, {"enable_thinking": False, "thinking": False}):
                try:
                    yield tokenizer.apply_chat_template(
                        conversation,
                        tools=tools,
                        add_generation_prompt=conversation[-1]["role"] == "user",
                        tokenize=False,
                        **options,
                    )
                except MemoryError:
                    raise
                except Exception:  # rendering a real conversation reports it
                    continue


def _run_limited(count: Callable[[], int]) -> str:
    """Run `count` under the limits in a forked child. Return the limit that it exceeded, or "".

    The child inherits the tokenizer through the fork, and runs only pure Python.
    """
    child = os.fork()
    if child == 0:
        _child(count)
    descriptor = os.pidfd_open(child)
    try:
        exited, _, _ = select.select([descriptor], [], [], WALL_S)
        if not exited:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(status)
    if code == _FAILED:
        raise RuntimeError("the child process that checks chat templates failed")
    reasons = {_DONE: "", _MEMORY: f"takes more than {MEMORY // 2**20:,} MiB"}
    reasons[_LONG] = f"writes more than {_MAX_TEXT:,} characters"
    reasons[-signal.SIGXCPU] = reasons[-signal.SIGKILL] = f"takes more than {CPU_S} s"
    return reasons.get(code, f"ends its process with {code}")


def _child(count: Callable[[], int]) -> NoReturn:
    code = _FAILED
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
        _limit(resource.RLIMIT_AS, used + MEMORY, used + MEMORY)
        _limit(resource.RLIMIT_CPU, spent + CPU_S, spent + CPU_S + 1)
        _limit(resource.RLIMIT_CORE, 0, 0)
        code = _DONE if count() <= _MAX_TEXT else _LONG
    except MemoryError:
        code = _MEMORY
    finally:
        os._exit(code)


def _limit(kind: int, soft: int, hard: int) -> None:
    _, current = resource.getrlimit(kind)
    if current != resource.RLIM_INFINITY:
        soft, hard = min(soft, current), min(hard, current)
    resource.setrlimit(kind, (soft, hard))
