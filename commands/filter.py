"""`keel filter`: select training prompts by their pass rates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from keel.commands.sampling import (
    PREEMPTED_FIRST,
    STOPPING,
    choose_policy,
    sample_prompts,
    step_counter,
    to_be_retried,
)
from keel.configs.load import load_config
from keel.data.pass_rate_filter import FilterFolder
from keel.trainer.run.signals import Interrupt


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """Measure how often the policy solves each training prompt, and keep the prompts worth training
    on.

    The policy is a checkpoint, the base model or an endpoint.
    """
    config = load_config(recipe, overrides)
    policy = choose_policy(recipe, overrides, "filter.checkpoint", config.filter.checkpoint)
    with FilterFolder(config, policy.dataset.train.sources, policy.identity) as out:
        if prompts := out.waiting:
            print(f"{policy.text}\n{len(prompts):,} prompts to sample, with {policy.label}")
            with (
                policy.sampling(out.path) as runtime,
                Interrupt(print, STOPPING, preempted_first=PREEMPTED_FIRST) as stop,
            ):
                sample_prompts(
                    prompts,
                    config.filter.samples,
                    config,
                    sample=lambda prompt, size: runtime.submit(prompt, "eval", size),
                    score=partial(runtime.scorer.submit, purpose="eval"),
                    record=lambda prompt, groups: (
                        None if to_be_retried(groups) else out.record(prompt, groups)
                    ),
                    note=out.progress,
                    should_stop=runtime.with_watchdog(stop),
                    say=partial(print, flush=True),
                    count_steps=step_counter(runtime),
                )
        print(out.finish())
