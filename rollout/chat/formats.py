"""The known chat formats: how to read their calls, and which tokens end their turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keel.model.tiny.tokenizer import CHAT_TEMPLATE
from keel.rollout.chat.encoding import Encoder
from keel.rollout.chat.parsing import (
    LLAMA3_JSON,
    Read,
    deepseek_v31_calls,
    deepseek_v32_calls,
    glm_calls,
    json_calls,
    llama3_calls,
    no_calls,
    read_harmony,
    tagged,
    tiny_calls,
)
from keel.rollout.chat.thinking import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A model family's format of turns and calls."""

    name: str
    read: Callable[..., Read]
    ends: tuple[str, ...] = ()
    """Control texts that end a turn, besides the tokenizer's eos_token."""
    equal_ends: bool = False
    """The ends are interchangeable: a template may write another one than was sampled."""
    message: str = ""
    """Begins the body of each message, for turns of several messages."""
    message_end: str = ""
    """Ends such a message, and in a template's history also the turn."""
    calls: bool = True


FORMATS = {
    known.name: known
    for known in (
        Format(name="tiny", read=tagged(tiny_calls, Bounds("^@", "\n"))),
        Format(
            name="harmony",
            read=read_harmony,
            ends=("<|call|>", "<|return|>"),
            message="<|message|>",
            message_end="<|end|>",
        ),
        Format(
            name="deepseek-v3.2",
            read=tagged(deepseek_v32_calls, Bounds("<｜DSML｜invoke", "</｜DSML｜invoke>")),
        ),
        Format(
            name="deepseek-v3.1",
            read=tagged(deepseek_v31_calls, Bounds("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
        ),
        # The policy ends its turn with the mark that begins the next message.
        Format(
            name="glm",
            read=tagged(glm_calls, Bounds("<tool_call>", "</tool_call>")),
            ends=("<|user|>", "<|observation|>"),
        ),
        Format(
            name="llama3",
            read=tagged(llama3_calls, Bounds(r"<\|python_tag\|>", whole=LLAMA3_JSON)),
            ends=("<|eot_id|>", "<|eom_id|>"),
            equal_ends=True,
        ),
        Format(name="hermes", read=tagged(json_calls, Bounds("<tool_call>", "</tool_call>"))),
        Format(name="plain", read=tagged(no_calls), calls=False),
    )
}


def format_of(tokenizer: Any, encoder: Encoder) -> Format:
    """Detect the format of a tokenizer's family from its template and control tokens."""
    template, controls = str(tokenizer.chat_template or ""), encoder.controls
    signs = {
        "tiny": template == CHAT_TEMPLATE,
        "harmony": "<|channel|>" in controls and "<|message|>" in controls,
        "deepseek-v3.2": "｜DSML｜" in controls and (not template or "｜DSML｜" in template),
        "deepseek-v3.1": "<｜tool▁calls▁begin｜>" in template,
        "glm": "<arg_key>" in template,
        # Qwen3-Coder writes another format between the same marks.
        "hermes": "<tool_call>" in template and "<function=" not in template,
        "llama3": "<|python_tag|>" in controls and "<tool_call>" not in template,
        "plain": True,
    }
    return FORMATS[next(name for name, sign in signs.items() if sign)]
