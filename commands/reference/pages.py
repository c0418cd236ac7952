"""Which page of docs/ speaks of a knob."""

from __future__ import annotations

import re

PAGES = {
    "run": "checkpoints",
    "run.steps": "learning",
    "run.seed": "stability",
    "run.device": "from-base-to-rl",
    "run.gpu_gib": "scaling",
    "run.gpus_per_node": "scaling",
    "run.nodes": "scaling",
    "run.eval_every": "evaluation",
    "run.save_trajectories": "report",
    "run.save_tokens": "report",
    "run.save_all_trajectories": "sft",
    "run.startup_timeout_s": "reliability",
    "run.trackers": "trackers",
    "model": "from-base-to-rl",
    "model.chat_template": "data",
    "model.dtype": "stability",
    "model.tokenizer": "data",
    "model.tiny": "learning",
    "data.sources": "data",
    "data.sources[].rewards": "rewards",
    "data.sources[].environment": "environments",
    "data.sources[].pass_rates": "rollouts",
    "data.sources[].least_pass_rate": "rollouts",
    "data.sources[].most_pass_rate": "rollouts",
    "data.sources[].holdout": "evaluation",
    "data.sources[].kl_coef": "alarms",
    "data.sources[].thinking": "rewards",
    "data.sources[].system_template": "synthesis",
    "data.sources[].length": "rewards",
    "data.sources[].budget": "synthesis",
    "data.only": "learning",
    "data.train_on": "distillation",
    "data.max_prompt_tokens": "synthesis",
    "rewards": "rewards",
    "rewards.judge": "rubrics",
    "rollout": "rollouts",
    "rollout.engines": "performance",
    "rollout.cascade_attention": "rollouts",
    "rollout.dtype": "stability",
    "rollout.head_dtype": "performance",
    "rollout.sampling": "stability",
    "rollout.sampling.max_tokens": "rewards",
    "agents": "agents",
    "algorithm": "stability",
    "algorithm.prompts_per_step": "synthesis",
    "algorithm.scale_advantages": "rewards",
    "algorithm.max_lag": "rollouts",
    "algorithm.filter_groups": "rollouts",
    "algorithm.max_refills": "rollouts",
    "algorithm.publish_every": "rollouts",
    "algorithm.skip_uniform_groups": "report",
    "trainer": "performance",
    "trainer.ranks": "checkpoints",
    "trainer.zero_stage": "checkpoints",
    "trainer.expert_parallel": "checkpoints",
    "trainer.sequence_parallel": "checkpoints",
    "trainer.lr": "sft",
    "trainer.warmup_steps": "sft",
    "trainer.schedule": "sft",
    "trainer.micro_batch_tokens": "rollouts",
    "trainer.publish_bucket_mib": "scaling",
    "trainer.compile": "scaling",
    "trainer.offload_optimizer": "checkpoints",
    "trainer.timeout_s": "reliability",
    "alarms": "alarms",
    "eval": "evaluation",
    "filter": "rollouts",
    "sft": "sft",
    "endpoint": "evaluation",
    "distill": "distillation",
    "synthesize": "synthesis",
    "synthesize.code": "synthesis",
    "synthesize.search": "synthesis",
}
"""How the names of knobs begin → page. The longest counts, unless a docstring names a page."""


def page_of(knob: str, text: str) -> str:
    """Without `docs/` and `.md`. text: the knob's own."""
    if named := re.search(r"docs/([\w-]+)\.md", text):
        return named[1]
    parts = re.split(r"(?=[.[])", knob)
    begins = ("".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((PAGES[begin] for begin in begins if begin in PAGES), "")
