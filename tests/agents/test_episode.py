"""Episodes: what is said, called, answered, graded and recorded, and what ends them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keel.agents.context import ContextManager, Method
from keel.agents.types import ToolResult, Unscored
from keel.rl.turns import Message, ToolCall
from keel.rl.types import Trajectory, Verdict
from keel.rollout.chat.encoding import Marks
from tests.agents.scripted import BUDGET, END, Policy, Sums, chat, play, says


def done(found: Trajectory | str) -> Trajectory:
    assert isinstance(found, Trajectory), found
    return found


def test_calls_are_run_and_answered_until_the_policy_says_its_last_word() -> None:
    policy, sums = says("@add 20, 20", "@add 40, 2", "42"), Sums()
    trajectory = done(play(policy, sums))
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


def test_the_trainer_gets_exactly_the_contexts_that_were_sampled_from() -> None:
    policy = says("@add 1, 2", "@add 3, 4", "42")
    (segment,) = done(play(policy, Sums())).segments
    ids = segment.token_ids_T.tolist()
    places = np.flatnonzero(np.diff(segment.trainable_T.astype(int)) == 1) + 1
    rows = 0
    for turn, (request, first) in enumerate(zip(policy.requests, places, strict=True)):
        assert request.token_ids_T.tolist() == ids[:first] and request.routes_from == rows
        assert segment.version_T[first] == turn
        rest = segment.trainable_T[first:]
        sampled = len(rest) if rest.all() else int(np.argmin(rest))
        rows = int(first) + sampled - 1  # the last sampled token has been no input yet
    assert segment.routes_TLK is not None
    # Row t comes from the turn that had token t as input for the first time.
    turns = (segment.routes_TLK[:-1, 0, 0] - np.arange(len(ids) - 1)) // 100
    firsts = [request.routes_from for request in policy.requests]
    assert turns.tolist() == [sum(t >= f for f in firsts) - 1 for t in range(len(ids) - 1)]


def test_what_is_no_call_or_no_tool_is_answered_and_the_policy_may_try_again() -> None:
    sums = Sums()
    trajectory = done(play(says("@add 1, ", "@mul 1, 2", "42"), sums))
    assert not any("call add" in line for line in sums.log)
    usage = trajectory.usage
    assert usage is not None and usage.calls == 2 and usage.failed_calls == 2
    assert usage.malformed_calls >= 1
    errors = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert "not a tool call" in errors[0] and len(errors) == 2


def test_a_call_that_was_cut_off_is_never_run() -> None:
    sums = Sums()
    policy = Policy(lambda turn, _: "@add 1, 2", finish="length")
    trajectory = done(play(policy, sums))
    assert trajectory.finish_reason == "length"
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
def test_budgets_end_it_and_it_is_graded_on_what_it_did(
    change: dict[str, float], reason: str
) -> None:
    policy, sums = Policy(lambda turn, _: "@add 1, 2" + END), Sums()
    wide = replace(BUDGET, turns=50, tokens=10_000, window=10_000)
    budget = replace(wide, **change)
    trajectory = done(play(policy, sums, budget=budget))
    assert trajectory.finish_reason == reason
    assert sums.log[-2:] == [f"verdict {reason}", "close"]
    assert trajectory.sampled_tokens <= budget.tokens
    assert all(len(s.token_ids_T) <= budget.window for s in trajectory.segments)


def test_a_turn_without_a_token_ends_it_and_one_that_never_spoke_is_left_out() -> None:
    silent = Policy(lambda turn, _: "" if turn else "@add 1, 2" + END, finish="deadline")
    assert done(play(silent, Sums())).finish_reason == "deadline"
    reason = play(Policy(lambda turn, _: "", finish="deadline"), Sums())
    assert isinstance(reason, str) and "before it had sampled a token" in reason


def test_the_environment_may_end_it_with_a_result() -> None:
    sums = Sums()
    trajectory = done(play(says("@add 90, 9\n@add 1, 1"), sums))
    assert trajectory.finish_reason == "stop"
    assert [line for line in sums.log if line.startswith("call")] == ["call add {'a': 90, 'b': 9}"]
    assert trajectory.messages[-1]["content"] == "99"


@pytest.mark.parametrize("method", ["open", "call", "reply"])
def test_a_lost_environment_leaves_its_trajectory_out_with_the_reason(method: str) -> None:
    sums = Sums(fails=method)
    reason = play(says("@add 1, 2", "42"), sums)
    assert reason == f"environment, at {method}: ended with SIGSEGV"
    assert sums.log[-1] == "close"


@pytest.mark.parametrize("method", ["call", "reply"])
def test_an_environment_that_the_policy_brings_down_may_count_as_a_failure(method: str) -> None:
    sums = Sums(fails=method)
    trajectory = done(play(says("@add 1, 2", "42"), sums, crash_is_failure=("call", "reply")))
    assert trajectory.finish_reason == "crash" and sums.log[-1] == "close"
    assert trajectory.verdict == Verdict(
        parts={"correct": 0.0}, facts={"crash": f"environment, at {method}: ended with SIGSEGV"}
    )
    assert trajectory.messages[-1]["role"] == "assistant" and trajectory.sampled_tokens > 0


def test_one_that_goes_down_by_itself_never_does() -> None:
    assert play(says("42"), Sums(fails="open"), crash_is_failure=("call", "reply")) == (
        "environment, at open: ended with SIGSEGV"
    )
    unscored = Sums(grade=Unscored(reason="tests did not run"))
    assert isinstance(play(says("42"), unscored, crash_is_failure=("call", "reply")), str)


def test_one_that_goes_down_over_its_grading_may_count_as_a_failure() -> None:
    gone = Unscored(reason="environment, at verdict: ended with SIGKILL", fault="crash")
    everywhere = ("call", "reply", "verdict")
    trajectory = done(play(says("42"), Sums(grade=gone), crash_is_failure=everywhere))
    assert trajectory.finish_reason == "crash" and trajectory.sampled_tokens > 0
    assert trajectory.verdict == Verdict(parts={"correct": 0.0}, facts={"crash": gone.reason})
    assert isinstance(play(says("42"), Sums(grade=gone), crash_is_failure=("call",)), str)
    raised = replace(gone, fault="raised")  # the grader's own
    assert isinstance(play(says("42"), Sums(grade=raised), crash_is_failure=everywhere), str)


def test_a_grader_that_fails_is_never_a_zero() -> None:
    reason = play(says("42"), Sums(grade=Unscored(reason="tests did not run")))
    assert reason == "the environment has no verdict: tests did not run"


def test_an_engine_that_fails_ends_it_and_the_environment_is_closed() -> None:
    def script(turn: int, _: str) -> str:
        raise RuntimeError("no engine")

    sums = Sums()
    with pytest.raises(RuntimeError, match="no engine"):
        play(Policy(script), sums)
    assert sums.log == ["open 7", "close"]


def test_an_environment_that_cannot_be_closed_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def close(self: Sums) -> None:
        raise OSError("it is stuck")

    monkeypatch.setattr(Sums, "close", close)
    assert done(play(says("42"), Sums())).finish_reason == "stop"
    assert "could not be closed: OSError('it is stuck')" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["call", "reply"])
def test_a_text_that_cannot_fit_the_window_is_not_tokenised_whole(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One event loop has all episodes: a text of 8 MiB would hold it up for ten seconds."""
    sums = (
        Sums(words=(8 << 20) // len(" word")) if by == "call" else Sums(replies=["word " * 10**6])
    )
    longest, encode = [0], chat().encoder.encode

    def measured(text: str, marks: Marks) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return encode(text, marks)

    monkeypatch.setattr(chat().encoder, "encode", measured)
    trajectory = done(play(says("@add 20, 20" if by == "call" else "20", "42"), sums))
    assert trajectory.finish_reason == "window"  # as with any that is too long
    assert BUDGET.characters < longest[0] < BUDGET.characters + 500
    said = str(trajectory.messages[-1]["content"])
    assert said.endswith(" characters left out]") and len(said) < BUDGET.characters + 50


def test_a_text_that_could_fit_is_left_as_it_is() -> None:
    wide = replace(BUDGET, window=1_000_000)
    assert wide.characters == 16_000_000 and BUDGET.characters == 65_536
    for budget, length in ((wide, 8 << 20), (BUDGET, 65_536)):
        assert budget.cut("x" * length) == "x" * length
    assert BUDGET.cut("x" * 65_540) == "x" * 65_536 + "\n[4 characters left out]"


def test_an_opening_that_fills_the_window_is_named() -> None:
    reason = play(says("42"), Sums(), budget=replace(BUDGET, window=10))
    assert isinstance(reason, str) and "agents.window" in reason


def test_thinking_goes_at_the_users_next_message_and_each_token_is_trained_once() -> None:
    policy = Policy(lambda turn, context: _open(context) + script_of(turn))
    trajectory = done(play(policy, Sums(replies=["Is it?"]), thinking=True))
    assert [m["role"] for m in trajectory.messages].count("user") == 2
    first, second = trajectory.segments
    shown = chat().decode(second.token_ids_T.tolist())
    assert "I see." in chat().decode(first.token_ids_T.tolist()) and "I see." not in shown
    sampled = sum(int(s.trainable_T.sum()) for s in (first, second))
    assert sampled == trajectory.sampled_tokens


def _open(context: str) -> str:
    return "" if context.rstrip().endswith("<think>") else "<think>\n"


def script_of(turn: int) -> str:
    said = ["I see.\n</think>\n\n@add 1, 2", "Then.\n</think>\n\n3?", "So.\n</think>\n\n42"]
    return said[turn] + END


@pytest.mark.parametrize(
    ("method", "window"), [("discard-all", 260), ("discard-75", 260), ("summary", 900)]
)
def test_a_context_that_fills_its_window_is_rewritten_and_goes_on(
    method: Method, window: int
) -> None:
    turns = window // 20

    def script(turn: int, context: str) -> str:
        assert f"</think>\n\n{END}" not in context, "a turn that nobody took"
        if "Write down what is needed" in context.rpartition("<|im_start|>user")[2]:
            return "Added a lot." + END
        return ("42" if turn >= turns else f"@add {turn % 50}, 2") + END

    policy, sums = Policy(script), Sums(words=4)
    context = ContextManager(method=method, window=window, most=9, summary_tokens=window // 3)
    budget = replace(BUDGET, turns=turns + 9, tokens=10_000, window=window)
    trajectory = done(play(policy, sums, budget=budget, context=context))
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) > 1
    assert trajectory.usage is not None and trajectory.usage.rewrites >= 1
    assert all(len(r.token_ids_T) < window for r in policy.requests)
    for segment in trajectory.segments:
        text = chat().decode(segment.token_ids_T.tolist())
        assert "Sum." in text.partition("<|im_start|>assistant")[0], "the opening is gone"
    said = sum("Added a lot." in str(m["content"]) for m in trajectory.messages)
    assert said == (2 * trajectory.usage.rewrites if method == "summary" else 0)


def test_time_is_looked_at_between_calls_and_a_call_that_was_begun_has_its_own() -> None:
    policy, sums = Policy(lambda turn, _: "@add 1, 2\n@add 3, 4" + END, seconds=1.0), Sums()
    budget = replace(BUDGET, timeout_s=1.0)  # gone when the turn is over
    trajectory = done(play(policy, sums, budget=budget))
    assert trajectory.finish_reason == "deadline"
    assert sums.log == ["open 7", "verdict deadline", "close"]
    within: list[float] = []

    async def call(call: ToolCall, *, timeout_s: float) -> ToolResult:
        within.append(timeout_s)
        return ToolResult(text="3")

    sums = Sums()
    sums.call = call  # type: ignore[method-assign]
    budget = replace(BUDGET, timeout_s=1.5)
    done(play(says("@add 1, 2", "42"), sums, budget=budget))
    assert within == [BUDGET.call_s], "less than the call's own time"


def test_an_end_that_the_chat_format_does_not_know_is_an_end() -> None:
    policy, sums = Policy(lambda turn, _: "42", finish="stop"), Sums()
    assert done(play(policy, sums)).finish_reason == "stop"
    assert sums.log == ["open 7", "verdict stop", "close"]


def test_a_conversation_that_cannot_go_on_costs_itself_alone() -> None:
    class Wrong(Sums):
        async def reply(self, said: Message) -> Message | None:
            return {"role": "assistant", "content": "I speak for you."}

    reason = play(says("42", "42"), Wrong())
    assert isinstance(reason, str) and reason.startswith("the conversation broke: ")


def test_what_an_engine_refuses_is_no_fault_of_the_conversation() -> None:
    def script(turn: int, _: str) -> str:
        raise ValueError("exceeds the engine")

    with pytest.raises(ValueError, match="exceeds the engine"):
        play(Policy(script), Sums())


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN"])
def test_a_number_that_is_none_is_no_call(number: str) -> None:
    sums = Sums()
    trajectory = done(play(says(f"@add {number}, 2", "42"), sums))
    assert not any(line.startswith("call") for line in sums.log)
    assert trajectory.usage is not None and trajectory.usage.malformed_calls == 1
