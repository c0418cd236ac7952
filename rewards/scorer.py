"""Scores groups of trajectories and computes their advantages."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch

from keel.rewards import compose
from keel.rewards.compose import LANGUAGE_PARTS, REFUSAL, Score
from keel.rewards.custom import TextTrajectory, is_function, prompt_fields, scores_group
from keel.rewards.failures import FailureBudget
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import (
    JUDGED_KINDS,
    REFUSAL_SPEC,
    CallError,
    Counts,
    Judgement,
)
from keel.rewards.length import LengthRule, apply_length_rule
from keel.rewards.pool import VerifierScore, WorkerPool
from keel.rewards.text import final_text, keeps_format, raw_text, thinking_text
from keel.rl.advantages import group_advantages
from keel.rl.futures import failed, when_all
from keel.rl.metrics import Metric
from keel.rl.summary import ERROR
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

_Result = VerifierScore | Judgement | CallError


@dataclass(slots=True)
class _Draft:
    """A trajectory's reward parts, collected while its group is being scored."""

    trajectory: Trajectory
    parts: dict[str, float] = field(default_factory=lambda: {ERROR: 0.0})
    notes: dict[str, str] = field(default_factory=dict[str, str])  # on judged criteria and errors
    dropped: str = ""  # why the trajectory is dropped

    def add(self, part: str, result: _Result) -> None:
        if isinstance(result, CallError):
            self.dropped = self.dropped or f"the judge failed ({result.kind}): {result.reason}"
        elif isinstance(result, Judgement):
            prefix = f"{REFUSAL}: " if part == REFUSAL else ""
            self.parts |= {part: result.value, **({} if prefix else result.parts)}
            for verdict in result.verdicts:
                self.notes[prefix + verdict.name] = f"{verdict.score:g}: {verdict.reason}"
        else:
            self.parts |= {**result.parts, part: result.score}
            if result.error:
                self.parts[ERROR] = 1.0
                self.notes[part] = f"error: {result.error}"


class Scorer:
    """Scores groups in worker processes as they arrive. Use it as a context manager."""

    def __init__(
        self,
        weights: Mapping[str, Mapping[str, float]],
        *,
        pool: WorkerPool,
        scale: Literal["none", "std"] = "none",
        lengths: Mapping[str, LengthRule] | None = None,
        judge: JudgeService | None = None,
        max_failure_fraction: float = 1.0,
        environments: Collection[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        """Check the reward weights. Raises ValueError if a part is unknown.

        `weights` maps each domain to its reward parts and their weights, and `lengths` maps each
        domain to its length rule. `environments` lists the domains whose environments define their
        own parts. `close` closes `pool`, but the caller must close `judge`. `say` is called with
        each line of an error report.
        """
        compose.check_weights(weights, environments)
        self._weights, self._pool = weights, pool
        self._scale: Literal["none", "std"] = scale
        names = {name for parts in weights.values() for name in parts if is_function(name)}
        self._group_functions = set(filter(scores_group, names))
        self._lengths, self._judge = lengths or {}, judge
        self._reported_counts = Counts()
        self._failures = FailureBudget(max_failure_fraction, say)

    def report_to(self, say: Callable[[str], None]) -> None:
        """Call `say` with each line of an error report from now on."""
        self._failures.report = say

    def submit(self, group: Group, purpose: Purpose = "train") -> Future[ScoredGroup]:
        """Start scoring all trajectories in a group.

        If a verifier fails on a completion, its part is 0 and the part `error` is 1.
        Completions that the judge couldn't score are dropped. In training, truncated ones are
        dropped too if the length rule requires it. The future raises ValueError if the domain has
        no weights or the reward spec is malformed, and RewardStopped if too many
        completions couldn't be scored.
        """
        try:
            pending = self._start(group)
        except ValueError as error:
            return failed(ValueError(f"prompt {group.prompt.prompt_id} {error}"))
        return when_all([*pending.values()], lambda: self._score_group(group, pending, purpose))

    def metrics(self) -> dict[str, Metric]:
        """Return the judge's metrics since the last call, or an empty dict without a judge."""
        if self._judge is None:
            return {}
        previous, self._reported_counts = self._reported_counts, self._judge.counts()
        return self._reported_counts.since(previous)

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, group: Group) -> dict[str, Future[list[_Result]]]:
        """Start computing a group's reward parts. Each has one result per trajectory."""
        prompt, trajectories = group.prompt, group.trajectories
        kind, weights = prompt.reward.get("kind"), self._weights.get(prompt.domain)
        if weights is None:
            raise ValueError(f"has no rewards for its domain {prompt.domain!r} in data.sources")
        compose.check_parts(str(kind), weights)
        pending: dict[str, Future[list[_Result]]] = {}
        if kind in JUDGED_KINDS:
            pending["correct"] = self._judge_all(prompt, trajectories)
        elif kind not in (ENVIRONMENT, FUNCTIONS):
            pending["correct"] = self._verify(group)
        if REFUSAL in weights:
            pending[REFUSAL] = self._judge_all(replace(prompt, reward=REFUSAL_SPEC), trajectories)
        for name in weights:
            if is_function(name):
                pending[name] = self._call_function(name, group)
            elif name in LANGUAGE_PARTS:
                pending[name] = self._measure_language(LANGUAGE_PARTS[name], group)
        return pending

    def _judge_all(
        self, prompt: Prompt, trajectories: Sequence[Trajectory]
    ) -> Future[list[_Result]]:
        if self._judge is None:
            raise ValueError("needs a judge; set rewards.judge.base_url and model")
        answers = [
            self._judge.submit(
                replace(prompt, messages=_opening_messages(prompt, one)),
                final_text(one.messages),
                thinking_text(one.messages),
            )
            for one in trajectories
        ]
        return when_all(answers, lambda: [answer.result() for answer in answers])

    def _verify(self, group: Group) -> Future[list[_Result]]:
        spec, texts = group.prompt.reward, [final_text(one.messages) for one in group.trajectories]
        if spec.get("kind") != "code":
            return self._submit(group, spec, texts)
        # Programs take seconds: one job each, so that all workers share them.
        jobs = {text: self._submit(group, spec, [text]) for text in set(texts)}
        return when_all([*jobs.values()], lambda: [jobs[text].result()[0] for text in texts])

    def _call_function(self, name: str, group: Group) -> Future[list[_Result]]:
        spec = {"kind": "function", "name": name, "prompt": prompt_fields(group.prompt)}
        texts = [_serialize(trajectory) for trajectory in group.trajectories]
        if name not in self._group_functions:
            return self._submit(group, spec, texts)
        spec_of_group = {**spec, "group": True}
        whole = self._pool.submit(spec_of_group, [json.dumps(texts)], node=group.node)

        def split() -> list[_Result]:
            (result,) = whole.result()
            scores = [result.parts.get(str(index), 0.0) for index in range(len(texts))]
            return [replace(result, score=score, parts={}) for score in scores]

        return when_all([whole], split)

    def _measure_language(self, of: str, group: Group) -> Future[list[_Result]]:
        prompt, trajectories = group.prompt, group.trajectories
        # An environment may have written the task.
        opening = _opening_messages(prompt, trajectories[0]) if trajectories else prompt.messages
        task = str(opening[-1].get("content") or "")
        texts = [_serialize(trajectory, sampled=True) for trajectory in trajectories]
        return self._submit(group, {"kind": "language", "prompt": task, "of": of}, texts)

    def _submit(
        self, group: Group, spec: Mapping[str, Any], texts: Sequence[str]
    ) -> Future[list[_Result]]:
        return cast(Future[list[_Result]], self._pool.submit(spec, texts, node=group.node))

    def _score_group(
        self, group: Group, pending: Mapping[str, Future[list[_Result]]], purpose: Purpose
    ) -> ScoredGroup:
        weights = self._weights[group.prompt.domain]
        rule = self._lengths.get(group.prompt.domain, LengthRule())
        try:
            drafts = self._collect_parts(group, pending)
        except ValueError as error:
            raise ValueError(f"prompt {group.prompt.prompt_id}: {error}") from error
        scores: list[Score] = []
        for draft in drafts:
            cut = draft.trajectory.cut and draft.trajectory.finish_reason != "crash"
            if cut and rule.truncated == "drop" and purpose == "train":
                draft.dropped = draft.dropped or CUT_OFF
            if not draft.dropped:
                cut_off = cut and rule.truncated == "zero"
                scores.append(compose.compose(draft.parts, weights, cut_off=cut_off))
        remaining = [draft for draft in drafts if not draft.dropped]
        trajectories = tuple(draft.trajectory for draft in remaining)
        notes = tuple(draft.notes for draft in remaining)
        if len(remaining) < len(drafts):
            reasons = (draft.dropped for draft in drafts if draft.dropped)
            group = replace(group, trajectories=trajectories, dropped=(*group.dropped, *reasons))
        if rule.active:
            scores = apply_length_rule(scores, trajectories, rule)
        rewards = torch.tensor([score.value for score in scores], dtype=torch.float32)
        # An empty group has no mean.
        advantages = group_advantages(rewards, scale=self._scale) if scores else rewards
        return ScoredGroup(
            group=group,
            rewards_G=rewards.numpy(),
            parts_G=tuple(score.parts for score in scores),
            advantages_G=advantages.numpy(),
            left_out=tuple(draft.trajectory for draft in drafts if draft.dropped),
            notes_G=notes if any(notes) else (),
        )

    def _collect_parts(
        self, group: Group, pending: Mapping[str, Future[list[_Result]]]
    ) -> list[_Draft]:
        """Collect all of a group's reward parts. Raises ValueError if its prompt or verdict is
        invalid."""
        prompt, weights = group.prompt, self._weights[group.prompt.domain]
        kind, drafts = prompt.reward.get("kind"), [_Draft(one) for one in group.trajectories]
        for draft in drafts:
            if prompt.environment and draft.trajectory.verdict is not None:
                draft.parts = {**draft.trajectory.verdict.parts, ERROR: 0.0}
            if prompt.environment and kind == ENVIRONMENT and "correct" not in draft.parts:
                raise ValueError("its environment's verdict has no part `correct`; return one")
        for part, future in pending.items():
            results = future.result()
            label = (str(prompt.reward.get(key, "")) for key in ("kind", "task", "match"))
            name = f"correct ({' '.join(filter(None, label))})" if part == "correct" else part
            errors = [(one.error, one.at) for one in results if isinstance(one, VerifierScore)]
            self._failures.record(name, prompt.prompt_id, errors, counted=is_function(part))
            for draft, result in zip(drafts, results, strict=True):
                draft.add(part, result)
        for draft in drafts:
            if kind == FUNCTIONS:
                graded = {n: w for n, w in weights.items() if is_function(n) and w > 0}
                total = sum(weight * draft.parts[name] for name, weight in graded.items())
                draft.parts["correct"] = total / sum(graded.values())
            if draft.trajectory.verdict is None:
                text, finished = raw_text(draft.trajectory.messages), not draft.trajectory.cut
                kept = keeps_format(text, thinking=prompt.thinking, finished=finished)
                draft.parts["format"] = float(kept)
            if draft.trajectory.finish_reason == "crash":  # the worst value of every part
                worst = {name: float(weight < 0) for name, weight in weights.items()}
                draft.parts, draft.dropped = {**worst, "correct": 0.0, ERROR: 0.0}, ""
            _check_parts(draft, weights)
        return drafts


def _check_parts(draft: _Draft, weights: Mapping[str, float]) -> None:
    """Check that a trajectory has a value for every reward part that has a weight."""
    missing = [name for name in weights if name not in draft.parts]
    if missing and not draft.dropped:
        error = (
            f"reward part {missing[0]!r} has a weight but no value. Available: "
            f"{', '.join(sorted(draft.parts))}. Give sources without it a separate domain"
        )
        if draft.trajectory.verdict is None or draft.trajectory.verdict.parts:
            raise ValueError(error)
        # A program ended by its deadline has an empty verdict, which should not stop the run.
        draft.dropped = f"its program or environment gave no verdict: {error}"


def _opening_messages(prompt: Prompt, trajectory: Trajectory) -> tuple[Mapping[str, Any], ...]:
    """Return the messages before the policy's first turn. They may have been written by an
    environment."""
    messages = trajectory.messages if prompt.environment else ()
    roles = [message.get("role") for message in messages]
    first = trajectory.opening or (roles.index("assistant") if "assistant" in roles else 0)
    return messages[:first] or prompt.messages


def _serialize(trajectory: Trajectory, *, sampled: bool = False) -> str:
    """Serialize a trajectory for the workers. If `sampled` is set, messages written by the agent
    program itself are omitted."""
    messages = trajectory.messages
    if sampled:
        ours = [m.get("role") == "assistant" and m.get("name") == PROGRAM for m in messages]
        messages = tuple(m for m, skip in zip(messages, ours, strict=True) if not skip)
    return TextTrajectory(
        messages=messages,
        finish_reason="length" if trajectory.cut else "stop",
        sampled_tokens=trajectory.sampled_tokens,
        opening=trajectory.opening,
    ).dumps()
