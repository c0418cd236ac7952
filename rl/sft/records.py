"""Trajectories as lines of JSON, to be learned from by `keel sft`.

A line is a conversation in the form `messages` (docs/sft.md), so that any program can read it, and
has beside it what was sampled, token by token: `segments`, good for the tokenizer that `tokenizer`
names. An agent program may hold several conversations in a trajectory: the first one that the
policy spoke in is the line's own, and `other_conversations` has the rest, each with `messages` and
`tools`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from keel.rl.sft.lessons import shown
from keel.rl.turns import MALFORMED, Message
from keel.rl.types import PROGRAM, Dialogue, Prompt, ScoredGroup, Segment, Trajectory


def record_of(prompt: Prompt, trajectory: Trajectory, *, tokenizer: str) -> dict[str, Any]:
    """Return a trajectory's line without its rewards. tokenizer: digest of the policy's tokenizer,
    as `keel.model.load.digest_of_tokenizer` has it."""
    first, *others = _conversations(prompt, trajectory)
    return {
        "id": prompt.prompt_id,
        "domain": prompt.domain,
        "sibling": trajectory.sibling,
        "finish_reason": trajectory.finish_reason,
        "thinking": prompt.thinking,
        **first,
        **({"other_conversations": others} if others else {}),
        "tokenizer": tokenizer,
        "segments": [_spans(segment) for segment in trajectory.segments] if tokenizer else [],
    }


def records_of(scored: ScoredGroup, index: int, *, tokenizer: str) -> dict[str, Any]:
    """The line of one trajectory of a group, with its rewards."""
    group = scored.group
    return {
        **record_of(group.prompt, group.trajectories[index], tokenizer=tokenizer),
        "reward": float(scored.rewards_G[index]),
        "parts": {name: float(value) for name, value in scored.parts_G[index].items()},
    }


def segments_of(record: Mapping[str, Any], prompt_id: str) -> tuple[Segment, ...]:
    """What was sampled, as `record_of` has written it. Raises `ValueError` for anything else."""
    segments: list[Segment] = []
    for written in cast(list[Any], record["segments"]):
        try:
            ids = np.array(written["ids"], np.int32)
            said = np.zeros(len(ids), np.bool_)
            for start, stop in written["said"]:
                if not 0 < start < stop <= len(ids):
                    raise ValueError(f"said: [{start}, {stop}] is not within {len(ids)} ids")
                said[start:stop] = True
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"`segments` needs `ids` and `said`: {error!r}") from error
        segments.append(shown(prompt_id, ids, said))
    return tuple(segments)


def _conversations(prompt: Prompt, trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return `messages` and `tools` of each conversation, those with sampled messages first."""
    dialogues = sorted(trajectory.dialogues, key=lambda dialogue: not dialogue.sampled)
    if not dialogues:
        asked = () if prompt.environment else prompt.messages  # else it is in the transcript
        messages = (*asked, *trajectory.messages)
        opening = len(asked) or trajectory.opening
        sampled = frozenset(range(opening, len(messages)))
        tools = trajectory.tools or prompt.tools
        dialogues = [Dialogue(messages=messages, sampled=sampled, tools=tools)]
    return [
        {
            "tools": [dict(tool) for tool in dialogue.tools],
            "messages": [
                _written(message, learned=place in dialogue.sampled)
                for place, message in enumerate(dialogue.messages)
            ],
        }
        for dialogue in dialogues
    ]


def _spans(segment: Segment) -> dict[str, Any]:
    edges = np.flatnonzero(np.diff(segment.trainable_T, prepend=False, append=False))
    return {"ids": segment.token_ids_T.tolist(), "said": edges.reshape(-1, 2).tolist()}


def _written(message: Message, *, learned: bool) -> dict[str, Any]:
    """Without the text that it was read from. Of the assistant's, what the policy did not sample,
    or what cannot be written again as it was, is no example: `weight` 0."""
    written = {key: value for key, value in message.items() if key != "raw"}
    if message["role"] == "assistant":
        broken = any(
            call["function"]["name"] == MALFORMED for call in message.get("tool_calls") or ()
        )
        if not learned or broken or message.get("name") == PROGRAM:
            written["weight"] = 0
    return written
