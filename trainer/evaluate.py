"""Wiring: `keel eval` and `keel filter`, which sample and score and train nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from keel.configs.schema import Config, ConfigError, EvalVariant
from keel.data.evaluated import Asked, EvaluationFolder, asked_of, read_evaluation
from keel.data.filtered import FilterFolder
from keel.data.results import compared, compared_table, results, table
from keel.rewards.text import final_text, marked_answer
from keel.rl.types import Prompt, ScoredGroup, Trajectory
from keel.trainer.filter import POLICY, STOPPING, sample_prompts
from keel.trainer.prepare import Task, prepare
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.interrupt import Interrupt
from keel.trainer.system import System, episodes, running

MOST_ANSWER = 200
"""Characters: what is longer, and not marked as the answer, is none to agree with."""


def evaluate(recipe: str, overrides: Sequence[str]) -> None:
    """`keel eval`: the held-out sets, in each of `eval.variants`, by a checkpoint or the base
    model."""
    task = prepare(recipe, overrides)
    config, heldout = task.config, task.dataset.heldout
    if not heldout:
        raise ConfigError(
            "data.sources: no source has a holdout, so there is nothing to evaluate on. A file of "
            "problems that is there for this alone has weight: 0, and holdout: their number"
        )
    for variant in config.eval.each_variant:
        _check_variant(config, variant)
    other = read_evaluation(Path(config.eval.against)) if config.eval.against else ()
    folder = RunFolder(config)
    folder.check(POLICY)
    for line in folder.words():
        print(f"warning: {line}")
    chosen = folder.chosen(config.eval.checkpoint)
    name = chosen.name if chosen else "base"
    policy = f"{folder.path.resolve()}, {name}" if chosen else "the base model"
    with EvaluationFolder(config, policy, name) as out:
        print(task.text(), flush=True)
        print(f"sampling with {policy}", flush=True)
        with running(task, print) as system, Interrupt(print, STOPPING) as stop:
            if chosen:
                system.learner.load(chosen)
                system.wake()
            for variant in config.eval.each_variant:
                if not stop():
                    _ask(task, system, variant, out, stop)
        whole = not any(
            out.waiting(variant.name, prompts)
            for variant in config.eval.each_variant
            for prompts in heldout.values()
        )
        print("\n".join(_told(out, config, whole=whole, against=other)))


def _told(
    out: EvaluationFolder, config: Config, *, whole: bool, against: Sequence[Asked]
) -> list[str]:
    """What came of it, for people; written down where all is there. Raises ConfigError for an
    evaluation that it cannot be compared with."""
    if not out.asked:
        return [f"nothing was sampled; the same command goes on in {out.path}"]
    found = results(out.asked, config.eval.each_pass_at)
    lines = table(found)
    reasons = Counter(reason for one in out.asked for reason in one.missing)
    lines += [f"{n:,} completions missing, counted as wrong: {r}" for r, n in reasons.items()]
    if whole:
        out.finish(found)
    else:
        lines.append("not all is sampled; the same command goes on")
    if against:
        try:
            lines += [f"− {config.eval.against}:", *compared_table(compared(against, out.asked))]
        except ValueError as error:
            raise ConfigError(f"eval.against = {config.eval.against}: {error}") from error
    return [*lines, f"completions and results: {out.path}"]


def _check_variant(config: Config, variant: EvalVariant) -> None:
    """Raises ConfigError for one that the engines have no room for, or that asks nothing."""
    knob, most = f"eval.variants[{variant.name}]", config.rollout.sampling.max_tokens
    if variant.max_tokens > most:
        raise ConfigError(
            f"{knob}.max_tokens = {variant.max_tokens}: the engines have room for "
            f"rollout.sampling.max_tokens = {most}; raise that"
        )
    if variant.context != "as-in-training" and not config.with_agents:
        raise ConfigError(f"{knob}.context = {variant.context}: no source has an environment")


def _ask(
    task: Task, system: System, variant: EvalVariant, out: EvaluationFolder, stop: Interrupt
) -> None:
    sources = {
        prompt.prompt_id: (prompt, source)
        for source, prompts in task.dataset.heldout.items()
        for prompt in out.waiting(variant.name, prompts)
    }

    def record(asked: Prompt, groups: Sequence[ScoredGroup]) -> None:
        prompt, source = sources[asked.prompt_id]
        out.add(asked_of(variant.name, source, prompt, groups, answer_of))

    with _in(task, system, variant) as changed:
        if len(task.config.eval.each_variant) > 1:
            print(f"variant {variant.name}", flush=True)
        sample_prompts(
            [as_asked(prompt, variant) for prompt, _ in sources.values()],
            task.config.eval.samples,
            task.config,
            sample=lambda prompt, size: changed.submit(prompt, "eval", size),
            score=partial(system.scorer.submit, purpose="eval"),
            record=record,
            said=out.said,
            stop=stop,
            say=partial(print, flush=True),
        )


@contextmanager
def _in(task: Task, system: System, variant: EvalVariant) -> Iterator[System]:
    """The system, to sample as the variant has it."""
    config = task.config
    if variant.max_tokens:
        sampling = replace(config.rollout.sampling, max_tokens=variant.max_tokens)
        config = replace(config, rollout=replace(config.rollout, sampling=sampling))
    if variant.context != "as-in-training":
        config = replace(config, agents=replace(config.agents, context=variant.context))
    if config is task.config:
        yield system
        return
    changed = replace(task, config=config)
    with episodes(changed, system.pool) as agents:
        yield replace(system, task=changed, agents=agents)


def as_asked(prompt: Prompt, variant: EvalVariant) -> Prompt:
    """The prompt in the variant's words."""
    thinking = prompt.thinking if variant.thinking == "as-asked" else variant.thinking == "with"
    messages = [dict(message) for message in prompt.messages]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if variant.line and last is not None:
        last["content"] = f"{last['content']}\n{variant.line}"
    return replace(prompt, thinking=thinking, messages=tuple(messages))


def answer_of(trajectory: Trajectory) -> str:
    """What is marked as the answer; else all that was said, where that is short."""
    said = final_text(trajectory.messages).strip()
    answer = marked_answer(said)
    if answer is None:
        answer = said if len(said) <= MOST_ANSWER else ""
    return " ".join(answer.split())


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """`keel filter`: pass rates of the prompts to train on, by the last checkpoint or the base
    model, and those that are worth it."""
    task = prepare(recipe, overrides)
    folder = RunFolder(task.config)
    folder.check(POLICY)
    for line in folder.words():
        print(f"warning: {line}")
    latest = folder.latest
    policy = f"{folder.path.resolve()}, {latest.name}" if latest else "the base model"
    with FilterFolder(task.config, task.dataset.train.sources, policy) as out:
        if waiting := out.waiting:
            print(task.text(), flush=True)
            print(f"{len(waiting):,} prompts to sample, with {policy}", flush=True)
            with running(task, print) as system, Interrupt(print, STOPPING) as stop:
                if latest:
                    system.learner.load(latest)
                    system.wake()
                sample_prompts(
                    waiting,
                    task.config.filter.samples,
                    task.config,
                    sample=lambda prompt, size: system.submit(prompt, "eval", size),
                    score=partial(system.scorer.submit, purpose="eval"),
                    record=out.record,
                    said=out.said,
                    stop=stop,
                    say=partial(print, flush=True),
                )
        print(out.finish())
