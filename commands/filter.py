"""`keel filter`: select the prompts that are worth training on."""

from collections.abc import Sequence

from keel.commands.evaluate import choose_policy, sample_prompts
from keel.configs.load import load_config
from keel.data.pass_rate_filter import FilterFolder


def filter_prompts(recipe: str, overrides: Sequence[str]) -> None:
    """Measure how often a checkpoint, the base model or an endpoint solves each training prompt,
    and keep the prompts that are worth training on."""
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
