"""Judged specs, settings and caches; proofs, their composed reward, and the calls behind it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.configs.schema import ConfigError, JudgeConfig
from keel.rewards.judge import client
from keel.rewards.judge.client import _ReplyCache
from keel.rewards.judge.prompts import MetaCheck, Verification
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import (
    CallError,
    Proof,
    Rubric,
    _ProofSample,
    _ProofSpec,
    judged_spec,
    read_proof,
)
from keel.rl.types import Prompt
from tests.rewards.judge.judge_server import Reply, Server, judged, material_of, running, says
from tests.waiting import PATIENCE_S

ONE = {"name": "a", "text": "says a", "weight": 1}
VERIFICATION = {"kind": "verification", "problem": "a", "proof": "b", "score": 1}


def rubric(*criteria: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "rubric", "criteria": list(criteria), **more}


def weighted(*weights: Any) -> dict[str, Any]:
    return rubric(*({"name": f"c{i}", "text": "t", "weight": w} for i, w in enumerate(weights)))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        *((rubric(), "criteria"), ({"kind": "rubric", "criteria": "be nice"}, "criteria")),
        *(
            (rubric("nice"), "criteria.0.: must be an object, is 'nice'$"),
            (rubric({"text": "t", "weight": 1}), "name"),
        ),
        *((rubric({**ONE, "text": " "}), "text"), (rubric({**ONE, "wieght": 1}), "wieght")),
        *((rubric(ONE, criterion=1), "criterion"), (rubric(ONE, ONE), "same name")),
        *((rubric({**ONE, "thinking": 1}), "thinking"), (rubric(ONE, reference=3), "reference")),
        *((weighted(*w), "weight") for w in ((1.5, -0.5), (1, 0), (math.nan,), ("1",), (True,))),
        *(
            (weighted(0.5, 0.4), "sum to 0.9; make them sum to 1$"),
            (weighted(*[1 / 33] * 33), "criteria"),
        ),
        *(({"kind": "rubrik"}, "rubrik"), ({"kind": "refusal", "refuse": "yes"}, "refuse")),
        ({"kind": "proof", "alpha": 1.2}, "alpha"),
        *(({**VERIFICATION, "proof": ""}, "proof"), ({**VERIFICATION, "score": 2}, "score")),
    ],
)
def test_bad_specs_are_refused(spec: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        judged_spec(spec)


def test_weights_sum_up_to_rounding() -> None:
    rubric = Rubric.parse(weighted(0.333, 0.333, 0.333))
    everything = {f"c{i}": (1.0, "") for i in range(3)}
    assert rubric.combine({}, [everything]).value == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        *({"base_url": bad} for bad in ("localhost:8000", "", "http://me:sk-12345@h/v1")),
        *({"model": ""}, {"samples": 0}, {"max_failure_fraction": 1.5}, {"max_calls": -1}),
        *({"timeout_s": 0.0}, {"extra": {"model": "x"}}, {"api_key_env": "sk-12345"}),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.judge\.") as error:
        JudgeConfig(**{"base_url": "http://h/v1", "model": "m", **changes})
    assert "sk-12345" not in str(error.value), "keys are not repeated"


def test_runs_share_a_cache_file(tmp_path: Path) -> None:
    folder = str(tmp_path / "a" / "b")
    first, second = _ReplyCache(folder), _ReplyCache(folder)
    first.put("key", "old")
    second.put("key", "new ✓")
    assert first.get("key") == "new ✓"
    assert first.get("other") is None
    first.close()
    second.close()
    file = tmp_path / client._CACHE_FILE
    file.write_text("not a database, " * 100)
    for path in (tmp_path, file):
        with pytest.raises(ValueError, match=r"rewards\.judge\.cache_dir"):
            _ReplyCache(str(path))


def test_the_memory_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_REPLIES", 3)
    cache = _ReplyCache("")
    for number in range(5):
        cache.put(f"key {number}", "y")
    assert [cache.get(f"key {number}") for number in range(5)] == [None, None, "y", "y", "y"]


MESSAGES = ({"role": "user", "content": "Prove it."},)
PROMPT = Prompt(prompt_id="p", domain="d", messages=MESSAGES, reward={"kind": "proof"})


def answer(solution: str = "QED", score: str = "1", evaluation: str = "Fine.") -> str:
    return f"## Solution\n{solution}\n\n## Self Evaluation\n{evaluation}\n\\boxed{{{score}}}"


@pytest.mark.parametrize(
    "text",
    [
        *("QED", "## Solution\nQED", answer() + "\n## Solution\nagain", "First: " + answer()),
        *(answer("a\n## Self Evaluation\nb"), answer(" "), answer(score="0.9"), answer(score="")),
        "## Self Evaluation\n\\boxed{1}\n## Solution\nQED",
        "## Solution\n\\boxed{1}\n## Self Evaluation\nfine",
        "## Solution\na\n## Self Evaluation\n<answer>1</answer>",
    ],
)
def test_malformed_answers(text: str) -> None:
    assert isinstance(read_proof(text), str)


def sample(score: float, *, verifier: float | None = None, own: float = 1.0) -> _ProofSample:
    return _ProofSample(
        Verification("e", () if score == 1 else ("f",), score),
        None if verifier is None else MetaCheck("v", verifier),
        MetaCheck("s", own),
    )


def reward(claimed: float, *samples: _ProofSample, alpha: float = 0.75) -> float:
    return _ProofSpec(alpha=alpha).combine(Proof("y", "z", claimed), samples).value


def test_the_composed_reward() -> None:
    assert reward(1, sample(1)) == 1
    assert reward(1, sample(0, verifier=1)) == 0, "a wrong proof that claims to be right"
    assert reward(0, sample(0, verifier=1)) == 0.25, "one that admits it"
    assert reward(0, sample(0, verifier=1, own=0)) == 0, "… with flaws that it lacks"
    assert reward(0, sample(0, verifier=0)) == 0.75, "the verifier was wrong"
    assert reward(0.5, sample(0.5, verifier=1), sample(0.5, verifier=1)) == 0.375 + 0.25
    assert reward(1, sample(0.5, verifier=0.5)) == pytest.approx(0.75 * 0.75 + 0.25 * 0.75)


SCORE = st.sampled_from([0.0, 0.5, 1.0])


@given(SCORE, SCORE, SCORE, SCORE, st.floats(0.5, 1))
def test_honesty_pays(
    claimed: float, score: float, verifier: float, own: float, alpha: float
) -> None:
    one = sample(score, verifier=verifier if score < 1 else None, own=own)
    value = reward(claimed, one, alpha=alpha)
    assert 0 <= value <= 1
    assert value <= reward(1, sample(1), alpha=alpha)
    assert reward(one.proof, one, alpha=alpha) >= value, "honesty pays"
    assert one.proof >= score, "unconfirmed criticism costs nothing"


def scripted(score: str, verifier: str, own: str) -> Any:
    """A verifier and a meta-verifier with fixed scores."""

    def behave(request: dict[str, Any]) -> Reply:
        material = material_of(request["messages"])
        if "evaluation" not in material:
            flaws = [] if score == "1" else ["step 2 is wrong"]
            return says({"evaluation": "I looked.", "flaws": flaws, "score": score})
        of_verifier = material["evaluation"].startswith("I looked.")
        return says({"analysis": "checked", "score": verifier if of_verifier else own})

    return behave


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(scripted("1", "1", "1")) as server:
        yield server


@pytest.fixture(scope="module")
def service(server: Server) -> Iterator[JudgeService]:
    config = JudgeConfig(base_url=server.url, model="m", retries=1, max_failure_fraction=1.0)
    with JudgeService(config) as service:
        yield service


def test_the_calls_behind_a_proof(server: Server, service: JudgeService) -> None:
    server.reset()
    server.behave = scripted("1", "1", "1")
    result = judged(service, answer("right"), PROMPT)
    assert result.value == 1.0
    materials = [material_of(request["messages"]) for request in server.requests]
    assert set(map(tuple, materials)) == {("solution",), ("solution", "evaluation")}
    assert {"solution": "right"} in materials, "the verifier does not see the self-evaluation"

    server.reset()
    server.behave = scripted("0.5", "1", "0.5")
    result = judged(service, answer("nearly", "1"), PROMPT)
    parts = {"proof": 0.5, "self_score": 0.5, "self_meta": 0.5, "verifier_meta": 1.0}
    assert result.parts == {**parts, "proof_format": 1.0, "disagreement": 0.0}
    assert result.value == pytest.approx(0.76 * 0.5 + 0.24 * 0.5 * 0.5)
    assert len(server.requests) == 3
    printed = replace(PROMPT, reward={"kind": "proof", "check_verifier": False})
    server.behave = scripted("0.5", "0", "1")
    result = judged(service, answer("as printed", "0.5"), printed)
    assert result.value == pytest.approx(0.76 * 0.5 + 0.24) and len(server.requests) == 5
    criticism = [m for r in server.requests if "1. step 2" in (m := str(r["messages"][1]))]
    assert len(criticism) == 1, "the meta-check sees the flaws"


def test_the_reward_of_a_verifier(server: Server, service: JudgeService) -> None:
    spec = {"kind": "verification", "problem": "Prove it.", "proof": "QED", "score": 0.25}
    prompt = replace(PROMPT, reward=spec)
    server.reset()
    server.behave = scripted("1", "1", "0.5")
    result = judged(service, "Step 2 fails. \\boxed{0.5}", prompt)
    assert result.value == pytest.approx(0.75 * 0.5)
    (request,) = server.requests
    assert material_of(request["messages"])["solution"] == "QED" and "0.25" not in str(request)

    server.reset()
    result = judged(service, "It is fine.", prompt)
    assert (result.value, result.parts["verification_format"], server.requests) == (0, 0, [])
    first = replace(PROMPT, reward={**spec, "meta": False})
    assert judged(service, "Step 2 fails. \\boxed{0.5}", first).value == 0.75
    assert not server.requests, "a meta-verifier has nobody above it"


def test_malformed_answers_score_zero_unasked(server: Server, service: JudgeService) -> None:
    server.reset()
    result = judged(service, "It is obvious. \\boxed{1}", PROMPT)
    assert (result.value, result.parts["proof_format"]) == (0.0, 0.0)
    assert server.requests == []


@pytest.mark.parametrize(
    "wrong",
    [*({"flaws": []}, {"flaws": "many"}, {"flaws": [3]}), *({"score": 1}, {"score": "0.75"})],
)
def test_malformed_verifications_fail(
    server: Server, service: JudgeService, wrong: dict[str, Any]
) -> None:
    reply = {"evaluation": "bad", "flaws": ["step 2"], "score": "0", **wrong}
    honest = scripted("1", "1", "1")
    server.behave = lambda request: (
        honest(request) if "evaluation" in material_of(request["messages"]) else says(reply)
    )
    result = service.submit(PROMPT, answer(f"{wrong}")).result(PATIENCE_S)
    assert isinstance(result, CallError) and result.kind == "invalid"
