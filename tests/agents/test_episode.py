"""Episodes: calls, grading, budgets, lost environments, rewrites, calls in the thinking."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keel.agents.context import ContextManager, Method
from keel.agents.types import Unscored
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.types import Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from tests.agents.endpoint.kit import check_law
from tests.agents.scripted import BUDGET, CHAT, END, Policy, Sums, play


def completed(outcome: Trajectory | str) -> Trajectory:
    assert isinstance(outcome, Trajectory), outcome
    return outcome


def calls_of(sums: Sums) -> list[str]:
    return [line for line in sums.log if line.startswith("call")]


def test_calls_run_until_the_final_answer() -> None:
    policy, sums = Policy(["@add 20, 20", "@add 40, 2", "42"]), Sums()
    trajectory = completed(play(policy, sums))
    calls = ["call add {'a': 20, 'b': 20}", "call add {'a': 40, 'b': 2}"]
    assert sums.log == ["open 7", *calls, "reply 42", "verdict stop", "close"]
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) == 1
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.opening == 1
    usage = trajectory.usage
    assert usage is not None and (usage.turns, usage.calls, usage.failed_calls) == (3, 2, 0)
    assert usage.sampling_s == 1.5 and 0 < usage.cached_tokens <= usage.repeated_tokens


@pytest.mark.parametrize("text", ["@add 1, ", "@add 1e999, 2"])
def test_malformed_call_gets_an_error(text: str) -> None:
    sums = Sums()
    trajectory = completed(play(Policy([text, "@mul 1, 2", "42"]), sums))
    assert not any("call add" in line for line in sums.log)
    usage = trajectory.usage
    assert usage is not None and (usage.calls, usage.failed_calls) == (2, 2)
    assert usage.malformed_calls >= 1
    assert sum(message["role"] == "tool" for message in trajectory.messages) == 2


def test_cut_call_is_never_run() -> None:
    sums = Sums()
    policy = Policy(lambda _, turn: "@add 1, 2", finish="length")
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
    policy, sums = Policy(lambda _, turn: "@add 1, 2"), Sums()
    budget = replace(replace(BUDGET, turns=50, tokens=10_000, window=10_000), **change)
    trajectory = completed(play(policy, sums, budget=budget))
    assert trajectory.finish_reason == reason
    assert sums.log[-2:] == [f"verdict {reason}", "close"]
    assert trajectory.sampled_tokens <= budget.tokens
    assert all(len(s.token_ids_T) <= budget.window for s in trajectory.segments)


@pytest.mark.parametrize("phase", ["open", "call"])
@pytest.mark.parametrize("is_failure", [False, True])
def test_lost_environment_is_dropped_or_a_failure(phase: str, is_failure: bool) -> None:
    sums, phases = Sums(fails=phase), ("call", "reply") if is_failure else ()
    outcome = play(Policy(["@add 1, 2", "42"]), sums, crash_is_failure=phases)
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
    assert isinstance(play(Policy(["42"]), Sums(grade=unscored), crash_is_failure=phases), str)
    lost = Unscored(reason="environment, at verdict: ended with SIGKILL", fault="crash")
    trajectory = completed(play(Policy(["42"]), Sums(grade=lost), crash_is_failure=phases))
    assert trajectory.finish_reason == "crash" and trajectory.sampled_tokens > 0
    assert trajectory.verdict == Verdict(parts={"correct": 0.0}, facts={"crash": lost.reason})
    assert isinstance(play(Policy(["42"]), Sums(grade=lost), crash_is_failure=("call",)), str)
    raised = replace(lost, fault="raised")  # by the grader's own code
    assert isinstance(play(Policy(["42"]), Sums(grade=raised), crash_is_failure=phases), str)


@pytest.mark.parametrize("error", [RuntimeError("no engine"), ValueError("exceeds the engine")])
def test_engine_error_is_raised_and_the_environment_closed(error: Exception) -> None:
    sums, policy = Sums(), Policy([])
    policy.fail = error
    with pytest.raises(type(error), match=str(error)):
        play(policy, sums)
    assert sums.log == ["open 7", "close"]


def test_oversized_text_is_cut_before_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing 8 MiB would block the event loop of all episodes for ten seconds."""
    longest, encode = [0], CHAT.encoder.encode

    def measured(text: str) -> list[int]:
        longest[0] = max(longest[0], len(text))
        return encode(text)

    monkeypatch.setattr(CHAT.encoder, "encode", measured)
    trajectory = completed(play(Policy(["@add 20, 20", "42"]), Sums(words=10**6)))
    assert trajectory.finish_reason == "window"
    assert BUDGET.characters < longest[0] < BUDGET.characters + 500
    assert len(str(trajectory.messages[-1]["content"])) < BUDGET.characters + 50


@pytest.mark.parametrize(
    ("method", "window"), [("discard-all", 260), ("discard-75", 260), ("summary", 900)]
)
def test_full_context_is_rewritten(method: Method, window: int) -> None:
    turns = window // 20

    def script(context: str, turn: int) -> str:
        assert f"</think>\n\n{END}" not in context, "an empty turn in the context"
        if "Write down what is needed" in context.rpartition("<|im_start|>assistant")[0][-400:]:
            return "Added a lot."
        return "42" if turn >= turns else f"@add {turn % 50}, 2"

    policy, sums = Policy(script), Sums(words=4)
    context = ContextManager(method=method, window=window, most=9, summary_tokens=window // 3)
    budget = replace(BUDGET, turns=turns + 9, tokens=10_000, window=window)
    trajectory = completed(play(policy, sums, budget=budget, context=context))
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) > 1
    assert trajectory.usage is not None and trajectory.usage.rewrites >= 1
    assert all(len(r.token_ids_T) < window for r in policy.requests)
    check_law(policy, trajectory.segments)
    for segment in trajectory.segments:
        text = CHAT.decode(segment.token_ids_T.tolist())
        assert "Sum." in text.partition("<|im_start|>assistant")[0], "the opening is gone"
    summaries = sum("Added a lot." in str(m["content"]) for m in trajectory.messages)
    assert summaries == (2 * trajectory.usage.rewrites if method == "summary" else 0)


def test_truncate_keeps_texts_that_could_fit() -> None:
    assert BUDGET.truncate("x" * 65_536) == "x" * 65_536
    assert BUDGET.truncate("x" * 65_540) == "x" * 65_536 + "\n[4 characters left out]"


def test_several_calls_in_one_thinking() -> None:
    policy = Policy(
        ["<think>\nLet me add.\n@add 20, 20", "Two more.\n@add 40, 2", "Done.\n</think>42"]
    )
    sums = Sums()
    form = TemplateChat(build_tokenizer(), tools_in_thinking=True)
    trajectory = completed(play(policy, sums, thinking=True, form=form))
    assert calls_of(sums) == ["call add {'a': 20, 'b': 20}", "call add {'a': 40, 'b': 2}"]
    assert trajectory.verdict == Verdict(parts={"correct": 1.0})
    assert trajectory.finish_reason == "stop" and trajectory.usage is not None
    assert (trajectory.usage.calls, trajectory.usage.failed_calls) == (2, 0)
    turns = [m for m in trajectory.messages if m["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in turns] == ["Let me add.", "Two more.", "Done."]
    assert [m["content"] for m in turns] == ["", "", "42"]
    (segment,) = trajectory.segments
    check_law(policy, trajectory.segments)
    text = form.decode(segment.token_ids_T.tolist())
    assert text.count("<think>") == 1 == text.count("</think>")
