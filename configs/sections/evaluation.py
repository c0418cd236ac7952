"""`eval`, `filter` and `endpoint`: measure a policy without training it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import Section, knob, require_endpoint, require_unique

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig(Section, path="endpoint"):
    """Settings for an OpenAI-compatible endpoint that `keel eval` and `keel filter` sample from in
    place of the recipe's model. No engine or trainer is started."""

    base_url: str = ""
    """URL of the endpoint, such as `http://localhost:8000/v1`. Empty: use the recipe's model."""
    model: str = ""
    """Model name at the endpoint."""
    api_key_env: str = ""
    """Name of the environment variable with the API key. Empty: no key."""
    max_concurrent: int = knob(32, ge=1)
    """Maximum number of concurrent requests."""
    timeout_s: float = knob(600.0, gt=0)
    """Timeout in seconds per request."""
    retries: int = knob(4, ge=0)
    """Number of retries after a timeout, a rate limit or a server error."""
    tells_thinking: bool = False
    """Send each prompt's thinking mode as vLLM and SGLang servers expect it:
    `chat_template_kwargs: {enable_thinking: …, thinking: …}`."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Additional fields of the request body."""

    def check(self) -> None:
        rule = f"set both endpoint.model and endpoint.base_url = {self.base_url!r}, or neither"
        self.require(bool(self.base_url) == bool(self.model), "model", rule)
        if self.base_url:
            require_endpoint("endpoint", self.base_url, self.api_key_env)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalVariant(Section, path="eval.variants[{self.name}]"):
    """Settings for one variant in `keel eval`, such as its thinking mode and token limit. Every
    variant is evaluated on all prompts."""

    name: str
    """Name in the results. It may contain letters, digits, `.`, `_`, `+` and `-`."""
    thinking: Literal["as-asked", "with", "without"] = "as-asked"
    """Thinking mode. as-asked: the mode set by each source."""
    max_tokens: int = knob(0, ge=0)
    """Maximum number of tokens per completion or turn, thinking included. 0:
    `rollout.sampling.max_tokens`."""
    ask: str = ""
    """Line to append to the last user message. `boxed`: ask for step-by-step reasoning and the
    answer within `\\boxed{}`, for mathematics (DeepSeek-V3.2, section 4.1)."""
    context: Literal["as-in-training", "none", "summary", "discard-75", "discard-all"] = (
        "as-in-training"
    )
    """How to manage the context of episodes. as-in-training: as set by `agents.context`."""

    def check(self) -> None:
        ok = bool(re.fullmatch(r"[\w.+-]+", self.name))
        self.require(ok, "name", "must be letters, digits and any of . _ + -")

    @property
    def line(self) -> str:
        return BOXED if self.ask == "boxed" else self.ask


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig(Section, path="eval"):
    """Settings for evaluations, both during training and with `keel eval`."""

    file: str = ""
    """File with evaluation prompts (`--eval FILE` on the command line). It adds a source with
    `holdout: all` that is read and scored like the recipe's first file source. The run's
    config.yaml lists it in `data.sources`."""
    samples: int = knob(1, ge=1)
    """Number of completions per held-out prompt. pass@1 is the fraction that is fully correct."""
    temperature: float = knob(1.0, ge=0, le=10)
    """Sampling temperature of evaluations. 0: greedy. Training uses
    `rollout.sampling.temperature`."""
    top_p: float = knob(1.0, gt=0, le=1)
    """Nucleus sampling in evaluations. 1: off. Below 1 it needs `top_k`."""
    top_k: int = knob(0, ge=0)
    """Number of most likely ids to keep in evaluations. 0: all, but the 1,024 most likely on a GPU
    if training truncates, because vLLM needs a bound to return sampling masks."""

    prompts: Literal["heldout", "train"] = "heldout"
    """`keel eval`: prompts to sample. train: the training prompts, for use by `keel sft` or `keel
    distill`."""
    size: int = knob(0, ge=0)
    """`keel eval`: number of prompts per source, from the first. 0: all."""
    pass_at: tuple[int, ...] = ()
    """`keel eval`: values of k for pass@k and maj@k. Empty: `samples` and the powers of two below
    it."""
    submissions: int = knob(0, ge=0)
    """`keel eval`: number of `samples` to submit as in a programming contest, scored by the best
    per subtask (DeepSeek-V3.2, appendix D). Only completions that pass the visible tests, are not
    truncated and do not decline are submitted, longest thinking first. 0: off."""
    variants: tuple[EvalVariant, ...] = ()
    """`keel eval`: ways of asking the prompts that are evaluated. Empty: only the way set by the
    recipe."""
    checkpoint: str = "last"
    """`keel eval`: checkpoint to evaluate: `last` (the base model if there is no checkpoint),
    `base`, or a step."""
    dir: str = ""
    """`keel eval`: folder for completions and results. Empty: a new folder in `run.dir`/eval."""

    def check(self) -> None:
        most = self.samples
        ok = all(1 <= k <= most for k in self.pass_at)
        self.require(ok, "pass_at", f"each must be from 1 to eval.samples = {most}")
        rule = f"must be at most eval.samples = {most}"
        self.require(self.submissions <= most, "submissions", rule)
        require_unique("eval.variants", [variant.name for variant in self.variants])
        _require_checkpoint(self)
        ok = self.temperature == 0 or self.temperature >= 0.01
        self.require(ok, "temperature", "must be 0 (greedy) or in [0.01, 10]")
        rule = "must be 1 with eval.temperature = 0, which always samples the same completion"
        self.require(self.temperature > 0 or most == 1, "samples", rule)
        rule = f"must be above 0 with eval.top_p = {self.top_p}. Try 512"
        self.require(self.top_p == 1 or self.top_k > 0, "top_k", rule)

    @property
    def each_variant(self) -> tuple[EvalVariant, ...]:
        return self.variants or (EvalVariant(name="recipe"),)

    @property
    def each_pass_at(self) -> tuple[int, ...]:
        powers = [2**n for n in range(self.samples.bit_length()) if 2**n <= self.samples]
        return tuple(sorted({*(self.pass_at or (*powers, self.samples))}))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterConfig(Section, path="filter"):
    """Settings for `keel filter`, which selects training prompts based on the policy's pass
    rate."""

    dir: str = ""
    """Folder for pass rates and selected prompts. Empty: `filter` in `run.dir`."""
    checkpoint: str = "last"
    """Checkpoint to sample from, as in `eval.checkpoint`."""
    samples: int = knob(100, ge=1)
    """Number of completions per prompt."""
    least_pass_rate: float = knob(0.0, ge=0, le=1)
    """Minimum pass rate of a selected prompt. Prompts that no completion solves are never
    selected."""
    most_pass_rate: float = knob(1.0, ge=0, le=1)
    """Maximum pass rate of a selected prompt."""

    def check(self) -> None:
        _require_checkpoint(self)
        least, most = self.least_pass_rate, self.most_pass_rate
        rule = f"must be above 0 and not below least_pass_rate = {least:g}"
        self.require(least <= most and most > 0, "most_pass_rate", rule)


def _require_checkpoint(section: EvalConfig | FilterConfig) -> None:
    ok = section.checkpoint in ("last", "base") or section.checkpoint.isdecimal()
    section.require(ok, "checkpoint", "must be last, base, or a step such as 20")
