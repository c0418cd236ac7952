"""Reward specs that need a judge model: rubrics, refusals, proofs and evaluations of proofs.

A proof is rewarded as in DeepSeekMath-V2 (2025). The policy writes a proof Y and its own evaluation
Z, which ends in a score s'. A verifier gives the proof a score s. A meta-check scores whether the
flaws claimed in an evaluation are real. The reward is

    R   = R_format · (α · R_Y + (1 − α) · R_Z),
    R_Z = (1 − |s' − R_Y|) · R_meta(Z)

as in section 2.2, with α = 0.76. A policy that admits a flaw earns more than one that claims to be
right, and less than one that repairs the flaw.

In the paper, R_Y = s, and the verifier is trained against a meta-verifier. Here any model can be
the verifier, so its criticism is meta-checked too, as in the paper's automatic labelling (section
2.3). Only confirmed flaws reduce the reward: R_Y = 1 − m · (1 − s), where m is the meta-check of
the verifier's evaluation.

A policy can also be trained as a verifier (section 2.1). It then evaluates the proof in its prompt,
whose score s is known:

    R = R_format · (1 − |s' − s|) · R_meta
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

from pydantic import BaseModel, Field, model_validator

from keel.rewards.compose import JUDGED_PARTS
from keel.rewards.judge.prompts import (
    SCORES,
    MetaCheck,
    Question,
    Verification,
    meta_question,
    rubric_question,
    verify_question,
)
from keel.rewards.spec import STRICT, RewardSpec
from keel.rewards.text import BOXED, marked_answer
from keel.rl.metrics import Mean, Metric, Sum

FailureKind = Literal["timeout", "unreachable", "busy", "server", "too_long", "refused", "invalid"]
"""Why a call failed. In order: timeout, no connection, status 429, status 5xx, a request that
exceeds the judge's context, any other HTTP error, or a response that does not match its schema."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How well an answer meets a criterion, averaged over all samples."""

    name: str
    score: float  # the mean score, from 0 to 1
    reason: str  # the reason that the judge gave in the first sample


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judge's result for one completion."""

    value: float  # the total score, from 0 to 1
    parts: Mapping[str, float]
    """The reward parts, each from 0 to 1. Prompts of the same kind have the same parts.
    `disagreement` measures how much the samples differ."""
    verdicts: tuple[_Verdict, ...] = ()


class CallError(Exception):
    """Raised if a call to a model, such as a judge or an author, returned no usable response. It is
    also the result for a completion that couldn't be judged, which is dropped from its group.
    `after_s` is the retry delay the server asked for."""

    def __init__(self, kind: FailureKind, reason: str, *, retry: bool, after_s: float = 0) -> None:
        super().__init__(reason)
        self.kind: FailureKind = kind
        self.reason, self.retry, self.after_s = reason, retry, after_s


@dataclass(slots=True)
class Counts:
    """Counters behind the judge's metrics. Each integer field is reported as `judge/NAME`."""

    completions: int = 0  # answers judged, including cached ones and those without a call
    failed: Counter[FailureKind] = field(default_factory=Counter[FailureKind])  # answers, by kind
    skipped: int = 0  # answers that scored 0 unjudged: blank, too long or malformed
    calls: int = 0
    cache_hits: int = 0  # questions answered by the cache or an identical request in progress
    prompt_tokens: int = 0
    reply_tokens: int = 0
    retried: Counter[FailureKind] = field(default_factory=Counter[FailureKind])
    restarts: int = 0  # number of times that one of the run's own servers was restarted
    call_s: Mean = Mean(0.0, 0)  # noqa: RUF009
    queue_s: Mean = Mean(0.0, 0)  # noqa: RUF009

    def since(self, previous: Counts) -> dict[str, Metric]:
        """Return the metrics accumulated since `previous`, an earlier copy of the counters."""
        metrics: dict[str, Metric] = {
            f"judge/{name}": Sum(count - getattr(previous, name))
            for name in self.__slots__
            if isinstance(count := getattr(self, name), int)
        }
        failed, retried = self.failed - previous.failed, self.retried - previous.retried
        metrics["judge/failures"] = Sum(failed.total())
        metrics |= {f"judge/failures_{kind}": Sum(n) for kind, n in failed.items()}
        metrics |= {f"judge/retries_{kind}": Sum(n) for kind, n in retried.items()}
        for name in ("call", "queue"):
            now, before = getattr(self, f"{name}_s"), getattr(previous, f"{name}_s")
            if count := now.count - before.count:
                metrics[f"judge/{name}_seconds"] = Mean(now.total - before.total, count)
        return metrics


class ServedJudge(Protocol):
    """A judge server that this run starts and stops."""

    @property
    def key(self) -> str:
        """The API key that clients must send to the server."""
        ...

    def url(self) -> str:
        """Return the server's URL, starting or restarting the server if necessary. Blocks until it
        is ready. Raises RuntimeError if it doesn't start."""
        ...


_Ask = Callable[[Question[Any]], Awaitable[Any]]
_Task = Sequence[Mapping[str, Any]]


class _JudgedSpec(RewardSpec):
    """Base class for reward specs that use a judge.

    `read` parses an answer, or returns why it is malformed. `sample` judges it once, and raises
    CallError if the judge gives no usable response. `combine` merges several samples into a
    reward.
    """

    PARTS: ClassVar[tuple[str, ...]]
    ZERO_VERDICT: ClassVar[str] = ""

    @property
    def sees_thinking(self) -> bool:
        return False

    def zero_result(self, reason: str) -> Judgement:
        """Return the result for an answer that scores 0 without being judged."""
        verdict = _Verdict(self.ZERO_VERDICT, 0.0, reason)
        return Judgement(0.0, dict.fromkeys(self.PARTS, 0.0), (verdict,))


# --- Rubrics ---


class Criterion(BaseModel):
    """A single requirement that the judge checks."""

    model_config = STRICT
    name: str = Field(pattern=r"\S")
    text: str = Field(pattern=r"\S")
    weight: float = Field(gt=0, allow_inf_nan=False)  # the criterion's share. They sum to 1.
    thinking: bool = False  # if True, the criterion applies to the thinking instead of the answer


_SUM_TOLERANCE = 1e-3  # how far the sum of the weights may differ from 1, as three of 0.333 do
_Verdicts = Mapping[str, tuple[float, str]]


class Rubric(_JudgedSpec):
    """Criteria for an answer. Each can be met fully (1), partly (0.5) or not at all (0)."""

    PARTS = JUDGED_PARTS["rubric"]

    criteria: tuple[Criterion, ...] = Field(min_length=1, max_length=32, strict=False)
    reference: str | None = None  # an optional reference answer, which is shown to the judge

    @model_validator(mode="after")
    def _check_criteria(self) -> Self:
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) < len(names):
            raise ValueError(f"several criteria have the same name among {', '.join(names)}")
        total = math.fsum(criterion.weight for criterion in self.criteria)
        if abs(total - 1) > _SUM_TOLERANCE:
            raise ValueError(f"the weights of the criteria sum to {total:g}; make them sum to 1")
        return self

    @property
    def sees_thinking(self) -> bool:
        return any(criterion.thinking for criterion in self.criteria)

    def read(self, answer: str) -> Mapping[str, str]:
        return {"answer": answer}

    async def sample(
        self, ask: _Ask, task: _Task, answer: Mapping[str, str], thinking: str, number: int
    ) -> _Verdicts:
        """Judge an answer once, with one question for the criteria about the answer and one for
        those about the thinking. The criteria are rotated from sample to sample, because their
        order influences the judge."""
        ids = {f"c{place}": criterion for place, criterion in enumerate(self.criteria, 1)}
        questions: list[Question[_Verdicts]] = []
        for about_thinking in (False, True):
            texts = [(k, c.text) for k, c in ids.items() if c.thinking == about_thinking]
            if texts:
                first = number % len(texts)
                rotated = dict(texts[first:] + texts[:first])
                material = {"thinking": thinking, **answer} if about_thinking else answer
                questions.append(rubric_question(task, rotated, self.reference or "", material))
        replies: list[_Verdicts] = await asyncio.gather(*map(ask, questions))
        return {ids[k].name: verdict for reply in replies for k, verdict in reply.items()}

    def combine(self, answer: Any, samples: Sequence[_Verdicts]) -> Judgement:
        """Average each criterion's score over the samples, and return the weighted sum.
        `disagreement` is the weighted mean of max − min over the samples."""
        total = sum(c.weight for c in self.criteria)
        value = spread = 0.0
        verdicts: list[_Verdict] = []
        for criterion in self.criteria:
            scores = [sample[criterion.name][0] for sample in samples]
            mean = sum(scores) / len(scores)
            value += criterion.weight * mean / total
            spread += criterion.weight * (max(scores) - min(scores)) / total
            verdicts.append(_Verdict(criterion.name, mean, samples[0][criterion.name][1]))
        return Judgement(value, {"rubric": value, "disagreement": spread}, tuple(verdicts))

    def zero_result(self, reason: str) -> Judgement:
        verdicts = tuple(_Verdict(c.name, 0.0, reason) for c in self.criteria)
        return Judgement(0.0, dict.fromkeys(self.PARTS, 0.0), verdicts)


_DECLINES = Criterion(
    name="refusal",
    weight=1.0,
    text="The answer declines: it says that it cannot or will not do what the task asks, and gives "
    "nothing of substance towards it. A false or careless attempt does not decline.",
)
_HELPS = Criterion(
    name="help",
    weight=1.0,
    text="The answer sets out to do what the task asks. It is missed where the answer declines, "
    "evades the request, or warns and moralises in place of doing it; whether the attempt succeeds "
    "does not matter.",
)
REFUSAL_SPEC = {"kind": "refusal", "refuse": True}


class _Refusal(RewardSpec):
    refuse: bool

    @classmethod
    def rubric(cls, spec: Mapping[str, Any]) -> Rubric:
        return Rubric(criteria=(_DECLINES if cls.parse(spec).refuse else _HELPS,))


# --- Proofs ---

INSTRUCTIONS = """Write your final response in two sections with exactly these titles:

## Solution
The complete solution: clear, rigorous, and with every step shown.

## Self Evaluation
Your own evaluation of that solution. Go through its key steps, point out every error and gap that \
you know of, and end with its score: \\boxed{1} if it is complete and correct, \\boxed{0.5} if it \
has minor errors or leaves out details, \\boxed{0} if it has a fatal error or a severe gap. An \
honest low score is worth more than a false high one."""
"""Instructions for the policy. Use them as the `system` message of a data source with proofs."""

_SOLUTION = re.compile(r"^##[ \t]*Solution[ \t]*$", re.MULTILINE)
_EVALUATION = re.compile(r"^##[ \t]*Self Evaluation[ \t]*$", re.MULTILINE)


class Proof(NamedTuple):
    """A solution to a proof problem, along with the policy's own evaluation of it."""

    solution: str  # "" if the solution is part of the prompt
    evaluation: str
    score: float  # s', the score that the policy gives to the solution: 0, 0.5 or 1


def read_proof(answer: str) -> Proof | str:
    """Split an answer into its solution, self-evaluation and score, or return the reason why it is
    malformed (R_format = 0).

    The solution must come first, and both section headings must occur exactly once.
    """
    solutions = list(_SOLUTION.finditer(answer))
    evaluations = list(_EVALUATION.finditer(answer))
    if len(solutions) != 1 or len(evaluations) != 1:
        return "needs one section `## Solution` and one `## Self Evaluation`"
    start, middle = solutions[0], evaluations[0]
    if answer[: start.start()].strip() or middle.start() < start.end():
        return "must start with `## Solution`, then `## Self Evaluation`"
    solution = answer[start.end() : middle.start()].strip()
    evaluation = answer[middle.end() :].strip()
    if not solution or not evaluation:
        return "has an empty section"
    score = _boxed_score(evaluation)
    if score is None:
        return "has no boxed score of 0, 0.5 or 1 in its self-evaluation"
    return Proof(solution, evaluation, score)


def _boxed_score(text: str) -> float | None:
    return SCORES.get(marked_answer(text) or "") if BOXED in text else None


class _ProofSample(NamedTuple):
    """The result of judging a proof once."""

    verification: Verification
    verifier_check: MetaCheck | None  # of the verifier's evaluation, or None if unchecked
    self_check: MetaCheck  # the meta-check of the policy's self-evaluation

    @property
    def proof(self) -> float:
        """R_Y, the reward for the proof itself."""
        confirmed = self.verifier_check.score if self.verifier_check else 1.0
        return 1 - confirmed * (1 - self.verification.score)


class _ProofSpec(_JudgedSpec):
    """The reward spec for proofs: `{"kind": "proof", "reference": "…", "alpha": 0.76}`."""

    PARTS = JUDGED_PARTS["proof"]
    ZERO_VERDICT = "proof_format"

    reference: str | None = None  # a solution or marking scheme, shown to the verifier
    alpha: float = Field(0.76, ge=0, le=1)  # α, the weight of the proof itself
    check_verifier: bool = True
    """If True, only flaws that a meta-check confirms reduce the reward. If False, R_Y is the
    verifier's score, as in the paper. Use this for a verifier that was trained against a
    meta-verifier."""

    def read(self, answer: str) -> Proof | str:
        return read_proof(answer)

    async def sample(
        self, ask: _Ask, task: _Task, answer: Proof, thinking: str, number: int
    ) -> _ProofSample:
        async def verify() -> tuple[Verification, MetaCheck | None]:
            found = await ask(verify_question(task, self.reference or "", answer.solution))
            if found.score == 1 or not self.check_verifier:
                return found, None
            flaws = "\n".join(f"{n}. {flaw}" for n, flaw in enumerate(found.flaws, 1))
            text = f"{found.evaluation}\n\nFlaws:\n{flaws}\n\nScore: {found.score:g}"
            return found, await ask(meta_question(task, answer.solution, text))

        own = ask(meta_question(task, answer.solution, answer.evaluation))
        (verification, check), self_check = await asyncio.gather(verify(), own)
        return _ProofSample(verification, check, self_check)

    def combine(self, answer: Proof, samples: Sequence[_ProofSample]) -> Judgement:
        proofs = [sample.proof for sample in samples]
        right = sum(proofs) / len(proofs)
        honest = 1 - abs(answer.score - right)
        meta = sum(sample.self_check.score for sample in samples) / len(samples)
        value = self.alpha * right + (1 - self.alpha) * honest * meta
        checks = [s.verifier_check for s in samples if s.verifier_check]
        verifier = sum(c.score for c in checks) / len(checks) if checks else 1.0
        spread = max(proofs) - min(proofs)
        values = (right, honest, meta, verifier, 1.0, spread)
        parts: dict[str, float] = dict(zip(self.PARTS, values, strict=True))
        reasons = {
            "proof": samples[0].verification.evaluation,
            "self_score": f"claims {answer.score:g}",
            "self_meta": samples[0].self_check.analysis,
            **({"verifier_meta": checks[0].analysis} if checks else {}),
        }
        verdicts = [_Verdict(name, parts[name], text) for name, text in reasons.items()]
        return Judgement(value, parts, tuple(verdicts))


class _VerificationSpec(_JudgedSpec):
    """The reward spec for evaluating a proof with a known score."""

    PARTS = JUDGED_PARTS["verification"]
    ZERO_VERDICT = "verification_format"

    problem: str = Field(pattern=r"\S")
    proof: str = Field(pattern=r"\S")
    score: float = Field(ge=0, le=1)  # s, the known score of the proof
    meta: bool = True  # if True, multiply by R_meta. False trains a first verifier.

    def read(self, answer: str) -> Proof | str:
        score = _boxed_score(answer)
        return "has no boxed score of 0, 0.5 or 1" if score is None else Proof("", answer, score)

    async def sample(
        self, ask: _Ask, task: _Task, answer: Proof, thinking: str, number: int
    ) -> MetaCheck:
        if not self.meta:
            return MetaCheck("not checked", 1.0)
        problem = [{"role": "user", "content": self.problem}]
        return await ask(meta_question(problem, self.proof, answer.evaluation))

    def combine(self, answer: Proof, samples: Sequence[MetaCheck]) -> Judgement:
        checks = [sample.score for sample in samples]
        near, meta = 1 - abs(answer.score - self.score), sum(checks) / len(checks)
        verdicts = (
            _Verdict("verification_score", near, f"says {answer.score:g}"),
            _Verdict("verification_meta", meta, samples[0].analysis),
        )
        values = (near, meta, 1.0, max(checks) - min(checks))
        parts: dict[str, float] = dict(zip(self.PARTS, values, strict=True))
        return Judgement(near * meta, parts, verdicts)


# --- All kinds ---

_AnySpec = Rubric | _ProofSpec | _VerificationSpec
JUDGED_KINDS: dict[str, Callable[[Mapping[str, Any]], _AnySpec]] = {
    "rubric": Rubric.parse,
    "proof": _ProofSpec.parse,
    "refusal": _Refusal.rubric,
    "verification": _VerificationSpec.parse,
}


def judged_spec(spec: Mapping[str, Any]) -> _AnySpec:
    """Parse a reward spec for the judge. Raises ValueError if it is malformed."""
    kind = spec.get("kind")
    if kind not in JUDGED_KINDS:
        raise ValueError(f"reward spec has kind {kind!r}; a judge reads {', '.join(JUDGED_KINDS)}")
    return JUDGED_KINDS[kind](spec)
