"""From a prompt and an answer to what the answer is worth, by a model that judges it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from keel.rewards.failure_budget import Recent
from keel.rewards.judge.prompts import (
    MetaCheck,
    Verification,
    meta_question,
    rubric_question,
    verify_question,
)
from keel.rewards.judge.proof import Checked, Proof, ProofSpec, read_proof
from keel.rewards.judge.results import (
    Counts,
    Failed,
    FailureKind,
    Judged,
    JudgeSettings,
    Server,
    Unjudged,
)
from keel.rewards.judge.rubric import Rubric, Sample
from keel.rewards.judge.specs import Spec, judged_spec
from keel.rewards.judge.untrusted import size, tail
from keel.rewards.judge.verification import Evaluation, VerificationSpec, read_evaluation
from keel.rewards.text import blank, outside_think
from keel.rl.types import Prompt

T = TypeVar("T")

LONG = 0.1
"""Of `max_characters`: an answer beyond, with the thinking where that is sent, is what makes a
request too long, and not the task."""


def _read(spec: Spec, final: str) -> Proof | Evaluation | str | None:
    """An answer in the form that its spec wants, or what is wrong with that; None: any will do."""
    if isinstance(spec, Rubric):
        return None
    return read_proof(final) if isinstance(spec, ProofSpec) else read_evaluation(final)


class Judge:
    """Judges completions by their prompt's rubric. Belongs to one event loop."""

    def __init__(
        self, settings: JudgeSettings, *, server: Server | None = None, backoff_s: float = 0.5
    ) -> None:
        """settings: `keel.configs.schema.JudgeConfig`; server: of the run's own, in place of a
        `base_url`; backoff_s: the first pause between attempts.

        Raises ValueError naming the knob if there is no endpoint, no key, or no usable cache.
        """
        # Few runs have a judge, and its client takes more than a second to load.
        from keel.rewards.judge.client import Endpoint  # noqa: PLC0415

        self._settings = settings
        self._where = (
            f"at {settings.base_url}" if settings.base_url else f"{settings.model!r} of this run"
        )
        self._endpoint = Endpoint(settings, server=server, backoff_s=backoff_s)
        self._recent = Recent(settings.max_failure_fraction)
        self._failed: Counter[FailureKind] = Counter()
        self._judged = self._unasked = 0

    def counts(self) -> Counts:
        """What has been done so far."""
        return replace(
            self._endpoint.counts(),
            judged=self._judged,
            failed=dict(self._failed),
            unasked=self._unasked,
        )

    async def judge(self, prompt: Prompt, answer: str, *, thinking: str = "") -> Judged | Failed:
        """What `answer` is worth by `prompt.reward`, a spec that `judged_spec` reads.

        thinking: what the policy thought first; only criteria that ask for it see it, and what
        `answer` itself holds up to a `</think>` is cut off.

        Raises ValueError naming the prompt for a bad spec, and JudgeStopped when the calls have
        run out or too many completions could not be judged.
        """
        try:
            spec = judged_spec(prompt.reward)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.prompt_id}: {error}") from error
        final = outside_think(answer)
        read = _read(spec, final)
        most = self._settings.max_characters
        why = ""
        if size(final) > most:
            why = f"the answer has {size(final)} characters, more than max_characters = {most}"
        elif blank(final):
            why = "there is no answer"
        elif isinstance(read, str):
            why = f"the answer {read}"
        if why:
            self._judged += 1
            self._unasked += 1
            return spec.missed(why)
        try:
            if isinstance(spec, Rubric):
                result = await self._rubric(spec, prompt, final, thinking)
            elif isinstance(spec, ProofSpec):
                assert isinstance(read, Proof)
                result = await self._proof(spec, prompt, read)
            else:
                assert isinstance(read, Evaluation)
                result = await self._verification(spec, read)
        except Unjudged as error:
            # A text that takes many tokens is its author's doing, and no fault of the judge's.
            if error.kind == "too_long" and size(final) + error.thinking > most * LONG:
                self._unasked += 1
                return self._note(spec.missed(f"the judge's context does not hold it: {error}"))
            return self._note(Failed(error.kind, str(error)))
        return self._note(result)

    async def check_reachable(self) -> None:
        """Ask for one small judgement. Raises ValueError if none comes, or none in due form."""
        question = rubric_question(
            [{"role": "user", "content": "Name a colour."}],
            {"c1": "The answer names a colour."},
            "",
            "Blue.",
        )
        try:
            await self._endpoint.ask(question, fresh=True)
        except Unjudged as error:
            settings = self._settings
            if not settings.base_url:
                raise ValueError(
                    f"rewards.judge.model = {settings.model!r}: it is served, and gives no "
                    f"judgement: {error}. See rewards.judge.server and max_reply_tokens, or take "
                    "another model"
                ) from error
            raise ValueError(
                f"rewards.judge.base_url = {settings.base_url!r}: the judge {settings.model!r} "
                f"does not answer: {error}. Start it, or correct base_url, model or api_key_env"
            ) from error

    async def close(self) -> None:
        """End the connections."""
        await self._endpoint.close()

    async def _rubric(self, rubric: Rubric, prompt: Prompt, answer: str, thinking: str) -> Judged:
        thought = tail(thinking, self._settings.max_characters)  # its end led to the answer

        async def one(sample: int) -> Sample:
            calls = rubric.questions(prompt.messages, answer, thought, sample=sample)
            replies = await asyncio.gather(
                *(self._endpoint.ask(question, sample=sample) for _, question in calls),
                return_exceptions=True,
            )
            # That of the call without the thinking first: it shows whose doing it is.
            failures = [reply for reply in replies if isinstance(reply, BaseException)]
            if failures:
                raise min(failures, key=lambda failure: isinstance(failure, Unjudged))
            named: dict[str, tuple[float, str]] = {}
            for (asked, _), reply in zip(calls, replies, strict=True):
                assert not isinstance(reply, BaseException)
                named |= rubric.named(asked, reply)
            return named

        return rubric.judged(await self._samples(one))

    async def _proof(self, spec: ProofSpec, prompt: Prompt, proof: Proof) -> Judged:
        task = prompt.messages

        async def verified(sample: int) -> tuple[Verification, MetaCheck | None]:
            question = verify_question(task, spec.reference, proof.solution)
            found = await self._endpoint.ask(question, sample=sample)
            if found.score == 1:
                return found, None
            listed = "\n".join(f"{number}. {flaw}" for number, flaw in enumerate(found.flaws, 1))
            said = f"{found.evaluation}\n\nFlaws:\n{listed}\n\nScore: {found.score:g}"
            check = meta_question(task, proof.solution, said)
            return found, await self._endpoint.ask(check, sample=sample)

        async def one(sample: int) -> Checked:
            own = meta_question(task, proof.solution, proof.evaluation)
            (found, check), self_check = await asyncio.gather(
                verified(sample), self._endpoint.ask(own, sample=sample)
            )
            return Checked(found, check, self_check)

        return spec.judged(proof, await self._samples(one))

    async def _verification(self, spec: VerificationSpec, evaluation: Evaluation) -> Judged:
        question = meta_question(
            [{"role": "user", "content": spec.problem}], spec.proof, evaluation.text
        )

        async def one(sample: int) -> MetaCheck:
            return await self._endpoint.ask(question, sample=sample)

        return spec.judged(evaluation, await self._samples(one))

    async def _samples(self, one: Callable[[int], Awaitable[T]]) -> list[T]:
        """`samples` judgements at once; more than half of them have to succeed."""
        count = self._settings.samples
        done = await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)
        failures = [result for result in done if isinstance(result, BaseException)]
        for failure in failures:
            if not isinstance(failure, Unjudged):
                raise failure
        if 2 * len(failures) >= count:
            raise failures[0]
        return [result for result in done if not isinstance(result, BaseException)]

    def _note(self, result: Judged | Failed) -> Judged | Failed:
        """Count `result`; raise JudgeStopped if too many of late were failures."""
        much = self._recent.add(isinstance(result, Failed))
        if not isinstance(result, Failed):
            self._judged += 1
            return result
        self._failed[result.kind] += 1
        if much:
            raise self._endpoint.stop(
                f"the judge {self._where} failed on {much}, and "
                f"rewards.judge.max_failure_fraction = {self._settings.max_failure_fraction:g}; "
                f"the last: {result.reason}"
            )
        return result
