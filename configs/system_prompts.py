"""System prompts that a recipe selects by name with `data.sources[].system_template`.

They follow DeepSeek-V3.2's cold start (2025, section 3.2.2 and Appendix B, Tables 6 to 8), but the
wording is our own. The chat template adds the list of tools and explains how to call them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

SystemTemplate = Literal["none", "reasoning", "tools", "tools-in-thinking"]
PYTHON = "python"
"""Name of the tool of `keel.agents.environments.interpreter`."""

_REASONING = (
    "Reason before you answer. Your reply begins with <think>. Between it and </think> you think: "
    "you try ideas out, check them and correct yourself. After </think> comes the final answer, "
    "complete and without the reasoning."
)
_TOOLS = (
    "You have tools. Use them wherever they can tell you what you would otherwise have to guess, "
    "and write each call in exactly the form that is given with them. When you have what you need, "
    "answer without a call."
)
_IN_THINKING = (
    "You have tools, and you call them while you think. Your reply begins with <think>. Call a "
    "tool early, as soon as it can help, in exactly the form that is given; its result comes back "
    "into your thinking, where you go on. Up to {calls} calls are run. Rather compute or look "
    "something up than argue in words, and keep the thinking short.\n\n"
    "When you are sure, close the thinking with </think> and present the solution to a reader who "
    "has seen nothing of it: in Markdown, with formulas in LaTeX, and without any call."
)
_PYTHON = (
    f"The tool {PYTHON} is an interpreter (Jupyter) that keeps its state: variables and imports "
    "stay from call to call. A call may run for {seconds:g} seconds. The user sees neither your "
    "code nor what it prints, so say in the answer what they need to know of it."
)


def system_prompt(
    template: SystemTemplate, *, tools: Sequence[str] = (), calls: int = 20, seconds: float = 120.0
) -> str:
    """Return a built-in system prompt, or "" for the template "none".

    `tools` lists the names of the available tools. If `python` is among them, the prompt includes a
    paragraph that explains it. `calls` is the maximum number of calls inside the thinking block,
    and `seconds` is the time limit per cell.
    """
    prompt = {
        "none": "",
        "reasoning": _REASONING,
        "tools": _TOOLS,
        "tools-in-thinking": _IN_THINKING.format(calls=calls),
    }[template]
    python = _PYTHON.format(seconds=seconds) if PYTHON in tools and "tools" in template else ""
    return "\n\n".join(filter(None, (prompt, python)))


def with_system(text: str, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Insert `text` as a system message at the start, or prepend it to the existing system
    message."""
    if not text:
        return tuple(messages)
    if messages and messages[0].get("role") == "system":
        merged = f"{text}\n\n{messages[0].get('content') or ''}".strip()
        return ({**messages[0], "content": merged}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)
