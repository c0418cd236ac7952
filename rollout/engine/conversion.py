"""Between the project's types and the engine's: prompts to ids, recordings to trajectories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keel.model.source import written_by_code
from keel.rl.seeds import seed_of
from keel.rl.types import NO_ROUTE, FinishReason, KeptSets, Prompt, Segment, Trajectory
from keel.rollout.chat.render import deepseek_v32
from keel.rollout.chat.thinking import THINK_END, THINK_START

_THINK_BLOCK = re.compile(f"{THINK_START}(.*?){THINK_END}", re.DOTALL)


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any
    eos_token_id: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A prompt as the policy sees it."""

    token_ids: list[int]
    thinking: bool
    """The template has already opened a think block that the policy is to close."""


def render_prompt(tokenizer: Tokenizer, prompt: Prompt) -> RenderedPrompt:
    """Through the chat template, or the code that stands for one, up to where the policy speaks; a
    raw prompt as the tokenizer begins a text."""
    if prompt.raw:
        return _raw(tokenizer, prompt)
    messages = [dict(message) for message in prompt.messages]
    tools = [dict(tool) for tool in prompt.tools]
    if written_by_code(tokenizer):
        text = deepseek_v32(messages, tools, thinking=prompt.thinking)
    else:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            add_generation_prompt=True,
            enable_thinking=prompt.thinking,
            thinking=prompt.thinking,  # DeepSeek-V3.1's word for it
            tokenize=False,
        )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise ValueError(f"prompt {prompt.prompt_id}: the chat template renders it to nothing")
    return RenderedPrompt(token_ids=token_ids, thinking=text.rstrip().endswith(THINK_START))


def _raw(tokenizer: Tokenizer, prompt: Prompt) -> RenderedPrompt:
    (message,) = prompt.messages
    text = str(message["content"])
    token_ids = tokenizer.encode(text, add_special_tokens=True)
    if token_ids[-1:] == [tokenizer.eos_token_id]:  # some end every text, and this one goes on
        token_ids = token_ids[:-1]
    if not token_ids:
        raise ValueError(f"prompt {prompt.prompt_id}: is nothing to the tokenizer")
    return RenderedPrompt(token_ids=token_ids, thinking=text.rstrip().endswith(THINK_START))


def decode_all(tokenizer: Tokenizer, completions: Sequence[Sequence[int]]) -> list[str]:
    """The texts of completions, without special tokens but for thinking marks."""
    given = [list(ids) for ids in completions]
    hidden = _hidden(tokenizer)
    skip = hidden is None
    if hidden is not None:
        given = [[one for one in ids if one not in hidden] for ids in given]
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # On all cores, where transformers takes one after the other.
        return fast.decode_batch(given, skip_special_tokens=skip)
    return [tokenizer.decode(ids, skip_special_tokens=skip) for ids in given]


def _hidden(tokenizer: Tokenizer) -> set[int] | None:
    """Special tokens, where the thinking marks are among them; None: they are words."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    marks = {THINK_START, THINK_END}
    if marks.isdisjoint(special.values()):
        return None
    return {i for i, text in special.items() if text not in marks}


def check_fits(prompt: Prompt, prompt_tokens: int, max_tokens: int, context: int) -> None:
    """Raise `ValueError` for a prompt whose longest completion would not fit the engine."""
    if prompt_tokens + max_tokens > context:
        raise ValueError(
            f"prompt {prompt.prompt_id}: its {prompt_tokens} tokens and rollout.sampling.max_tokens"
            f" = {max_tokens} exceed the engine's context of {context}; lower max_tokens or "
            "data.max_prompt_tokens"
        )


def split_message(raw: str, *, thinking: bool) -> dict[str, str]:
    """One assistant message: `content`, `reasoning_content` if there is any, and `raw`.

    `thinking`: the prompt has opened the think block. If a block is never closed, everything is
    reasoning, so an answer inside it does not count as given.
    """
    opens = raw.lstrip().startswith(THINK_START)
    text = THINK_START + raw if thinking and not opens else raw
    # What is behind the last end holds no block: to look for one behind each of many beginnings
    # would take a time that grows with their square.
    before, end, behind = text.rpartition(THINK_END)
    content = _THINK_BLOCK.sub("", before + end) + behind
    if THINK_START in content:
        content, reasoning = "", text.replace(THINK_START, "").replace(THINK_END, "")
    else:
        reasoning = "\n".join(_THINK_BLOCK.findall(before + end))
    message = {"role": "assistant", "content": content.strip()}
    if reasoning.strip():
        message["reasoning_content"] = reasoning.strip()
    return {**message, "raw": raw}


def build_segment(
    prompt_id: str,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    sampled_ids: Sequence[int],
    *,
    logp: NDArray[np.float32],
    versions: NDArray[np.int32],
    kept: KeptSets | None = None,
    routes: NDArray[np.int16] | None = None,
) -> Segment:
    """One turn: P prompt tokens, then G sampled ones.

    `logp` and `versions` [G], `kept` G spans, `routes` [P+G−1, L, K] (input-aligned: the last
    token has been no input yet). Raises `ValueError` if the lengths do not agree.
    """
    prompt, sampled = len(prompt_ids), len(sampled_ids)
    tokens = prompt + sampled
    for name, have, want in (
        ("logp", len(logp), sampled),
        ("versions", len(versions), sampled),
        ("kept", sampled if kept is None else len(kept), sampled),
        ("routes", tokens - 1 if routes is None else len(routes), tokens - 1),
    ):
        if have != want:
            raise ValueError(f"segment of {prompt_id}: {name} has {have} entries, expected {want}")
    return Segment(
        prompt_id=prompt_id,
        token_ids_T=np.array([*prompt_ids, *sampled_ids], np.int32),
        trainable_T=np.arange(tokens) >= prompt,
        logp_old_T=np.concatenate([np.zeros(prompt, np.float32), logp]),
        version_T=np.concatenate([np.full(prompt, -1, np.int32), versions]),
        routes_TLK=(
            None
            if routes is None
            else np.concatenate([routes, np.full((1, *routes.shape[1:]), NO_ROUTE, np.int16)])
        ),
        kept=None if kept is None else KeptSets.concat([KeptSets.empty(prompt), kept]),
    )


def build_trajectory(
    sibling: int, segment: Segment, raw: str, *, thinking: bool, finish_reason: FinishReason
) -> Trajectory:
    """One completion of one turn. `raw` is its text without special tokens."""
    return Trajectory(
        prompt_id=segment.prompt_id,
        sibling=sibling,
        segments=(segment,),
        finish_reason=finish_reason,
        messages=(split_message(raw, thinking=thinking),),
    )


def sibling_seed(seed: int, prompt_id: str, version: int, draw: int, sibling: int) -> int:
    """Seed of one completion, in [0, 2⁶³): the same on every engine and in every run. `draw`: how
    often this version has been asked the prompt before; else it would say the same again."""
    return seed_of(seed, version, draw, sibling, prompt_id)
