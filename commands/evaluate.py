"""Wiring: `keel eval` and `keel filter`, which sample and score and train nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from keel.agents.episode import BROKE
from keel.commands.filter import GIVEN_UP, POLICY, STOPPING, sample_prompts
from keel.commands.recipes.variants import as_asked, as_in, check_room, check_variant
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, EvalVariant
from keel.data.dataset import Dataset, load_dataset
from keel.data.eval_store import Asked, EvaluationFolder, asked_of, read_evaluation
from keel.data.pass_rate_filter import FilterFolder
from keel.data.pass_rates import digest_of
from keel.data.results import compared, compared_table, results, table
from keel.data.summary import source_lines
from keel.model.hub import hub_answers
from keel.rewards.checks import check_spec
from keel.rewards.judge.service import JudgeService
from keel.rewards.text import every_turn, final_text, marked_answer, thinking_text
from keel.rl.types import Prompt, ScoredGroup, Trajectory
from keel.rollout.endpoint import LATER, EndpointCompletions
from keel.trainer.launch import Remote, System, episodes, running, scorer_of, with_episodes
from keel.trainer.prepare import (
    check_rewards,
    needs_judge,
    prepare,
    prompt_tokens,
    require_prompts,
)
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import fingerprint
from keel.trainer.run.signals import Interrupt

REWARDS = "rewards"
"""In the folder of results: what reward functions print."""
CAUSES = "the data, run.seed or eval.variants was another one"
MOST_ANSWER = 200
"""Characters: what is longer, and not marked as the answer, is none to agree with."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Whose completions are measured, to what prompts."""

    config: Config
    dataset: Dataset
    policy: str
    """To know it again."""
    whose: str
    """The same for people."""
    name: str
    """Fit for a folder."""
    text: str
    """What is planned."""
    sampling: Callable[[Path], AbstractContextManager[System | Remote]]
    """What samples and scores, started. Rewards print into the folder `rewards` of that one."""
    tokenizer: str = ""
    """`Task.tokenizer_digest`; empty where nobody knows the tokens of an endpoint."""
    count_tokens: Callable[[Prompt], int] | None = None
    """Of a prompt; None where nobody knows the tokens of an endpoint."""

    @property
    def sets(self) -> Mapping[str, Sequence[Prompt]]:
        """Source → the prompts that `keel eval` is to ask."""
        given, of = self.config.eval, self.dataset
        chosen = of.heldout if given.prompts == "heldout" else of.train.sources
        return {name: prompts[: given.size or None] for name, prompts in chosen.items()}


def evaluate(recipe: str, overrides: Sequence[str]) -> None:
    """`keel eval`: the held-out sets, or the prompts to train on, in each of `eval.variants`, by a
    checkpoint, the base model or a model behind an endpoint."""
    config = load_config(recipe, overrides)
    for variant in config.eval.each_variant:
        check_variant(config, variant)
    other = read_evaluation(Path(config.eval.against)) if config.eval.against else ()
    subject = _subject(recipe, overrides, "eval.checkpoint", config.eval.checkpoint)
    sets = subject.sets
    if not any(sets.values()):
        raise ConfigError(
            "data.sources: no source has a holdout, so there is nothing to evaluate on. Name a "
            "file of problems: --eval FILE; or set data.sources[].holdout"
        )
    if subject.count_tokens is not None:
        for variant in config.eval.each_variant:
            check_room(subject.config, variant, sets, subject.count_tokens)
    if other:
        _check_same_prompts(config, sets, other)
    with EvaluationFolder(config, subject.policy, subject.name) as out:
        print(f"{subject.text}\nsampling with {subject.whose}", flush=True)
        with (
            subject.sampling(out.path) as system,
            Interrupt(print, STOPPING, preempted_first=GIVEN_UP) as stop,
        ):
            for variant in config.eval.each_variant:
                if not stop():
                    _ask(subject, system, variant, out, stop)
        whole = not any(
            out.waiting(variant.name, prompts)
            for variant in config.eval.each_variant
            for prompts in sets.values()
        )
        print("\n".join(_told(out, subject, whole=whole, against=other)))


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """`keel filter`: pass rates of the prompts to train on, by a checkpoint, the base model or a
    model behind an endpoint, and those that are worth it."""
    config = load_config(recipe, overrides)
    subject = _subject(recipe, overrides, "filter.checkpoint", config.filter.checkpoint)
    with FilterFolder(config, subject.dataset.train.sources, subject.policy) as out:
        if waiting := out.waiting:
            print(f"{subject.text}\n{len(waiting):,} prompts to sample, with {subject.whose}")
            with (
                subject.sampling(out.path) as system,
                Interrupt(print, STOPPING, preempted_first=GIVEN_UP) as stop,
            ):
                sample_prompts(
                    waiting,
                    config.filter.samples,
                    config,
                    sample=lambda prompt, size: system.submit(prompt, "eval", size),
                    score=partial(system.scorer.submit, purpose="eval"),
                    record=lambda prompt, groups: (
                        None if to_be_had_later(groups) else out.record(prompt, groups)
                    ),
                    said=out.said,
                    stop=system.attended(stop),
                    say=partial(print, flush=True),
                    decoded=decoded_by(system),
                )
        print(out.finish())


def _subject(recipe: str, overrides: Sequence[str], knob: str, checkpoint: str) -> Subject:
    """Raises ConfigError. checkpoint: what `knob` says."""
    config = load_config(recipe, overrides)
    if config.endpoint.base_url:
        return _remote(config)
    task = prepare(recipe, overrides)
    folder = RunFolder(task.config, task.tokenizer_digest)
    folder.check(POLICY)
    for line in folder.warnings():
        print(f"warning: {line}")
    chosen = folder.select_checkpoint(knob, checkpoint)
    if chosen is None and checkpoint == "last":
        there = "has no checkpoint" if folder.path.exists() else "does not exist"
        print(f"warning: run.dir = {folder.path} {there}: model.path itself is asked ({knob}=base)")
    weights = fingerprint(chosen or Path(task.config.model.path).expanduser())
    told = f" (weights {weights})" * bool(weights)
    its = f"{folder.path.resolve()}, {chosen.name}" if chosen else ""

    @contextmanager
    def sampling(out: Path) -> Iterator[System]:
        say = partial(print, flush=True)
        # A checkpoint's weights are the ranks' to read; a model folder's, the engines'.
        with running(task, say, out / REWARDS, learner=chosen is not None) as system:
            if chosen:
                system.learner.load(chosen)
                system.wake()
            yield system

    return Subject(
        config=task.config,
        dataset=task.dataset,
        policy=(its or "the base model") + told,
        whose=(its or f"model.path = {task.config.model.path}") + told,
        name=chosen.name if chosen else "base",
        text=task.text(trains=False, evaluates=knob == "eval.checkpoint"),
        sampling=sampling,
        tokenizer=task.tokenizer_digest,
        count_tokens=lambda prompt: prompt_tokens(prompt, task.tokenizer, task.facts),
    )


def _remote(config: Config) -> Subject:
    """Its prompts are not counted in tokens: nobody knows how the endpoint would. Raises
    ConfigError."""
    endpoint = config.endpoint
    require_prompts(config)
    if driven := [source.name for source in config.data.sources if source.environment.program]:
        raise ConfigError(
            f"endpoint.base_url = {endpoint.base_url}: gives texts, and the program of "
            f"data.sources[{driven[0]}] needs tokens; leave such sources out (data.only), or serve "
            "the model by model.path"
        )
    if raw := [source.name for source in config.data.sources if source.raw]:
        raise ConfigError(
            f"endpoint.base_url = {endpoint.base_url}: is asked in chats, and data.sources["
            f"{raw[0]}].raw has none; leave such sources out (data.only), or serve the model by "
            "model.path"
        )
    dataset = load_dataset(
        config.data,
        seed=config.run.seed,
        count_tokens=lambda _: 0,
        check_reward=check_spec,
        hub_answers=hub_answers,
    )
    notes = check_rewards(config, dataset)
    judged = needs_judge(config, dataset)
    if judged and not config.rewards.judge.base_url:
        raise ConfigError(
            "rewards.judge.base_url: with endpoint.base_url, nothing is served here; give the "
            "judge of these rubrics an endpoint, too"
        )
    try:
        completions = EndpointCompletions(endpoint)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    @contextmanager
    def sampling(out: Path) -> Iterator[Remote]:
        with ExitStack() as stack:
            judge = None
            if judged:
                judge = stack.enter_context(JudgeService(config.rewards.judge))
                judge.check_reachable()
            scorer = stack.enter_context(scorer_of(config, judge, print, out / REWARDS))
            stack.enter_context(completions)
            remote = Remote(config=config, completions=completions, scorer=scorer)
            yield stack.enter_context(with_episodes(remote)) if config.with_agents else remote

    lines = [*source_lines(config, dataset), *(f"{name}: {note}" for name, note in notes.items())]
    policy = f"{endpoint.model} at {endpoint.base_url}"
    return Subject(
        config=config,
        dataset=dataset,
        policy=policy,
        whose=policy,
        name=re.sub(r"[^\w+-]+", "-", endpoint.model).strip("-") or "endpoint",
        text="\n".join(lines),
        sampling=sampling,
    )


def _check_same_prompts(
    config: Config, sets: Mapping[str, Sequence[Prompt]], other: Sequence[Asked]
) -> None:
    """Raises ConfigError where the evaluation that is to come could not be compared."""
    theirs = {one.id: one.digest for one in other}
    common = [p for prompts in sets.values() for p in prompts if p.prompt_id in theirs]
    why = "" if common else "it has none of these prompts"
    had = {one.variant for one in other}
    if had.isdisjoint(variant.name for variant in config.eval.each_variant):
        why = f"it has other variants ({', '.join(sorted(had))})"
    for prompt in common:
        if theirs[prompt.prompt_id] != digest_of(prompt):
            why = f"it has another prompt called {prompt.prompt_id}"
            break
    if why:
        raise ConfigError(f"eval.against = {config.eval.against}: {why}: {CAUSES}")


def _told(
    out: EvaluationFolder, subject: Subject, *, whole: bool, against: Sequence[Asked]
) -> list[str]:
    """What came of it, for people; written down where all is there. What an earlier start has asked
    more does not count: the sets were larger then."""
    config = subject.config
    wanted = {prompt.prompt_id for prompts in subject.sets.values() for prompt in prompts}
    asked = [one for one in out.asked if one.id in wanted]
    if not asked:
        return [f"nothing was sampled; the same command goes on in {out.path}"]
    found = results(asked, config.eval.each_pass_at, config.eval.submissions)
    lines = table(found)
    if more := len({one.id for one in out.asked} - wanted):
        lines.append(f"{more:,} prompts that an earlier start asked are in no set now: left out")
    reasons = Counter(reason for one in asked for reason in one.missing)
    lines += [f"{n:,} completions missing, counted as wrong: {r}" for r, n in reasons.items()]
    if whole:
        out.finish(found)
    else:
        lines.append("not all is sampled; the same command goes on")
    if against:
        try:
            lines += [f"− {config.eval.against}:", *compared_table(compared(against, asked))]
        except ValueError as error:  # of what there is so far, say
            lines.append(f"− {config.eval.against}: {error}")
    return [*lines, f"completions and results: {out.path}"]


def _ask(
    subject: Subject,
    system: System | Remote,
    variant: EvalVariant,
    out: EvaluationFolder,
    stop: Interrupt,
) -> None:
    sources = {
        prompt.prompt_id: (prompt, source)
        for source, prompts in subject.sets.items()
        for prompt in out.waiting(variant.name, prompts)
    }

    def record(asked: Prompt, groups: Sequence[ScoredGroup]) -> None:
        prompt, source = sources[asked.prompt_id]
        if to_be_had_later(groups):
            return
        found = asked_of(
            variant.name,
            source,
            prompt,
            groups,
            answer_of,
            thinking_of,
            tokenizer=subject.tokenizer,
        )
        out.add(found)

    config = subject.config
    with as_the_variant_has_it(config, system, variant) as changed:
        if len(config.eval.each_variant) > 1:
            print(f"variant {variant.name}", flush=True)
        sample_prompts(
            [as_asked(prompt, variant) for prompt, _ in sources.values()],
            config.eval.samples,
            config,
            sample=lambda prompt, size: changed.submit(prompt, "eval", size),
            score=partial(system.scorer.submit, purpose="eval"),
            record=record,
            said=out.said,
            stop=system.attended(stop),
            say=partial(print, flush=True),
            decoded=decoded_by(system),
        )


def decoded_by(system: System | Remote) -> Callable[[], int] | None:
    """What counts the decoding steps; None for an endpoint, and for episodes, whose number of turns
    is not known in advance."""
    pool = getattr(system, "pool", None)
    return None if pool is None or system.agents is not None else lambda: pool.steps


@contextmanager
def as_the_variant_has_it(
    given: Config, system: System | Remote, variant: EvalVariant
) -> Iterator[System | Remote]:
    """The system, to sample so."""
    config = as_in(variant, given)
    if config is given:
        yield system
        return
    if isinstance(system, Remote):
        changed = replace(system, config=config)
        with with_episodes(changed) if config.with_agents else nullcontext(changed) as remote:
            yield remote
        return
    changed = replace(system.task, config=config)
    with episodes(changed, system.pool) as agents:
        yield replace(system, task=changed, agents=agents)


def to_be_had_later(groups: Sequence[ScoredGroup]) -> bool:
    """Whether completions are missing only since an endpoint had too much to do: their prompt is
    asked again by the next start, and does not count as one that was failed."""
    dropped = [reason for group in groups for reason in group.group.dropped]
    return any(reason.removeprefix(BROKE).startswith(LATER) for reason in dropped)


def answer_of(trajectory: Trajectory) -> str:
    """What is marked as the answer; else all that was said, where that is short."""
    said = final_text(trajectory.messages).strip()
    answer = marked_answer(said)
    if answer is None:
        answer = said if len(said) <= MOST_ANSWER else ""
    return " ".join(answer.split())


def thinking_of(trajectory: Trajectory) -> str:
    """Of all turns."""
    return every_turn(thinking_text, trajectory.messages)
