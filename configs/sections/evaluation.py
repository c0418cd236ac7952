"""What is measured of a policy and never trained on: evaluations, and pass rates of prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import require, require_endpoint, require_pass_rates

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
Thinking = Literal["as-asked", "with", "without"]
Context = Literal["as-in-training", "none", "summary", "discard-75", "discard-all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """A model behind an OpenAI-compatible endpoint, whose completions `keel eval` and `keel filter`
    measure in place of the recipe's model. Neither engines nor a trainer are started."""

    base_url: str = ""
    """`http://localhost:8000/v1`; empty: the recipe's model is measured."""
    model: str = ""
    """As the endpoint calls it."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: the endpoint wants none."""
    max_concurrent: int = 32
    """Most completions in flight at once."""
    timeout_s: float = 600.0
    """Longest wait for one, in seconds."""
    retries: int = 4
    """Further attempts after a timeout, a refusal for load or a server error."""
    tells_thinking: bool = False
    """Send whether a prompt is to be thought about, as vLLM's and SGLang's servers take it:
    `chat_template_kwargs: {enable_thinking: …, thinking: …}`."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sent along with each request."""

    def __post_init__(self) -> None:
        require(
            bool(self.base_url) == bool(self.model),
            "endpoint.model",
            self.model,
            f"goes together with endpoint.base_url = {self.base_url!r}: set both or none",
        )
        if not self.base_url:
            return
        require_endpoint("endpoint", self.base_url, self.api_key_env)
        for name, least in (("max_concurrent", 1), ("retries", 0)):
            value = getattr(self, name)
            require(value >= least, f"endpoint.{name}", value, f"must be at least {least}")
        require(self.timeout_s > 0, "endpoint.timeout_s", self.timeout_s, "must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalVariant:
    """`keel eval`: another way of asking the same prompts, measured beside the others."""

    name: str
    """In the results: letters, digits and any of . _ + -"""
    thinking: Thinking = "as-asked"
    """as-asked: as each source says."""
    max_tokens: int = 0
    """Budget of a completion, or of a turn, its thinking included; 0: `rollout.sampling`'s."""
    ask: str = ""
    """A line after the last user message; `boxed`: to reason step by step and to put the answer
    within `\\boxed{}`, for mathematics (DeepSeek-V3.2, section 4.1)."""
    context: Context = "as-in-training"
    """What to do when an episode's context is nearly full; as-in-training: `agents.context`."""

    def __post_init__(self) -> None:
        knob = f"eval.variants[{self.name}]"
        require(
            bool(re.fullmatch(r"[\w.+-]+", self.name)),
            f"{knob}.name",
            self.name,
            "must be letters, digits and any of . _ + -",
        )
        require(self.max_tokens >= 0, f"{knob}.max_tokens", self.max_tokens, "must be >= 0")

    @property
    def line(self) -> str:
        return BOXED if self.ask == "boxed" else self.ask


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluations in a run, and `keel eval`."""

    file: str = ""
    """An evaluation set by file, `--eval FILE` on the command line: a further source with `holdout:
    all`, whose rows are read and scored like those of the recipe's first file. The run's
    config.yaml has it among `data.sources`."""
    samples: int = 1
    """Completions per held-out prompt; pass@1 is the fraction that is wholly right."""
    temperature: float = 1.0
    """Sampling temperature of evaluations; 0: greedy, the likeliest token at each position.
    Training has `rollout.sampling.temperature`."""
    top_p: float = 1.0
    """Sample from the likeliest ids that reach this probability together; 1: from all. Below 1 it
    needs `top_k`."""
    top_k: int = 0
    """0: the whole vocabulary; on a GPU, where training truncates, the likeliest 1,024 ids: vLLM's
    engines take no request without a bound if they return sampling masks."""

    prompts: Literal["heldout", "train"] = "heldout"
    """`keel eval`: which of the sources' prompts. train: those to train on, to learn from the
    completions (`keel sft`, `keel distill`)."""
    size: int = 0
    """`keel eval`: the first so many of each source; 0: all."""
    pass_at: tuple[int, ...] = ()
    """`keel eval`: k of pass@k and maj@k; empty: `samples`, and the powers of two below it."""
    submissions: int = 0
    """`keel eval`: as in a programming contest, submit this many of the `samples` and count the
    best for each subtask (DeepSeek-V3.2, appendix D): those that pass the tests the task shows, are
    not cut off and do not decline, longest thinking first. 0: no such figure."""
    variants: tuple[EvalVariant, ...] = ()
    """`keel eval`: ways of asking; empty: the recipe's own alone."""
    checkpoint: str = "last"
    """`keel eval`: whose completions: `last` (the base model, where the run has no checkpoint),
    `base`, or the step of a checkpoint that is there."""
    dir: str = ""
    """`keel eval`: where completions and results go; empty: a folder in `eval` in `run.dir`."""
    against: str = ""
    """`keel eval`: folder of an evaluation of the same prompts, to be compared with pair by
    pair."""

    def __post_init__(self) -> None:
        require(self.samples >= 1, "eval.samples", self.samples, "must be at least 1")
        require(self.size >= 0, "eval.size", self.size, "must not be negative")
        for k in self.pass_at:
            require(
                1 <= k <= self.samples,
                "eval.pass_at",
                list(self.pass_at),
                f"each must be from 1 to eval.samples = {self.samples}",
            )
        require(
            0 <= self.submissions <= self.samples,
            "eval.submissions",
            self.submissions,
            f"must be from 0 to eval.samples = {self.samples}",
        )
        names = [variant.name for variant in self.variants]
        require(len(set(names)) == len(names), "eval.variants", names, "names must differ")
        _require_checkpoint("eval.checkpoint", self.checkpoint)
        require(
            self.temperature == 0 or 0.01 <= self.temperature <= 10,
            "eval.temperature",
            self.temperature,
            "must be 0 (greedy) or in [0.01, 10]",
        )
        require(
            self.temperature > 0 or self.samples == 1,
            "eval.samples",
            self.samples,
            "must be 1 with eval.temperature = 0: greedy completions of a prompt are all the same",
        )
        require(0 < self.top_p <= 1, "eval.top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k >= 0, "eval.top_k", self.top_k, "must not be negative")
        require(
            self.top_p == 1 or self.top_k > 0,
            "eval.top_k",
            self.top_k,
            f"must be above 0 with eval.top_p = {self.top_p} (try 512)",
        )

    @property
    def each_variant(self) -> tuple[EvalVariant, ...]:
        return self.variants or (EvalVariant(name="recipe"),)

    @property
    def each_pass_at(self) -> tuple[int, ...]:
        """In order."""
        powers = [2**n for n in range(self.samples.bit_length()) if 2**n <= self.samples]
        return tuple(sorted({*(self.pass_at or (*powers, self.samples))}))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig:
    """`keel filter`: which prompts are worth training on, by the policy's own pass rate."""

    dir: str = ""
    """Where the pass rates and the kept prompts go; empty: `filter` in `run.dir`."""
    checkpoint: str = "last"
    """Whose completions, as in `eval.checkpoint`."""
    samples: int = 100
    """Completions of each prompt."""
    least_pass_rate: float = 0.0
    """Keep prompts from this pass rate on; one that no completion passes is never kept."""
    most_pass_rate: float = 1.0
    """Keep prompts up to this pass rate."""

    def __post_init__(self) -> None:
        require(self.samples >= 1, "filter.samples", self.samples, "must be at least 1")
        _require_checkpoint("filter.checkpoint", self.checkpoint)
        require_pass_rates("filter", self.least_pass_rate, self.most_pass_rate)


def _require_checkpoint(knob: str, value: str) -> None:
    require(
        value in ("last", "base") or value.isdecimal(),
        knob,
        value,
        "must be last, base, or a step such as 20",
    )
