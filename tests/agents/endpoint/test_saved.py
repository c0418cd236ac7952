"""What a program's trajectory is saved as, and how it is rendered again for supervised learning."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.agents.endpoint.record import Finished
from keel.data.conversations.files import read_trajectories
from keel.data.eval_store import asked_of
from keel.rl.records import trajectory_record
from keel.rl.types import Group, Prompt, ScoredGroup, Segment, Trajectory
from keel.trainer.prepare import chat_renderer
from tests.agents.endpoint.kit import TOOLS, Policy, as_sent, ask, play, recording, result, user
from tests.agents.endpoint.test_record import script
from tests.data.conversations.sources import source
from tests.rollout.chat.families import chat_of

AGENTS = {"planner": TOOLS, "critic": []}


def two_agents(*, thinking: bool) -> Finished:
    """Two conversations at once, each with its own system prompt and tools."""

    async def work() -> Finished:
        recorded = recording(Policy(script), thinking=thinking)
        talks = {
            name: [{"role": "system", "content": f"You are the {name}."}, user("Where to?")]
            for name in AGENTS
        }
        for _ in range(4):
            for name, messages in talks.items():
                reply = await ask(recorded, messages, AGENTS[name])
                messages.append(as_sent(reply))
                calls = reply.message.get("tool_calls", ())
                messages += [result(call["id"], "far") for call in calls] or [user("Go on.")]
        return await recorded.finish()

    return play(work())


def rendered(
    finished: Finished, folder: Path, family: str, *, thinking: bool, evaluated: bool = False
) -> list[Segment]:
    """The contexts that `keel sft` learns, as another tokenizer or system prompt has them."""
    trajectory = Trajectory(
        prompt_id="p",
        sibling=0,
        segments=finished.segments,
        finish_reason=finished.finish_reason,
        messages=(*finished.opening, *finished.messages),
        dialogues=finished.dialogues,
    )
    prompt = Prompt(
        prompt_id="p", domain="d", messages=(user("?"),), environment="e", thinking=thinking
    )
    line = {
        **trajectory_record(prompt, trajectory, tokenizer="mine"),
        "reward": 1,
        "parts": {"correct": 1},
    }
    if evaluated:
        scored = ScoredGroup(
            group=Group(prompt=prompt, trajectories=(trajectory,)),
            rewards_G=np.ones(1, np.float32),
            parts_G=({"correct": 1.0},),
            advantages_G=np.zeros(1, np.float32),
        )
        line = asdict(asked_of("", "s", prompt, [scored], str, str, tokenizer="mine"))
    path = folder / "step_000001.jsonl"
    path.write_text(json.dumps(line) + "\n")
    read = read_trajectories(source(str(path), source="trajectories"), tokenizer="another")
    render = chat_renderer(chat_of(family))
    return [segment for example in read.examples for segment in render(example)]


@pytest.mark.parametrize("thinking", [False, True])
def test_saved_conversations_render_exactly_as_sampled(tmp_path: Path, thinking: bool) -> None:
    def contents(segments: Any) -> list[tuple[list[int], list[bool]]]:
        return sorted((s.token_ids_T.tolist(), s.trainable_T.tolist()) for s in segments)

    finished = two_agents(thinking=thinking)
    again = rendered(finished, tmp_path, "tiny", thinking=thinking)
    assert contents(again) == contents(finished.segments)


@pytest.mark.parametrize("evaluated", [False, True])
def test_each_agent_keeps_its_own_prompt_and_tools(tmp_path: Path, evaluated: bool) -> None:
    finished = two_agents(thinking=False)
    chat = chat_of("qwen3")
    texts = [
        chat.decode(segment.token_ids_T.tolist())
        for segment in rendered(finished, tmp_path, "qwen3", thinking=False, evaluated=evaluated)
    ]
    shown = [("planner" in text, "critic" in text, '"name": "city"' in text) for text in texts]
    assert sorted(shown) == [(False, True, False), (True, False, True)]
