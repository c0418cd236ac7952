"""Episodes: calls, grading, budgets, rewrites, lost environments; groups of them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.agents.episode import Budget, EpisodeSettings, shorten_context
from keel.agents.runner import EpisodeRunner
from keel.agents.types import NodeLost, ToolResult
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import Message, ToolCall, TurnRequest, TurnResult
from keel.rl.types import Purpose, Trajectory, Verdict
from keel.rollout.chat.chat import TemplateChat
from tests.agents.endpoint.kit import check_law
from tests.agents.scripted import BUDGET, CHAT, END, TASK, Policy, Sums, play
from tests.waiting import PATIENCE_S, wait_for


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
    sums = Sums(grade="tests did not run")
    assert isinstance(play(Policy(["42"]), sums, crash_is_failure=phases), str)
    trajectory = completed(play(Policy(["42"]), Sums(fails="verdict"), crash_is_failure=phases))
    assert trajectory.finish_reason == "crash" and trajectory.sampled_tokens > 0
    reason = "environment, at verdict: ended with SIGSEGV"
    assert trajectory.verdict == Verdict(parts={"correct": 0.0}, facts={"crash": reason})
    sums = Sums(fails="verdict")
    assert play(Policy(["42"]), sums, crash_is_failure=("call",)) == reason


def test_engine_error_is_raised_and_the_environment_closed() -> None:
    sums, policy = Sums(), Policy([])
    policy.fail = ValueError("exceeds the engine")
    with running(policy, Factory(lambda: sums)) as runner:
        group = runner.submit(TASK, group_size=1, purpose="train")
        with pytest.raises(ValueError, match="exceeds"):
            group.result(PATIENCE_S)
    assert sums.log[0].startswith("open") and sums.log[1:] == ["close"]


def test_oversized_text_is_cut_before_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_full_context_is_rewritten(method: Any, window: int) -> None:
    turns = window // 20

    def script(context: str, turn: int) -> str:
        assert f"</think>\n\n{END}" not in context, "an empty turn in the context"
        if "Write down what is needed" in context.rpartition("<|im_start|>assistant")[0][-400:]:
            return "Added a lot."
        return "42" if turn >= turns else f"@add {turn % 50}, 2"

    policy, sums = Policy(script), Sums(words=4)
    limits = {"turns": turns + 9, "tokens": 10_000, "window": window}
    how = {"context": method, "max_rewrites": 9, "summary_tokens": window // 3}
    trajectory = completed(play(policy, sums, budget=replace(BUDGET, **limits, **how)))
    assert trajectory.finish_reason == "stop" and len(trajectory.segments) > 1
    assert trajectory.usage is not None and trajectory.usage.rewrites >= 1
    assert all(len(r.token_ids_T) < window for r in policy.requests)
    check_law(policy, trajectory.segments)
    for segment in trajectory.segments:
        text = CHAT.decode(segment.token_ids_T.tolist())
        assert "Sum." in text.partition("<|im_start|>assistant")[0], "the opening is gone"
    summaries = sum("Added a lot." in str(m["content"]) for m in trajectory.messages)
    assert summaries == (2 * trajectory.usage.rewrites if method == "summary" else 0)


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


@dataclass
class Factory:
    make: Callable[[], Sums] = Sums
    made: list[Sums] = field(default_factory=list[Sums])

    def __call__(self, last_try: bool) -> Sums:
        self.made.append(self.make())
        return self.made[-1]

    @property
    def open(self) -> int:
        return sum(environment.log[-1] != "close" for environment in self.made)


@contextmanager
def running(
    turns: Any, factory: Factory | None = None, *, most_open: Callable[[], int] = lambda: 64
) -> Iterator[EpisodeRunner]:
    """turns: a policy, or a `SubmitTurn`."""
    with EpisodeRunner(
        {"sums": EpisodeSettings(environment=factory or Factory(), chat=CHAT, budget=BUDGET)},
        submit_turn=turns.submit if isinstance(turns, Policy) else turns,
        seed=1,
        most_open=most_open,
    ) as runner:
        yield runner
    assert not any(t.name == "keel-agents" for t in threading.enumerate())


def test_repeated_prompt_draws_new_reproducible_seeds() -> None:
    def seeds(*, update: bool) -> list[set[int]]:
        policy, draws = Policy(["42"]), []
        with running(policy) as runner:
            for _ in range(2):
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
                draws.append({r.seed for r in policy.requests})
                policy.requests.clear()
                if update:
                    runner.set_version(3)
        return draws

    first, second = seeds(update=False)
    assert not first & second and seeds(update=False) == [first, second]
    assert not seeds(update=True)[1] & (first | second)


def test_resumed_run_sends_the_same_requests() -> None:
    prompts = [TASK, replace(TASK, prompt_id="s/2")]

    def requests_after(versions: Sequence[int]) -> list[Any]:
        policy, factory = Policy(["@add 40, 2", "42"]), Factory()
        with running(policy, factory) as runner:
            for version in versions:
                runner.set_version(version)
                runner.submit(TASK, group_size=2, purpose="train").result(PATIENCE_S)
            policy.requests.clear()
            factory.made.clear()
            runner.set_version(3)
            for prompt in prompts:
                runner.submit(prompt, group_size=2, purpose="train").result(PATIENCE_S)
        tasks = sorted(environment.log[0] for environment in factory.made)
        turns = sorted((r.conversation, r.seed, r.token_ids_T.tolist()) for r in policy.requests)
        return [tasks, turns]

    assert requests_after([]) == requests_after([0, 1, 2])


class OnLostNode(Sums):
    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        raise NodeLost("call", "its node was lost")


@pytest.mark.parametrize("losses", [2, 9])
def test_lost_node_starts_the_episode_again(losses: int) -> None:
    factory = Factory()
    factory.make = lambda: OnLostNode() if len(factory.made) < losses else Sums()
    policy = Policy(lambda context, _: "42" if "tool" in context else "@add 40, 2")
    with running(policy, factory) as runner:
        group = runner.submit(TASK, group_size=1, purpose="train").result(PATIENCE_S)
    assert len(factory.made) == 3 and not factory.open
    assert (len(group.trajectories), len(group.dropped)) == ((1, 0) if losses == 2 else (0, 1))
    assert losses == 2 or "its node was lost" in group.dropped[0]


def test_open_episodes_are_limited() -> None:
    counts: list[int] = []
    factory, most = Factory(), 0
    policy = Policy(lambda _, turn: counts.append(factory.open) or "42")
    with running(policy, factory, most_open=lambda: most) as runner:
        for most in (3, 7, 2):
            groups = [runner.submit(TASK, group_size=4, purpose="train") for _ in range(4)]
            assert sum(len(group.result(PATIENCE_S).trajectories) for group in groups) == 16
            assert max(counts) == most
            counts.clear()


def test_dropped_episode_keeps_its_siblings() -> None:
    made = iter([Sums(), Sums(fails="call"), Sums(grade="no tests"), Sums()])
    with running(Policy(["@add 40, 2", "42"]), Factory(lambda: next(made))) as runner:
        group = runner.submit(TASK, group_size=4, purpose="train").result(PATIENCE_S)
    assert [t.sibling for t in group.trajectories] == [0, 3]
    assert sorted(reason.partition(":")[0] for reason in group.dropped) == [
        "environment, at call",
        "the environment has no verdict",
    ]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelled_group_leaves_nothing_open(how: str) -> None:
    futures: list[Future[TurnResult]] = []

    def turns(request: TurnRequest, purpose: Purpose) -> Future[TurnResult]:
        futures.append(Future())
        return futures[-1]

    factory = Factory()
    with running(turns, factory) as runner:
        group = runner.submit(TASK, group_size=3, purpose="train")
        wait_for(lambda: len(futures) == 3)
        if how == "cancel":
            assert group.cancel()
    with pytest.raises(CancelledError):
        group.result(PATIENCE_S)
    assert factory.open == 0 and len(factory.made) == 3
    assert all(future.cancelled() for future in futures)


OPENING: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
METHODS = ("none", "summary", "discard-75", "discard-all")


def step(number: int, results: int) -> list[Message]:
    calls = [{"id": f"{number}.{i}", "function": {"name": "t"}} for i in range(results)]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    return [turn, *({"role": "tool", "content": "r", "tool_call_id": c["id"]} for c in calls)]


def talk(number: int) -> list[Message]:
    return [
        {"role": "assistant", "content": f"answer {number}"},
        {"role": "user", "content": f"question {number}"},
    ]


def budget_of(method: Any, most: int = 3) -> Budget:
    return replace(BUDGET, context=method, window=100, max_rewrites=most, summary_tokens=10)


def rewrite(method: str, view: list[Message], tokens: int = 85, rewrites: int = 0) -> Any:
    return shorten_context(budget_of(method), OPENING, view, tokens=tokens, rewrites=rewrites)


def test_rewrite_is_due_from_80_percent() -> None:
    view = [*OPENING, *step(0, 1)]
    for method in METHODS:
        due = [tokens for tokens in range(100) if rewrite(method, view, tokens)]
        assert due == ([] if method == "none" else list(range(80, 100)))
        assert not rewrite(method, view, 99, rewrites=3)


def test_discard_removes_the_oldest_calls() -> None:
    view = [*OPENING, *step(0, 1), *step(1, 2), *talk(2), *step(3, 1), *step(4, 1)]
    rest = (*OPENING, *talk(2), *step(4, 1))
    assert rewrite("discard-75", view) == rest
    assert rewrite("discard-all", view) == (*OPENING, *talk(2))


def test_summary_is_asked_for_where_it_fits() -> None:
    view, plain = [*OPENING, *step(0, 1), *step(1, 1)], [*OPENING, *talk(0)]
    for tokens in (90, 91):
        assert rewrite("summary", view, tokens) == (*OPENING,)
        assert budget_of("summary").fits_summary(tokens) == (tokens == 90)
    assert rewrite("summary", plain, 90) == (*plain,)
    assert rewrite("summary", plain, 91) is None


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data(), opening=st.integers(1, 120), most=st.integers(1, 4))
def test_endless_policy_ends_with_calls_intact(
    method: str, data: st.DataObject, opening: int, most: int
) -> None:
    budget = budget_of(method, most)
    lengths = st.integers(0, 60)
    size = {id(message): 1 for message in OPENING} | {id(OPENING[-1]): opening}
    view = list(OPENING)
    rewrites = turns = 0

    def tokens() -> int:
        return sum(size[id(message)] for message in view)

    def check(messages: Any) -> list[Message]:
        assert list(messages[:2]) == OPENING
        calls = [call["id"] for m in messages for call in m.get("tool_calls", ())]
        results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
        assert sorted(calls) == sorted(results), "a call without its result, or the reverse"
        assert messages[-1]["role"] in ("user", "tool"), "the policy can speak"
        return list(messages)

    while tokens() < budget.window:
        assert turns <= 100 * (most + 1) + 1, "each turn takes a token, each rewrite counts"
        messages = shorten_context(budget, OPENING, view, tokens=tokens(), rewrites=rewrites)
        if messages is not None:
            if method == "summary":
                view = view if budget.fits_summary(tokens()) else check(messages)
                messages = (*OPENING, {"role": "user", "content": "a summary"})
                size[id(messages[-1])] = data.draw(st.integers(1, 10))
            assert tokens() >= 0.8 * budget.window or method == "summary"
            shorter = check(messages)
            assert method == "summary" or len(shorter) < len(view)
            view = shorter
            rewrites += 1
        turns += 1
        new = step(turns, data.draw(st.integers(1, 3))) if data.draw(st.booleans()) else talk(turns)
        size |= {id(message): data.draw(lengths) for message in new} | {id(new[0]): 1}
        view += new
    assert rewrites <= most
