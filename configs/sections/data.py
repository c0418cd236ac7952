"""`data`: the sources of prompts, their rewards and their limits."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from keel.configs.sections.agents import EnvironmentConfig
from keel.configs.sections.base import Section, knob, require, require_unique
from keel.configs.sections.evaluation import BOXED
from keel.configs.system_prompts import SystemTemplate

_PLACEHOLDER = re.compile(r"(?<!\{)\{\w[\w .-]*\}")
ROWS = ("jsonl", "file", "hub")
"""Kinds of sources whose prompts are rows in files."""
_MOST = 10_000_000
"""Upper bound for a source's weight and for its number of prompts, which are held in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig(Section, path="data.sources[].length"):
    """Settings for the penalty on a completion's length relative to its group
    (`rewards/length.py`)."""

    linear: float = knob(0.0, ge=0)
    """Penalty at `limit` in units of reward. It grows linearly from `target`."""
    overlong: float = knob(0.0, ge=0)
    """Penalty at `limit` in units of reward. It grows over the last `margin` tokens before the
    limit."""
    overlong_charges: Literal["all", "right"] = "all"
    """Completions that `overlong` applies to. all: every completion, as in DAPO. right: only
    correct ones, so that a wrong completion loses nothing by being truncated."""
    target: int = knob(0, ge=0)
    """Number of tokens up to which `linear` gives no penalty."""
    limit: int = knob(0, ge=0)
    """Length in tokens at which the full penalty applies. 0: rollout.sampling.max_tokens; in an
    environment agents.max_sampled_tokens or the window."""
    margin: int = knob(0, ge=0)
    """Number of tokens over which `overlong` grows. 0: a fifth of `limit`."""
    correct_threshold: float = knob(0.999, gt=0, le=1)
    """Minimum value of `correct` for a completion to count as right. Lower it for rubrics."""
    wrong_too: bool = False
    """Also compare wrong completions with each other. This may teach a policy to give up early."""
    may_outweigh: bool = False
    """Allow a short wrong completion to score higher than a long right one."""
    truncated: Literal["keep", "zero", "drop"] = "keep"
    """Handling of truncated completions. keep: score them like others. zero: reward 0. drop: leave
    them out of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig(Section, path="data.sources[].budget"):
    """Limits for completions and trajectories in one domain. 0 means that the run's own limit
    applies."""

    max_tokens: int = knob(0, ge=0)
    """Maximum number of tokens per completion or turn; at most rollout.sampling.max_tokens."""
    window: int = knob(0, ge=0)
    """Environment: context window in tokens; at most agents.window."""
    max_turns: int = knob(0, ge=0)
    """Environment: replaces agents.max_turns."""
    max_sampled_tokens: int = knob(0, ge=0)
    """Environment: replaces agents.max_sampled_tokens."""
    call_s: float = knob(0.0, ge=0)
    """Environment: replaces agents.call_s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig(Section, path="data.sources[{self.name}]"):
    """Settings for one source of prompts."""

    name: str
    """Name of the source. Its held-out set is reported as `eval/<name>/pass@1`."""
    source: Literal["reasoning_gym", "jsonl", "file", "hub", "environment"]
    """Kind of source. reasoning_gym: generated tasks. jsonl: JSON lines. file: a file of any
    supported kind or a folder of them. hub: a dataset of the Hugging Face hub. environment: tasks
    that the environment creates from the seeds 0 … size − 1. docs/data.md"""
    task: str = knob("", kinds=("reasoning_gym",))
    """reasoning_gym: name of the task."""
    params: Mapping[str, Any] = knob({}, kinds=("reasoning_gym",))
    """reasoning_gym: parameters of the task."""
    path: str = knob("", kinds=ROWS)
    """jsonl, file: path of the file or folder: `.jsonl`, `.json`, `.csv`, `.tsv` (also `.gz`),
    `.parquet`, `.arrow`, or a folder as on the hub or from `save_to_disk`. hub: owner/name. A row
    has `prompt` (text) or `messages`, and one of `answer`, `criteria`, `tests` and `reward`. Paths
    are relative to the current folder; `configs/…` also finds the files that come with Keel."""
    split: str = knob("", kinds=("file", "hub"))
    """file, hub: split of the dataset. Empty: train."""
    subset: str = knob("", kinds=("file", "hub"))
    """file, hub: subset of a dataset that has several."""
    columns: Mapping[str, str] = knob({}, kinds=ROWS)
    """jsonl, file, hub: the column to read for each key, such as `{prompt: question, answer:
    solution}`. A dot selects a field of an object. '': ignore the column that has the name of the
    key."""
    template: str = knob("", kinds=ROWS)
    """jsonl, file, hub: text of the prompt, with `{column}` for the value of a column and `{{x}}`
    for a literal {x}. boxed: `{prompt}` and a request to reason step by step and to answer within
    `\\boxed{}`. Empty: the prompt unchanged."""
    answer_after: str = knob("", kinds=ROWS)
    """jsonl, file, hub: use the text after the last occurrence of this mark as `answer`, such as
    #### for GSM8K."""
    raw: bool = False
    """Send the prompt without a chat template, for base models. `rollout.sampling.stop` ends
    completions."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Multi-turn environment (`agents`). With source: jsonl, each line is a task for the
    environment. With reasoning_gym, the environment provides the tools and the task's verifier
    grades."""
    size: int = knob(0, ge=0, le=_MOST)
    """reasoning_gym, environment: number of prompts. Other sources: maximum number of rows to read
    (0: all)."""
    holdout: int | Literal["all"] = knob(0, ge=0)
    """Number of prompts to hold out for evaluation; they are never trained on. all: use the source
    for evaluation only."""
    weight: float = knob(1.0, ge=0, le=_MOST)
    """Sampling weight relative to the other sources. 0: evaluate only, which needs a holdout."""
    domain: str = ""
    """Domain for metrics and rewards. Empty: the name of the source."""
    kl_coef: float = knob(0.0, ge=0)
    """β, the KL coefficient of this domain. 0 is usual for mathematics."""
    teacher: str = ""
    """Model folder or hub name of a teacher for this domain, which replaces the initial model in
    the KL term (docs/distillation.md). It must have the model's tokenizer, and at least as large a
    vocabulary, since models of a family are padded differently."""
    thinking: bool = True
    """Let the policy reason before it answers."""
    system: str = ""
    """System message before each prompt. Empty: none."""
    system_template: SystemTemplate = "none"
    """Built-in system prompt, placed before `system` or the environment's opening: reasoning (think
    first, then answer), tools, or tools-in-thinking (call tools inside the reasoning). After the
    cold start of DeepSeek-V3.2, Tables 6 to 8."""
    on_bad_line: Literal["error", "skip"] = knob("error", kinds=ROWS)
    """jsonl, file, hub: handling of malformed rows. Skipped rows are counted and reported."""
    rewards: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """Reward parts and their weights: `correct`, `format` and others (docs/rewards.md), or the
    dotted names of your functions."""
    length: LengthConfig = field(default_factory=LengthConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)

    def check(self) -> None:
        self.require(bool(self.name), "name", "must not be empty")
        self.require("/" not in self.name, "name", "must not contain '/'")
        self.require(not self.teacher or self.kl_coef > 0, "teacher", "needs kl_coef above 0")
        if self.teacher and Path(self.teacher).is_dir():  # actors run in other folders
            object.__setattr__(self, "teacher", str(Path(self.teacher).absolute()))
        self.require_kinds(self.source)
        if self.source in ROWS:
            self._check_rows()
        else:
            self.require(self.size >= 1, "size", f"must be at least 1 with source: {self.source}")
        if self.source == "reasoning_gym":
            self.require(bool(self.task), "task", "must name a reasoning_gym task")
        self._check_prompts()
        count = 0 if self.holdout == "all" else self.holdout
        fits = self.size == 0 or count < self.size or self.weight == 0
        self.require(fits, "holdout", f"must be below size = {self.size}, or set weight: 0")
        self.require(
            self.weight > 0 or self.holdout != 0,
            "weight",
            "is 0, so the source is neither trained nor evaluated. Set holdout: all to evaluate it",
        )
        self.require(bool(self.rewards), "rewards", "must name at least one part")
        for name, weight in self.rewards.items():
            path = f"{self.full_path()}.rewards.{name}"
            require(math.isfinite(weight), path, weight, "must be finite")

    def _check_rows(self) -> None:
        kind = "a dataset of the hub: owner/name" if self.source == "hub" else "a file"
        self.require(bool(self.path), "path", f"must name {kind}")
        table = self.path.lower().endswith((".csv", ".tsv", ".parquet", ".arrow"))
        rule = f"reads JSON lines. Set source: file for {self.path!r}"
        self.require(self.source != "jsonl" or not table, "source", rule)
        named = self.source != "hub" or bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.path))
        rule = "must be owner/name. For a folder or a file set source: file"
        self.require(named, "path", rule)
        filled = not self.template or bool(_PLACEHOLDER.search(self.template_text))
        rule = "must contain a {column} such as {prompt}, or be boxed"
        self.require(filled, "template", rule)

    def _check_prompts(self) -> None:
        enabled, template = self.environment.enabled, self.system_template
        if self.source == "environment":
            rule = "needs a target, command, url or program"
            require(enabled, f"{self.full_path()}.environment", "", rule)
            self.require(
                self.environment.grades,
                "source",
                "needs an environment that creates and grades tasks, which an MCP server does not. "
                "Use source: jsonl with an answer, tests, criteria or a reward per line",
            )
            rule = "cannot be set: the environment opens the episode"
            self.require(not self.system, "system", rule)
        rule = "needs an environment, which provides the tools"
        self.require(enabled or "tools" not in template, "system_template", rule)
        plain = self.thinking or template in ("none", "tools")
        self.require(plain, "system_template", "needs thinking: true")
        if self.raw:
            rule = "needs a chat template, and raw is true"
            self.require(not self.system, "system", rule)
            self.require(template == "none", "system_template", rule)
            self.require(not enabled, "raw", "must be false with an environment")
        for name in ("window", "max_turns", "max_sampled_tokens", "call_s"):
            ok = enabled or not getattr(self.budget, name)
            self.require(ok, f"budget.{name}", "needs an environment")

    @property
    def template_text(self) -> str:
        return f"{{prompt}}\n{BOXED}" if self.template == "boxed" else self.template

    @property
    def domain_name(self) -> str:
        return self.domain or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Section, path="data"):
    """Settings for the training prompts and the held-out sets."""

    sources: tuple[SourceConfig, ...] = ()
    only: tuple[str, ...] = ()
    """Names of the sources to use, for example in a specialist's recipe. Others are removed. Empty:
    all."""
    train_on: tuple[str, ...] = ()
    """Names of the sources to train on. Others are only evaluated on their held-out sets, which
    measures transfer. The cold start of the tiny model still uses all. Empty: all."""
    max_prompt_tokens: int = knob(256, ge=1)
    """Maximum prompt length in tokens, chat template included."""
    long_prompts: Literal["error", "drop"] = "error"
    """Handling of prompts longer than `max_prompt_tokens`. drop: leave them out and count them."""

    def check(self) -> None:
        names = [source.name for source in self.sources]
        require_unique("data.sources", names)
        self._require_known("data.only", self.only, names)
        if self.only:
            chosen = tuple(source for source in self.sources if source.name in self.only)
            object.__setattr__(self, "sources", chosen)
            names = [source.name for source in chosen]
        self._require_known("data.train_on", self.train_on, names)
        rule = "must be above 0 for a source that is not in data.train_on"
        for source in self.sources:
            trained = not self.train_on or source.name in self.train_on
            source.require(trained or bool(source.holdout), "holdout", rule)
        trained = not names or any(self.weight_of(source) > 0 for source in self.sources)
        among = " in data.train_on" * bool(self.train_on)
        rule = f"at least one source needs a weight above 0{among}"
        require(trained, "data.sources", names, rule)
        domains = self.domains
        for source in self.sources:
            domain = source.domain_name
            others = (source.length.linear, source.length.overlong, source.kl_coef)
            source.require(
                self.weight_of(source) == 0 or any((*source.rewards.values(), *others)),
                "rewards",
                "every weight is 0, so every advantage would be 0. Give a part a weight, or set "
                "holdout: all for a source that is only evaluated",
            )
            for name in ("rewards", "length", "budget", "teacher"):
                source.require(
                    getattr(source, name) == getattr(domains[domain], name),
                    name,
                    f"differs from another source of domain {domain!r}. Use the same {name} or a "
                    "separate domain",
                )

    @staticmethod
    def _require_known(knob: str, chosen: Sequence[str], names: Sequence[str]) -> None:
        for name in chosen:
            nearest = get_close_matches(name, names, n=1, cutoff=0.0)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            require(name in names, knob, name, f"no such source{hint}")

    def weight_of(self, source: SourceConfig) -> float:
        """Return a source's training weight, which is 0 if the source isn't in `train_on` or all of
        its prompts are held out."""
        trained = not self.train_on or source.name in self.train_on
        return source.weight if trained and source.holdout != "all" else 0.0

    @property
    def domains(self) -> dict[str, SourceConfig]:
        """The first source of each domain, whose rewards, length, budget and teacher apply to the
        whole domain."""
        return {source.domain_name: source for source in reversed(self.sources)}

    @property
    def rewards_by_domain(self) -> dict[str, Mapping[str, float]]:
        return {domain: source.rewards for domain, source in self.domains.items()}

    @property
    def references(self) -> tuple[str, ...]:
        """Distinct reference models for the KL term. The initial model, written as "", always comes
        first, even if no domain uses it."""
        used = (s.teacher for s in self.sources if s.kl_coef > 0 and self.weight_of(s) > 0)
        return tuple(dict.fromkeys(("", *used)))

    @property
    def uses_initial_model(self) -> bool:
        return any(source.kl_coef > 0 and not source.teacher for source in self.sources)

    @property
    def domains_with_environments(self) -> frozenset[str]:
        return frozenset(s.domain_name for s in self.sources if s.environment.enabled)
