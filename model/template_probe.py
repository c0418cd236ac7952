"""Tests chat templates under resource limits, because a template is a program that comes with a
model."""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from keel.configs.schema import ConfigError

CPU_S = 10
"""CPU time limit in seconds. Rendering a few short conversations takes milliseconds."""
_WALL_S = 30.0
_MEMORY = 2**30
"""Memory limit in bytes, in addition to the memory that the process already uses."""
_MAX_TEXT = 2**20
"""Maximum total number of characters in the rendered conversations."""
_OUT_OF_MEMORY, _TOO_LONG = 3, 4
"""Exit codes of the child process."""

_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": _SCHEMA},
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
    fails for another reason."""
    child = os.fork()  # it inherits the tokenizer, and runs only pure Python
    if child == 0:
        _render_limited(tokenizer)
    descriptor = os.pidfd_open(child)
    if not select.select([descriptor], [], [], _WALL_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    slow = f"takes more than {CPU_S} s"
    limits = {
        _OUT_OF_MEMORY: f"takes more than {_MEMORY // 2**20:,} MiB",
        _TOO_LONG: f"writes more than {_MAX_TEXT:,} characters",
        -signal.SIGXCPU: slow,
        -signal.SIGKILL: slow,
    }
    if code == 1:
        raise RuntimeError(f"the process that checks the chat template of {name} failed")
    if code:
        reason = limits.get(code, f"ends its process with {code}")
        raise ConfigError(
            f"the chat template of {name} {reason} for a few short conversations. Set another one "
            "in model.chat_template, or use another model"
        )


def _render_limited(tokenizer: Any) -> NoReturn:
    code = 1
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + 1
        _limit(resource.RLIMIT_AS, used + _MEMORY)
        _limit(resource.RLIMIT_CPU, spent + CPU_S)
        _limit(resource.RLIMIT_CORE, 0)
        code = _TOO_LONG if sum(map(len, _render_all(tokenizer))) > _MAX_TEXT else 0
    except MemoryError:
        code = _OUT_OF_MEMORY
    finally:
        os._exit(code)


def _limit(kind: int, amount: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(
        kind, (amount if most == resource.RLIM_INFINITY else min(amount, most), most)
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
