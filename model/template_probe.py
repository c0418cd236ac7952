"""A trial of chat templates under limits: they are programs, and come with a model."""

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
"""Processor time for writing a few short conversations, which takes milliseconds."""
WALL_S = 30.0
MEMORY = 2**30
"""Bytes beyond what the process has."""
MOST_TEXT = 2**20
"""Characters of all of them together."""
_DONE, _OURS, _MEMORY, _LONG = 0, 1, 3, 4
"""Exit codes of the process that tries."""

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "Hello."}]
_ANSWERED = [*_ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
_CALLED = [
    *_ASKED,
    {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [_CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "c1", "content": "1"},
    {"role": "assistant", "content": "a"},
]
CONVERSATIONS = (_ASKED[1:], _ASKED, _ANSWERED * 4, _CALLED)


def check_template(tokenizer: Any, name: str) -> None:
    """Write a few conversations with a tokenizer's chat template in a process of its own, with
    limits on time, memory and text. A template that cannot write them passes.

    Raises:
        ConfigError: it does not end, takes too much memory, or writes too much. `name`: whose
            template it is.
        RuntimeError: it could not be tried, for no fault of its own.
    """
    if said := _ended(lambda: sum(map(len, _written(tokenizer)))):
        raise ConfigError(
            f"the chat template of {name}: {said} writing a few short conversations. It cannot be "
            "used; give another (model.chat_template), or take another model"
        )


def _written(tokenizer: Any) -> Iterator[str]:
    for conversation in CONVERSATIONS:
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
                except Exception:  # whoever writes a real conversation says it
                    continue


def _ended(count: Callable[[], int]) -> str:
    """How a process went wrong in which `count` was called, under the limits; empty if it did not.

    It is a fork, which has the tokenizer at once, and does nothing but pure Python.
    """
    child = os.fork()
    if child == 0:
        _limited(count)
    watched = os.pidfd_open(child)
    try:
        over, _, _ = select.select([watched], [], [], WALL_S)
        if not over:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(watched)
    code = os.waitstatus_to_exitcode(status)
    if code == _DONE:
        return ""
    if code == _MEMORY:
        return f"it takes more than {MEMORY // 2**20:,} MiB"
    if code == _LONG:
        return f"it writes more than {MOST_TEXT:,} characters"
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {CPU_S} s"
    if code == _OURS:
        raise RuntimeError("chat templates cannot be tried here: the process that tries one failed")
    return f"its process ended with {code}"


def _limited(count: Callable[[], int]) -> NoReturn:
    code = _OURS
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
        _limit(resource.RLIMIT_AS, has + MEMORY, has + MEMORY)
        _limit(resource.RLIMIT_CPU, spent + CPU_S, spent + CPU_S + 1)
        _limit(resource.RLIMIT_CORE, 0, 0)
        code = _DONE if count() <= MOST_TEXT else _LONG
    except MemoryError:
        code = _MEMORY
    finally:
        os._exit(code)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process, at most the hard one that it has: no user may raise that."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))
