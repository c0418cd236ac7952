"""Write trajectories as JSON lines and read them back.

Each line is a conversation in the `messages` format (docs/sft.md), which `keel sft` can train on.
It also contains `segments` with the sampled tokens, which are valid only for the tokenizer whose
digest is in `tokenizer`.

If an agent program held several conversations, the line contains the first one with sampled
messages, and `other_conversations` contains the `messages` and `tools` of the others.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from keel.rl.sft import supervised_segment
from keel.rl.turns import MALFORMED, Message
from keel.rl.types import PROGRAM, Dialogue, Prompt, ScoredGroup, Segment, Trajectory


def trajectory_record(prompt: Prompt, trajectory: Trajectory, *, tokenizer: str) -> dict[str, Any]:
    """Convert a trajectory to a JSON record without rewards. `tokenizer` is the digest of the
    policy's tokenizer (`keel.model.load.digest_of_tokenizer`). The record has no segments if it is
    empty."""
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


def scored_record(scored: ScoredGroup, index: int, *, tokenizer: str) -> dict[str, Any]:
    """Convert a trajectory from a scored group to a JSON record that includes its rewards."""
    group = scored.group
    return {
        **trajectory_record(group.prompt, group.trajectories[index], tokenizer=tokenizer),
        "reward": float(scored.rewards_G[index]),
        "parts": {name: float(value) for name, value in scored.parts_G[index].items()},
    }


def recorded_segments(record: Mapping[str, Any], prompt_id: str) -> tuple[Segment, ...]:
    """Parse the segments of a record written by `trajectory_record`. Raises `ValueError` if they
    are malformed."""
    segments: list[Segment] = []
    for entry in cast(list[Any], record["segments"]):
        try:
            ids = np.array(entry["ids"], np.int32)
            sampled = np.zeros(len(ids), np.bool_)
            for start, stop in entry["said"]:
                if not 0 < start < stop <= len(ids):
                    raise ValueError(f"said: [{start}, {stop}] is not within {len(ids)} ids")
                sampled[start:stop] = True
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"`segments` needs `ids` and `said`: {error!r}") from error
        segments.append(supervised_segment(prompt_id, ids, sampled))
    return tuple(segments)


def _conversations(prompt: Prompt, trajectory: Trajectory) -> list[dict[str, Any]]:
    dialogues = sorted(trajectory.dialogues, key=lambda dialogue: not dialogue.sampled)
    if not dialogues:
        # The transcript of an environment already contains the prompt.
        question = () if prompt.environment else prompt.messages
        messages = (*question, *trajectory.messages)
        opening = len(question) or trajectory.opening
        sampled = frozenset(range(opening, len(messages)))
        tools = trajectory.tools or prompt.tools
        dialogues = [Dialogue(messages=messages, sampled=sampled, tools=tools)]
    return [
        {
            "tools": [dict(tool) for tool in dialogue.tools],
            "messages": [
                _message_to_json(message, learned=place in dialogue.sampled)
                for place, message in enumerate(dialogue.messages)
            ],
        }
        for dialogue in dialogues
    ]


def _spans(segment: Segment) -> dict[str, Any]:
    edges = np.flatnonzero(np.diff(segment.trainable_T, prepend=False, append=False))
    return {"ids": segment.token_ids_T.tolist(), "said": edges.reshape(-1, 2).tolist()}


def _message_to_json(message: Message, *, learned: bool) -> dict[str, Any]:
    """Convert a message to JSON. Assistant messages get `weight` 0 if they must not be trained on,
    because the policy did not sample them or they contain a malformed tool call."""
    entry = {key: value for key, value in message.items() if key != "raw"}
    if message["role"] == "assistant":
        broken = any(
            call["function"]["name"] == MALFORMED for call in message.get("tool_calls") or ()
        )
        if not learned or broken or message.get("name") == PROGRAM:
            entry["weight"] = 0
    return entry
