"""Groups in, scored groups out."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from keel.rewards.compose import (
    ERROR,
    LANGUAGE_PARTS,
    REFUSAL,
    Score,
    check_found,
    check_parts,
    check_weights,
    compose,
    of_functions,
    worst,
    worth_nothing,
)
from keel.rewards.custom import TextTrajectory, prompt_fields, sees_group
from keel.rewards.explanations import notes_of
from keel.rewards.failure_budget import Failures, is_function, to_standard_error
from keel.rewards.judge.results import Counts, Failed, Judged
from keel.rewards.judge.rubric import REFUSAL as DECLINING
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import is_judged
from keel.rewards.length import LengthRule, with_length
from keel.rewards.rules.verifiers import keeps_format
from keel.rewards.text import final_text, raw_text
from keel.rewards.workers.pool import Verdict, WorkerPool
from keel.rl.advantages import group_advantages
from keel.rl.futures import failed, when_all
from keel.rl.metrics import Metric
from keel.rl.types import (
    CUT_OFF,
    ENVIRONMENT,
    FUNCTIONS,
    PROGRAM,
    Group,
    Prompt,
    Purpose,
    ScoredGroup,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A group that is being judged, with a future for each trajectory (or for all together)."""

    group: Group
    rule: Sequence[Future[list[Verdict]]]
    judge: Sequence[Future[Judged | Failed]]
    refusals: Sequence[Future[Judged | Failed]]
    others: Mapping[str, Future[list[Verdict]]]
    """Parts about the whole trajectory, by name."""

    def notes(self) -> list[dict[str, str]]:
        """Once all is done."""
        judged = {
            "": [future.result() for future in self.judge],
            f"{REFUSAL}: ": [future.result() for future in self.refusals],
        }
        verified = {name: future.result() for name, future in self.others.items()}
        verified["correct"] = [verdict for future in self.rule for verdict in future.result()]
        return notes_of(len(self.group.trajectories), judged, verified)


class Scorer:
    """Scores groups as they arrive, in worker processes of its own. A context manager."""

    def __init__(
        self,
        weights: Mapping[str, Mapping[str, float]],
        *,
        scale: Literal["none", "std"] = "none",
        workers: int = 2,
        timeout_s: float = 3.0,
        code: Mapping[str, Any] | None = None,
        lengths: Mapping[str, LengthRule] | None = None,
        judge: JudgeService | None = None,
        max_failure_fraction: float = 1.0,
        environments: Collection[str] = (),
        log: Path | None = None,
        say: Callable[[str], None] = to_standard_error,
    ) -> None:
        """weights: domain → reward part → weight; scale: of the advantages; workers: processes (0:
        none, and then no deadline either); timeout_s: longest look at one completion; code: how
        programs are run, the fields of `keel.configs.schema.CodeConfig`; lengths: domain → its
        rule; judge: for rubrics and proofs, closed by whoever opened it; max_failure_fraction: of a
        user's function, as in `RewardsConfig`; environments: domains that have some; log: folder
        for what the worker processes print (standard error without one); say: for people, the first
        error of each kind.

        Raises ValueError for a reward part that does not exist.
        """
        check_weights(weights, environments)
        self._weights = weights
        self._scale: Literal["none", "std"] = scale
        self._grouped = {n for w in weights.values() for n in w if is_function(n) and sees_group(n)}
        self._lengths, self._judge = lengths or {}, judge
        self._counted = Counts()
        self._failures = Failures(max_failure_fraction, say)
        self._log, self._told = log, False
        self._pool = WorkerPool(workers, timeout_s=timeout_s, code=code, log=log)

    def tell(self, say: Callable[[str], None]) -> None:
        """From now on say there what went wrong."""
        self._failures.say = say

    def submit(self, group: Group, purpose: Purpose = "train") -> Future[ScoredGroup]:
        """Judge all trajectories of a group.

        A completion whose verifier fails gets 0 for that part and `error` 1. One that the judge
        could not judge is dropped from its group, with the reason; so is, in training, one that was
        cut off, where the domain's rule says so. The future fails with ValueError naming the prompt
        for a domain without weights and for a reward spec that nothing reads, and with JudgeStopped
        or RewardStopped where too many completions could not be scored.
        """
        try:
            pending = self._submit(group)
        except ValueError as error:
            return failed(error)
        parts = [*pending.rule, *pending.judge, *pending.refusals, *pending.others.values()]
        return when_all(parts, lambda: self._scored(pending, purpose))

    def score(self, groups: Iterable[Group], purpose: Purpose = "train") -> list[ScoredGroup]:
        """`submit` of all `groups`: their scores, in their order. Every wait has a deadline."""
        futures = [self.submit(group, purpose) for group in groups]
        return [future.result() for future in futures]

    def metrics(self) -> dict[str, Metric]:
        """What the judge did since the last call; nothing without a judge."""
        if self._judge is None:
            return {}
        before, now = self._counted, self._judge.counts()
        self._counted = now
        return now.since(before)

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, group: Group) -> _Pending:
        prompt = group.prompt
        if prompt.domain not in self._weights:
            raise ValueError(
                f"prompt {prompt.prompt_id}: no rewards for its domain {prompt.domain!r}; "
                f"there are {', '.join(self._weights)}"
            )
        weights = self._weights[prompt.domain]
        try:
            check_parts(str(prompt.reward.get("kind")), weights)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt_id} {error}") from error
        others: dict[str, Future[list[Verdict]]] = {}
        for name in weights:
            if is_function(name):
                spec = {"kind": "function", "name": name, "prompt": prompt_fields(prompt)}
                if name in self._grouped:
                    others[name] = self._group_verdicts(spec, group)
                    continue
            elif name in LANGUAGE_PARTS:
                asked = _asked(group)
                spec = {"kind": "language", "prompt": asked, "of": LANGUAGE_PARTS[name]}
            else:
                continue
            sampled = name in LANGUAGE_PARTS
            texts = [_text_of(t, sampled=sampled).dumps() for t in group.trajectories]
            others[name] = self._pool.submit(spec, texts)
        rule: Sequence[Future[list[Verdict]]] = ()
        judge: Sequence[Future[Judged | Failed]] = ()
        if prompt.reward.get("kind") in (ENVIRONMENT, FUNCTIONS):
            pass  # its verdict has come with the trajectory, or the functions are all there is
        elif is_judged(prompt.reward):
            judge = [self._ask(prompt, trajectory) for trajectory in group.trajectories]
        else:
            rule = self._verify(prompt, group.trajectories)
        refusals: Sequence[Future[Judged | Failed]] = ()
        if REFUSAL in weights:
            asked = replace(prompt, reward=DECLINING)
            refusals = [self._ask(asked, trajectory) for trajectory in group.trajectories]
        return _Pending(group, rule, judge, refusals, others)

    def _group_verdicts(self, spec: Mapping[str, Any], group: Group) -> Future[list[Verdict]]:
        """Of a function that sees all trajectories at once."""
        texts = [_text_of(t, sampled=False).dumps() for t in group.trajectories]
        asked = self._pool.submit({**spec, "group": True}, [json.dumps(texts)])

        def each() -> list[Verdict]:
            (whole,) = asked.result()
            scores = [whole.parts.get(str(index), 0.0) for index in range(len(texts))]
            return [replace(whole, score=score, parts={}) for score in scores]

        return when_all([asked], each)

    def _ask(self, prompt: Prompt, trajectory: Trajectory) -> Future[Judged | Failed]:
        if self._judge is None:
            why = "needs a judge, and there is none; set rewards.judge.base_url and model"
            raise ValueError(f"prompt {prompt.prompt_id}: {why}")
        opened = replace(prompt, messages=_opening(prompt, trajectory))
        return self._judge.submit(opened, trajectory)

    def _verify(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> list[Future[list[Verdict]]]:
        completions = [final_text(trajectory.messages) for trajectory in trajectories]
        if prompt.reward.get("kind") != "code":
            return [self._pool.submit(prompt.reward, completions)]
        # Programs take seconds: one job each, so that all workers share in them.
        jobs = {
            completion: self._pool.submit(prompt.reward, [completion])
            for completion in set(completions)
        }
        return [jobs[completion] for completion in completions]

    def _scored(self, pending: _Pending, purpose: Purpose) -> ScoredGroup:
        group = pending.group
        try:
            parts, notes = self._parts(pending), pending.notes()
        except ValueError as error:
            raise ValueError(f"prompt {group.prompt.prompt_id}: {error}") from error
        length = self._lengths.get(group.prompt.domain, LengthRule())
        kept: list[Trajectory] = []
        scores: list[Score] = []
        said: list[Mapping[str, str]] = []
        dropped: list[str] = []
        left_out: list[Trajectory] = []
        for trajectory, found, note in zip(group.trajectories, parts, notes, strict=True):
            cut = trajectory.cut and trajectory.finish_reason != "crash"
            out = cut and length.truncated == "drop" and purpose == "train"
            if isinstance(found, str) or out:
                dropped.append(found if isinstance(found, str) else CUT_OFF)
                left_out.append(trajectory)
            else:
                kept.append(trajectory)
                said.append(note)
                worth = worth_nothing if cut and length.truncated == "zero" else compose
                scores.append(worth(found, self._weights[group.prompt.domain]))
        if dropped:
            group = replace(group, trajectories=tuple(kept), dropped=(*group.dropped, *dropped))
        if length.active:
            scores = with_length(scores, kept, length)
        rewards = torch.tensor([score.value for score in scores], dtype=torch.float32)
        # A group may have lost all its trajectories, and nothing has no mean.
        advantages = group_advantages(rewards, scale=self._scale) if scores else rewards
        return ScoredGroup(
            group=group,
            rewards_G=rewards.numpy(),
            parts_G=tuple(score.parts for score in scores),
            advantages_G=advantages.numpy(),
            left_out=tuple(left_out),
            notes_G=tuple(said) if any(said) else (),
        )

    def _parts(self, pending: _Pending) -> list[dict[str, float] | str]:
        """The parts of each trajectory, or why it has none. Every wait inside has a deadline of
        its own, completion by completion."""
        group = pending.group
        parts: list[dict[str, float] | str] = []
        for result in (future.result() for future in pending.judge):
            if isinstance(result, Failed):
                parts.append(_unjudged(result))
            else:
                parts.append({"correct": result.value, **result.parts, ERROR: 0.0})
        weights = self._weights[group.prompt.domain]
        alone = group.prompt.reward.get("kind") == FUNCTIONS
        if alone:
            parts = [{ERROR: 0.0} for _ in group.trajectories]
        ruled = [verdict for future in pending.rule for verdict in future.result()]
        for verdict in ruled:
            error = float(bool(verdict.error))
            parts.append({**verdict.parts, "correct": verdict.score, ERROR: error})
        self._note(_verifier(group.prompt), group, ruled)
        if group.prompt.environment:
            parts = _with_verdicts(group, parts)
        for index, result in enumerate(future.result() for future in pending.refusals):
            if isinstance(found := parts[index], str):
                continue
            if isinstance(result, Failed):
                parts[index] = _unjudged(result)
            else:
                found[REFUSAL] = result.value
        for name, future in pending.others.items():
            verdicts = future.result()
            self._note(name, group, verdicts)
            for found, verdict in zip(parts, verdicts, strict=True):
                if not isinstance(found, str):
                    found[name] = verdict.score
                    found[ERROR] = max(found[ERROR], float(bool(verdict.error)))
        for found in parts if alone else ():
            assert not isinstance(found, str)
            found["correct"] = of_functions(found, weights)
        for found, trajectory in zip(parts, group.trajectories, strict=True):
            if not isinstance(found, str) and trajectory.verdict is None:
                found["format"] = float(
                    keeps_format(
                        raw_text(trajectory.messages),
                        thinking=group.prompt.thinking,
                        finished=not trajectory.cut,
                    )
                )
        for index, trajectory in enumerate(group.trajectories):
            if trajectory.finish_reason == "crash":  # nothing that it had done counts
                parts[index] = worst(weights)
            elif not isinstance(found := parts[index], str):
                try:
                    check_found(found, weights)
                except ValueError as error:
                    if trajectory.verdict is None or trajectory.verdict.parts:
                        raise
                    # A program that was ended gives none: no reason to end the run, too.
                    parts[index] = f"its program or environment gave no verdict: {error}"
        return parts

    def _note(self, name: str, group: Group, verdicts: Sequence[Verdict]) -> None:
        errors = [(verdict.error, verdict.at) for verdict in verdicts]
        self._failures.note(name, group.prompt.prompt_id, errors)
        if self._log is not None and not self._told and self._pool.printed():
            self._told = True
            self._failures.say(f"the reward workers print to {self._log}")


def _unjudged(failed: Failed) -> str:
    return f"the judge failed ({failed.kind}): {failed.reason}"


def _asked(group: Group) -> str:
    """What the user said last of the opening."""
    every = [_opening(group.prompt, one) for one in group.trajectories[:1]]
    return str([*every, group.prompt.messages][0][-1].get("content") or "")


def _opening(prompt: Prompt, trajectory: Trajectory) -> tuple[Mapping[str, Any], ...]:
    """What was said before the policy spoke: an environment opens the conversation."""
    every = trajectory.messages if prompt.environment else ()
    roles = [message.get("role") for message in every]
    first = trajectory.opening or (roles.index("assistant") if "assistant" in roles else 0)
    return every[:first] or prompt.messages


def _with_verdicts(
    group: Group, ruled: Sequence[dict[str, float] | str]
) -> list[dict[str, float] | str]:
    """The parts of the environment's verdicts, and those of a rule or judge where there is one."""
    parts: list[dict[str, float] | str] = []
    for index, trajectory in enumerate(group.trajectories):
        own = {} if trajectory.verdict is None else dict(trajectory.verdict.parts)
        found = ruled[index] if ruled else {ERROR: 0.0}
        parts.append(found if isinstance(found, str) else {**own, **found})
    if not ruled and any("correct" not in found for found in parts):
        raise ValueError(
            "its environment's verdict has no part `correct`, and nothing else grades it: have "
            "the environment give one, or give the prompts an answer, tests, criteria or a reward"
        )
    return parts


def _verifier(prompt: Prompt) -> str:
    """For messages: `correct (reasoning_gym gcd)`. No dots in it: it is no user's function."""
    said = [str(prompt.reward.get(key, "")) for key in ("kind", "task", "match")]
    return f"correct ({' '.join(filter(None, said))})".replace(".", " ")


def _programs(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant" and message.get("name") == PROGRAM


def _text_of(trajectory: Trajectory, *, sampled: bool) -> TextTrajectory:
    """sampled: without what an agent program said for the policy."""
    messages = trajectory.messages
    if sampled:
        messages = tuple(m for m in messages if not _programs(m))
    return TextTrajectory(
        messages=messages,
        finish_reason="length" if trajectory.cut else "stop",
        sampled_tokens=trajectory.sampled_tokens,
        opening=trajectory.opening,
    )
