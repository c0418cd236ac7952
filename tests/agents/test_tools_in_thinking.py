"""Episodes of a policy that calls its tools inside the thinking, and what it is told at first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from keel.agents.context import ContextManager
from keel.agents.system_prompt import WithSystemPrompt
from keel.configs.system_prompts import system_prompt
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.types import Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from tests.agents.scripted import BUDGET, END, NO_CONTEXT, Policy, Sums, play, says

WIDE = replace(BUDGET, turns=50, tokens=20_000, window=20_000)


@cache
def form() -> TemplateChat:
    return TemplateChat(build_tokenizer(), tools_in_thinking=True)


def played(policy: Policy, sums: Sums, *, context: ContextManager = NO_CONTEXT, **budget: int):
    wide = replace(WIDE, **budget)
    found = play(policy, sums, budget=wide, context=context, thinking=True, form=form())
    assert isinstance(found, Trajectory), found
    return found


def test_several_calls_in_one_thinking_then_the_answer() -> None:
    policy = says("<think>\nLet me add.\n@add 20, 20", "Two more.\n@add 40, 2", "Done.\n</think>42")
    sums = Sums()
    trajectory = played(policy, sums)
    assert [line for line in sums.log if line.startswith("call")] == [
        "call add {'a': 20, 'b': 20}",
        "call add {'a': 40, 'b': 2}",
    ]
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})
    assert trajectory.finish_reason == "stop" and trajectory.usage is not None
    assert (trajectory.usage.calls, trajectory.usage.failed_calls) == (2, 0)
    spoken = [m for m in trajectory.messages if m["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in spoken] == ["Let me add.", "Two more.", "Done."]
    assert [m["content"] for m in spoken] == ["", "", "42"]
    (segment,) = trajectory.segments
    ids = segment.token_ids_T.tolist()
    starts = np.flatnonzero(np.diff(segment.trainable_T.astype(int)) == 1) + 1
    assert len(starts) == len(policy.requests) == 3
    for request, start in zip(policy.requests, starts, strict=True):
        assert request.token_ids_T.tolist() == ids[:start], "trained on another context"
    assert form().decode(ids).count("<think>") == 1 == form().decode(ids).count("</think>")


def test_a_call_in_the_answer_is_not_run() -> None:
    sums = Sums()
    trajectory = played(says("<think>\nhm\n</think>@add 1, 2", "<think>\nOh.\n</think>42"), sums)
    assert not any(line.startswith("call") for line in sums.log)
    assert trajectory.usage is not None and trajectory.usage.malformed_calls == 1
    (told,) = (m["content"] for m in trajectory.messages if m["role"] == "tool")
    assert "called while thinking" in told and "Nothing was run" in told
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})


def test_no_more_calls_are_run_than_the_budget_has() -> None:
    def script(turn: int, context: str) -> str:
        if "no more will be" in context:
            return "Enough.\n</think>42" + END
        return ("<think>\n" if turn == 0 else "") + "@add 1, 2\n@add 3, 4\n@add 5, 6" + END

    sums = Sums()
    trajectory = played(Policy(script), sums, calls=20)
    assert sum(line.startswith("call") for line in sums.log) == 20
    assert trajectory.usage is not None
    assert (trajectory.usage.calls, trajectory.usage.failed_calls) == (21, 1)
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})


def test_thinking_goes_at_the_users_message_and_calls_with_their_results_stay() -> None:
    policy = says(
        "<think>\nI see.\n@add 20, 20", "Hm.\n</think>40?", "<think>\nOh.\n@add 40, 2", "</think>42"
    )
    trajectory = played(policy, Sums(replies=["Are you sure?"]))
    first, second = (form().decode(s.token_ids_T.tolist()) for s in trajectory.segments)
    assert "I see." in first and "Hm." in first
    assert "I see." not in second and "Hm." not in second and "Oh." in second
    assert "@add 20, 20" in second and "40?" in second
    assert second.count("@add") == 2 + first.count("@add") - 1
    sampled = sum(int(s.trainable_T.sum()) for s in trajectory.segments)
    assert sampled == trajectory.sampled_tokens


def test_a_context_rewritten_in_the_thinking_begins_a_thinking_of_its_own() -> None:
    """The rewritten one shows turns as the template does: closed. So the next call needs a thinking
    of its own to stand in."""

    def script(turn: int, context: str) -> str:
        if turn > 40:
            return "</think>42" + END
        new = context.rpartition("<|im_start|>assistant\n")[0].rpartition("<think>")[2]
        return ("" if "</think>" not in new and "<think>" in context else "<think>\n") + (
            "@add 1, 2" + END
        )

    sums = Sums(words=4)
    context = ContextManager(method="discard-all", window=260, most=9)
    trajectory = played(Policy(script), sums, context=context, window=260)
    assert len(trajectory.segments) > 2 and trajectory.usage is not None
    assert trajectory.usage.malformed_calls == 0
    assert trajectory.finish_reason == "stop"


def test_what_the_policy_is_told_at_first() -> None:
    def told(tools: object) -> str:
        asked.append(tools)
        return system_prompt("tools-in-thinking", calls=20)

    asked: list[object] = []
    sums = Sums()
    found = play(
        says("<think>\n@add 40, 2", "</think>42"),
        WithSystemPrompt(sums, told),
        budget=WIDE,
        thinking=True,
        form=form(),
    )
    assert isinstance(found, Trajectory) and asked == [["add"]]
    assert found.messages[0] == {"role": "system", "content": told(["add"])}
    assert found.messages[1] == {"role": "user", "content": "Sum."} and found.opening == 2
    shown = form().decode(found.segments[0].token_ids_T.tolist())
    assert shown.index("Up to 20 calls") < shown.index("@add a, b") < shown.index("Sum.")
    assert sums.log[-2:] == ["verdict stop", "close"]
