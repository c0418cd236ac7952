"""Converts prompts to token ids for the engine, and sampled completions to trajectories. A job is a
group of completions, or one turn of a conversation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.configs.schema import SamplingConfig
from keel.rl.turns import THINK, ThinkingMarks, TurnResult
from keel.rl.types import Group, Prompt, Recordings, Segment, Trajectory, join_recordings
from keel.rollout.chat.parsing import HARMONY, HARMONY_CONTROLS, BadCall, read_harmony
from keel.rollout.chat.render import check_shown, render
from keel.rollout.recording.base import RecordingOptions
from keel.rollout.spec import LostTurn

_THINK_BLOCK = re.compile(f"{THINK.open}(.*?){THINK.close}", re.DOTALL)


def render_prompt(
    tokenizer: Any, prompt: Prompt, marks: ThinkingMarks = THINK
) -> tuple[list[int], bool]:
    """Convert a prompt to token ids with the chat template. A raw prompt is tokenized as is,
    preceded by the tokenizer's start token. Also returns True if the prompt ends inside a think
    block, which the policy has to close.

    `marks` are the strings that open and close the model's thinking. Raises ValueError if there are
    no token ids.
    """
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
    return token_ids, text.rstrip().endswith(marks.open)


def decode_all(
    tokenizer: Any, completions: Sequence[Sequence[int]], marks: ThinkingMarks = THINK
) -> list[str]:
    """Decode completions without special tokens, and replace the model's thinking marks with
    `THINK`."""
    completions = [list(ids) for ids in completions]
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {i: str(token) for i, token in added.items() if token.special}
    shown = HARMONY_CONTROLS if marks == HARMONY else f"{marks.open} {marks.close}"
    hidden = {i for i, text in special.items() if text not in shown}
    skip = len(hidden) == len(special)  # all special tokens are hidden
    if hidden and not skip:
        completions = [[index for index in ids if index not in hidden] for ids in completions]
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # On all cores; transformers decodes one at a time.
        texts = fast.decode_batch(completions, skip_special_tokens=skip)
    else:
        texts = [tokenizer.decode(ids, skip_special_tokens=skip) for ids in completions]
    return [_translate_marks(text, marks) for text in texts]


def _translate_marks(text: str, marks: ThinkingMarks) -> str:
    """Replace a model's thinking marks with `THINK`, the marks that rewards look for.

    If a model with other marks writes `THINK` as plain text, a space is inserted so that it isn't
    mistaken for a mark.
    """
    if marks == THINK:
        return text
    for usual in (THINK.open, THINK.close):
        text = text.replace(usual, f"{usual[0]} {usual[1:]}")
    if marks != HARMONY:
        return text.replace(marks.open, THINK.open).replace(marks.close, THINK.close)
    turn = read_harmony(text, tools_in_thinking=False)
    stray = [call.text for call in turn.calls if isinstance(call, BadCall)]
    thoughts = "\n".join([*filter(None, [turn.reasoning]), *stray])
    if not thoughts:
        return turn.content
    return f"{THINK.open}{thoughts}" + f"{THINK.close}{turn.content}" * bool(turn.content)


def _split_message(raw: str, *, thinking: bool) -> dict[str, str]:
    """Convert a completion to a message with `content`, `raw` and, if there is thinking,
    `reasoning_content`.

    Set `thinking` if the prompt already opened the think block. If the block is never closed, all
    text counts as reasoning, so an answer inside it does not count.
    """
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


Result = Group | TurnResult | LostTurn  # raising an error would stop the engine
NOT_FINITE = (
    "not finite: a token's log-probability is not a number. The model's logits may overflow in "
    "rollout.dtype"
)


@dataclass(slots=True, kw_only=True)
class Job:
    """A group of completions of `prompt`, or one turn of `conversation`. Each completion is a
    request to vLLM."""

    label: str
    context: Sequence[int] | NDArray[np.int32]
    sampling: SamplingConfig
    recording: RecordingOptions
    prompt: Prompt | None = None
    thinking: bool = False  # True if the prompt ends inside a think block
    conversation: str = ""
    stop_ids: tuple[int, ...] = ()
    requests: dict[str, int] = field(default_factory=dict[str, int])  # number by unfinished name
    done: dict[int, tuple[TurnResult, str]] = field(
        default_factory=dict[int, tuple[TurnResult, str]]
    )
    dropped: list[str] = field(default_factory=list[str])
    cut: bool = False  # after the deadline, each unfinished request ends with its next token

    def add(self, sibling: int, sampled: TurnResult, text: str) -> None:
        """Add a completion. `text` is its text without special tokens, or "" for a turn, which the
        chat format decodes."""
        if np.isfinite(sampled.logp_old_R).all():
            self.done[sibling] = sampled, text
        else:
            self.dropped.append(NOT_FINITE)

    def result(self) -> Result:
        """Return the group or turn. A turn has no tokens if its deadline passed before the first
        token was sampled."""
        if self.prompt is not None:
            trajectories = tuple(
                self._trajectory(self.prompt, sibling, *self.done[sibling])
                for sibling in sorted(self.done)
            )
            return Group(prompt=self.prompt, trajectories=trajectories, dropped=tuple(self.dropped))
        if NOT_FINITE in self.dropped:
            return LostTurn(NOT_FINITE)
        if self.done:
            return self.done[0][0]
        return TurnResult(
            token_ids_R=np.zeros(0, np.int32),
            logp_old_R=np.zeros(0, np.float32),
            version_R=np.zeros(0, np.int32),
            finish_reason="deadline",
        )

    def _trajectory(
        self, prompt: Prompt, sibling: int, sampled: TurnResult, text: str
    ) -> Trajectory:
        before = len(self.context)
        tokens = before + len(sampled.token_ids_R)
        assert isinstance(sampled.recordings, Recordings)
        segment = Segment(
            prompt_id=prompt.prompt_id,
            token_ids_T=np.concatenate([np.array(self.context, np.int32), sampled.token_ids_R]),
            trainable_T=np.arange(tokens) >= before,
            logp_old_T=np.concatenate([np.zeros(before, np.float32), sampled.logp_old_R]),
            version_T=np.concatenate([np.full(before, -1, np.int32), sampled.version_R]),
            **join_recordings([(before, sampled.recordings)], tokens),
        )
        return Trajectory(
            prompt_id=prompt.prompt_id,
            sibling=sibling,
            segments=(segment,),
            finish_reason=sampled.finish_reason,
            messages=(_split_message(text, thinking=self.thinking),),
        )
