"""Converts prompts to token ids for the engine, and sampled completions to trajectories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.rl.turns import THINK, ThinkingMarks
from keel.rl.types import Prompt
from keel.rollout.chat.parsing import Broken, read_harmony
from keel.rollout.chat.render import check_shown, render
from keel.rollout.chat.thinking import HARMONY, HARMONY_CONTROLS

_THINK_BLOCK = re.compile(f"{THINK.open}(.*?){THINK.close}", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RenderedPrompt:
    token_ids: list[int]
    thinking: bool
    """True if the prompt ends inside a think block that the policy has to close."""


def render_prompt(tokenizer: Any, prompt: Prompt, marks: ThinkingMarks = THINK) -> _RenderedPrompt:
    """Convert a prompt to token ids. Messages are rendered with the chat template. A raw prompt is
    encoded after the tokenizer's start token. `marks` are the strings that open and close thinking
    in this model family. Raises ValueError if the prompt is empty."""
    if prompt.raw:
        (message,) = prompt.messages
        text = str(message["content"])
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        if token_ids[-1:] == [tokenizer.eos_token_id]:  # some tokenizers end every text
            token_ids = token_ids[:-1]
    else:
        messages = [dict(message) for message in prompt.messages]
        tools = [dict(tool) for tool in prompt.tools]
        text = render(tokenizer, messages, tools, thinking=prompt.thinking)
        check_shown(messages, text)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        source = "tokenizer" if prompt.raw else "chat template"
        raise ValueError(f"prompt {prompt.prompt_id}: the {source} renders it to nothing")
    return _RenderedPrompt(token_ids=token_ids, thinking=text.rstrip().endswith(marks.open))


def decode_all(
    tokenizer: Any, completions: Sequence[Sequence[int]], marks: ThinkingMarks = THINK
) -> list[str]:
    """Decode completions to text without special tokens, and replace the model's thinking marks
    with `THINK`."""
    completions = [list(ids) for ids in completions]
    hidden = _hidden_ids(tokenizer, marks)
    if hidden:
        completions = [[index for index in ids if index not in hidden] for ids in completions]
    skip = hidden is None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # On all cores; transformers decodes one at a time.
        texts = fast.decode_batch(completions, skip_special_tokens=skip)
    else:
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in completions]
    return [_translate_marks(text, marks) for text in texts]


def _hidden_ids(tokenizer: Any, marks: ThinkingMarks) -> set[int] | None:
    # The special tokens outside thinking marks. None means all of them.
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    shown = HARMONY_CONTROLS if marks == HARMONY else f"{marks.open} {marks.close}"
    hidden = {i for i, text in special.items() if text not in shown}
    return hidden if len(hidden) < len(special) else None


def _translate_marks(text: str, marks: ThinkingMarks) -> str:
    """Replace a completion's thinking marks with `THINK`, the marks that rewards look for. If a
    model with different marks happens to write `THINK` as text, a space is inserted so that it is
    not mistaken for a mark."""
    if marks == THINK:
        return text
    for usual in (THINK.open, THINK.close):
        text = text.replace(usual, f"{usual[0]} {usual[1:]}")
    if marks != HARMONY:
        return text.replace(marks.open, THINK.open).replace(marks.close, THINK.close)
    turn = read_harmony(text, (), opened=False, inside=False)
    stray = [item.text for item in turn.items if isinstance(item, Broken)]
    thoughts = "\n".join([*filter(None, [turn.reasoning]), *stray])
    if not thoughts:
        return turn.content
    return f"{THINK.open}{thoughts}" + f"{THINK.close}{turn.content}" * bool(turn.content)


def split_message(raw: str, *, thinking: bool) -> dict[str, str]:
    """Convert a completion to an assistant message. The message has `content`, `raw` and, if there
    is any reasoning, `reasoning_content`. Set `thinking` if the prompt has already opened the think
    block. If the block is never closed, the whole text is reasoning, so an answer inside it does
    not count."""
    opens = raw.lstrip().startswith(THINK.open)
    text = THINK.open + raw if thinking and not opens else raw
    # No block begins after the last closing mark; searching there would take quadratic time.
    before, end, behind = text.rpartition(THINK.close)
    content = _THINK_BLOCK.sub("", before + end) + behind
    if THINK.open in content:
        content, reasoning = "", text.replace(THINK.open, "").replace(THINK.close, "")
    else:
        reasoning = "\n".join(_THINK_BLOCK.findall(before + end))
    message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return {**message, "raw": raw}
