"""Results of evaluations, and statistics against independent values; resuming an evaluation."""

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.commands.compare import _paired_difference, compare
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.data.eval_store import EvaluationFolder, SampledPrompt
from keel.data.results import (
    _contest_score,
    _count_submissions,
    _fewest_steps_at_k,
    _majority_at_k,
    _pass_interval,
    format_results,
    results,
    scores_by_steps,
)


def sample(thinking: int, small: float, large: float, **more: Any) -> dict[str, Any]:
    parts = {"subtask/small": small, "subtask/large": large, **more.pop("parts", {})}
    known = {"correct": small + large, "error": 0.0, "finish_reason": "stop"}
    return {**known, "thinking": thinking, "parts": parts, **more}


def test_contest_score() -> None:
    samples = [sample(10, 0.3, 0), sample(50, 0, 0.7), sample(90, 0, 0), sample(40, 0.3, 0)]
    scores = [_contest_score(samples, n) for n in (1, 2, 3, 4)]
    assert scores == pytest.approx([0, 0.7, 1, 1])  # by hand: 90; then 50, then 40
    assert _contest_score([], 3) == 0


def test_attempts_count_submissions_in_their_order() -> None:
    right, wrong = sample(40, 0.3, 0.7), sample(50, 0.3, 0)
    samples = [right, wrong, sample(90, 0, 0.7), sample(99, 0.3, 0.7, finish_reason="length")]
    assert [_count_submissions(samples, n) for n in (1, 2, 3, 4)] == [None, None, 3, 3]
    sets = [asked("a", samples), asked("a", [right], number=1), asked("a", [wrong], number=2)]
    assert results(sets, (), 3)["recipe"]["a"]["attempts"] == 2  # by hand: (3 + 1) / 2
    assert results(sets, (), 3)["recipe"]["a"]["contest"] == pytest.approx((1 + 1 + 0.3) / 3)
    assert results(sets[2:], (), 3)["recipe"]["a"]["attempts"] is None


def test_unfit_completions_are_not_submitted() -> None:
    later = sample(1, 0.3, 0)
    known = ({"parts": {"samples": 0.0}}, {"parts": {"refusal": 1.0}})
    for unfit in (*known, {"finish_reason": "length"}, {"error": 1.0}):
        assert _contest_score([sample(99, 0.3, 0.7, **unfit), later], 1) == pytest.approx(0.3)
    fit = sample(99, 0.3, 0.7, parts={"samples": 1.0, "refusal": 0.0})
    assert _contest_score([fit, later], 1) == pytest.approx(1)


def asked(
    source: str, samples: list[dict[str, Any]], missing: int = 0, number: int = 0
) -> SampledPrompt:
    known = {"error": 0.0, "answer": "a", "tokens": 3, "finish_reason": "stop"}
    return SampledPrompt(
        variant="recipe",
        source=source,
        domain="agents" if source in ("a", "b") else source,
        id=f"{source}/{number}",
        digest="d",
        samples=[{**known, **one} for one in samples],
        missing=["late"] * missing,
    )


def test_fewest_turns() -> None:
    trips = [
        {"correct": 0.0, "turns": 1, "finish_reason": "length"},
        {"correct": 1.0, "turns": 2},
        {"correct": 0.0, "turns": 3},
    ]
    plain = [{"correct": 1.0}] * 4
    found = results([asked("trip", trips, missing=1), asked("sums", plain)], [1, 2, 4])
    trip, sums, everything = (found["recipe"][name] for name in ("trip", "sums", "all"))
    assert trip["fewest@4"] == 1.0 and trip["pass@1"] == 0.25
    assert trip["fewest@2"] == pytest.approx(1 / 2)  # three of the six pairs have the second
    assert not any(name.startswith("fewest") for of in (sums, everything) for name in of)
    assert "fewest@4" in format_results(found)[0]


def test_compared_by_domain(tmp_path: Path) -> None:
    for rate in (0, 1):
        of = [("a", 1), ("b", rate), ("b", rate), ("c", 0)]
        sets = [asked(name, [{"correct": right}], 0, n) for n, (name, right) in enumerate(of)]
        (tmp_path / str(rate)).mkdir()
        lines = "".join(json.dumps(asdict(one)) + "\n" for one in sets)
        (tmp_path / str(rate) / "samples.jsonl").write_text(lines)
    _, _, *table = compare(str(tmp_path / "0"), str(tmp_path / "1")).splitlines()
    assert [re.split(r"\s{2,}", line)[:3] for line in table] == [
        ["a", "1", "+0.000"],
        ["b", "2", "+1.000"],
        ["c", "1", "+0.000"],
        ["domain agents", "3", "+0.667"],
        ["all", "4", "+0.500"],
    ]


def test_wilson_interval() -> None:
    passes = [1] * 8 + [0] * 2
    # 10 prompts are 9 free residuals: n_eff = p(1−p) / (n/(n−1) · p(1−p)/n) = 9.
    low, high = _pass_interval(passes, [1] * 10)
    assert (low, high) == pytest.approx(wilson(0.8, 9), abs=1e-9)
    assert _pass_interval([0] * 10, [1] * 10) == pytest.approx((0, 0.2775328), abs=1e-6)
    assert _pass_interval([3, 3], [3, 3]) == pytest.approx((1 - 0.6576, 1), abs=1e-4)


def wilson(p: float, n: float) -> tuple[float, float]:
    z = 1.959964
    half, middle = z * ((p * (1 - p) + z * z / (4 * n)) / n) ** 0.5, p + z * z / (2 * n)
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def test_interval_coverage() -> None:
    rng, held, trials = np.random.default_rng(0), 0, 400
    for _ in range(trials):
        skill = rng.beta(1, 2, 60)  # of each prompt; mean 1/3
        low, high = _pass_interval(rng.binomial(4, skill).tolist(), [4] * 60)
        held += low <= 1 / 3 <= high
    assert 0.92 <= held / trials <= 0.98


def test_paired_difference() -> None:
    rng = np.random.default_rng(1)
    hard = rng.uniform(size=200)
    first, second = hard, np.clip(hard + 0.03 + rng.normal(0, 0.05, 200), None, None)
    found = _paired_difference(first.tolist(), second.tolist())
    assert found.mean == pytest.approx((second - first).mean())
    assert 0.015 < found.low < found.mean < found.high < 0.045 and found.p < 0.001
    assert found == _paired_difference(first.tolist(), second.tolist())
    back = _paired_difference(second.tolist(), first.tolist())
    assert back.mean == -found.mean and back.p == found.p
    same = _paired_difference([0.5] * 8, [0.5] * 8)
    assert (same.mean, same.low, same.high, same.p) == (0, 0, 0, 1)


def test_majority() -> None:
    answers = ["a", "a", "b", "b", "c", ""]
    assert _majority_at_k(answers, "a", 6) == 0.5
    assert _majority_at_k(answers, "c", 6) == 0 == _majority_at_k(["", ""], "a", 2)
    threes = itertools.combinations(answers, 3)
    exact = np.mean([_majority_at_k(list(three), "a", 3) for three in threes])
    assert _majority_at_k(answers, "a", 3) == pytest.approx(exact, abs=0.1)


@given(
    st.lists(st.tuples(st.sampled_from([None, 1, 2, 3]), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_fewest_steps(ended: list[tuple[int | None, bool]], k: int) -> None:

    def chosen(drawn: tuple[tuple[int | None, bool], ...]) -> float:
        least = min((steps for steps, _ in drawn if steps is not None), default=None)
        right = [ok for steps, ok in drawn if steps == least and steps is not None]
        return float(np.mean(right)) if right else 0.0

    steps, right = [one for one, _ in ended], [ok for _, ok in ended]
    k = min(k, len(ended))
    draws = [chosen(drawn) for drawn in itertools.combinations(ended, k)]
    assert _fewest_steps_at_k(steps, right, k) == pytest.approx(np.mean(draws))


def test_scores_by_steps() -> None:
    first = [{"correct": 1.0, "turns": 2}, {"correct": 0.0, "turns": 6}]
    second = [{"correct": 1.0, "turns": 4}, {"correct": 1.0, "turns": 8, "finish_reason": "turns"}]
    longer, wider = scores_by_steps([asked("a", first), asked("a", second)])
    # Stopped after 2, 4, 6 and 8 steps, which takes 2, 3.5, 4.5 and 5 on average.
    assert longer == {2: 0.25, 4: 0.5, 5: 0.5}
    assert wider == {5: 0.5, 10: 1.0}
    assert scores_by_steps([asked("a", [{"correct": 1.0}])]) == ({}, {})


def test_settings_of_an_evaluation(tmp_path: Path) -> None:
    def settings(*overrides: str) -> object:
        config = load_config("quickstart", [f"run.dir={tmp_path}", *overrides])
        return EvaluationFolder(config, "the model", "model")._settings

    assert settings("run.steps=7", "data.sources[spelling].weight=2") == settings()
    budget = "data.sources[spelling].budget.max_tokens=40"
    for knob in (budget, "rollout.timeout_s=77", "data.max_prompt_tokens=70"):
        assert settings(knob) != settings()


def test_progress(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    known = {"variant": "recipe", "source": "s", "domain": "d", "digest": "x"}

    def asked(number: int, *correct: float, missing: int = 0) -> SampledPrompt:
        samples = [{"correct": one} for one in correct]
        return SampledPrompt(**known, id=f"s/{number}", samples=samples, missing=["late"] * missing)

    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(0, 1.0, 0.0))
        out.add(asked(1, 1.0, missing=1))
        assert out.progress() == "pass@1 so far 0.500"
    with EvaluationFolder(config, "the model", "model") as out:
        out.add(asked(2, 1.0))
        assert out.progress() == "pass@1 so far 0.600" and len(out.asked) == 3


def test_folder_used_by_another_evaluation_is_rejected(tmp_path: Path) -> None:
    config = load_config("quickstart", [f"run.dir={tmp_path}"])
    first, second = (EvaluationFolder(config, "the model", "model") for _ in range(2))
    with first as out:
        out.finish({})
    with pytest.raises(ConfigError, match="run the command again"):
        second.__enter__()
