"""What a user's reward function gets wrong is said, with its place, and stops the run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keel.rewards.checks import FAILED, sample_completion, try_functions
from keel.rewards.compose import check_weights
from keel.rewards.custom import prompt_fields
from keel.rewards.failure_budget import LEAST, MOST_SAID, Failures, Recent, RewardStopped
from keel.rewards.scorer import Scorer
from keel.rewards.workers.pool import WorkerPool
from tests.rewards.groups import PROMPT, group
from tests.waiting import PATIENCE_S, within_some

pytestmark = pytest.mark.e2e

MINE = '''"""Rewards with all that can be wrong with one."""
import asyncio, json, os, signal, time

def raises(prompt, trajectory):
    return json.loads(trajectory.answer)["score"]

def raises_twice(prompt, trajectory):
    if trajectory.answer == "3":
        raise KeyError("three")
    return 1 / len(trajectory.thinking)

def none(prompt, trajectory):
    if not trajectory.answer:
        return 1.0

def nan(prompt, trajectory):
    return float("nan")

def below(prompt, trajectory):
    return -0.5

def above(prompt, trajectory):
    return 7

def text(prompt, trajectory):
    return "good"

def scores(prompt, trajectory, **more):
    return [1.0, 0.0]

def few(prompt, trajectories):
    return [1.0]

def one(prompt, trajectories):
    return 1.0

def leaves(prompt, trajectory):
    raise SystemExit(3)

def escapes(prompt, trajectory):
    raise ValueError("\\x1b[2J" + trajectory.answer)

def dies(prompt, trajectory):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(prompt, trajectory):
    time.sleep(1000)

def talks(prompt, trajectory):
    print("heard", trajectory.answer)
    return 0.5

def some(prompt, trajectory):
    assert trajectory.answer != "bad", "a bad one"
    return 0.5

async def later(prompt, trajectory):
    await asyncio.sleep(0)
    return json.loads(trajectory.answer)["score"]

async def many(prompt, trajectory):
    yield 1.0

def alone(trajectory):
    return 1.0

def texts(prompts, completions, **kwargs):
    return [1.0 for _ in completions]

def verl(data_source, solution_str, ground_truth=None, extra_info=None):
    return float(solution_str == ground_truth)

def column(completions, answer, **kwargs):
    return [1.0 for _ in completions]

def turned(trajectory, prompt):
    return 1.0

def trl(completions, **kwargs):
    return [1.0 for _ in completions]
'''
LINES = {
    line.partition("def ")[2].partition("(")[0]: number
    for number, line in enumerate(MINE.splitlines(), start=1)
    if "def " in line
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    (tmp_path / "failing_rewards.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("failing_rewards", None)


def weights(name: str) -> dict[str, dict[str, float]]:
    return {"maths": {"correct": 1.0, f"failing_rewards.{name}": 0.5}}


WRONG = [
    ("raises", 1, "TypeError: 'int' object is not subscriptable"),
    ("none", 0, "BadReward: returned None; is there a way through it without a `return`"),
    ("nan", 0, "BadReward: returned NaN"),
    ("below", 0, "BadReward: returned -0.5, below 0"),
    ("above", 0, "BadReward: returned 7.0, above 1; scale it"),
    ("text", 0, "BadReward: returned a str ('good'); a number"),
    ("scores", 0, "BadReward: returned a list ('[1.0, 0.0]'); a number"),
    ("few", 0, "BadReward: returned 1 numbers for "),
    ("one", 0, "BadReward: returned a float; a list is wanted"),
    ("later", 2, "TypeError: 'int' object is not subscriptable"),
    ("leaves", 1, "RuntimeError: called exit(3)"),
    ("escapes", 1, "ValueError: �[2J3"),
]
"""A function of MINE, the line of it that fails, and what is said."""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_first_error_is_said_once_with_its_place(workers: int) -> None:
    said: list[str] = []
    domains = {name: weights(name)["maths"] for name, *_ in WRONG}
    with Scorer(domains, workers=workers, timeout_s=PATIENCE_S, say=said.append) as scorer:
        for name, line, message in WRONG:
            said.clear()
            prompt = replace(PROMPT, domain=name)
            for _ in range(3):
                (scored,) = scorer.score([group("</think>3", "</think>3", prompt=prompt)])
            (only,) = said
            assert f"failing_rewards.{name} failed on prompt file/1: {message}" in only
            assert f"(failing_rewards.py:{LINES[name] + line} in {name})" in only
            assert [parts["error"] for parts in scored.parts_G] == [1.0, 1.0], name
            assert [parts["correct"] for parts in scored.parts_G] == [1.0, 1.0], name


def test_errors_of_other_places_are_said_as_well() -> None:
    said: list[str] = []
    with Scorer(weights("raises_twice"), workers=0, say=said.append) as scorer:
        scorer.score([group("</think>3", "</think>4", "</think>3", "</think>5")])
    assert len(said) == 2
    assert "KeyError: 'three'" in said[0]
    assert "ZeroDivisionError" in said[1]
    failures = Failures(1.0, said.append)
    for number in range(100):
        failures.note("a.b", "x/1", [("ValueError: x", f"a.py:{number} in b")])
    assert len(said) == 2 + MOST_SAID


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_always_fails_stops_the_run(workers: int) -> None:
    with Scorer(weights("none"), workers=workers, max_failure_fraction=0.2, say=list) as scorer:  # type: ignore[arg-type]
        future = scorer.submit(group(*["</think>3"] * 8))
        place = f"failing_rewards.py:{LINES['none']} in none"
        message = (
            "reward failing_rewards.none failed on 5 of the last 5 completions, and "
            f"rewards.max_failure_fraction = 0.2; the last, of prompt file/1: .*{place}"
            ".*Fix the function"
        )
        with pytest.raises(RewardStopped, match=message):
            future.result(PATIENCE_S)


def test_a_few_failures_do_not_and_neither_does_a_verifier_that_cannot_read() -> None:
    unreadable = {
        "kind": "reasoning_gym",
        "task": "prime_factorization",
        "entry": {"answer": "2 × 3", "metadata": {}},
    }
    prompt = replace(PROMPT, reward=unreadable)
    said: list[str] = []
    with Scorer(weights("some"), workers=0, max_failure_fraction=0.2, say=said.append) as scorer:
        for _ in range(30):
            scored = scorer.score([group(*["</think>ok"] * 9, "</think>bad", prompt=prompt)])
    assert [parts["error"] for parts in scored[0].parts_G] == [1.0] * 10
    assert re.search(r"reward correct \(reasoning_gym prime_factorization\).*ValueError", said[0])
    assert "a bad one" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize(("share", "stops_at"), [(0.0, 1), (0.2, 5), (0.5, 11), (1.0, None)])
def test_the_share_at_the_start_is_of_twenty(share: float, stops_at: int | None) -> None:
    recent = Recent(share)
    first = next((n for n in range(1, 10 * LEAST) if recent.add(True)), None)
    assert first == stops_at
    assert Recent(share).add(False) == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("many", r"is an async generator; return the number"),
        ("alone", r"takes \(trajectory\), .*Write def alone\(prompt, trajectory\)"),
        (
            "texts",
            r"takes \(prompts, completions.*Write def texts\(prompt, trajectory\), or def te",
        ),
        ("verl", r"takes \(data_source, solution_str, .*prompt, trajectories\) for all of a group"),
        ("column", r"takes \(completions, answer.*, not with the texts and columns of other libr"),
        ("turned", r"one trajectory, in that order\. Write def turned\(prompt, trajectory\)"),
        ("trl", r"takes \(completions, \*\*kwargs\), and is called with one prompt and one traj"),
    ],
)
def test_what_can_never_work_is_refused_before_the_run(name: str, message: str) -> None:
    at = f"failing_rewards.py:{LINES[name]} in {name}"
    with pytest.raises(ValueError, match=message) as refused:
        check_weights(weights(name))
    assert at in str(refused.value)


def test_a_module_that_fails_to_load_says_where(folder: Path) -> None:
    (folder / "failing_rewards.py").write_text("import math\nlimit = math.sqrt(-1)\n")
    message = r"cannot be imported: ValueError: .* \(failing_rewards.py:2 in <module>\)"
    with pytest.raises(ValueError, match=message):
        check_weights(weights("x"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("dies", "verifier ended with SIGSEGV"), ("hangs", "verifier ran past its deadline of ")],
)
def test_a_worker_that_dies_says_where_it_was(
    folder: Path, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.rewards.workers.pool.FIRST_S", 0.0)

    def dies(limit_s: float) -> None:
        said: list[str] = []
        log = folder / "run" / f"rewards_{limit_s}"
        with Scorer(weights(name), workers=1, timeout_s=limit_s, say=said.append, log=log) as one:
            one.score([group("</think>3")])
        at = f"(failing_rewards.py:{LINES[name] + 1} in {name})"
        assert re.search(rf"{message}.*{re.escape(at)}", "".join(said))

    within_some(dies, (1.0, 10.0, 60.0) if name == "hangs" else (PATIENCE_S,))


def test_what_a_function_prints_is_kept_and_the_user_told_where(folder: Path) -> None:
    said: list[str] = []
    log = folder / "run" / "rewards"
    with Scorer(
        weights("talks"), workers=1, timeout_s=PATIENCE_S, say=said.append, log=log
    ) as scorer:
        scorer.score([group("</think>3", "</think>4"), group("</think>5")])
    assert (log / "worker_0.log").read_text() == "heard 3\nheard 4\nheard 5\n"
    assert said == [f"the reward workers print to {log}"]


def test_without_a_log_it_is_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with Scorer(weights("talks"), workers=1, timeout_s=PATIENCE_S) as scorer:
        scorer.score([group("</think>3")])
    assert "heard 3" in capfd.readouterr().err


def test_what_verifiers_print_is_not_kept(folder: Path) -> None:
    # The Tower of Hanoi's prints each move that it refuses.
    entry = {
        "question": "?",
        "answer": "Move disk 1 from Peg 1 to Peg 2",
        "metadata": {"num_disks": 1, "num_pegs": 3, "start_peg": 1, "target_peg": 2},
    }
    spec = {"kind": "reasoning_gym", "task": "tower_of_hanoi", "entry": entry}
    pool = WorkerPool(1, timeout_s=PATIENCE_S, log=folder / "rewards")
    answers = [entry["answer"], "Move disk 1 from Peg 1 to Peg 9"]
    right, wrong = pool.submit(spec, answers).result(PATIENCE_S)
    pool.close()
    assert (right.score, wrong.score) == (1.0, 0.0)
    assert not pool.printed()


def test_each_function_is_tried_on_a_sample_before_the_run() -> None:
    names = ("some", "none", "raises")
    weights_of = {f"failing_rewards.{name}": 1.0 for name in names}
    tried = try_functions([PROMPT], weights_of, timeout_s=PATIENCE_S)
    assert tried["failing_rewards.some"] == "0.5 for a sample completion of file/1"
    assert tried["failing_rewards.none"].startswith(f"{FAILED} of file/1")
    assert f"(failing_rewards.py:{LINES['none']} in none)" in tried["failing_rewards.none"]
    assert f":{LINES['raises'] + 1} in raises)" in tried["failing_rewards.raises"]
    assert try_functions([PROMPT], {"correct": 1.0}, timeout_s=1.0) == {}


def test_a_group_function_is_tried_on_two_different_completions(folder: Path) -> None:
    (folder / "grouped.py").write_text(
        "def one(prompt, trajectories):\n"
        "    return [1.0]\n"
        "def unlike(prompt, trajectories):\n"
        "    return [float(one.answer == trajectories[0].answer) for one in trajectories]\n"
    )
    names = {"grouped.one": 1.0, "grouped.unlike": 1.0}
    for prompt in (PROMPT, replace(PROMPT, reward={"kind": "functions"})):
        tried = try_functions([prompt], names, timeout_s=PATIENCE_S)
        assert "returned 1 numbers for 2 trajectories" in tried["grouped.one"]
        assert tried["grouped.unlike"].startswith("0.5 for a group of two sample completions")


def test_the_first_call_may_load_and_the_others_have_the_runs_deadline(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "loads.py").write_text(
        "import time\n"
        "model = []\n"
        "def kept(prompt, trajectory):\n"
        "    if not model:\n"
        "        time.sleep(2.5)\n"
        "        model.append(1)\n"
        "    return 1.0\n"
        "def slow(prompt, trajectory):\n"
        "    print('slow is called')\n"
        "    time.sleep(2.5)\n"
        "    return 1.0\n"
    )
    tried = try_functions([PROMPT], {"loads.kept": 1.0, "loads.slow": 1.0}, timeout_s=2.0)
    assert tried["loads.kept"] == "1 for a sample completion of file/1"
    assert "verifier ran past its deadline of 2 s" in tried["loads.slow"]
    assert "rewards.timeout_s, where it is slow" in tried["loads.slow"]
    assert "(loads.py:10 in slow)" in tried["loads.slow"]
    told = "".join(capfd.readouterr())
    assert "slow is called" in told and "most recent call first" not in told


def test_a_first_call_that_comes_to_no_end_gets_its_time_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keel.rewards.workers.pool.FIRST_S", 0.4)
    fields = prompt_fields(PROMPT)
    spec = {"kind": "function", "name": "failing_rewards.hangs", "prompt": fields}
    pool = WorkerPool(1, timeout_s=0.2)
    text = sample_completion(PROMPT).dumps()
    first, second = (pool.submit(spec, [text]).result(PATIENCE_S)[0] for _ in range(2))
    pool.close()
    assert first.error.endswith("deadline of 0.4 s") and second.error.endswith("of 0.2 s")


def test_a_completion_that_hangs_takes_no_time_to_load_from_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of those that are scored is the first of its process."""
    (folder / "loads_again.py").write_text(
        "import time\n"
        "def score(prompt, trajectory):\n"
        "    time.sleep(1000 if trajectory.answer == 'hangs' else 0.5)\n"
        "    return 1.0\n"
    )
    monkeypatch.setattr("keel.rewards.workers.pool.FIRST_S", 6.0)
    given = {PROMPT.domain: {"loads_again.score": 1.0}}
    with Scorer(given, workers=1, timeout_s=0.3, say=lambda _: None) as scorer:
        found = [
            scorer.score([group(f"</think>{said}")])[0].rewards_G[0]
            for said in ("3", "hangs", "hangs", "3")
        ]
    assert found == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return answr", "NameError: name 'answr' is not defined"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_fails_whatever_the_completion_is_refused(folder: Path, body: str, said: str) -> None:
    (folder / "slips.py").write_text(f"def mine(prompt, trajectory):\n    {body}\n")
    with pytest.raises(ValueError, match=rf"reward slips\.mine: {said} \(slips\.py:2 in mine\)"):
        try_functions([PROMPT], {"slips.mine": 1.0}, timeout_s=PATIENCE_S)


def test_the_sample_is_an_answer_to_the_prompt() -> None:
    answer = sample_completion(PROMPT)
    assert (answer.answer, answer.finish_reason) == ("3", "stop")
    assert answer.thinking and answer.raw.endswith("</think>3") and answer.sampled_tokens > 3
    task = replace(PROMPT, reward={"kind": "code", "tests": []}, thinking=False)
    assert sample_completion(task).answer and sample_completion(task).thinking == ""
