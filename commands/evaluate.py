"""`keel eval` and `keel filter`: score a policy without training it, and select prompts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from keel.commands.sampling import (
    AnyRuntime,
    SampledPolicy,
    choose_policy,
    extract_answer,
    sample_prompts,
)
from keel.configs.load import load_config
from keel.configs.schema import Config, ConfigError, EvalVariant
from keel.data.eval_store import EvaluationFolder, SampledPrompt, collect_samples, read_evaluation
from keel.data.items import prompt_digest
from keel.data.pass_rates import FilterFolder
from keel.data.results import compare_pass_rates, format_comparison, format_results, results
from keel.rl.types import Prompt, ScoredGroup
from keel.trainer.launch import RemoteRuntime, run_episodes, run_remote_episodes
from keel.trainer.run.signals import Interrupt


def evaluate(recipe: str, overrides: Sequence[str]) -> None:
    """Score a checkpoint, the base model or an endpoint on the held-out or the training prompts,
    once for each variant in `eval.variants`."""
    config = load_config(recipe, overrides)
    variants = config.eval.each_variant
    for variant in variants:
        config.check_variant(variant)
    baseline = read_evaluation(Path(config.eval.against)) if config.eval.against else ()
    policy = choose_policy(recipe, overrides, "eval.checkpoint", config.eval.checkpoint)
    sets = policy.sets
    if not any(sets.values()):
        raise ConfigError(
            "data.sources: no source has a holdout, so there is nothing to evaluate on. Name a "
            "file of problems: --eval FILE; or set data.sources[].holdout"
        )
    if policy.count_tokens is not None:
        for variant in variants:
            _check_prompts_fit(policy.config, variant, sets, policy.count_tokens)
    if baseline:
        _check_comparable(config, sets, baseline)
    with EvaluationFolder(config, policy.identity, policy.name) as out:
        print(f"{policy.text}\nsampling with {policy.label}", flush=True)
        with policy.running(out.path) as (runtime, stop):
            for variant in variants:
                if not stop():
                    _sample_variant(policy, runtime, variant, out, stop)
        complete = not any(
            out.waiting(variant.name, prompts) for variant in variants for prompts in sets.values()
        )
        print("\n".join(_summary(out, policy, complete=complete, baseline=baseline)))


def _check_comparable(
    config: Config, sets: Mapping[str, Sequence[Prompt]], baseline: Sequence[SampledPrompt]
) -> None:
    digests = {one.id: one.digest for one in baseline}
    common = [p for prompts in sets.values() for p in prompts if p.prompt_id in digests]
    problem = "" if common else "it has none of these prompts"
    variants = {one.variant for one in baseline}
    if variants.isdisjoint(variant.name for variant in config.eval.each_variant):
        problem = f"it has other variants ({', '.join(sorted(variants))})"
    for prompt in common:
        if digests[prompt.prompt_id] != prompt_digest(prompt):
            problem = f"it has another prompt called {prompt.prompt_id}"
            break
    if problem:
        raise ConfigError(
            f"eval.against = {config.eval.against}: {problem}. Use the same data, run.seed and "
            "eval.variants"
        )


def _summary(
    out: EvaluationFolder,
    policy: SampledPolicy,
    *,
    complete: bool,
    baseline: Sequence[SampledPrompt],
) -> list[str]:
    config = policy.config
    ids = {prompt.prompt_id for prompts in policy.sets.values() for prompt in prompts}
    request = [one for one in out.asked if one.id in ids]
    if not request:
        return [f"nothing was sampled; rerun the same command to resume in {out.path}"]
    scores = results(request, config.eval.each_pass_at, config.eval.submissions)
    lines = format_results(scores)
    if ignored := len({one.id for one in out.asked} - ids):
        lines.append(f"{ignored:,} prompts sampled earlier are in no set now: left out")
    reasons = Counter(reason for one in request for reason in one.missing)
    lines += [f"{n:,} completions missing, counted as wrong: {r}" for r, n in reasons.items()]
    if complete:
        out.finish(scores)
    else:
        lines.append("not all is sampled; rerun the same command to resume")
    if baseline:
        try:
            lines += [
                f"− {config.eval.against}:",
                *format_comparison(compare_pass_rates(baseline, request)),
            ]
        except ValueError as error:  # nothing in common so far
            lines.append(f"− {config.eval.against}: {error}")
    return [*lines, f"completions and results: {out.path}"]


def _sample_variant(
    policy: SampledPolicy,
    runtime: AnyRuntime,
    variant: EvalVariant,
    out: EvaluationFolder,
    stop: Interrupt,
) -> None:
    sources = {
        prompt.prompt_id: (prompt, source)
        for source, prompts in policy.sets.items()
        for prompt in out.waiting(variant.name, prompts)
    }
    digest = policy.tokenizer_digest

    def record(asked: Prompt, groups: Sequence[ScoredGroup]) -> None:
        prompt, source = sources[asked.prompt_id]
        known = (variant.name, source, prompt, groups, extract_answer, policy.thinking_length)
        out.add(collect_samples(*known, tokenizer=digest))

    config = policy.config
    with _variant_runtime(config, runtime, variant) as changed:
        if len(config.eval.each_variant) > 1:
            print(f"variant {variant.name}", flush=True)
        sample_prompts(
            changed,
            [_as_asked(prompt, variant) for prompt, _ in sources.values()],
            config.eval.samples,
            config,
            record=record,
            note=out.progress,
            stop=stop,
        )


@contextmanager
def _variant_runtime(
    config: Config, runtime: AnyRuntime, variant: EvalVariant
) -> Iterator[AnyRuntime]:
    changed = config.in_variant(variant)
    if changed is config:
        yield runtime
    elif isinstance(runtime, RemoteRuntime):
        remote = replace(runtime, config=changed)
        with run_remote_episodes(remote) if changed.with_agents else nullcontext(remote) as remote:
            yield remote
    else:
        task = replace(runtime.task, config=changed)
        with run_episodes(task, runtime.pool) as agents:
            yield replace(runtime, task=task, agents=agents)


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """Measure how often a checkpoint, the base model or an endpoint solves each training prompt,
    and keep the prompts worth training on."""
    config = load_config(recipe, overrides)
    policy = choose_policy(recipe, overrides, "filter.checkpoint", config.filter.checkpoint)
    with FilterFolder(config, policy.dataset.train.sources, policy.identity) as out:
        if prompts := out.waiting:
            print(f"{policy.text}\n{len(prompts):,} prompts to sample, with {policy.label}")
            with policy.running(out.path) as (runtime, stop):
                sample_prompts(
                    runtime,
                    prompts,
                    config.filter.samples,
                    config,
                    record=out.record,
                    note=out.progress,
                    stop=stop,
                )
        print(out.finish())


def _check_prompts_fit(
    config: Config,
    variant: EvalVariant,
    sets: Mapping[str, Sequence[Prompt]],
    count_tokens: Callable[[Prompt], int],
) -> None:
    """Raise ConfigError for the first prompt that does not fit in the context once the variant's
    extra line and token limit are applied."""
    if not variant.line and variant.thinking == "as-asked":
        return
    knob = f"eval.variants[{variant.name}]"
    budget = config.in_variant(variant).rollout.sampling.max_tokens
    room = config.max_context - budget
    for source, prompts in sets.items():
        for prompt in prompts:
            tokens = count_tokens(_as_asked(prompt, variant))
            if tokens > room:
                limit = config.data.max_prompt_tokens
                raise ConfigError(
                    f"{knob}: prompt {prompt.prompt_id} of data.sources[{source}] has {tokens} "
                    f"tokens, and a budget of {budget} leaves {room}. Raise data.max_prompt_tokens "
                    f"= {limit} by at least {tokens - room}"
                )


def _as_asked(prompt: Prompt, variant: EvalVariant) -> Prompt:
    thinking = prompt.thinking if variant.thinking == "as-asked" else variant.thinking == "with"
    messages = [dict(message) for message in prompt.messages]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if variant.line and last is not None:
        last["content"] = f"{last['content']}\n{variant.line}"
    return replace(prompt, thinking=thinking, messages=tuple(messages))
