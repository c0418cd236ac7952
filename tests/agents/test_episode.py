"""Episodes: calls, grading, budgets, lost environments, rewrites, calls in the thinking."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from keel.agents.context import ContextManager, Method
from keel.agents.system_prompt import WithSystemPrompt
from keel.agents.types import ToolResult, Unscored
from keel.configs.system_prompts import system_prompt
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import Message, ToolCall
from keel.rl.types import Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import Marks
from tests.agents.scripted import BUDGET, END, Policy, Sums, chat, play, says


def completed(outcome: Trajectory | str) -> Trajectory:
    assert isinstance(outcome, Trajectory), outcome
    return outcome


def calls_of(sums: Sums) -> list[str]:
    return [line for line in sums.log if line.startswith("call")]


def test_calls_run_until_the_final_answer() -> None:
    policy, sums = says("@add 20, 20", "@add 40, 2", "42"), Sums()
    trajectory = completed(play(policy, sums))
    assert sums.log == [
        "open 7",
        "call add {'a': 20, 'b': 20}",
        "call add {'a': 40, 'b': 2}",
        "reply 42",
        "verdict stop",
        "close",
    ]
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) == 1
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.opening == 1
    usage = trajectory.usage
    assert usage is not None and (usage.turns, usage.calls, usage.failed_calls) == (3, 2, 0)
    assert usage.sampling_s == 3 and 0 < usage.cached_tokens <= usage.repeated_tokens


def test_segment_has_the_sampled_contexts_and_rows() -> None:
    policy = says("@add 1, 2", "@add 3, 4", "42")
    (segment,) = completed(play(policy, Sums())).segments
    ids = segment.token_ids_T.tolist()
    places = np.flatnonzero(np.diff(segment.trainable_T.astype(int)) == 1) + 1
    rows = 0
    for turn, (request, first) in enumerate(zip(policy.requests, places, strict=True)):
        assert request.token_ids_T.tolist() == ids[:first] and request.routes_from == rows
        assert segment.version_T[first] == turn
        rest = segment.trainable_T[first:]
        sampled = len(rest) if rest.all() else int(np.argmin(rest))
        rows = int(first) + sampled - 1  # the last sampled token was no input yet
    assert segment.routes_TLK is not None
    # Row t comes from the turn that first had token t as input.
    turns = (segment.routes_TLK[:-1, 0, 0] - np.arange(len(ids) - 1)) // 100
    firsts = [request.routes_from for request in policy.requests]
    assert turns.tolist() == [sum(t >= f for f in firsts) - 1 for t in range(len(ids) - 1)]


@pytest.mark.parametrize("text", ["@add 1, ", "@add 1e999, 2", "@add -1e999, 2", "@add NaN, 2"])
def test_malformed_call_gets_an_error(text: str) -> None:
    sums = Sums()
    trajectory = completed(play(says(text, "@mul 1, 2", "42"), sums))
    assert not any("call add" in line for line in sums.log)
    usage = trajectory.usage
    assert usage is not None and (usage.calls, usage.failed_calls) == (2, 2)
    assert usage.malformed_calls >= 1
    assert sum(message["role"] == "tool" for message in trajectory.messages) == 2


def test_cut_call_is_never_run() -> None:
    sums = Sums()
    policy = Policy(lambda turn, _: "@add 1, 2", finish="length")
    assert completed(play(policy, sums)).finish_reason == "length"
    assert sums.log == ["open 7", "verdict length", "close"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"turns": 2}, "turns"),
        ({"tokens": 20}, "length"),
        ({"window": 100}, "window"),
        ({"timeout_s": 1.5}, "deadline"),
    ],
)
def test_spent_budget_ends_and_grades(change: dict[str, float], reason: str) -> None:
    policy, sums = Policy(lambda turn, _: "@add 1, 2" + END), Sums()
    budget = replace(replace(BUDGET, turns=50, tokens=10_000, window=10_000), **change)
    trajectory = completed(play(policy, sums, budget=budget))
    assert trajectory.finish_reason == reason
    assert sums.log[-2:] == [f"verdict {reason}", "close"]
    assert trajectory.sampled_tokens <= budget.tokens
    assert all(len(s.token_ids_T) <= budget.window for s in trajectory.segments)


def test_turn_without_tokens_ends_the_episode() -> None:
    silent = Policy(lambda turn, _: "" if turn else "@add 1, 2" + END, finish="deadline")
    assert completed(play(silent, Sums())).finish_reason == "deadline"
    reason = play(Policy(lambda turn, _: "", finish="deadline"), Sums())
    assert isinstance(reason, str) and "rollout.timeout_s" in reason


def test_tool_result_can_end_the_episode() -> None:
    sums = Sums()
    trajectory = completed(play(says("@add 90, 9\n@add 1, 1"), sums))
    assert trajectory.finish_reason == "stop"
    assert calls_of(sums) == ["call add {'a': 90, 'b': 9}"]
    assert trajectory.messages[-1]["content"] == "99"


@pytest.mark.parametrize("phase", ["open", "call", "reply"])
@pytest.mark.parametrize("is_failure", [False, True])
def test_lost_environment_is_dropped_or_a_failure(phase: str, is_failure: bool) -> None:
    sums, phases = Sums(fails=phase), ("call", "reply") if is_failure else ()
    outcome = play(says("@add 1, 2", "42"), sums, crash_is_failure=phases)
    assert sums.log[-1] == "close"
    reason = f"environment, at {phase}: ended with SIGSEGV"
    if phase not in phases:
        assert outcome == reason
        return
    trajectory = completed(outcome)
    assert trajectory.finish_reason == "crash" and trajectory.sampled_tokens > 0
    assert trajectory.verdict == Verdict(parts={"correct": 0.0}, facts={"crash": reason})
    assert trajectory.messages[-1]["role"] == "assistant"


def test_failed_grading_is_never_a_zero() -> None:
    phases = ("call", "reply", "verdict")
    unscored = Unscored(reason="tests did not run")
    assert isinstance(play(says("42"), Sums(grade=unscored), crash_is_failure=phases), str)
    lost = Unscored(reason="environment, at verdict: ended with SIGKILL", fault="crash")
    trajectory = completed(play(says("42"), Sums(grade=lost), crash_is_failure=phases))
    assert trajectory.finish_reason == "crash" and trajectory.sampled_tokens > 0
    assert trajectory.verdict == Verdict(parts={"correct": 0.0}, facts={"crash": lost.reason})
    assert isinstance(play(says("42"), Sums(grade=lost), crash_is_failure=("call",)), str)
    raised = replace(lost, fault="raised")  # by the grader's own code
    assert isinstance(play(says("42"), Sums(grade=raised), crash_is_failure=phases), str)


@pytest.mark.parametrize("error", [RuntimeError("no engine"), ValueError("exceeds the engine")])
def test_engine_error_is_raised_and_the_environment_closed(error: Exception) -> None:
    def fails(turn: int, _: str) -> str:
        raise error

    sums = Sums()
    with pytest.raises(type(error), match=str(error)):
        play(Policy(fails), sums)
    assert sums.log == ["open 7", "close"]


def test_failing_close_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close(self: Sums) -> None:
        raise OSError("it is stuck")

    monkeypatch.setattr(Sums, "close", close)
    assert completed(play(says("42"), Sums())).finish_reason == "stop"


@pytest.mark.parametrize("source", ["call", "reply"])
def test_oversized_text_is_cut_before_tokenization(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing 8 MiB would block the event loop of all episodes for ten seconds."""
    by_call = source == "call"
    sums = Sums(words=(8 << 20) // len(" word")) if by_call else Sums(replies=["word " * 10**6])
    longest, encode = [0], chat().encoder.encode

    def measured(text: str, marks: Marks) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return encode(text, marks)

    monkeypatch.setattr(chat().encoder, "encode", measured)
    trajectory = completed(play(says("@add 20, 20" if by_call else "20", "42"), sums))
    assert trajectory.finish_reason == "window"
    assert BUDGET.characters < longest[0] < BUDGET.characters + 500
    assert len(str(trajectory.messages[-1]["content"])) < BUDGET.characters + 50


def test_truncate_keeps_texts_that_could_fit() -> None:
    wide = replace(BUDGET, window=1_000_000)
    assert wide.characters == 16_000_000 and BUDGET.characters == 65_536
    for budget, length in ((wide, 8 << 20), (BUDGET, 65_536)):
        assert budget.truncate("x" * length) == "x" * length
    assert BUDGET.truncate("x" * 65_540) == "x" * 65_536 + "\n[4 characters left out]"


def test_broken_conversations_are_dropped() -> None:
    class Wrong(Sums):
        async def reply(self, turn: Message) -> Message | None:
            return {"role": "assistant", "content": "I speak for you."}

    reason = play(says("42", "42"), Wrong())
    assert isinstance(reason, str) and reason.startswith("the conversation broke: ")
    reason = play(says("42"), Sums(), budget=replace(BUDGET, window=10))
    assert isinstance(reason, str) and "agents.window" in reason


def test_user_message_drops_the_thinking() -> None:
    turns = ["I see.\n</think>\n\n@add 1, 2", "Then.\n</think>\n\n3?", "So.\n</think>\n\n42"]

    def script(turn: int, context: str) -> str:
        return ("" if context.rstrip().endswith("<think>") else "<think>\n") + turns[turn] + END

    trajectory = completed(play(Policy(script), Sums(replies=["Is it?"]), thinking=True))
    assert [m["role"] for m in trajectory.messages].count("user") == 2
    first, second = trajectory.segments
    texts = [chat().decode(segment.token_ids_T.tolist()) for segment in (first, second)]
    assert "I see." in texts[0] and "I see." not in texts[1]
    assert sum(int(s.trainable_T.sum()) for s in (first, second)) == trajectory.sampled_tokens


@pytest.mark.parametrize(
    ("method", "window"), [("discard-all", 260), ("discard-75", 260), ("summary", 900)]
)
def test_full_context_is_rewritten(method: Method, window: int) -> None:
    turns = window // 20

    def script(turn: int, context: str) -> str:
        assert f"</think>\n\n{END}" not in context, "an empty turn in the context"
        if "Write down what is needed" in context.rpartition("<|im_start|>user")[2]:
            return "Added a lot." + END
        return ("42" if turn >= turns else f"@add {turn % 50}, 2") + END

    policy, sums = Policy(script), Sums(words=4)
    context = ContextManager(method=method, window=window, most=9, summary_tokens=window // 3)
    budget = replace(BUDGET, turns=turns + 9, tokens=10_000, window=window)
    trajectory = completed(play(policy, sums, budget=budget, context=context))
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) > 1
    assert trajectory.usage is not None and trajectory.usage.rewrites >= 1
    assert all(len(r.token_ids_T) < window for r in policy.requests)
    for segment in trajectory.segments:
        text = chat().decode(segment.token_ids_T.tolist())
        assert "Sum." in text.partition("<|im_start|>assistant")[0], "the opening is gone"
    summaries = sum("Added a lot." in str(m["content"]) for m in trajectory.messages)
    assert summaries == (2 * trajectory.usage.rewrites if method == "summary" else 0)


def test_deadline_is_checked_between_calls() -> None:
    policy, sums = Policy(lambda turn, _: "@add 1, 2\n@add 3, 4" + END, seconds=1.0), Sums()
    trajectory = completed(play(policy, sums, budget=replace(BUDGET, timeout_s=1.0)))
    assert trajectory.finish_reason == "deadline"
    assert sums.log == ["open 7", "verdict deadline", "close"]
    timeouts: list[float] = []

    async def call(call: ToolCall, *, timeout_s: float) -> ToolResult:
        timeouts.append(timeout_s)
        return ToolResult(text="3")

    sums = Sums()
    sums.call = call  # type: ignore[method-assign]
    completed(play(says("@add 1, 2", "42"), sums, budget=replace(BUDGET, timeout_s=1.5)))
    assert timeouts == [BUDGET.call_s], "a call has its full time"


def test_unknown_end_of_turn_ends_the_episode() -> None:
    policy, sums = Policy(lambda turn, _: "42", finish="stop"), Sums()
    assert completed(play(policy, sums)).finish_reason == "stop"
    assert sums.log == ["open 7", "verdict stop", "close"]


@cache
def thinking_chat() -> TemplateChat:
    return TemplateChat(build_tokenizer(), tools_in_thinking=True)


def think(policy: Policy, sums: Any, *, calls: int | None = None, **settings: Any) -> Trajectory:
    """Play an episode whose tools are called inside the thinking."""
    budget = replace(BUDGET, turns=50, tokens=20_000, window=settings.pop("window", 20_000))
    budget = replace(budget, calls=calls) if calls else budget
    form = thinking_chat()
    return completed(play(policy, sums, budget=budget, thinking=True, form=form, **settings))


def test_several_calls_in_one_thinking() -> None:
    policy = says("<think>\nLet me add.\n@add 20, 20", "Two more.\n@add 40, 2", "Done.\n</think>42")
    sums = Sums()
    trajectory = think(policy, sums)
    assert calls_of(sums) == ["call add {'a': 20, 'b': 20}", "call add {'a': 40, 'b': 2}"]
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})
    assert trajectory.finish_reason == "stop" and trajectory.usage is not None
    assert (trajectory.usage.calls, trajectory.usage.failed_calls) == (2, 0)
    turns = [m for m in trajectory.messages if m["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in turns] == ["Let me add.", "Two more.", "Done."]
    assert [m["content"] for m in turns] == ["", "", "42"]
    (segment,) = trajectory.segments
    ids = segment.token_ids_T.tolist()
    starts = np.flatnonzero(np.diff(segment.trainable_T.astype(int)) == 1) + 1
    assert len(starts) == len(policy.requests) == 3
    for request, start in zip(policy.requests, starts, strict=True):
        assert request.token_ids_T.tolist() == ids[:start], "trained on another context"
    text = thinking_chat().decode(ids)
    assert text.count("<think>") == 1 == text.count("</think>")


def test_call_outside_the_thinking_is_not_run() -> None:
    sums = Sums()
    trajectory = think(says("<think>\nhm\n</think>@add 1, 2", "<think>\nOh.\n</think>42"), sums)
    assert not calls_of(sums)
    assert trajectory.usage is not None and trajectory.usage.malformed_calls == 1
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})


def test_calls_beyond_the_budget_are_refused() -> None:
    def script(turn: int, context: str) -> str:
        if "no more will be" in context:
            return "Enough.\n</think>42" + END
        return ("<think>\n" if turn == 0 else "") + "@add 1, 2\n@add 3, 4\n@add 5, 6" + END

    sums = Sums()
    trajectory = think(Policy(script), sums, calls=20)
    assert len(calls_of(sums)) == 20
    assert trajectory.usage is not None
    assert (trajectory.usage.calls, trajectory.usage.failed_calls) == (21, 1)
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})


def test_user_message_keeps_calls_made_in_thinking() -> None:
    policy = says(
        "<think>\nI see.\n@add 20, 20", "Hm.\n</think>40?", "<think>\nOh.\n@add 40, 2", "</think>42"
    )
    trajectory = think(policy, Sums(replies=["Are you sure?"]))
    first, second = (thinking_chat().decode(s.token_ids_T.tolist()) for s in trajectory.segments)
    assert "I see." in first and "Hm." in first
    assert "I see." not in second and "Hm." not in second and "Oh." in second
    assert "@add 20, 20" in second and "40?" in second
    assert second.count("@add") == 2 + first.count("@add") - 1
    sampled = sum(int(s.trainable_T.sum()) for s in trajectory.segments)
    assert sampled == trajectory.sampled_tokens


def test_rewrite_in_thinking_starts_a_new_one() -> None:
    """The rewritten context shows closed turns, so the next call needs its own thinking."""

    def script(turn: int, context: str) -> str:
        if turn > 40:
            return "</think>42" + END
        new = context.rpartition("<|im_start|>assistant\n")[0].rpartition("<think>")[2]
        is_open = "</think>" not in new and "<think>" in context
        return ("" if is_open else "<think>\n") + "@add 1, 2" + END

    context = ContextManager(method="discard-all", window=260, most=9)
    trajectory = think(Policy(script), Sums(words=4), context=context, window=260)
    assert len(trajectory.segments) > 2 and trajectory.usage is not None
    assert trajectory.usage.malformed_calls == 0
    assert trajectory.finish_reason == "stop"


def test_system_prompt_precedes_the_tools() -> None:
    offered: list[object] = []

    def prompt(tools: object) -> str:
        offered.append(tools)
        return system_prompt("tools-in-thinking", calls=20)

    sums = Sums()
    environment = WithSystemPrompt(sums, prompt)
    trajectory = think(says("<think>\n@add 40, 2", "</think>42"), environment)
    assert offered == [["add"]]
    assert trajectory.messages[0] == {"role": "system", "content": prompt(["add"])}
    assert trajectory.messages[1] == {"role": "user", "content": "Sum."}
    assert trajectory.opening == 2
    text = thinking_chat().decode(trajectory.segments[0].token_ids_T.tolist())
    assert text.index("Up to 20 calls") < text.index("@add a, b") < text.index("Sum.")
    assert sums.log[-2:] == ["verdict stop", "close"]
